"""Interface of ``PageFormat`` and ``PlaneFormat`` for code that stores, sizes and passes on pages."""

from __future__ import annotations

from typing import Protocol

import torch

from sglang_kvq.formats.code import CodeFormat
from sglang_kvq.formats.planes import PLANES, PlaneCode


class RecordCode(Protocol):
    """The code that turns keys, or values, into integers."""

    def describe(self) -> str:
        """Returns a few words for logs."""


class RecordFormat(Protocol):
    """A page of one KV head, keys and values, stored in ``record_bytes`` bytes.

    Attributes:
        head_dim: D.
        k, v: codes of keys and of values.
        clip_k, clip_v: clip quantiles; 1 clips nothing.
        rank_k, rank_v: the clips as ranks of magnitudes in a row; 0 clips nothing.
        elements: number of keys' and values' elements in a record.
        bits_per_element: allocated bits per element, scales and everything else included.
        layout: this format without clipping, equal for all formats with the same record layout.
        per_token: True if tokens share no stored data, so a token can move to another page.
        keeps_first: True if a sequence's first token is coded so badly that it must be kept in BF16
            (``cache.sink_token_cache``).
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
        """Quantizes whole pages, BF16 ``[..., PAGE_SIZE, D]`` each, into records uint8 ``[..., record_bytes]``."""

    def dequantize_pages(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantizes records ``[..., record_bytes]`` to keys and values, float32 ``[..., PAGE_SIZE, D]`` each."""

    def check_per_token(self) -> None:
        """Checks that tokens can move between pages.

        Raises:
            KVQuantError: tokens share stored data (not ``per_token``).
        """

    def split_tokens(self, records: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Splits records ``[..., record_bytes]`` into what each token stores: uint8 ``[..., PAGE_SIZE, n]`` each.

        Raises:
            KVQuantError: tokens share stored data (not ``per_token``).
        """

    def join_tokens(self, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Inverts ``split_tokens``; tokens may come from any pages."""


def code_bits(code: RecordCode) -> float:
    """Returns the bits of one element's code; for planes, the mean over the planes.

    Raises:
        TypeError: the code is of another kind.
    """
    if isinstance(code, CodeFormat):
        return code.bits
    if isinstance(code, PlaneCode):
        return code.total / PLANES
    raise TypeError(f"code_bits: {type(code).__name__} is not a known kind of code.")
