"""Pages whose rows have a width for each quarter, and one gain of 8 bits: what transform coding stores.

A row of D elements has four *planes* of D / 4. Elements come scaled so that a step of the quantizer is 1 in every one
of them (``rotations.maths.transform``), most energy first; plane p has codes of ``widths[p]`` bits, 0 to 4. With w bits
the levels are the 2^w half-integers about 0, and per row

    gain  = least number of ``GAINS`` not below the rank-th largest of |x_i| 2^(1 - w_i)      (w_i > 0)
    code  = #{integers t, |t| < 2^(w - 1) : x > t gain}
    value = (code - (2^w - 1) / 2) gain,    0 where w is 0

At rank 1 no element is clipped. A gain has three bits behind its leading one, so t gain is exact in float32 and every
path gives the same codes. A record of one KV head is, without gaps,

    K pieces   for each plane its codes' upper bits, then the lower ones: widths are 4, 2 + 1, 2 or 1
    V pieces   likewise
    K gains, V gains   uint8 [P]

A piece of s bits is a matrix of bytes, [P s / 8, D / 4] for keys and [D / 4, P s / 8] for values: its byte t holds
tokens t, t + P s / 8, t + 2 P s / 8, ... of one element, the first in its lowest bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch

from sglang_kvq.config import HEAD_DIMS, PAGE_SIZE
from sglang_kvq.errors import KVQuantError

PLANES = 4
MOST_BITS = 4
#: Bits of each plane's codes.
Widths: TypeAlias = tuple[int, int, int, int]

#: A gain's byte is what remains of its float32 bits, less this, without 20 bits of its significand: 128 is a gain of 1.
GAIN_BIAS = (127 << 3) - 128
_SIGNIFICAND = 20
#: By width, the pieces of a code, upper bits first.
_PIECES = {0: (), 1: (1,), 2: (2,), 3: (2, 1), 4: (4,)}


def gain_bytes(least: torch.Tensor) -> torch.Tensor:
    """uint8, the bytes of the least gains not below these positive float32 numbers; the nearest gain out of range."""
    rounded = (least.float().contiguous().view(torch.int32) + ((1 << _SIGNIFICAND) - 1)) >> _SIGNIFICAND
    return (rounded - GAIN_BIAS).clamp(0, 255).to(torch.uint8)


def gains_of(stored: torch.Tensor) -> torch.Tensor:
    """float32 gains of bytes uint8: from 2^-16 to 1.875 * 2^15."""
    return ((stored.int() + GAIN_BIAS) << _SIGNIFICAND).view(torch.float32)


@dataclass(frozen=True)
class PlaneCode:
    """The code of keys or of values.

    Attributes:
        widths: bits of each plane.
        rank: from 1; which of a row's largest elements sets its gain. Those above it are clipped. Not part of the
            layout.

    Raises:
        KVQuantError: a width that does not exist, or a rank below 1.
    """

    widths: Widths
    rank: int = 1

    def __post_init__(self) -> None:
        if len(self.widths) != PLANES or any(w not in _PIECES for w in self.widths):
            raise KVQuantError(
                f"widths {self.widths}: four numbers from 0 to {MOST_BITS}, one for each plane of a row."
            )
        if self.rank < 1:
            raise KVQuantError(f"rank {self.rank} of the element that sets a row's gain: at least 1.")

    @property
    def total(self) -> int:
        """Bits of one element of each plane together."""
        return sum(self.widths)

    @property
    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """(plane, bits, how far left of the code's lowest bit) in the order of a record."""
        for plane, width in enumerate(self.widths):
            left = width
            for bits in _PIECES[width]:
                left -= bits
                yield plane, bits, left

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows ``[..., D]`` that float32 holds exactly to codes uint8 ``[..., D]`` and gains' bytes uint8 ``[...]``."""
        planes = x.float().unflatten(-1, (PLANES, -1))
        reach = [planes[..., p, :].abs() * 2.0 ** (1 - w) for p, w in enumerate(self.widths) if w]
        if not reach:
            return torch.zeros(x.shape, dtype=torch.uint8, device=x.device), gain_bytes(x.float().abs().amin(-1) * 0)
        every = torch.cat(reach, dim=-1)
        stored = gain_bytes(every.topk(min(self.rank, every.shape[-1]), dim=-1).values[..., -1])
        gain = gains_of(stored)[..., None]
        codes = torch.zeros(planes.shape, dtype=torch.uint8, device=x.device)
        for p, w in enumerate(self.widths):
            for t in range(1 - 2 ** (w - 1), 2 ** (w - 1)) if w else ():
                codes[..., p, :] += planes[..., p, :] > t * gain
        return codes.flatten(-2), stored

    def dequantize(self, codes: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
        """Values float32 ``[..., D]`` of codes ``[..., D]`` and gains' bytes ``[...]``, each exact."""
        widths = torch.tensor(self.widths, device=codes.device)
        middle = ((2.0**widths) - 1) / 2
        levels = (codes.unflatten(-1, (PLANES, -1)).float() - middle[:, None]) * (widths > 0)[:, None]
        values: torch.Tensor = levels.flatten(-2) * gains_of(stored)[..., None]
        return values

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes ``[..., P, D]`` of a page's keys to bytes, uint8 ``[..., total * P * D / 32]``."""
        planes = codes.unflatten(-1, (PLANES, -1))
        parts = [codes.new_zeros(*codes.shape[:-2], 0)]
        for plane, bits, left in self.pieces:
            piece = (planes[..., plane, :] >> left) & ((1 << bits) - 1)
            shares = piece.unflatten(-2, (8 // bits, -1))  # [..., tokens of a byte, P bits / 8, D / 4]
            packed = sum(shares[..., n, :, :] << bits * n for n in range(8 // bits))
            parts.append(torch.as_tensor(packed).flatten(-2))
        return torch.cat(parts, dim=-1)

    def unpack(self, packed: torch.Tensor, head_dim: int) -> torch.Tensor:
        """``pack``'s inverse: uint8 ``[..., P, D]``."""
        quarter = head_dim // PLANES
        codes = packed.new_zeros(*packed.shape[:-1], PAGE_SIZE, PLANES, quarter)
        first = 0
        for plane, bits, left in self.pieces:
            size = PAGE_SIZE * bits // 8 * quarter
            piece = packed[..., first : first + size].unflatten(-1, (-1, quarter))
            shares = [(piece >> bits * n) & ((1 << bits) - 1) for n in range(8 // bits)]
            codes[..., plane, :] |= torch.cat(shares, dim=-2) << left
            first += size
        return codes.flatten(-2)


@dataclass(frozen=True)
class PlaneFormat:
    """A page of one KV head.

    Attributes:
        head_dim: D, one of ``HEAD_DIMS``, the same for keys and values.
        k, v: their codes.

    Raises:
        KVQuantError: a head_dim that does not exist.
    """

    head_dim: int
    k: PlaneCode
    v: PlaneCode

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise KVQuantError(
                f"head_dim {self.head_dim} is not supported by --kv-quant; supported: {', '.join(map(str, HEAD_DIMS))}."
            )

    @cached_property
    def parts(self) -> tuple[int, int, int, int, int]:
        """Where a record's parts begin, in bytes: K codes, V codes, K gains, V gains, and its end."""
        plane = PAGE_SIZE * self.head_dim // PLANES // 8
        v_codes = self.k.total * plane
        k_gains = v_codes + self.v.total * plane
        return 0, v_codes, k_gains, k_gains + PAGE_SIZE, k_gains + 2 * PAGE_SIZE

    @property
    def record_bytes(self) -> int:
        return self.parts[-1]

    @property
    def bits_per_element(self) -> float:
        """Allocated bits per stored element, gains included."""
        return self.record_bytes * 8 / (2 * PAGE_SIZE * self.head_dim)

    def quantize_pages(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Whole pages, BF16 ``[..., PAGE_SIZE, head_dim]`` each, to records uint8 ``[..., record_bytes]``."""
        k_codes, k_gains = self.k.quantize(k)
        v_codes, v_gains = self.v.quantize(v)
        return torch.cat([self.k.pack(k_codes), self._turned(self.v, v_codes), k_gains, v_gains], dim=-1)

    def dequantize_pages(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Records ``[..., record_bytes]`` to keys and values, float32 ``[..., PAGE_SIZE, head_dim]`` each."""
        k, v, k_gains, v_gains, end = self.parts
        k_codes = self.k.unpack(records[..., k:v], self.head_dim)
        v_codes = self.v.unpack(self._turned_back(self.v, records[..., v:k_gains]), self.head_dim)
        return (
            self.k.dequantize(k_codes, records[..., k_gains:v_gains]),
            self.v.dequantize(v_codes, records[..., v_gains:end]),
        )

    def _turned(self, code: PlaneCode, codes: torch.Tensor) -> torch.Tensor:
        """``PlaneCode.pack`` with each piece transposed: values are read along tokens."""
        return self._transposed(code, code.pack(codes), packed_first=True)

    def _turned_back(self, code: PlaneCode, packed: torch.Tensor) -> torch.Tensor:
        return self._transposed(code, packed, packed_first=False)

    def _transposed(self, code: PlaneCode, packed: torch.Tensor, packed_first: bool) -> torch.Tensor:
        quarter, first, parts = self.head_dim // PLANES, 0, [packed[..., :0]]
        for _, bits, _ in code.pieces:
            rows = PAGE_SIZE * bits // 8
            shape = (rows, quarter) if packed_first else (quarter, rows)
            piece = packed[..., first : first + rows * quarter].unflatten(-1, shape)
            parts.append(piece.transpose(-1, -2).flatten(-2))
            first += rows * quarter
        return torch.cat(parts, dim=-1)
