"""Sessions: the server's knowledge of conversations, and the choice of pages or episodes that a question reads.

This package imports neither SGLang nor torch, because the router and ``benchmarks/research/episodes`` share it.
"""
