"""What ``benchmarks/kernels.py`` and those beside it measure with: a timer, inputs of many shapes, rows of results."""
