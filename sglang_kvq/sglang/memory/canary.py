"""SGLang's KV canary (``--kv-canary``) for our pool: it notes the token and position last written to each location.

The canary has its own buffers. After each batch it notes, for the locations in ``out_cache_loc``, token, position and a
hash of all tokens before. Before and after the next batch it verifies the locations in ``req_to_token``. This finds a
page that was freed, repointed or given out while a request still reads it. Of the cache's layout the canary needs only
the number of locations. It can also hash the cached bytes (``--kv-canary-real-data``). Our bytes change when a page is
quantized, so ``checks`` refuses that flag.
"""

from __future__ import annotations

import torch
from sglang.srt.kv_canary.buffer_group import CanaryBufferGroup, PoolKind
from sglang.srt.kv_canary.pool_patcher.api import register_pool_attacher
from sglang.srt.kv_canary.pool_patcher.buffer_alloc import alloc_canary_buf

from sglang_kvq.errors import KVQuantError
from sglang_kvq.sglang.types import KVCache


def attach_kv_quant(
    *, pool: KVCache, device: torch.device, read_bytes: int, kv_token_id_vs_position_offset: int
) -> tuple[CanaryBufferGroup, ...]:
    """Returns the canary's buffers for a ``KVQuantPool``: one checked before a batch, one after.

    Each buffer is uint8 ``[pages * PAGE_SIZE, 32]``, page 0 included. One set serves both keys and values, because they
    share a page and are written together.

    Raises:
        KVQuantError: the canary was asked to hash cached bytes.
    """
    if read_bytes:
        raise KVQuantError("--kv-canary-real-data: a page's bytes change when it is quantized. Leave the flag out.")
    slots = pool.size + pool.page_size
    head, tail = (alloc_canary_buf(num_slots=slots, device=device) for _ in range(2))
    return (
        CanaryBufferGroup(
            kind=PoolKind.FULL,
            k_head=head,
            k_tail=tail,
            v_head=None,
            v_tail=None,
            real_kv_sources_k=(),
            real_kv_sources_v=(),
            swa_index_lut=None,
            kv_token_id_vs_position_offset=kv_token_id_vs_position_offset,
        ),
    )


def register(pool_class: type) -> None:
    """Registers ``attach_kv_quant`` with ``--kv-canary`` for this class of pools."""
    register_pool_attacher(pool_class, attach_kv_quant)
