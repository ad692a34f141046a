"""Palu (Chang et al., "Palu: KV-Cache Compression with Low-Rank Projection", arXiv 2407.21118): low rank, then codes.

Palu factors the projections of keys and values and caches the narrow product. With its whitening by the inputs, the
best factors of a given rank project the outputs onto their principal directions. The moments of keys before RoPE and of
values, of all heads of a layer together, are therefore sufficient. Ranks go where they remove most of each matrix's
energy (the paper weighs by Fisher information). A fixed rotation evens out the narrow vectors (the paper's Hadamard
matrix). Each vector is quantized per token with one scale and offset, or stays in 16 bits.

In ``transform`` this is a preset: channels in order of energy, equal widths for the first and 0 bits for the others
(``served.PRESETS``). ``transform`` adds a basis that weighs keys by the queries that read them, different widths, and
one gain in place of scale and offset.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.research.families.base import NUMBER, SCALE, History, Stored, uniform

#: Widths in the order in which a search prefers them; 16 means no quantization.
WIDTHS = (2, 3, 4, 6, 16)


@dataclass(frozen=True)
class Bases:
    """Principal directions of a model's keys before RoPE and of its values.

    Attributes:
        k, v: float32 ``[layers, H D, H D]``, columns by falling energy.
        k_energies, v_energies: float64 ``[layers, H D]``, relative to their layer's sum.
        turns: float32 ``[positions, D, D]``; multiplying keys before RoPE by a matrix gives the keys at its position.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_energies: torch.Tensor
    v_energies: torch.Tensor
    turns: torch.Tensor

    @classmethod
    def of(cls, k_moments: torch.Tensor, v_moments: torch.Tensor, turns: torch.Tensor) -> Bases:
        """Diagonalizes second moments, float64 ``[layers, H D, H D]``."""
        found = []
        for moments in (k_moments, v_moments):
            energies, vectors = torch.linalg.eigh(moments)
            found += [vectors.flip(-1).float(), energies.flip(-1) / energies.sum(-1, keepdim=True)]
        return cls(found[0], found[2], found[1], found[3], turns)

    def ranks(self, share: float) -> torch.Tensor:
        """Divides a share of all dimensions: int64 ``[2, layers]``, for keys and values; at least one each."""
        energies = torch.stack([self.k_energies, self.v_energies])
        taken = torch.zeros(energies.numel(), dtype=torch.int64, device=energies.device)
        taken[energies.flatten().topk(int(share * energies.numel())).indices] = 1
        return taken.view_as(energies).sum(-1).clamp(min=1)


def before_rope(k: torch.Tensor, positions: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Undoes RoPE of keys ``[heads, n, D]``."""
    return torch.einsum("hnd,ned->hne", k, turns[positions])


@dataclass(frozen=True)
class Palu:
    """A share of all dimensions, in ``width`` bits each (16: not quantized)."""

    bases: Bases
    share: float
    width: int

    def __call__(self, layer: int, history: History) -> Stored:
        ranks = self.bases.ranks(self.share)[:, layer].tolist()
        k = before_rope(history.k, history.positions, self.bases.turns)
        k, k_bits = self._narrow(k, self.bases.k[layer], ranks[0])
        v, v_bits = self._narrow(history.v, self.bases.v[layer], ranks[1])
        k = torch.einsum("hnd,nde->hne", k, self.bases.turns[history.positions])
        return Stored(k, v, k_bits + v_bits)

    def _narrow(self, x: torch.Tensor, basis: torch.Tensor, rank: int) -> tuple[torch.Tensor, float]:
        heads, n, dim = x.shape
        kept = basis[:, :rank] @ _rotation(rank)
        narrow = x.transpose(0, 1).reshape(n, heads * dim) @ kept
        scales = 0 if self.width == NUMBER else 2 * SCALE
        narrow = narrow.bfloat16().float() if self.width == NUMBER else uniform(narrow, self.width, 1)
        return (narrow @ kept.T).view(n, heads, dim).transpose(0, 1), n * (rank * self.width + scales)


def _rotation(size: int) -> torch.Tensor:
    """Returns a random orthogonal matrix, float32, which is the same for the same size."""
    drawn = torch.randn(size, size, generator=torch.Generator().manual_seed(size), device="cpu")
    return torch.linalg.qr(drawn)[0].to(torch.get_default_device())


def settings(bases: Bases, budget: float) -> list[Palu]:
    """Returns the largest share of dimensions for each width within ``budget`` bits per element."""
    size = bases.k_energies.shape[-1]
    found = []
    for width in WIDTHS:
        scales = 0.0 if width == NUMBER else 2 * SCALE / size
        share = min((budget - scales) / width, 1.0)
        if share * size >= 2:
            found.append(Palu(bases, share, width))
    return found
