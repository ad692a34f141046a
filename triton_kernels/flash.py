"""Flash attention of new tokens over a stored prefix (all of it) and over themselves (causally).

    out[t, h] = softmax(scale q[t, h] k^T) v    over the keys that token t sees, online, base 2

The stored keys may come in several slabs: then every launch but the last leaves its running softmax
(acc, denominator, maximum) in float32 for the next.
"""

import torch
import triton
import triton.language as tl

from sglang_kvq.kernels.common import INTERPRETED, dot, to_bf16

LOG2E = 1.4426950408889634
NEVER = tl.constexpr(-1e30)
#: int32 fields of a tile in the plan, see ``plan_tiles``.
FIELDS = tl.constexpr(6)


def rows_per_tile(head_dim: int, longest: int) -> int:
    """Query rows of a tile, given the longest request's new tokens."""
    if INTERPRETED:
        return 32
    return 128 if longest > 64 and head_dim <= 128 else 64


def plan_tiles(new_lens: list[int], stored: list[tuple[int, int]], rows: int) -> list[list[int]]:
    """The launch's tiles, heaviest first.

    Args:
        new_lens: new tokens of each request.
        stored: for each request, where its keys lie in the slab: (first token, tokens).
        rows: from ``rows_per_tile``.

    Returns:
        per tile: first query row, query rows, first stored key, stored keys, first new key, and the
        tile's first query counted within its request.
    """
    tiles, start = [], 0
    for new, (first, count) in zip(new_lens, stored):
        tiles += [[start + i, min(rows, new - i), first, count, start, i] for i in range(0, new, rows)]
        start += new
    return sorted(tiles, key=lambda tile: -(tile[3] + tile[5]))


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
) -> None:
    """One slab.

    Args:
        out: BF16 ``[T, q_heads, D]``, contiguous, written by the last launch.
        state: float32 ``[T, q_heads, D]`` and ``[T, q_heads, 2]`` between launches; None if there is one only.
        q: BF16 ``[T, q_heads, D]``; new: the new tokens' k and v, ``[T, kv_heads, D]``, seen in the last
            launch only; stored: the slab's k and v ``[N, kv_heads, D]``. Last axes contiguous.
        plan: int32 ``[tiles, 6]`` of ``plan_tiles``, made with the same ``rows``.
    """
    q_heads, d = q.shape[1:]
    k, v = new
    k_old, v_old = stored
    acc, sums = state or (q, q)
    wide = d <= 128
    _flash[(q_heads, plan.shape[0])](
        out, acc, sums, q, k, v, k_old, v_old, plan, scale * LOG2E,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *k_old.stride()[:2], *v_old.stride()[:2],
        GQA_GROUP=q_heads // k.shape[1],
        D=d,
        DP=triton.next_power_of_2(d),
        ROWS=rows,
        KEYS=64 if wide else 32,
        FIRST=first,
        LAST=last,
        num_warps=8 if rows == 128 else 4,
        num_stages=3 if wide else 2,
    )  # fmt: skip


