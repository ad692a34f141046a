"""Tools of ``benchmarks/kernels.py`` and similar benchmarks: a timer, inputs of many shapes, rows of results."""
