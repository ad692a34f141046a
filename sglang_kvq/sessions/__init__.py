"""Sessions: what is known of a conversation, and which of its pages or episodes a question reads.

Imports neither SGLang nor torch: the router and the oracle of ``benchmarks/research/episodes`` share it.
"""
