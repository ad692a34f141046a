"""Flash attention of new tokens over a stored prefix (all of it) and over themselves (causally).

    out[t, h] = softmax(scale q[t, h] k^T) v    over the keys that token t sees, online, base 2

The stored keys may come in several slabs, one per launch. Every launch but the last then stores its running softmax
(acc, denominator, maximum) in float32 for the next one.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_kvq.kernels.device.arguments import View, field_count, load_fields, view
from sglang_kvq.kernels.device.common import INTERPRETED, dot, to_bf16
from sglang_kvq.kernels.device.launch import start_kernel
from sglang_kvq.kernels.device.shape import shape_of
from sglang_kvq.kernels.device.softmax import LOG2E, NEVER, Softmax, load_sink, no_keys, with_sink


class Tile(NamedTuple):
    """A tile's int32 fields in the plan, in this order.

    Attributes:
        row: the tile's first query row; rows: number of its query rows.
        stored: its request's first stored key in the slab; stored_keys: number of these keys.
        new: its request's first new key.
        position: index of its first query within the request.
    """

    row: int
    rows: int
    stored: int
    stored_keys: int
    new: int
    position: int


FIELDS = field_count(Tile)


def rows_per_tile(head_dim: int, longest: int) -> int:
    """Returns the query rows of a tile, given the longest request's new tokens."""
    if INTERPRETED:
        return 32
    return 128 if longest > 64 and head_dim <= 128 else 64


def plan_tiles(new_lens: list[int], stored: list[tuple[int, int]], rows: int) -> list[Tile]:
    """Returns the launch's tiles, those with most work first.

    Args:
        new_lens: new tokens of each request.
        stored: for each request, the range of its keys in the slab: (first token, tokens).
        rows: from ``rows_per_tile``.
    """
    tiles, start = [], 0
    for new, (first, count) in zip(new_lens, stored):
        tiles += [Tile(start + i, min(rows, new - i), first, count, start, i) for i in range(0, new, rows)]
        start += new
    return sorted(tiles, key=lambda tile: -(tile.stored_keys + tile.position))


def flash_attention(
    out: torch.Tensor,
    state: tuple[torch.Tensor, torch.Tensor] | None,
    q: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor],
    stored: tuple[torch.Tensor, torch.Tensor],
    plan: torch.Tensor,
    scale: float,
    *,
    rows: int,
    first: bool,
    last: bool,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attends to one slab of stored keys, and in the last launch to the new tokens.

    Args:
        out: BF16 ``[T, q_heads, D]``, contiguous, written by the last launch.
        state: float32 ``[T, q_heads, D]`` and ``[T, q_heads, 2]`` between launches; None if there is only one.
        q: BF16 ``[T, q_heads, D]``; new: the new tokens' k and v, ``[T, kv_heads, D]``, seen in the last launch only;
            stored: the slab's k and v ``[N, kv_heads, D]``. Last axes contiguous.
        plan: int32 ``[tiles, FIELDS]`` from ``plan_tiles``, with the same ``rows``.
        sinks: float ``[q_heads]``, applied by the last launch; None for none.
    """
    q_heads, d = q.shape[1:]
    acc, sums = state or (q, q)
    wide = d <= 128
    start_kernel(
        _flash, (q_heads, plan.shape[0]),
        out, acc, sums, view(q), tuple(map(view, new)), tuple(map(view, stored)), plan, scale * LOG2E,
        out if sinks is None else sinks,
        SHAPE=shape_of(new[0].shape[1], d, q_heads),
        ROWS=rows,
        KEYS=64 if wide else 32,
        FIRST=first,
        LAST=last,
        SINKS=sinks is not None,
        num_warps=8 if rows == 128 else 4,
        num_stages=3 if wide else 2,
    )  # fmt: skip


@triton.jit
def _flash(
    out, acc_state, sums_state, q, new, stored, plan, scale_log2, sinks,
    SHAPE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Program (query head, tile): loads the state, attends to stored, then new keys, and stores the result or state."""
    D: tl.constexpr = SHAPE.D
    DP: tl.constexpr = SHAPE.DP
    head = tl.program_id(0)
    kv_head = head // SHAPE.GQA_GROUP
    tile = Tile(*load_fields(plan + tl.program_id(1) * FIELDS, FIELDS))

    row, dim = tl.arange(0, ROWS), tl.arange(0, DP)
    in_tile = row < tile.rows
    live = in_tile[:, None] & (dim < D)[None, :]  # [ROWS, DP]
    token = tile.row.to(tl.int64) + row
    queries = tl.load(q.data + token[:, None] * q.token + head * q.head + dim[None, :], mask=live, other=0.0)
    result = token * SHAPE.Q_HEADS + head  # [ROWS]
    elements = result[:, None] * D + dim[None, :]
    if FIRST:
        state = no_keys(ROWS, DP)
    else:
        state = Softmax(
            tl.load(acc_state + elements, mask=live, other=0.0),
            tl.load(sums_state + 2 * result, mask=in_tile, other=0.0),
            tl.load(sums_state + 2 * result + 1, mask=in_tile, other=NEVER),
        )

    k, v = _head_of(stored[0], tile.stored, kv_head), _head_of(stored[1], tile.stored, kv_head)
    state = _attend(state, queries, k, v, tile.stored_keys, tile.stored_keys, scale_log2, SHAPE, ROWS, KEYS)
    if LAST:
        k, v = _head_of(new[0], tile.new, kv_head), _head_of(new[1], tile.new, kv_head)
        count = tile.position + tile.rows
        state = _attend(state, queries, k, v, count, tile.position, scale_log2, SHAPE, ROWS, KEYS)
        if SINKS:
            state = with_sink(state, load_sink(sinks, head))
        tl.store(out + elements, to_bf16(state.acc / tl.maximum(state.total, 1e-30)[:, None]), mask=live)
    else:
        tl.store(acc_state + elements, state.acc, mask=live)
        tl.store(sums_state + 2 * result, state.total, mask=in_tile)
        tl.store(sums_state + 2 * result + 1, state.top, mask=in_tile)


