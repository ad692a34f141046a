"""Episodes of a conversation: segments, their embeddings and clusters, and which of them a question needs.

Imports neither SGLang nor torch: the router and the oracle of ``benchmarks/research/episodes`` share it.
"""
