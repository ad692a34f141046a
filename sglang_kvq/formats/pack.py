"""Packs codes into bytes: 2-bit planes, and a second part with the higher bits of wider codes.

A matrix of codes ``[R, N]`` is stored as

    low    [R, N/4]     byte (r, i) holds bits 0-1 of columns i, i + N/4, i + N/2, i + 3N/4,
                        in its bits 0-1, 2-3, 4-5, 6-7
    high   4 bits: [R, N/4], the same arrangement of bits 2-3
           3 bits: [R/2, N/4], byte (r, i) holds bit 2 of row r's four columns in its bits 0-3, of row r + R/2's in 4-7

A kernel that reads the tile (rows, i) of ``low`` therefore finds the higher bits at the same i.
"""

from __future__ import annotations

import torch


def packed_bytes(rows: int, columns: int, bits: int) -> tuple[int, int]:
    """Returns the bytes of the low and of the high part."""
    low = rows * columns // 4
    return low, low * (bits - 2) // 2


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs codes uint8 ``[..., R, N]`` (R even, N a multiple of 4) into uint8 ``[..., low + high]``, row by row."""
    parts = [_pack_planes(codes & 3, 2)]
    if bits == 4:
        parts.append(_pack_planes(codes >> 2, 2))
    elif bits == 3:
        upper, lower = _pack_planes(codes >> 2, 1).chunk(2, dim=-2)
        parts.append(upper | lower << 4)
    return torch.cat([part.flatten(-2) for part in parts], dim=-1)


def unpack_codes(packed: torch.Tensor, rows: int, columns: int, bits: int) -> torch.Tensor:
    """Inverts ``pack_codes``: returns uint8 ``[..., rows, columns]``."""
    low_bytes, _ = packed_bytes(rows, columns, bits)
    low, high = (part.unflatten(-1, (-1, columns // 4)) for part in packed.tensor_split([low_bytes], dim=-1))
    codes = _unpack_planes(low, 2)
    if bits == 4:
        codes |= _unpack_planes(high, 2) << 2
    elif bits == 3:
        codes |= _unpack_planes(torch.cat([high & 15, high >> 4], dim=-2), 1) << 2
    return codes


def _pack_planes(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Packs ``[..., N]`` codes of ``width`` bits into ``[..., N/4]``: column i + n N/4 starts at bit n * width."""
    a, b, c, d = codes.chunk(4, dim=-1)
    return a | b << width | c << 2 * width | d << 3 * width


def _unpack_planes(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Inverts ``_pack_planes``."""
    return torch.cat([packed >> n * width & 2**width - 1 for n in range(4)], dim=-1)