@triton.jit
def _head_of(x, token, head):
    """Returns the view that starts at the token and head."""
    return View(x.data + token.to(tl.int64) * x.token + head * x.head, x.token, x.head)


@triton.jit
def _attend(
    state, queries, k, v, count, position, scale_log2, SHAPE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr
):
    """Adds keys 0 .. count; row r sees keys up to position + r. Blocks that every row sees whole need no mask."""
    whole = tl.minimum(position + 1, count) // KEYS * KEYS
    for start in tl.range(0, whole, KEYS):
        state = _block(state, queries, k, v, start, count, position, scale_log2, SHAPE, ROWS, KEYS, False)
    for start in tl.range(whole, count, KEYS):
        state = _block(state, queries, k, v, start, count, position, scale_log2, SHAPE, ROWS, KEYS, True)
    return state


@triton.jit
def _block(
    state, queries, k, v, start, count, position, scale_log2,
    SHAPE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Runs online softmax over keys start .. start + KEYS."""
    key, dim = start + tl.arange(0, KEYS), tl.arange(0, SHAPE.DP)
    inside = (dim < SHAPE.D)[None, :]
    if MASKED:
        inside = inside & (key < count)[:, None]
    row = key.to(tl.int64)[:, None]
    if MASKED or SHAPE.D != SHAPE.DP:
        keys = tl.load(k.data + row * k.token + dim[None, :], mask=inside, other=0.0)
        values = tl.load(v.data + row * v.token + dim[None, :], mask=inside, other=0.0)
    else:
        keys = tl.load(k.data + row * k.token + dim[None, :])
        values = tl.load(v.data + row * v.token + dim[None, :])
    x = dot(queries, tl.trans(keys), tl.zeros([ROWS, KEYS], tl.float32)) * scale_log2
    if MASKED:
        sees = (key < count)[None, :] & (key[None, :] <= position + tl.arange(0, ROWS)[:, None])
        x = tl.where(sees, x, NEVER)
    top = tl.maximum(state.top, tl.max(x, 1))
    decay = tl.exp2(state.top - top)
    p = tl.exp2(x - top[:, None])
    total = state.total * decay + tl.sum(p, 1)
    return Softmax(dot(to_bf16(p), values, state.acc * decay[:, None]), total, top)
