"""Compiles a starting server's kernels, several at the same time, so that no request waits for the compiler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from sglang_kvq.attention.base import ExtendBatch
from sglang_kvq.attention.drafts import DraftBatch, chain
from sglang_kvq.attention.planning.short_extend import ShortExtends
from sglang_kvq.attention.scores.scoring import KeyScores, plan_scoring
from sglang_kvq.attention.triton_ops import TritonOps
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.kernels.device.launch import compile_together

#: New tokens of the requests that are tried: too few for a library, enough for one, and enough for larger launches.
_NEW = (16, 2 * PAGE_SIZE, 5 * PAGE_SIZE)
#: Stored tokens of these requests, at most.
_STORED = (PAGE_SIZE, 16 * PAGE_SIZE)
#: Pages of a slab meanwhile, so that our own kernel, without a library, takes several slabs.
_SLAB_PAGES = 4


def compile_kernels(
    ops: TritonOps, drafts: int = 0, sinks: Sequence[torch.dtype | None] = (None,), scores: bool = False
) -> None:
    """Compiles the kernels of all operations, then runs prefills over stored prefixes; only padding is written.

    SGLang captures new prompts and steps that decode, and these captures would compile their kernels one after the
    other. No capture runs a prefill over a stored prefix.

    Args:
        drafts: drafts of each request that a step verifies; 0 without speculative decoding.
        sinks: types of the layers' learned sinks; None for layers without.
        scores: whether prompts score the keys before them.
    """
    kinds = [None if x is None else torch.zeros(ops.q_heads, dtype=x, device=ops.pool.device) for x in sinks]
    launch_all = partial(_launch_all, ops, drafts, kinds, scores)
    compile_together(launch_all)
    if fit_programs(ops, drafts):
        compile_together(launch_all)  # other numbers of items may need other kernels that merge
    for kind in kinds:
        _run_prefills(ops, kind)


def fit_programs(ops: TritonOps, drafts: int = 0) -> bool:
    """Plans no more programs than an SM holds at once, for every layer's decode kernel; tells if that changes a plan.

    Only the compiled kernel tells how much shared memory a program takes: in some kinds of records the compiler moves
    operands through shared memory, and its releases differ in this.

    Args:
        drafts: as for ``compile_kernels``.
    """
    changed = False
    for count in (0, drafts) if drafts else (0,):
        used = [0] * ops.pool.layers
        for store in ops.pool.stores:
            layers = [store.layers[0]] * 2
            step = partial(_verify, ops, layers, 1, count) if count else partial(_decode, ops, layers, 1)
            kernels = compile_together(partial(step, sinks=None))
            most = max((kernel.metadata.shared for kernel in kernels if kernel.name == "_decode"), default=0)
            for layer in store.layers:
                used[layer] = most
        changed |= ops.fit_programs(used, count)
    return changed


def _launch_all(ops: TritonOps, drafts: int, kinds: Sequence[torch.Tensor | None], scores: bool) -> None:
    layers = [store.layers[0] for store in ops.pool.stores]
    for sinks in kinds:
        _run_prefills(ops, sinks)
        for requests in _steps(ops, 0):
            _decode(ops, [layers[0], *layers], requests, sinks)
        if drafts:
            ops.reserve_drafts(ops.max_batch, drafts)
            for requests in _steps(ops, drafts):
                _verify(ops, [layers[0], *layers], requests, drafts, sinks)
    for layer in layers:
        _quantize(ops, layer)
        if scores:
            _score(ops, layer)


def _steps(ops: TritonOps, drafts: int) -> list[int]:
    """Returns numbers of requests whose steps together need every kernel that any number needs."""
    first: dict[tuple[int, ...], int] = {}
    for requests in range(1, ops.max_batch + 1):
        first.setdefault(ops.step_kind(requests, drafts), requests)
    return list(first.values())


def _run_prefills(ops: TritonOps, sinks: torch.Tensor | None) -> None:
    """Runs one layer of each kind of records over padding, in every way to attend."""
    context = ops.pool.req_to_token.shape[1]
    chosen, slab_pages, library = ops.short, ops.slab_pages, ops.prefill
    ways: list[ShortExtends | None] = [None]
    if chosen is not None:
        most = max(_NEW) * ops.geometry.gqa_group
        ways.append(replace(chosen, costs=None, least_prefix=1, most_rows_unpacked=most))
    try:
        for ops.prefill in (None,) if library is None else (library, None):  # some batches do not suit it
            ops.slab_pages = _SLAB_PAGES if ops.prefill is None else slab_pages
            for store in ops.pool.stores:
                for stored, new in product(_STORED, _NEW):
                    prefix = min(stored, (context - new) // PAGE_SIZE * PAGE_SIZE)
                    for ops.short in ways if prefix > 0 else ():
                        _prefill(ops, store.layers[0], prefix, new, sinks)
    finally:
        ops.short, ops.slab_pages, ops.prefill = chosen, slab_pages, library


def _prefill(ops: TritonOps, layer: int, prefix: int, new: int, sinks: torch.Tensor | None) -> None:
    """Runs a layer for a padding request with ``prefix`` stored and ``new`` new tokens."""
    q, k, v = _projected(ops, new)
    batch = _padding(ops, prefix, new)
    ops.keep_tokens(layer, batch.loc, k, v)
    q, k, v = ops.rotate_and_keep(layer, batch.loc, q, k, v)
    ops.rotate_output(layer, ops.extend(layer, q, k, v, batch, 1.0, sinks))


def _padding(ops: TritonOps, prefix: int, new: int) -> ExtendBatch:
    """Returns a batch of one padding request."""
    loc = torch.zeros(new, dtype=torch.int64, device=ops.pool.device)  # the location, and row, of padding
    return ExtendBatch(loc[:1], [prefix], [new], loc, loc[:0])


def _decode(ops: TritonOps, layers: list[int], requests: int, sinks: torch.Tensor | None) -> None:
    """Runs a step of padding requests; its first layer overlaps the plan differently than later ones."""
    q, k, v = _projected(ops, requests)
    rows = torch.zeros(requests, dtype=torch.int64, device=q.device)
    ops.plan_attention(rows, rows + 1)
    for layer in layers:
        rotated = ops.rotate_and_store(layer, rows, q, k, v)
        ops.rotate_output(layer, ops.decode(layer, rotated, rows, rows + 1, 1.0, sinks))


def _verify(ops: TritonOps, layers: list[int], requests: int, count: int, sinks: torch.Tensor | None) -> None:
    """Verifies the drafts of padding requests; the first layer overlaps the plan differently than later ones."""
    q, k, v = _projected(ops, requests * count)
    rows = torch.zeros(requests, dtype=torch.int64, device=q.device)
    drafts = DraftBatch(rows, rows + count, chain(count, q.device).repeat(requests, 1))
    ops.plan_drafts(drafts)
    for layer in layers:
        rotated = ops.rotate_and_store(layer, rows.repeat_interleave(count), q, k, v)
        ops.verify(layer, rotated, drafts, 1.0, sinks)


def _score(ops: TritonOps, layer: int) -> None:
    """Scores the keys of a padding request: stored ones and new ones."""
    pool = ops.pool
    scores = KeyScores(pool.layers, pool.kv_heads, 2 * PAGE_SIZE, pool.device)
    batch = _padding(ops, PAGE_SIZE, 2 * PAGE_SIZE)
    q, k, _ = _projected(ops, 2 * PAGE_SIZE)
    for part in plan_scoring(batch.prefix_lens, batch.new_lens, {0: scores}):
        ops.score_keys(layer, q, k, batch, part, 1.0)


def _quantize(ops: TritonOps, layer: int) -> None:
    """Quantizes one padding page from tokens and from its BF16 page, and restores it."""
    _, k, v = _projected(ops, PAGE_SIZE)
    page = torch.zeros(1, dtype=torch.int64, device=k.device)
    ops.quantize_tokens(layer, page, page, k, v)
    ops.quantize_slots(page, page, page)
    ops.restore_pages(page.int())


def _projected(ops: TritonOps, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns queries, keys and values of zeros, as slices of one projection, as in many models."""
    pool = ops.pool
    heads = [ops.q_heads, pool.kv_heads, pool.kv_heads]
    projected = torch.zeros(tokens, sum(heads), pool.head_dim, dtype=torch.bfloat16, device=pool.device)
    q, k, v = projected.split(heads, dim=1)
    return q, k, v
