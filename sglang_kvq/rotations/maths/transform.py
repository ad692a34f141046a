"""Transform coding: the basis in which errors are independent, and how many bits each of its channels is worth.

A rotation by a Hadamard matrix spreads energy evenly over the coordinates and gives each as many bits. Coding theory
does the opposite (Goyal, "Theoretical foundations of transform coding", 2001). With C the covariance of keys and W the
second moment of the queries that read them, both weighted by what an error there does to attention's output
(``maths.attended``), the mean squared error of a score is e^T W e for a key's error e. Let W^1/2 C W^1/2 = U L U^T.
Then y = U^T W^1/2 (k - mean) has independent channels of variances L, and the score's error is y's plain squared error:
bits go where L is large, by reverse water-filling, and the gain over equal bits in a mixed basis is the arithmetic over
the geometric mean of L. The mean is the same number in every score of a query, which the softmax does not see, so it
can be taken off all keys. Values are the same with W_o^T W_o for W and no mean.

Channels are coded by a uniform quantizer whose step, for a Gaussian of variance 1, is ``STEPS``; ``encoder`` folds the
steps into the basis, so that in ``formats.planes`` a step is 1.
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

#: By bits, 0 to 6: mean squared error and step of the best uniform quantizer of a Gaussian of variance 1 (Max,
#: "Quantizing for minimum distortion", 1960, table II; 0 bits give the mean).
DISTORTION = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.001041)
STEPS = (1.0, 1.596, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041)
#: Directions that queries ask less of than this share of the most are taken as asked for that much: what a short text
#: says of them is noise, and the decoder divides by it.
FLOOR = 1e-7

#: Different pairs of keys' and values' patterns in a model, unless more are asked for: kernels are compiled for each.
MOST_PAIRS = 8

#: Every pattern that fills a column's cells and gives no plane more bits than the one before it.
PATTERNS: tuple[Widths, ...] = tuple(
    pattern
    for a, b, c, d in combinations_with_replacement(range(MOST_BITS, -1, -1), PLANES)
    if cells_of(pattern := (a, b, c, d))
)


@dataclass(frozen=True)
class Basis:
    """Where keys or values are coded, of any number of layers and heads.

    Attributes:
        encode: float64 ``[..., D, D]``: rows times it are in the basis, channels in the order of their energy.
        decode: its inverse.
        energies: float64 ``[..., D]``, descending: each channel's variance, in units of the weighted squared error.
    """

    encode: torch.Tensor
    decode: torch.Tensor
    energies: torch.Tensor

    @property
    def coding_gain(self) -> torch.Tensor:
        """``[...]``: arithmetic over geometric mean of the energies, in dB."""
        mean = self.energies.mean(-1).log10() - self.energies.log10().mean(-1)
        return 10 * mean

    def scaled(self, widths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``encode`` and ``decode`` with the quantizers' steps folded in.

        Args:
            widths: int ``[..., PLANES]`` or what broadcasts to it.

        Returns:
            float32 ``[..., D, D]`` each, one the other's inverse.
        """
        steps = torch.tensor(STEPS, dtype=torch.float64)[widths]
        quarter = self.energies.shape[-1] // PLANES
        unit = self.energies.sqrt() * steps.repeat_interleave(quarter, dim=-1)
        return (self.encode / unit[..., None, :]).float(), (self.decode * unit[..., :, None]).float()


def fold_steps(rotations: LayerRotations, k_widths: torch.Tensor, v_widths: torch.Tensor) -> LayerRotations:
    """Whitened bases with each channel's step folded in: what a server rotates by.

    Args:
        rotations: channels of variance 1; ``k_mean`` in the rotated basis.
        k_widths, v_widths: int ``[layers, PLANES]``.

    Returns:
        the same scores and outputs, of keys and values in which a step of the quantizer is 1.
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
    """The basis of one part of the cache.

    Args:
        covariance: float64 ``[..., D, D]`` of keys, or the second moment of values.
        weight: float64 ``[..., D, D]``: an error e costs e^T weight e.

    Raises:
        KVQuantError: moments that are not finite, or a part without energy.
    """
    for name, x in (("covariance", covariance), ("weight", weight)):
        if not torch.isfinite(x).all():
            raise KVQuantError(f"the {name} of a layer is not finite; calibrate with another text or dtype.")
    root, inverse = _root(weight)
    values, u = torch.linalg.eigh(root @ covariance @ root)
    energies = values.flip(-1)
    if (energies[..., 0] <= 0).any():
        raise KVQuantError("a head whose keys or values never change has nothing to code; use another method.")
    energies = torch.maximum(energies, energies[..., :1] * 1e-12)
    u = u.flip(-1)
    return Basis(root @ u, u.mT @ inverse, energies)


def _root(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x^1/2 and x^-1/2, eigenvalues below ``FLOOR`` raised to it."""
    values, vectors = torch.linalg.eigh(x)
    root = torch.maximum(values, FLOOR * values[..., -1:]).sqrt()
    return vectors * root[..., None, :] @ vectors.mT, vectors / root[..., None, :] @ vectors.mT


