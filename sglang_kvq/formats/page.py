"""Memory layout of one quantized page of one KV head: a record of bytes.

For head_dim D and P tokens per page, a record is, without gaps,

    K codes   low, then high part of the matrix [P, D], see ``formats.pack``; its rows are tokens in the
              order ``KEY_TOKENS``
    V codes   low, then high part of the matrix [D, P]
    K scale, K offset, V scale, V offset   FP16: [D / group, P] along a token's row, [P / run, D] along channels;
              ``norm`` has scales [1, P] and no offsets
    K mean    FP16 [D], for centred keys only

V is stored transposed so that both matrix products of a decode step read codes along the reduced dimension. One thread
of a matrix product holds K's rows r and r + 8. ``KEY_TOKENS`` makes these neighboring tokens, so the thread reads both
scales at once.
Every part, and every record, starts on a multiple of 64 bytes. INT2 per token with group 128 takes 2.25 bits per
element at D = 128.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch

from sglang_kvq.constants import HEAD_DIMS, PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.code import INT2, CodeFormat
from sglang_kvq.formats.pack import pack_codes, packed_bytes, unpack_codes
from sglang_kvq.formats.quantize import channel_means, clip_rank, dequantize_rows, quantize_rows

#: Token in each row of a record's K codes: for every 16 tokens, first the even ones, then the odd ones.
KEY_TOKENS = torch.arange(PAGE_SIZE).view(-1, 8, 2).transpose(1, 2).flatten()


class RecordParts(NamedTuple):
    """Byte offsets of a record's parts; an absent part takes no bytes. ``end`` is the record's size."""

    k_low: int
    k_high: int
    v_low: int
    v_high: int
    k_scale: int
    k_offset: int
    v_scale: int
    v_offset: int
    k_mean: int
    end: int


@dataclass(frozen=True)
class PageFormat:
    """The record layout, and the clipping that goes with it.

    Attributes:
        head_dim: D, one of ``HEAD_DIMS``, the same for keys and values.
        group_size: elements along head_dim per scale and offset, for codes per token (``norm``: head_dim).
        clip_k, clip_v: clip quantiles in (0, 1]; 1 clips nothing. Not part of the layout.
        k, v: codes of keys and of values.
        run: tokens per scale and offset, for codes per channel; divides ``PAGE_SIZE``.

    Raises:
        KVQuantError: sizes do not divide, a clip is set for a code that cannot be clipped, or values are centred.
    """

    head_dim: int
    group_size: int
    clip_k: float = 1.0
    clip_v: float = 1.0
    k: CodeFormat = field(default=INT2)
    v: CodeFormat = field(default=INT2)
    run: int = PAGE_SIZE

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise KVQuantError(
                f"head_dim {self.head_dim} is not supported by --kv-quant. Supported: {', '.join(map(str, HEAD_DIMS))}."
            )
        if self.head_dim % self.group_size:
            raise KVQuantError(
                f"--kv-quant-group-size {self.group_size} does not divide this model's head_dim {self.head_dim}. "
                "Leave it out for min(head_dim, 128)."
            )
        if PAGE_SIZE % self.run:
            raise KVQuantError(
                f"runs of {self.run} tokens per scale: they must divide the page of {PAGE_SIZE}. Use "
                f"{PAGE_SIZE // 2} or {PAGE_SIZE}."
            )
        for flag, clip, code in (("k", self.clip_k, self.k), ("v", self.clip_v, self.v)):
            if clip != 1.0 and not code.clips:
                raise KVQuantError(
                    f"--kv-quant-clip-{flag} {clip}: codes per channel, centred or scaled by a norm are not clipped. "
                    "Leave it out."
                )
        if self.v.centred:
            raise KVQuantError(
                f"values in {self.v.describe()}: only keys can be centred, because the query is multiplied by their "
                "mean once per page. Use centred=False."
            )

    #: False: scales adapt to the stored data. By measurement, quantizing a first token costs no accuracy.
    keeps_first = False

    @property
    def layout(self) -> PageFormat:
        """This format without clipping, equal for all formats with the same record layout."""
        return replace(self, clip_k=1.0, clip_v=1.0)

    def group_of(self, code: CodeFormat) -> int:
        """Returns the number of elements per scale: along head_dim, or along tokens for codes per channel."""
        if code.axis == "channel":
            return self.run
        return self.head_dim if code.statistic == "norm" else self.group_size

    def scale_shape(self, code: CodeFormat) -> tuple[int, int]:
        """Returns the stored shape of K's or V's scales, rows and columns."""
        if code.axis == "channel":
            return PAGE_SIZE // self.run, self.head_dim
        return self.head_dim // self.group_of(code), PAGE_SIZE

    @cached_property
    def parts(self) -> RecordParts:
        sizes = [
            *packed_bytes(PAGE_SIZE, self.head_dim, self.k.bits),
            *packed_bytes(self.head_dim, PAGE_SIZE, self.v.bits),
        ]
        for code in (self.k, self.v):
            rows, columns = self.scale_shape(code)
            sizes += [2 * rows * columns, 2 * rows * columns * code.has_offset]
        sizes.append(2 * self.head_dim * self.k.centred)
        return RecordParts(*(sum(sizes[:i]) for i in range(len(sizes) + 1)))

    @property
    def record_bytes(self) -> int:
        return self.parts.end

    @property
    def elements(self) -> int:
        """Number of keys' and values' elements in a record."""
        return 2 * PAGE_SIZE * self.head_dim

    @property
    def bits_per_element(self) -> float:
        """Allocated bits per stored element, scales and offsets included."""
        return self.record_bytes * 8 / self.elements

    @property
    def rank_k(self) -> int:
        return clip_rank(self.head_dim, self.clip_k)

    @property
    def rank_v(self) -> int:
        return clip_rank(self.head_dim, self.clip_v)

    def quantize_pages(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Quantizes whole pages into records.

        Args:
            k, v: BF16 ``[..., PAGE_SIZE, head_dim]``.

        Returns:
            uint8 ``[..., record_bytes]``.
        """
        mean = channel_means(k) if self.k.centred else None
        rest = k if mean is None else k.float() - mean.float().unsqueeze(-2)
        k_codes, *k_halves = self._quantize(rest, self.k, self.rank_k)
        v_codes, *v_halves = self._quantize(v, self.v, self.rank_v)
        parts = [pack_codes(k_codes[..., KEY_TOKENS, :], self.k.bits)]
        parts.append(pack_codes(v_codes.transpose(-1, -2).contiguous(), self.v.bits))
        parts += [
            half.contiguous().view(torch.uint8).flatten(-2) for half in (*k_halves, *v_halves) if half is not None
        ]
        if mean is not None:
            parts.append(mean.view(torch.uint8))
        return torch.cat(parts, dim=-1)

    def dequantize_pages(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantizes records ``[..., record_bytes]`` to keys and values, float32 ``[..., PAGE_SIZE, head_dim]``."""
        at = self.parts
        k_codes = unpack_codes(records[..., at.k_low : at.v_low], PAGE_SIZE, self.head_dim, self.k.bits)
        v_codes = unpack_codes(records[..., at.v_low : at.k_scale], self.head_dim, PAGE_SIZE, self.v.bits)
        k_codes = k_codes.index_select(-2, KEY_TOKENS.argsort().to(records.device))
        k = self._dequantize(
            k_codes, records[..., at.k_scale : at.k_offset], records[..., at.k_offset : at.v_scale], self.k
        )
        if self.k.centred:
            k = k + records[..., at.k_mean : at.end].contiguous().view(torch.float16).float().unsqueeze(-2)
        v_codes, v_offset = v_codes.transpose(-1, -2), records[..., at.v_offset : at.k_mean]
        return k, self._dequantize(v_codes, records[..., at.v_scale : at.v_offset], v_offset, self.v)

    @property
    def per_token(self) -> bool:
        """True if tokens share no stored data, so that ``split_tokens`` can take them apart."""
        return self.k.per_token and self.v.per_token

    def split_tokens(self, records: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Splits records ``[..., record_bytes]`` into what each token stores: uint8 ``[..., PAGE_SIZE, n]`` each.

        The parts are the codes of K and of V, a byte each, then the bytes of scales and offsets. ``join_tokens`` is the
        inverse.

        Raises:
            KVQuantError: tokens share stored data (not ``per_token``).
        """
        self.check_per_token()
        at = self.parts
        k = unpack_codes(records[..., at.k_low : at.v_low], PAGE_SIZE, self.head_dim, self.k.bits)
        v = unpack_codes(records[..., at.v_low : at.k_scale], self.head_dim, PAGE_SIZE, self.v.bits)
        rest = records[..., at.k_scale : at.k_mean].unflatten(-1, (-1, PAGE_SIZE, 2))  # FP16 as bytes [.., rows, P, 2]
        return k[..., KEY_TOKENS.argsort(), :], v.transpose(-1, -2), rest.transpose(-2, -3).flatten(-2)

    def join_tokens(self, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Builds records ``[..., record_bytes]`` from parts of ``split_tokens``; tokens may come from any pages."""
        self.check_per_token()
        k, v, rest = parts
        codes = [pack_codes(k[..., KEY_TOKENS, :], self.k.bits), pack_codes(v.transpose(-1, -2), self.v.bits)]
        return torch.cat([*codes, rest.unflatten(-1, (-1, 2)).transpose(-2, -3).flatten(-3)], dim=-1)

    def check_per_token(self) -> None:
        """Checks that tokens can move between pages.

        Raises:
            KVQuantError: tokens share stored data (not ``per_token``).
        """
        if not self.per_token:
            raise KVQuantError(
                f"keys in {self.k.describe()}, values in {self.v.describe()}: tokens of a page share stored "
                "data, so none can move to another page. Use codes per token that are not centred."
            )

    def _quantize(
        self, x: torch.Tensor, code: CodeFormat, rank: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns codes ``[..., P, D]``, and scales and offsets in the shape in which they are stored."""
        rows = x.transpose(-1, -2) if code.axis == "channel" else x
        codes, scale, offset = quantize_rows(rows, self.group_of(code), rank, code, self.head_dim)
        if code.axis == "channel":
            codes = codes.transpose(-1, -2).contiguous()
        return codes, scale.transpose(-1, -2), None if offset is None else offset.transpose(-1, -2)

    def _dequantize(
        self, codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, code: CodeFormat
    ) -> torch.Tensor:
        """Dequantizes codes ``[..., P, D]`` to values ``[..., P, D]``; scales and offsets are bytes."""
        scales, offsets = self._halves(scale, code), self._halves(offset, code) if offset.shape[-1] else None
        if code.axis == "channel":
            return dequantize_rows(codes.transpose(-1, -2), scales, offsets, code, self.head_dim).transpose(-1, -2)
        return dequantize_rows(codes, scales, offsets, code, self.head_dim)

    def _halves(self, stored: torch.Tensor, code: CodeFormat) -> torch.Tensor:
        """Reads a row's scales or offsets, as FP16, from their bytes."""
        halves: torch.Tensor = stored.contiguous().view(torch.float16).unflatten(-1, self.scale_shape(code))
        return halves.transpose(-1, -2)