@triton.jit
def _flash(
    out, acc_state, sums_state, q, k, v, k_old, v_old, plan, scale_log2,
    q_token, q_head, k_token, k_head, v_token, v_head, ko_token, ko_head, vo_token, vo_head,
    GQA_GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Program (query head, tile)."""
    head, q_heads = tl.program_id(0), tl.num_programs(0)
    plan += tl.program_id(1) * FIELDS
    q_start, q_count = tl.load(plan).to(tl.int64), tl.load(plan + 1)
    old_start, old_count = tl.load(plan + 2).to(tl.int64), tl.load(plan + 3)
    new_start, position = tl.load(plan + 4).to(tl.int64), tl.load(plan + 5)

    row, dim = tl.arange(0, ROWS), tl.arange(0, DP)
    live = (row < q_count)[:, None] & (dim < D)[None, :]  # [ROWS, DP]
    token = q_start + row
    queries = tl.load(q + token[:, None] * q_token + head * q_head + dim[None, :], mask=live, other=0.0)
    place = token * q_heads + head  # [ROWS]
    if FIRST:
        acc = tl.zeros([ROWS, DP], tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        top = tl.full([ROWS], NEVER, tl.float32)
    else:
        acc = tl.load(acc_state + place[:, None] * D + dim[None, :], mask=live, other=0.0)
        total = tl.load(sums_state + 2 * place, mask=row < q_count, other=0.0)
        top = tl.load(sums_state + 2 * place + 1, mask=row < q_count, other=NEVER)

    kv_head = head // GQA_GROUP
    k_old += old_start * ko_token + kv_head * ko_head
    v_old += old_start * vo_token + kv_head * vo_head
    acc, total, top = _attend(
        acc, total, top, queries, k_old, ko_token, v_old, vo_token, old_count, old_count, scale_log2, D, DP, ROWS, KEYS
    )
    if LAST:
        k += new_start * k_token + kv_head * k_head
        v += new_start * v_token + kv_head * v_head
        acc, total, top = _attend(
            acc,
            total,
            top,
            queries,
            k,
            k_token,
            v,
            v_token,
            position + q_count,
            position,
            scale_log2,
            D,
            DP,
            ROWS,
            KEYS,
        )
        result = to_bf16(acc / tl.maximum(total, 1e-30)[:, None])
        tl.store(out + place[:, None] * D + dim[None, :], result, mask=live)
    else:
        tl.store(acc_state + place[:, None] * D + dim[None, :], acc, mask=live)
        tl.store(sums_state + 2 * place, total, mask=row < q_count)
        tl.store(sums_state + 2 * place + 1, top, mask=row < q_count)


@triton.jit
def _attend(
    acc, total, top, queries, k, k_token, v, v_token, count, position, scale_log2,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Add keys 0 .. count; row r sees keys up to position + r. Blocks that every row sees whole need no mask."""
    whole = tl.minimum(position + 1, count) // KEYS * KEYS
    for start in tl.range(0, whole, KEYS):
        acc, total, top = _block(
            acc, total, top, queries, k, k_token, v, v_token, start, count, position, scale_log2,
            D, DP, ROWS, KEYS, False,
        )  # fmt: skip
    for start in tl.range(whole, count, KEYS):
        acc, total, top = _block(
            acc, total, top, queries, k, k_token, v, v_token, start, count, position, scale_log2,
            D, DP, ROWS, KEYS, True,
        )  # fmt: skip
    return acc, total, top


@triton.jit
def _block(
    acc, total, top, queries, k, k_token, v, v_token, start, count, position, scale_log2,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys start .. start + KEYS."""
    key, dim = start + tl.arange(0, KEYS), tl.arange(0, DP)
    inside = (dim < D)[None, :]
    if MASKED:
        inside = inside & (key < count)[:, None]
    place = key.to(tl.int64)[:, None]
    if MASKED or D != DP:
        keys = tl.load(k + place * k_token + dim[None, :], mask=inside, other=0.0)
        values = tl.load(v + place * v_token + dim[None, :], mask=inside, other=0.0)
    else:
        keys = tl.load(k + place * k_token + dim[None, :])
        values = tl.load(v + place * v_token + dim[None, :])
    x = dot(queries, tl.trans(keys), tl.zeros([ROWS, KEYS], tl.float32)) * scale_log2
    if MASKED:
        sees = (key < count)[None, :] & (key[None, :] <= position + tl.arange(0, ROWS)[:, None])
        x = tl.where(sees, x, NEVER)
    new_top = tl.maximum(top, tl.max(x, 1))
    decay = tl.exp2(top - new_top)
    p = tl.exp2(x - new_top[:, None])
    total = total * decay + tl.sum(p, 1)
    acc = dot(to_bf16(p), values, acc * decay[:, None])
    return acc, total, new_top
