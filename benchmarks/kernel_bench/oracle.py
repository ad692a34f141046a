"""Float64 attention over a page pool, on the stored codes: the reference for tests and benchmarks of kernels.

It rounds nothing. ``ReferenceOps``, in contrast, rounds stored keys and values to BF16.
"""

from __future__ import annotations

import torch

from sglang_kvq.attention.base import ExtendBatch
from sglang_kvq.attention.drafts import DraftBatch, mask_of
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.constants import PAGE_SIZE


def stored(
    pool: PagePool, layer: int, row: int, length: int, heads: slice = slice(None)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads a row's first ``length`` keys and values of these KV heads, float64 ``[heads, length, D]``.

    A page outside the history that has no BF16 copy is read from slot 0, like padding.
    """
    pages = pool.places[pool.req_to_token[row, :length:PAGE_SIZE].long() // PAGE_SIZE].long()
    start = torch.arange(len(pages), device=pool.device) * PAGE_SIZE
    coded = ((start >= pool.row_sink_end[row]) & (start < pool.row_history_end[row]))[:, None, None, None]
    slots = pool.page_slot[pages].clamp(min=0).long()
    bf16_pages = pool.bf16_pages[layer][:, :, heads][slots]  # [n, 2, heads, PAGE, D]
    values = pool.formats[layer].dequantize_pages(pool.records[layer][:, heads][pages])
    k, v = (
        torch.where(coded, x.double(), bf16_pages[:, i].double()).transpose(0, 1).flatten(1, 2)[:, :length]
        for i, x in enumerate(values)
    )
    return k, v


def decode(
    pool: PagePool,
    layer: int,
    q: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``AttentionOps.decode`` in float64: q ``[B, q_heads, D]``, result float64 ``[B, q_heads, D]``."""
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for i, (row, length) in enumerate(zip(rows.tolist(), seq_lens.tolist())):
        out[i] = _attend(pool, layer, row, length, q[i : i + 1], None, None, scale, sinks)[0]
    return out


def verify(
    pool: PagePool,
    layer: int,
    q: torch.Tensor,
    drafts: DraftBatch,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``AttentionOps.verify`` in float64: ``[batch * count, q_heads, D]``."""
    out, count = torch.empty(q.shape, dtype=torch.float64, device=q.device), drafts.count
    for i, (row, length) in enumerate(zip(drafts.rows.tolist(), drafts.seq_lens.tolist())):
        mine = slice(i * count, (i + 1) * count)
        hidden = torch.zeros(count, length, dtype=torch.bool, device=q.device)
        hidden[:, length - count :] = ~mask_of(drafts.seen[i])
        out[mine] = _attend(pool, layer, row, length, q[mine], None, None, scale, sinks, hidden)
    return out


def extend(
    pool: PagePool,
    layer: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: ExtendBatch,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``AttentionOps.extend`` in float64: ``[T, q_heads, D]``."""
    out, start = torch.empty(q.shape, dtype=torch.float64, device=q.device), 0
    for row, prefix, new in zip(batch.rows.tolist(), batch.prefix_lens, batch.new_lens):
        mine = slice(start, start + new)
        out[mine] = extend_row(pool, layer, row, prefix, q[mine], k[mine], v[mine], scale, sinks)
        start += new
    return out


def extend_row(
    pool: PagePool,
    layer: int,
    row: int,
    prefix: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``extend`` of one request: q ``[new, q_heads, D]`` over its row's prefix and, causally, k and v."""
    return _attend(pool, layer, row, prefix, q, k, v, scale, sinks)


def _attend(
    pool: PagePool,
    layer: int,
    row: int,
    length: int,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None,
    hidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends with queries ``[n, q_heads, D]`` to the row's tokens and, causally, to new ones; saves memory by heads.

    hidden: bool ``[n, tokens]``, tokens that queries do not see; None hides only later tokens.
    """
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    if hidden is None:
        hidden = torch.ones(len(q), length + (0 if k is None else len(q)), dtype=torch.bool, device=q.device)
        hidden = hidden.triu(length + 1)
    for head, group in enumerate(torch.arange(q.shape[1]).chunk(pool.kv_heads)):
        keys, values = (x[0] for x in stored(pool, layer, row, length, slice(head, head + 1)))
        if k is not None and v is not None:
            keys, values = torch.cat([keys, k[:, head].double()]), torch.cat([values, v[:, head].double()])
        for h in group.tolist():
            x = (q[:, h].double() @ keys.T * scale).masked_fill(hidden, float("-inf"))
            if sinks is not None:  # one more key, whose value is zero
                x = torch.cat([x, sinks[h].double().expand(len(q), 1)], dim=1)
            out[:, h] = x.softmax(-1)[:, : len(values)] @ values
    return out
