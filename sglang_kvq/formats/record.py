"""What a record is to whoever stores, sizes and passes on pages: ``PageFormat`` and ``PlaneFormat`` alike."""

from __future__ import annotations

from typing import Protocol

import torch

from sglang_kvq.formats.code import CodeFormat
from sglang_kvq.formats.planes import PLANES, PlaneCode


class RecordCode(Protocol):
    """How keys, or values, become integers."""

    def describe(self) -> str:
        """A few words, for logs."""


class RecordFormat(Protocol):
    """A page of one KV head, keys and values, in ``record_bytes`` bytes.

    Attributes:
        head_dim: D.
        k, v: codes of keys and of values.
        clip_k, clip_v: clip quantiles; 1 clips nothing.
        rank_k, rank_v: the same as ranks in a row, 0 for none.
        elements: keys' and values' elements in a record.
        bits_per_element: allocated, with all that is stored beside codes.
        layout: equal for all formats whose records lie alike.
        per_token: whether all that is stored of a token is its own, so that it can move to another page.
        keeps_first: whether a sequence's first token is coded so badly that it is kept in BF16 (``cache.firsts``).
    """

    @property
    def head_dim(self) -> int: ...
    @property
    def k(self) -> RecordCode: ...
    @property
    def v(self) -> RecordCode: ...
    @property
    def clip_k(self) -> float: ...
    @property
    def clip_v(self) -> float: ...
    @property
    def rank_k(self) -> int: ...
    @property
    def rank_v(self) -> int: ...
    @property
    def record_bytes(self) -> int: ...
    @property
    def elements(self) -> int: ...
    @property
    def bits_per_element(self) -> float: ...
    @property
    def layout(self) -> RecordFormat: ...
    @property
    def per_token(self) -> bool: ...
    @property
    def keeps_first(self) -> bool: ...

    def quantize_pages(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Whole pages, BF16 ``[..., PAGE_SIZE, D]`` each, to records uint8 ``[..., record_bytes]``."""

    def dequantize_pages(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Records ``[..., record_bytes]`` to keys and values, float32 ``[..., PAGE_SIZE, D]`` each."""

    def check_per_token(self) -> None:
        """
        Raises:
            KVQuantError: not ``per_token``.
        """

    def split_tokens(self, records: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of records ``[..., record_bytes]``, what each token has: parts uint8 ``[..., PAGE_SIZE, n]``.

        Raises:
            KVQuantError: not ``per_token``.
        """

    def join_tokens(self, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """``split_tokens``' inverse, whatever pages the tokens came from."""


def code_bits(code: RecordCode) -> float:
    """Bits of one element's code, of planes their mean.

    Raises:
        TypeError: another kind of code.
    """
    if isinstance(code, CodeFormat):
        return code.bits
    if isinstance(code, PlaneCode):
        return code.total / PLANES
    raise TypeError(f"{type(code).__name__} does not say its bits")
