"""Tensor arithmetic only: Hadamard and random matrices, second moments, transform coding, fake quantization."""
