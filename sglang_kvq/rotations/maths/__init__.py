"""Tensor arithmetic only: Hadamard and random matrices, second moments, transform coding, RoPE, fake quantization."""
