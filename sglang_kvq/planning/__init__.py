"""``kvq plan`` computes what fits on any GPUs, in BF16, in FP8 and with each method; it needs no GPU."""
