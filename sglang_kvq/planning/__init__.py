"""``kvq plan``: what fits on GPUs that need not be here, in BF16, in FP8 and with each method."""
