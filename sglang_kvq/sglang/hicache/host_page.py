"""Layout of a page in host memory and in storage: records, the sequence's first token, a checksum.

A host page has

    records      of all layers, see ``cache.host_pages``
    first token  BF16 [layers, 2, kv_heads, D], where the format keeps first tokens
    flag         1 byte, 1 if the first token is present; padded to 16 bytes
    checksum     the last 8 bytes, XXH3 of all before them, written when the page goes to storage

A page begins a sequence if it is the first page of a prompt. The flag tells the host whether a page has a first token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import xxhash

from sglang_kvq.cache.host_pages import ALIGNED, HostLayout
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.tiers import TierManager

#: Version of the layout of a host page and its records. Storage never mixes two versions.
FORMAT = 2
#: Host pages are a multiple of this many bytes, as files and direct I/O require.
BLOCK = 4096
_CHECKSUM = 8


class HostPage:
    """Offsets of a page's parts in a row of host memory.

    Args:
        pool: the pool on the device.
        first_tokens: whether a row has room for a first token.

    Attributes:
        layout: layout of the records.
        token_bytes: bytes of a first token, which begins at ``token_start``; 0 without first tokens.
        flag_at: offset of the flag, after the first token.
        page_bytes: bytes of a row, a multiple of ``BLOCK``.
    """

    def __init__(self, pool: PagePool, first_tokens: bool) -> None:
        self.layout = HostLayout(pool)
        self.token_shape = (pool.layers, 2, pool.kv_heads, pool.head_dim)
        self.token_start = self.layout.page_bytes
        self.token_bytes = 2 * int(np.prod(self.token_shape)) if first_tokens else 0
        flag = -(-self.token_bytes // ALIGNED) * ALIGNED + self.token_start
        self.flag_at = flag
        self.page_bytes = -(-(flag + ALIGNED + _CHECKSUM) // BLOCK) * BLOCK

    # -- first tokens ----------------------------------------------------------------------------------

    def gather_tokens(self, tiers: TierManager, pages: torch.Tensor) -> torch.Tensor:
        """Returns first tokens and flags of pages int64 ``[n]``, uint8 ``[n, token_bytes + 16]`` on the device.

        A token is read from the page's BF16 copy, or, without a copy, from the cache of first tokens. The flag is 0 if
        a page does not begin a sequence or its token is lost.
        """
        pool, cache = tiers.pool, tiers.sink_cache
        if cache is None:
            raise RuntimeError(
                "kv-quant: SGLang wants first tokens of pages, but this cache keeps none. Please report this."
            )
        slots = pool.page_slot[pages].clamp(min=0).long()
        copied = (slots > 0)[None, :, None, None, None]
        tokens = torch.where(copied, pool.bf16_pages[:, slots, :, :, 0], cache.tokens[:, cache.entries(pages)])
        known = tiers.page_first[pages] & ((slots > 0) | cache.kept(pages))
        found = torch.zeros(
            len(pages), self.flag_at + ALIGNED - self.token_start, dtype=torch.uint8, device=pool.device
        )
        found[:, : self.token_bytes] = tokens.transpose(0, 1).flatten(1).contiguous().view(torch.uint8)
        found[:, self.flag_at - self.token_start] = known
        return found

    def put_tokens(self, host: torch.Tensor, host_pages: Sequence[int], tokens: torch.Tensor) -> None:
        """Copies the result of ``gather_tokens`` into rows of ``host`` on the current stream; does not wait."""
        for page, token in zip(host_pages, tokens):
            host[page, self.token_start : self.flag_at + ALIGNED].copy_(token, non_blocking=True)

    def clear_flags(self, host: torch.Tensor, host_pages: torch.Tensor) -> None:
        """Marks rows int64 ``[n]`` of ``host`` as pages without a first token. The host itself writes the flags."""
        host[host_pages, self.flag_at] = 0

    def has_token(self, host: torch.Tensor, host_page: int) -> bool:
        """Returns whether a row has a first token. The row's backup must have finished."""
        return bool(host[host_page, self.flag_at])

    def token_of(self, host: torch.Tensor, host_page: int) -> torch.Tensor:
        """Returns a row's first token, BF16 ``token_shape``: a view of host memory."""
        token = host[host_page, self.token_start : self.token_start + self.token_bytes]
        return token.view(torch.bfloat16).view(self.token_shape)

    # -- checksums -------------------------------------------------------------------------------------

    def checksum(self, host: torch.Tensor, host_page: int, key: str) -> int:
        """Returns the 64-bit checksum of a row and of its key in storage, so that pages under other keys differ."""
        name = xxhash.xxh3_64_intdigest(key.encode())
        return xxhash.xxh3_64_intdigest(host[host_page, :-_CHECKSUM].numpy().data, seed=name)

    def seal(self, host: torch.Tensor, host_page: int, key: str) -> None:
        """Writes a row's checksum into it."""
        host[host_page].numpy().view(np.uint64)[-1] = self.checksum(host, host_page, key)

    def is_sound(self, host: torch.Tensor, host_page: int, key: str) -> bool:
        """Returns whether a row is unchanged since it was sealed under this key."""
        return int(host[host_page].numpy().view(np.uint64)[-1]) == self.checksum(host, host_page, key)
