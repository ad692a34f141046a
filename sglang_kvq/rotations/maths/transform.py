"""Transform coding: a basis in which errors are independent, and the number of bits for each of its channels.

Let C be the covariance of keys, W the moment of the queries that read them, and W^1/2 C W^1/2 = U L U^T. Channels
y = U^T W^1/2 (k - mean) are independent with variances L, and the squared error of a score is that of y (Goyal,
"Theoretical foundations of transform coding", 2001). For values, W is W_o^T W_o, and there is no mean.
docs/notes/calibration.md has more.

A uniform quantizer codes the channels. ``STEPS`` has its steps for a Gaussian of variance 1. ``fold_steps`` folds the
steps into the basis, so that every step is 1 in ``formats.planes``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np
import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.planes import MOST_BITS, PLANES, Widths, cells_of

#: Mean squared error and step of the best uniform quantizer of a Gaussian of variance 1, by bits, 0 to 6 (Max,
#: "Quantizing for minimum distortion", 1960, table II; 0 bits give the mean).
DISTORTION = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.001041)
STEPS = (1.0, 1.596, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041)
#: Smallest weight of a direction, relative to the largest. A short text gives only noise about directions below it, and
#: the decoder divides by the weight.
FLOOR = 1e-7

#: Default limit on different (keys, values) pattern pairs in a model: kernels are compiled for each pair.
MOST_PAIRS = 8

#: All patterns that fill a column's cells and give no plane more bits than the plane before it.
PATTERNS: tuple[Widths, ...] = tuple(
    pattern
    for a, b, c, d in combinations_with_replacement(range(MOST_BITS, -1, -1), PLANES)
    if cells_of(pattern := (a, b, c, d))
)


@dataclass(frozen=True)
class Basis:
    """The coding basis of keys or values, float64: ``encode`` takes rows into it, ``decode`` is its inverse.

    ``energies`` ``[..., D]`` are the channels' variances, descending, in units of the weighted squared error.
    """

    encode: torch.Tensor
    decode: torch.Tensor
    energies: torch.Tensor


def coding_gain(energies: torch.Tensor) -> torch.Tensor:
    """Returns the arithmetic mean of energies ``[..., D]`` over their geometric mean, in dB: float64 ``[...]``.

    It is the factor by which bits allocated by energy reduce the error, compared with equal bits for all channels.
    """
    energies = energies.double()
    return 10 * (energies.mean(-1).log10() - energies.log10().mean(-1))


def fold_steps(rotations: LayerRotations, k_widths: torch.Tensor, v_widths: torch.Tensor) -> LayerRotations:
    """Folds the steps of widths int ``[layers, PLANES]`` into whitened bases; the server rotates with the result.

    Scores and outputs stay the same, and the quantizer's step for keys and values becomes 1.
    """

    def steps(widths: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        each = torch.tensor(STEPS, dtype=torch.float32, device=matrices.device)[widths.to(matrices.device)]
        return each.repeat_interleave(matrices.shape[-1] // PLANES, dim=-1)[:, None]  # [layers, 1, D]

    k, q, v, o, mean = rotations.k, rotations.q, rotations.v, rotations.o, rotations.k_mean
    if k is None or q is None or v is None or o is None or mean is None:
        raise ValueError("transform coding has k, q, v, o and k_mean")
    of_k, of_v = steps(k_widths, k), steps(v_widths, v)
    return LayerRotations(
        k / of_k[:, :, None], v / of_v[:, :, None], q * of_k[:, :, None], o * of_v[:, :, None], mean / of_k
    )


def coding_basis(covariance: torch.Tensor, weight: torch.Tensor) -> Basis:
    """Computes the coding basis of keys from their covariance, or of values from their second moment, ``[..., D, D]``.

    An error e costs e^T weight e.

    Raises:
        KVQuantError: moments are not finite, or a head has no energy.
    """
    for name, x in (("covariance", covariance), ("weight", weight)):
        if not torch.isfinite(x).all():
            raise KVQuantError(f"the {name} of a layer is not finite. Calibrate with another text or dtype.")
    root, inverse = _root(weight)
    values, u = torch.linalg.eigh(root @ covariance @ root)
    energies = values.flip(-1)
    if (still := energies[..., 0] <= 0).any():
        where = ", ".join(f"{name} {at}" for name, at in zip(("layer", "head"), still.nonzero()[0].tolist()))
        raise KVQuantError(
            f"{where}: its keys or values, or what reads them, are always the same or 0, so there is nothing to code. "
            "Use another --composition than transform."
        )
    energies = torch.maximum(energies, energies[..., :1] * 1e-12)
    u = u.flip(-1)
    return Basis(root @ u, u.mT @ inverse, energies)


def _root(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns x^1/2 and x^-1/2, with eigenvalues below ``FLOOR`` (relative) raised to it."""
    values, vectors = torch.linalg.eigh(x)
    root = torch.maximum(values, FLOOR * values[..., -1:]).sqrt()
    return vectors * root[..., None, :] @ vectors.mT, vectors / root[..., None, :] @ vectors.mT


