"""Tensors only: Hadamard and random matrices, second moments and what follows from them, RoPE, fake-quant attention."""
