"""How one quantised page of one KV head lies in memory: a record of bytes.

For head_dim D, P tokens per page and G = D / group_size groups, a record is

    K codes   [P, D/4]   byte (r, j) holds dims j, j + D/4, j + D/2, j + 3D/4 in bits 0-1, 2-3, 4-5, 6-7 of
                         token KEY_TOKENS[r]: of each 16 tokens first the even ones, then the odd ones
    V codes   [D, P/4]   byte (d, i) holds tokens i, i + P/4, i + P/2, i + 3P/4, likewise
    K scale   [G, P]     FP16, then K zero, V scale, V zero

V is stored transposed so that both matrix products of a decode step read their codes along the
reduced dimension. Rows r and r + 8 of K, which one thread of a matrix product holds, are neighbouring tokens, whose
scales it reads at once and whose probabilities it packs into one word. A record is 2.25 bits per element at D = 128, group 128.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from sglang_kvq.config import HEAD_DIMS, PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.quantise import clip_rank, dequantise_rows, quantise_rows

#: Token in each row of a record's K codes.
KEY_TOKENS = torch.arange(PAGE_SIZE).view(-1, 8, 2).transpose(1, 2).flatten()


def _pack4(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes uint8 ``[..., N]`` into ``[..., N/4]``: byte i holds elements i, i+N/4, i+N/2, i+3N/4."""
    a, b, c, d = codes.chunk(4, dim=-1)
    return a | b << 2 | c << 4 | d << 6


def _unpack4(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of ``_pack4``."""
    return torch.cat([packed >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)


@dataclass(frozen=True)
class PageFormat:
    """The record layout and the clipping that goes with it.

    Attributes:
        head_dim: D, one of ``HEAD_DIMS``, the same for keys and values.
        group_size: elements along head_dim per scale and zero.
        clip_k, clip_v: clip quantiles in (0, 1]; 1 clips nothing.
    """

    head_dim: int
    group_size: int
    clip_k: float = 1.0
    clip_v: float = 1.0

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise KVQuantError(
                f"head_dim {self.head_dim} is not supported by --kv-quant; supported: {', '.join(map(str, HEAD_DIMS))}."
            )
        if self.head_dim % self.group_size:
            raise KVQuantError(
                f"--kv-quant-group-size {self.group_size} does not divide this model's head_dim {self.head_dim}; "
                "leave it out for min(head_dim, 128)."
            )

    @property
    def groups(self) -> int:
        return self.head_dim // self.group_size

    @cached_property
    def offsets(self) -> tuple[int, int, int, int, int, int]:
        """Byte offsets of K codes, V codes, K scale, K zero, V scale, V zero."""
        codes, scales = PAGE_SIZE * self.head_dim // 4, 2 * self.groups * PAGE_SIZE
        return 0, codes, 2 * codes, 2 * codes + scales, 2 * codes + 2 * scales, 2 * codes + 3 * scales

    @property
    def record_bytes(self) -> int:
        return self.offsets[5] + 2 * self.groups * PAGE_SIZE

    @property
    def bits_per_element(self) -> float:
        """Allocated bits per stored element, scales and zeros included."""
        return self.record_bytes * 8 / (2 * PAGE_SIZE * self.head_dim)

    @property
    def rank_k(self) -> int:
        return clip_rank(self.head_dim, self.clip_k)

    @property
    def rank_v(self) -> int:
        return clip_rank(self.head_dim, self.clip_v)

    def quantise_pages(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Whole pages to records.

        Args:
            k, v: BF16 ``[..., PAGE_SIZE, head_dim]``.

        Returns:
            uint8 ``[..., record_bytes]``.
        """
        parts = []
        k_codes, k_scale, k_zero = quantise_rows(k, self.group_size, self.rank_k)
        v_codes, v_scale, v_zero = quantise_rows(v, self.group_size, self.rank_v)
        parts.append(_pack4(k_codes[..., KEY_TOKENS, :]).flatten(-2))
        parts.append(_pack4(v_codes.transpose(-1, -2)).flatten(-2))
        for half in (k_scale, k_zero, v_scale, v_zero):  # [..., P, G] -> [..., G, P]
            parts.append(half.transpose(-1, -2).contiguous().view(torch.uint8).flatten(-2))
        return torch.cat(parts, dim=-1)

    def dequantise_pages(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Records ``[..., record_bytes]`` to keys and values, float32 ``[..., PAGE_SIZE, head_dim]`` each."""
        bounds = (*self.offsets, self.record_bytes)
        k_codes, v_codes, *halves = (records[..., a:b] for a, b in zip(bounds, bounds[1:]))
        k_codes = _unpack4(k_codes.unflatten(-1, (PAGE_SIZE, -1)))[..., KEY_TOKENS.argsort(), :]
        v_codes = _unpack4(v_codes.unflatten(-1, (self.head_dim, -1))).transpose(-1, -2)
        k_scale, k_zero, v_scale, v_zero = (
            half.contiguous().view(torch.float16).unflatten(-1, (self.groups, PAGE_SIZE)).transpose(-1, -2)
            for half in halves
        )
        return dequantise_rows(k_codes, k_scale, k_zero), dequantise_rows(v_codes, v_scale, v_zero)