def choose_widths(
    k_costs: torch.Tensor, v_costs: torch.Tensor, budget: float, most: int = MOST_PAIRS
) -> list[tuple[Widths, Widths]]:
    """Chooses each layer's patterns of keys and values: least cost within a budget, with at most ``most`` pairs.

    A layer takes the pair of least cost + price * bits, for the price that meets the budget (Shoham and Gersho,
    "Efficient bit allocation for an arbitrary set of quantizers", 1988). The pairs that cost least to give up are
    removed. Each other pair moves to the patterns that suit its layers best (Lloyd). The remaining budget is spent
    where it saves most.

    Args:
        k_costs, v_costs: float64 ``[layers, PATTERNS]``: the cost of each pattern's error in each layer.
        budget: bits per element, gains not counted.

    Raises:
        KVQuantError: the budget is outside 1 to 4, or costs are not finite.
    """
    if not 1 <= budget <= 4:
        raise KVQuantError(f"a budget of {budget:g} bits per element, gains not counted: 1 to 4.")
    if not (torch.isfinite(k_costs).all() and torch.isfinite(v_costs).all()):
        raise KVQuantError("a layer's error has no finite cost. Calibrate with another text or dtype.")
    k, v = k_costs.numpy(), v_costs.numpy()
    bits = np.array([sum(p) for p in PATTERNS]) / (2 * PLANES)  # keys and values have half of a layer each
    layers = np.arange(len(k))
    found: list[tuple[float, np.ndarray]] = []  # not empty: at the first price every layer takes the fewest bits
    low, high = 0.0, float(max(k.max() - k.min(), v.max() - v.min())) * 16 * PLANES + 1.0
    for _ in range(60):
        price = (low + high) / 2 if found else high
        pairs = _few_pairs(k + price * bits, v + price * bits, most)
        of = (k + price * bits)[:, pairs[:, 0]] + (v + price * bits)[:, pairs[:, 1]]  # [layers, pairs]
        chosen = _spend(k[:, pairs[:, 0]] + v[:, pairs[:, 1]], bits[pairs].sum(1), of.argmin(1), budget * len(k))
        if chosen is None:
            low = price
            continue
        high = price
        mine = pairs[chosen]
        found.append((float((k[layers, mine[:, 0]] + v[layers, mine[:, 1]]).sum()), mine))
    _, best = min(found, key=lambda one: one[0])
    return [(PATTERNS[a], PATTERNS[b]) for a, b in best]


