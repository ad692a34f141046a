"""Compiles the kernels of prefills that read a stored prefix, so that no request waits for the compiler.

SGLang captures prefills without a prefix, and steps that decode; the kernels of those are compiled meanwhile.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch

from sglang_kvq.attention.base import ExtendBatch
from sglang_kvq.attention.planning.short_extend import ShortExtends
from sglang_kvq.attention.triton_ops import TritonOps
from sglang_kvq.constants import PAGE_SIZE

#: New tokens of the requests that are tried: too few for a library, enough for one, and enough for larger launches.
_NEW = (16, 2 * PAGE_SIZE, 5 * PAGE_SIZE)
#: Stored tokens of these requests, at most.
_STORED = (PAGE_SIZE, 16 * PAGE_SIZE)
#: Pages of a slab meanwhile, so that our own kernel, without a library, takes several slabs.
_SLAB_PAGES = 4


def compile_prefills(ops: TritonOps) -> None:
    """Runs one layer of each kind of records over padding, in every way to attend; only padding is written."""
    context = ops.pool.req_to_token.shape[1]
    chosen, slab_pages = ops.short, ops.slab_pages
    ways: list[ShortExtends | None] = [None]
    if chosen is not None:
        most = max(_NEW) * ops.geometry.gqa_group
        ways.append(replace(chosen, costs=None, least_prefix=1, most_rows_unpacked=most))
    if ops.prefill is None:
        ops.slab_pages = _SLAB_PAGES
    try:
        for store in ops.pool.stores:
            for stored, new in product(_STORED, _NEW):
                prefix = min(stored, (context - new) // PAGE_SIZE * PAGE_SIZE)
                for ops.short in ways if prefix > 0 else ():
                    _run(ops, store.layers[0], prefix, new)
    finally:
        ops.short, ops.slab_pages = chosen, slab_pages


def _run(ops: TritonOps, layer: int, prefix: int, new: int) -> None:
    """Runs a layer for a padding request with ``prefix`` stored and ``new`` new tokens."""
    pool, device = ops.pool, ops.pool.device
    heads = [ops.q_heads, pool.kv_heads, pool.kv_heads]
    projected = torch.zeros(new, sum(heads), pool.head_dim, dtype=torch.bfloat16, device=device)
    q, k, v = projected.split(heads, dim=1)  # slices of one projection, as in many models
    loc = torch.zeros(new, dtype=torch.int64, device=device)  # the location, and row, of padding
    batch = ExtendBatch(loc[:1], [prefix], [new], loc, loc[:0])
    q, k, v = ops.rotate_and_keep(layer, loc, q, k, v)
    ops.rotate_output(layer, ops.extend(layer, q, k, v, batch, 1.0))