def choose_widths(
    k_costs: torch.Tensor, v_costs: torch.Tensor, budget: float, most: int = MOST_PAIRS
) -> list[tuple[Widths, Widths]]:
    """Each layer's patterns of keys and values, of least cost within a budget, of few different pairs.

    A layer takes the pair of least cost + price * bits (Shoham and Gersho, "Efficient bit allocation for an arbitrary
    set of quantizers", 1988) for the price at which the budget is met. Kernels are compiled for each pair, so the pairs
    that cost least to do without are given up one by one, and the others moved to what suits their layers best, as in
    Lloyd's iteration; what the last step leaves over is spent where it helps most.

    Args:
        k_costs, v_costs: float64 ``[layers, PATTERNS]``: what each pattern's error costs in each layer.
        budget: bits per element, gains not counted.
        most: different pairs.

    Raises:
        KVQuantError: a budget outside of 1 to 4, or costs that are not finite.
    """
    if not 1 <= budget <= 4:
        raise KVQuantError(f"a budget of {budget:g} bits per element, gains not counted: 1 to 4.")
    if not (torch.isfinite(k_costs).all() and torch.isfinite(v_costs).all()):
        raise KVQuantError("a layer's error has no finite cost; calibrate with another text or dtype.")
    k, v = k_costs.numpy(), v_costs.numpy()
    bits = np.array([sum(p) for p in PATTERNS]) / (2 * PLANES)  # of a layer, keys or values
    layers = np.arange(len(k))
    best: tuple[float, np.ndarray] | None = None
    low, high = 0.0, float(max(k.max() - k.min(), v.max() - v.min())) * 16 * PLANES + 1.0
    for _ in range(60):
        price = (low + high) / 2 if best else high
        pairs = _few_pairs(k + price * bits, v + price * bits, most)
        of = (k + price * bits)[:, pairs[:, 0]] + (v + price * bits)[:, pairs[:, 1]]  # [layers, pairs]
        chosen = _spend(k[:, pairs[:, 0]] + v[:, pairs[:, 1]], bits[pairs].sum(1), of.argmin(1), budget * len(k))
        if chosen is None:
            low = price
            continue
        high = price
        mine = pairs[chosen]
        cost = float((k[layers, mine[:, 0]] + v[layers, mine[:, 1]]).sum())
        if best is None or cost < best[0]:
            best = (cost, mine)
    assert best is not None  # at the first price every layer takes the fewest bits
    return [(PATTERNS[a], PATTERNS[b]) for a, b in best[1]]


def _few_pairs(k: np.ndarray, v: np.ndarray, most: int) -> np.ndarray:
    """At most so many pairs of patterns, int ``[n, 2]``, of small total cost; k, v: ``[layers, PATTERNS]``."""
    order = np.argsort([sum(p) for p in PATTERNS], kind="stable")  # of equals the narrower one
    first = np.stack([order[k[:, order].argmin(1)], order[v[:, order].argmin(1)]], axis=1)
    pairs = np.unique(first, axis=0)
    while len(pairs) > most:
        costs = k[:, pairs[:, 0]] + v[:, pairs[:, 1]]
        two = np.partition(costs, 1, axis=1)[:, :2]
        # What giving a pair up adds, in the layers that it is best for.
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
    """The choice with what is left of the budget spent by steps of greatest use per bit; None if it is beyond.

    costs: ``[layers, pairs]``; bits: of a pair; chosen: int ``[layers]``.
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
    """The sum of each plane's energies ``[..., D]``: float64 ``[..., PLANES]``."""
    planes: torch.Tensor = energies.double().unflatten(-1, (PLANES, -1))
    return planes.sum(-1)


def pattern_costs(energies: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    """``choose_widths``'s costs of one part of the cache.

    Args:
        energies: ``[layers, heads, D]``, a ``Basis``'s.
        importance: ``[layers]``, by how much the model's output moves per unit of a layer's weighted squared error.

    Returns:
        float64 ``[layers, PATTERNS]``.
    """
    errors = torch.tensor(DISTORTION, dtype=torch.float64)[torch.tensor(PATTERNS)]  # [PATTERNS, PLANES]
    return importance.double()[:, None] * (plane_energies(energies).sum(1) @ errors.T)


def rate_distortion(energies: torch.Tensor, rates: Sequence[float]) -> list[float]:
    """Least squared error of Gaussian channels at so many bits per channel: reverse water-filling (Cover and Thomas,
    *Elements of Information Theory*, 10.3.3), over all channels together.

    Args:
        energies: of any shape, positive.
        rates: bits per channel.

    Returns:
        the sum of the channels' errors at each rate.
    """
    x = np.sort(energies.double().flatten().numpy())[::-1]
    found = []
    # With the n largest above the water, its logarithm is (sum of their log2 - 2 R) / n.
    logs, tails = np.cumsum(np.log2(x)), x.sum() - np.cumsum(x)
    counts = np.arange(1, len(x) + 1)
    for rate in rates:
        level = 2.0 ** ((logs - 2 * rate * len(x)) / counts)
        above = (level <= x) & (np.append(x[1:], 0.0) <= level)
        n = int(np.argmax(above)) if rate > 0 else 0
        found.append(float(level[n] * counts[n] + tails[n]) if rate > 0 else float(x.sum()))
    return found
