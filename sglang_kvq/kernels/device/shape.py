"""Heads and head_dim as one compile-time argument of kernels, like ``codes.Record``.

If an attribute of such an argument is part of a tensor's shape or a tuple, Triton 3.6 requires a name for it first:
``D: tl.constexpr = SHAPE.D``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import triton


@dataclass(frozen=True, eq=False)  # one object per geometry (shape_of): launches find kernels by identity
class Shape:
    """Heads of an attention layer on one worker; names in capitals, like constants in kernels.

    Attributes:
        Q_HEADS, KV_HEADS: of this worker.
        D: head_dim.
    """

    Q_HEADS: int
    KV_HEADS: int
    D: int

    @property
    def GQA_GROUP(self) -> int:
        """Query heads per KV head."""
        return self.Q_HEADS // self.KV_HEADS

    @property
    def HEADS(self) -> int:
        """Query heads per KV head, padded: at least four, because an INT8 product has eight columns, two per head."""
        return max(4, triton.next_power_of_2(self.GQA_GROUP))

    @property
    def DP(self) -> int:
        """D, padded."""
        return triton.next_power_of_2(self.D)

    @property
    def D4(self) -> int:
        """Dims of a plane (``formats.pack``), and so bytes of a token's two lower bits."""
        return self.D // 4

    @property
    def JP(self) -> int:
        """D4, padded; at least 16, the shortest that a product takes."""
        return max(16, triton.next_power_of_2(self.D4))

    @property
    def INT8_JP(self) -> int:
        """D4, padded; at least 32, the shortest that an INT8 product takes."""
        return max(32, triton.next_power_of_2(self.D4))

    @property
    def CP(self) -> int:
        """A quarter of D4, padded: a plane's channels in a work item of ``quantize_pages``."""
        return triton.next_power_of_2(self.D4 // 4)

    @property
    def WORDS(self) -> int:
        """Words of two BF16 dims in a plane, padded."""
        return triton.next_power_of_2(self.D // 8)

    @property
    def DIMS(self) -> int:
        """Dims of V that a program accumulates: no more than its registers can hold."""
        return value_dims(self.D)

    @property
    def VP(self) -> int:
        """DIMS, padded."""
        return triton.next_power_of_2(self.DIMS)


@cache
def shape_of(kv_heads: int, head_dim: int, q_heads: int | None = None) -> Shape:
    """Returns the one object for a geometry; q_heads is None for kernels that see no queries."""
    return Shape(kv_heads if q_heads is None else q_heads, kv_heads, head_dim)


def value_dims(head_dim: int) -> int:
    """Returns ``Shape.DIMS``."""
    return min(head_dim, 128)