def _few_pairs(k: np.ndarray, v: np.ndarray, most: int) -> np.ndarray:
    """Returns at most ``most`` pairs of patterns, int ``[n, 2]``, of small total cost; k, v: ``[layers, PATTERNS]``."""
    order = np.argsort([sum(p) for p in PATTERNS], kind="stable")  # at equal costs, the narrower pattern wins
    first = np.stack([order[k[:, order].argmin(1)], order[v[:, order].argmin(1)]], axis=1)
    pairs = np.unique(first, axis=0)
    while len(pairs) > most:
        costs = k[:, pairs[:, 0]] + v[:, pairs[:, 1]]
        two = np.partition(costs, 1, axis=1)[:, :2]
        # Cost of giving a pair up, in the layers that it suits best.
        added = [(two[:, 1] - two[:, 0])[costs.argmin(1) == n].sum() for n in range(len(pairs))]
        pairs = np.delete(pairs, int(np.argmin(added)), axis=0)
    for _ in range(10):
        mine = (k[:, pairs[:, 0]] + v[:, pairs[:, 1]]).argmin(1)
        moved = np.array(
            [
                (order[k[mine == n][:, order].sum(0).argmin()], order[v[mine == n][:, order].sum(0).argmin()])
                for n in np.unique(mine)
            ]
        )
        moved = np.unique(moved, axis=0)
        if np.array_equal(moved, pairs):
            break
        pairs = moved
    return pairs


def _spend(costs: np.ndarray, bits: np.ndarray, chosen: np.ndarray, budget: float) -> np.ndarray | None:
    """Spends the remaining budget by steps of greatest saving per bit; None if ``chosen`` already exceeds the budget.

    costs: ``[layers, pairs]``; bits of each pair: ``[pairs]``; chosen pairs: int ``[layers]``.
    """
    chosen, left = chosen.copy(), budget - bits[chosen].sum()
    if left < -1e-9:
        return None
    while True:
        saved = costs[np.arange(len(chosen)), chosen][:, None] - costs
        more = bits[None, :] - bits[chosen][:, None]
        rate = np.where((more > 0) & (more <= left + 1e-9) & (saved > 0), saved / np.maximum(more, 1e-9), 0.0)
        layer, pair = np.unravel_index(int(rate.argmax()), rate.shape)
        if rate[layer, pair] <= 0:
            return chosen
        left -= more[layer, pair]
        chosen[layer] = pair


def plane_energies(energies: torch.Tensor) -> torch.Tensor:
    """Sums each plane's energies ``[..., D]``: float64 ``[..., PLANES]``."""
    planes: torch.Tensor = energies.double().unflatten(-1, (PLANES, -1))
    return planes.sum(-1)


def coded_error(energies: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
    """Predicts the squared error of rows, summed over heads: float64 ``[layers]``.

    Energies are ``[layers, heads, D]``, widths int ``[PLANES]`` or ``[layers, PLANES]``.
    """
    distortion = torch.tensor(DISTORTION, dtype=torch.float64)[widths]
    return (plane_energies(energies).sum(1) * distortion).sum(-1)


def pattern_costs(energies: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    """Returns ``choose_widths``'s costs, float64 ``[layers, PATTERNS]``: importance ``[layers]`` times error."""
    errors = torch.stack([coded_error(energies, torch.tensor(widths)) for widths in PATTERNS], dim=1)
    return importance.double()[:, None] * errors


def rate_distortion(energies: torch.Tensor, rates: Sequence[float]) -> list[float]:
    """Returns the least squared error of independent Gaussian channels at each rate.

    Uses reverse water-filling over all channels (Cover and Thomas, *Elements of Information Theory*, 10.3.3).
    """
    x = np.sort(energies.double().flatten().numpy())[::-1]
    found = []
    # If the n largest are above the water level, its log2 is (sum of their log2 - 2 R) / n.
    logs, tails = np.cumsum(np.log2(x)), x.sum() - np.cumsum(x)
    counts = np.arange(1, len(x) + 1)
    for rate in rates:
        level = 2.0 ** ((logs - 2 * rate * len(x)) / counts)
        above = (level <= x) & (np.append(x[1:], 0.0) <= level)
        n = int(np.argmax(above)) if rate > 0 else 0
        found.append(float(level[n] * counts[n] + tails[n]) if rate > 0 else float(x.sum()))
    return found
