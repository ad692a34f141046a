"""Predicts the time of attention for new tokens over stored prefixes, with pages read directly or dequantized first.

The predicted time in microseconds is a sum of terms times constants. The terms follow from the batch and the geometry
alone, so predictions extrapolate. ``python benchmarks/extends.py --fit FILE`` fits the constants to measurements and
prints them. The constants are from an H200; only the comparison of the two times matters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_kvq.attention.planning.ragged_calls import TILE
from sglang_kvq.kernels.device.shape import value_dims
from sglang_kvq.kernels.extend.extend_attention import ExtendLaunch, extend_launch, schedule


@dataclass(frozen=True)
class Geometry:
    """This worker's heads, and the number of streaming multiprocessors of its GPU."""

    q_heads: int
    kv_heads: int
    head_dim: int
    sms: int

    @property
    def gqa_group(self) -> int:
        """Number of query heads per KV head."""
        return self.q_heads // self.kv_heads

    def concurrent_items(self, launch: ExtendLaunch) -> int:
        """Returns how many items of ``plan_extend`` run at once."""
        parts: int = self.head_dim // value_dims(self.head_dim)  # of V
        held: int = launch.programs_per_sm
        return max(self.sms * held // (self.kv_heads * parts), 1)


def direct_terms(prefix_lens: list[int], new_lens: list[int], geometry: Geometry, launch: ExtendLaunch) -> np.ndarray:
    """Returns the terms of reading pages directly.

    They are 1; sequential units of 64 keys, scaled to 64 rows of 128 dims and three programs per SM; waves of items.
    """
    wave = geometry.concurrent_items(launch)
    waves, units = schedule(prefix_lens, new_lens, geometry.gqa_group, launch.rows, wave)
    d = geometry.head_dim
    size = launch.rows / 64 * (d + value_dims(d)) / 256 * launch.programs_per_sm / 3
    return np.array([1.0, waves * units * size, waves])


def dequantized_terms(prefix_lens: list[int], new_lens: list[int], geometry: Geometry, capacity: int) -> np.ndarray:
    """Returns the terms of dequantizing first.

    They are 1; MB written to the workspace; sequential keys of 128 dims; these keys times the share of busy SMs; calls
    after the first; MB of the results of these calls, which are merged.

    capacity: tokens of the workspace.
    """
    prefix, new = np.array(prefix_lens, np.int64), np.array(new_lens, np.int64)
    q_heads, d = geometry.q_heads, geometry.head_dim
    tokens = int(prefix.sum() + new.sum())
    more = -(-tokens // capacity) - 1
    programs = -(-new // TILE) * q_heads
    count = int(programs.sum())
    # Keys of whole rounds over the SMs, but at least those of the longest request.
    mean = float((programs * (prefix + new)).sum()) / count
    keys = max(float((prefix + new).max()), -(-count // geometry.sms) * mean) * d / 128
    written = tokens * geometry.kv_heads * d * 4 / 1e6
    return np.array(
        [1.0, written, keys, keys * min(count / geometry.sms, 1), more, more * new.sum() * q_heads * d * 2 / 1e6]
    )


@dataclass(frozen=True)
class ExtendCosts:
    """The constants: microseconds per unit of each term.

    Attributes:
        direct, dequantized: constants of ``direct_terms`` and ``dequantized_terms``, in their order.
        unpacked: factor on the direct kernel's time per unit for records that are not ``extend.is_cheap``.
        own: time of our own kernel's attention over a workspace, divided by FlashInfer's time.
    """

    direct: tuple[float, ...]
    dequantized: tuple[float, ...]
    unpacked: float = 2.5
    own: float = 1.4

    def direct_us(
        self,
        prefix_lens: list[int],
        new_lens: list[int],
        geometry: Geometry,
        cheap: bool = True,
        launch: ExtendLaunch | None = None,
    ) -> float:
        """Predicts the time of reading pages directly; cheap: whether the records are cheap (``extend.is_cheap``)."""
        terms = direct_terms(prefix_lens, new_lens, geometry, launch or extend_launch(geometry.head_dim))
        terms[1] *= 1 if cheap else self.unpacked
        return float(terms @ self.direct)

    def dequantized_us(
        self, prefix_lens: list[int], new_lens: list[int], geometry: Geometry, capacity: int, flashinfer: bool = True
    ) -> float:
        """Predicts the time of dequantizing into ``capacity`` tokens; flashinfer: whether FlashInfer then attends."""
        terms = dequantized_terms(prefix_lens, new_lens, geometry, capacity)
        terms[2:4] *= 1 if flashinfer else self.own
        return float(terms @ self.dequantized)


#: Constants of an H200, printed by benchmarks/extends.py --fit benchmarks/results/kernels_h200.json.
H200 = ExtendCosts(
    direct=(8.664, 2.187, 10.34),
    dequantized=(17.27, 0.4571, 0.009209, 0.002958, 4.782, 0.5114),
)


def fit(terms: np.ndarray, microseconds: np.ndarray) -> tuple[float, ...]:
    """Fits non-negative constants by least squares of relative errors. terms: ``[measurements, terms]``."""
    terms, used = np.asarray(terms) / np.asarray(microseconds)[:, None], np.arange(np.shape(terms)[1])
    while True:
        found = np.linalg.lstsq(terms[:, used], np.ones(len(terms)), rcond=None)[0]
        if (found >= 0).all():
            break
        used = np.delete(used, found.argmin())
    constants = np.zeros(terms.shape[1])
    constants[used] = found
    return tuple(float(f"{x:.4g}") for x in constants)
