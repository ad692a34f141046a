"""Bytes of a page in host memory, and so in storage: records, the sequence's first token, a checksum.

A host page is

    records      of all layers, see ``cache.host_pages``
    first token  BF16 [layers, 2, kv_heads, D], where the format keeps first tokens
    flag         1 byte, 1 if the first token is there; it begins 16 bytes
    checksum     the last 8 bytes, written when the page goes to storage

A page begins a sequence if it is the first of a prompt. The host learns from the flag whether a page has its token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from sglang_kvq.cache.host_pages import ALIGNED, HostLayout
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.tiers import TierManager

#: Counts the layouts of a host page and of the records in it. Storage never mixes two of them.
FORMAT = 1
#: Host pages are multiples of this, as files and direct I/O want.
BLOCK = 4096
_CHECKSUM = 8


class HostPage:
    """Places of a page's parts in a row of host memory.

    Args:
        pool: the pool on the device.
        first_tokens: whether there is room for a first token.

    Attributes:
        layout: the records.
        token_bytes: bytes of a first token, 0 for none; it begins at ``token_start``, and its flag behind it.
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
        self._factors = _factors(self.page_bytes // 8 - 1)

    # -- first tokens ----------------------------------------------------------------------------------

    def gather_tokens(self, tiers: TierManager, pages: torch.Tensor) -> torch.Tensor:
        """Returns first tokens and flags of pages int64 ``[n]``, uint8 ``[n, token_bytes + 16]`` on the device.

        A token comes from the page's BF16 copy, or from where it is kept without one. The flag is 0 for pages that do
        not begin a sequence and for those whose token is lost.
        """
        pool, cache = tiers.pool, tiers.sink_cache
        if cache is None:
            raise RuntimeError("kv-quant: first tokens of pages are asked for that has none; please report this.")
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
        """Copies what ``gather_tokens`` found into rows of ``host``, on the current stream; the host does not wait."""
        for page, token in zip(host_pages, tokens):
            host[page, self.token_start : self.flag_at + ALIGNED].copy_(token, non_blocking=True)

    def clear_flags(self, host: torch.Tensor, host_pages: torch.Tensor) -> None:
        """Marks rows int64 ``[n]`` of ``host`` as pages without a first token; on the host, at once."""
        host[host_pages, self.flag_at] = 0

    def has_token(self, host: torch.Tensor, host_page: int) -> bool:
        """Returns whether a row has a first token; its backup must have ended."""
        return bool(host[host_page, self.flag_at])

    def token_of(self, host: torch.Tensor, host_page: int) -> torch.Tensor:
        """Returns a row's first token, BF16 ``token_shape``: a view of host memory."""
        token = host[host_page, self.token_start : self.token_start + self.token_bytes]
        return token.view(torch.bfloat16).view(self.token_shape)

    # -- checksums -------------------------------------------------------------------------------------

    def checksum(self, host: torch.Tensor, host_page: int, key: str) -> int:
        """Returns the checksum of a row under its key in storage: 64 bits, of which no two pages should share any."""
        words = host[host_page].numpy().view(np.uint64)[:-1]
        name = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=_CHECKSUM).digest(), "little")
        return int(np.dot(words, self._factors)) ^ name

    def seal(self, host: torch.Tensor, host_page: int, key: str) -> None:
        """Writes a row's checksum into it."""
        host[host_page].numpy().view(np.uint64)[-1] = self.checksum(host, host_page, key)

    def is_sound(self, host: torch.Tensor, host_page: int, key: str) -> bool:
        """Returns whether a row is as it was when it was sealed under this key."""
        return int(host[host_page].numpy().view(np.uint64)[-1]) == self.checksum(host, host_page, key)


def _factors(count: int) -> np.ndarray:
    """Returns factors of words, uint64 ``[count]``: fixed, without a pattern (splitmix64), and odd.

    As they are odd, no change of a single word leaves the sum as it was.
    """
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    factors: np.ndarray = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    return factors
