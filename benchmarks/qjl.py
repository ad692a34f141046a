"""TurboQuant's inner-product quantizer: a code of b - 1 bits and a 1-bit sketch of its residual. Not served.

QJL (arXiv 2406.03482) keeps only the signs of a Gaussian projection of a key's residual r, and the norm of r. For a
query q,

    q . k  ~  q . k_mse  +  |r| sqrt(pi / 2) / D * (S q) . sign(S r),     S [D, D] of independent N(0, 1)

is unbiased over S, with variance at most pi / (2 D) |q|^2 |r|^2 (QJL, lemma 3.5; TurboQuant, arXiv 2504.19874,
algorithm 2). A softmax exponentiates scores, so the bias that the sketch removes matters less than the variance that it
adds: docs/notes/methods.md has both. Serving it would take a second query S q and a second set of planes in every
kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from sglang_kvq.formats.code import CodeFormat
from sglang_kvq.formats.quantize import dequantize_rows, quantize_rows


def projection(head_dim: int, seed: int = 0) -> torch.Tensor:
    """Returns S, float32 ``[head_dim, head_dim]``, the same in every process."""
    return torch.randn(head_dim, head_dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


@dataclass(frozen=True)
class SketchedKeys:
    """Keys as TurboQuant's inner-product quantizer stores them.

    Attributes:
        values: float32 ``[..., D]``, values of the codes of b - 1 bits.
        signs: bool ``[..., D]``, signs of the projected residual.
        norms: FP16 ``[..., 1]``, norms of the residual.
    """

    values: torch.Tensor
    signs: torch.Tensor
    norms: torch.Tensor


def sketch_keys(k: torch.Tensor, code: CodeFormat, s: torch.Tensor) -> SketchedKeys:
    """Quantizes randomly rotated keys to ``code.bits`` bits in total, including one bit for the sketch.

    Args:
        k: ``[..., D]``, BF16 values.
        code: with ``norm`` statistic, 3 or 4 bits.
        s: the result of ``projection``.
    """
    coarse = replace(code, bits=code.bits - 1)
    values = dequantize_rows(*quantize_rows(k, k.shape[-1], 0, coarse), coarse)
    residual = k.float() - values
    return SketchedKeys(values, residual @ s.T > 0, residual.norm(dim=-1, keepdim=True).half())


def inner_products(q: torch.Tensor, keys: SketchedKeys, s: torch.Tensor) -> torch.Tensor:
    """Estimates q kᵀ, float32 ``[..., Q, K]``, for q ``[..., Q, D]`` and keys ``[..., K, D]``."""
    signs = 2.0 * keys.signs.float() - 1.0
    weight = keys.norms.float() * math.sqrt(math.pi / 2) / s.shape[0]  # [..., K, 1]
    return q.float() @ keys.values.mT + (q.float() @ s.T) @ (weight * signs).mT
