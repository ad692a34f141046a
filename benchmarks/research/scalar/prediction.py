"""Predicts values from the same token's keys, in one layer, before they are coded.

The decoder has a token's keys as they were stored, and undoes their RoPE. A linear map of all heads' keys, fitted to
the calibration texts, predicts the values in coordinates in which every error costs the same. The residual is coded in
its own basis. ``predicts=False`` fits the same kind of basis without prediction, for comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.research.families.base import History, Stored
from benchmarks.research.families.palu import before_rope
from benchmarks.research.families.served import to_model, to_stored
from benchmarks.research.scalar.coding import GAIN_BITS, Coder, code_heads
from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.rotations.base import Rotations
from sglang_kvq.rotations.maths.transform import DISTORTION

#: Weight of the penalty on the map, relative to the keys' mean square.
RIDGE = 1e-3


@dataclass(frozen=True)
class Predictor:
    """For every layer: the map, and the basis and energies of its residual.

    Attributes:
        maps: float32 ``[layers, kv_heads * D + 1, kv_heads * D]``, from keys and 1 to values in units of their cost.
        bases: float32 ``[layers, kv_heads, D, D]``, orthogonal.
        energies: float64 ``[layers, kv_heads, D]``, of the residual, falling.
        roots: float32 ``[layers, kv_heads, D]``; whitened values times these are in units of their cost.
        turns: as in ``palu.Bases``.
    """

    maps: torch.Tensor
    bases: torch.Tensor
    energies: torch.Tensor
    roots: torch.Tensor
    turns: torch.Tensor

    @classmethod
    def fitted(
        cls, rotations: Rotations, texts: Sequence[Sequence[History]], turns: torch.Tensor, *, predicts: bool
    ) -> Predictor:
        """Fits a predictor to texts, each the history of every layer."""
        worker = rotations.whole()
        assert rotations.v_energies is not None
        layers, heads, dim = rotations.v_energies.shape
        roots = rotations.v_energies.sqrt()
        maps = torch.zeros(layers, heads * dim + 1, heads * dim)
        bases, energies = torch.zeros(layers, heads, dim, dim), torch.zeros(layers, heads, dim, dtype=torch.float64)
        for layer in range(layers):
            columns = [_joint(before_rope(one[layer].k, one[layer].positions, turns)) for one in texts]
            keys = torch.cat([torch.cat(columns), torch.ones(sum(map(len, columns)), 1)], 1).double()
            stored = [to_stored(worker, layer, one[layer].k, one[layer].v)[1] for one in texts]
            values = torch.cat([_joint(v * roots[layer][:, None]) for v in stored]).double()
            if predicts:
                gram = keys.T @ keys
                penalty = RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
                maps[layer] = torch.linalg.solve(gram + penalty, keys.T @ values).float()
            left = (values - keys @ maps[layer].double()).unflatten(1, (heads, dim)).transpose(0, 1)
            found, vectors = torch.linalg.eigh(left.mT @ left / left.shape[1])
            energies[layer], bases[layer] = found.flip(-1).clamp(min=1e-12), vectors.flip(-1).float()
        return cls(maps, bases, energies, roots, turns)

    def whiten(self, layer: int, keys: torch.Tensor, positions: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Returns the residual of stored values ``[kv_heads, n, D]`` after prediction, scaled to variance 1."""
        left = v * self.roots[layer][:, None] - self._predicted(layer, keys, positions)
        return left @ self.bases[layer] / self.energies[layer].sqrt().float()[:, None]

    def restore(self, layer: int, keys: torch.Tensor, positions: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        """Inverts ``whiten``."""
        left = (left * self.energies[layer].sqrt().float()[:, None]) @ self.bases[layer].mT
        return (left + self._predicted(layer, keys, positions)) / self.roots[layer][:, None]

    def _predicted(self, layer: int, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows = _joint(before_rope(keys, positions, self.turns))
        found = torch.cat([rows, torch.ones(len(rows), 1)], 1) @ self.maps[layer]
        return found.unflatten(1, (len(keys), -1)).transpose(0, 1)


def _joint(x: torch.Tensor) -> torch.Tensor:
    """Reshapes ``[heads, n, D]`` to ``[n, heads * D]``."""
    return x.transpose(0, 1).flatten(1)


def value_widths(energies: torch.Tensor, importance: torch.Tensor, bits: float, gains: int = 1) -> torch.Tensor:
    """Returns widths int64 ``[layers, heads, D]`` of least predicted error, one per channel, at ``bits``."""
    weights = energies * importance[:, None, None]
    gain = weights[..., None] * -torch.tensor(DISTORTION, dtype=torch.float64).diff()
    count = int((bits - gains * GAIN_BITS / energies.shape[-1]) * energies.numel())
    taken = torch.zeros(gain.numel(), dtype=torch.int64)
    taken[gain.flatten().argsort(descending=True)[:count]] = 1
    return taken.view_as(gain).sum(-1)


@dataclass(frozen=True)
class Predicted:
    """A ``Method`` that codes keys as ``coding.Coding`` does, and values with a predictor."""

    rotations: LayerRotations
    predictor: Predictor
    k_widths: torch.Tensor
    v_widths: torch.Tensor
    code: Coder

    def __call__(self, layer: int, history: History) -> Stored:
        r = self.rotations
        k, v = to_stored(r, layer, history.k, history.v)
        k = code_heads(self.code, k.bfloat16().float(), self.k_widths[layer])
        keys, _ = to_model(r, layer, k, v)
        left = self.predictor.whiten(layer, keys, history.positions, v)
        left = code_heads(self.code, left, self.v_widths[layer])
        v = self.predictor.restore(layer, keys, history.positions, left)
        n, heads = history.k.shape[1], history.k.shape[0]
        bits = int(self.k_widths[layer].sum()) + int(self.v_widths[layer].sum()) + 2 * heads * GAIN_BITS
        return Stored(keys, to_model(r, layer, k, v)[1], float(n * bits))
