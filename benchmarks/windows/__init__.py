"""Sweeps the windows that stay in BF16: ``python -m benchmarks.windows``."""
