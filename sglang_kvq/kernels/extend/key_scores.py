"""Highest attention of a prompt's queries to each past key (``attention.key_scores``), for keys in BF16.

    lse[t, g]   = log2 of the sum over past keys j of 2^x          x = q[t, g] k[j] scale log2 e
    score[h, j] = max over t and the heads g of KV head h of 2^(x - lse[t, g])

Two passes avoid storing a matrix of products. In the first a program owns queries and reads keys, in the second it owns
keys and reads queries, so both reduce in registers. 2^x grows with x, so the second pass takes the maximum of
exponents: one multiply-add and one comparison per product, one power of two per key. In both passes, the owned operand
is in shared memory, and the other one is copied ahead of its use.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_kvq.kernels.device.arguments import View, view
from sglang_kvq.kernels.device.launch import start_kernel
from sglang_kvq.kernels.device.shape import shape_of
from sglang_kvq.kernels.device.softmax import LOG2E, NEVER, scores


@dataclass(frozen=True)
class ScoreLaunch:
    """Compile options of both kernels.

    Attributes:
        owned: queries (first pass) or keys (second) that a program owns; a query is one head of a token.
        read: keys or queries per iteration.
        warps, stages: compiler options.
    """

    owned: int
    read: int
    warps: int
    stages: int


#: 80 KiB of shared memory at 128 dims: two programs per SM, whose 16 warps hide the copies. Not measured yet.
NARROW = ScoreLaunch(owned=128, read=64, warps=8, stages=3)
#: Heads of 256: 128 KiB.
WIDE = ScoreLaunch(owned=128, read=64, warps=8, stages=2)
#: Programs that run at once on an SM; ``splits_of`` splits keys so that all are busy.
PROGRAMS_PER_SM = 2
#: Minimum number of keys per split, for which a program loads its queries once.
LEAST_KEYS = 512


def score_launch(head_dim: int) -> ScoreLaunch:
    return WIDE if head_dim > 128 else NARROW


def splits_of(prompt: int, q_heads: int, kv_heads: int, past: int, sms: int, launch: ScoreLaunch) -> int:
    """Returns the number of ranges into which the first pass splits keys, so that few queries occupy all SMs."""
    tiles = -(-prompt * (q_heads // kv_heads) // launch.owned) * kv_heads
    return max(min(PROGRAMS_PER_SM * sms // tiles, past // LEAST_KEYS), 1)


def past_lse(lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, scale: float, *, launch: ScoreLaunch) -> None:
    """Runs the first pass: computes each query's log-sum-exp over each range of past keys.

    Args:
        lse: float32 ``[splits, P, q_heads]``, contiguous, of each split's range of keys.
        q: BF16 ``[P, q_heads, D]``; k: BF16 ``[n, kv_heads, D]``, n at least 1. Last axes contiguous.
    """
    splits, prompt, q_heads = lse.shape
    past, kv_heads, d = k.shape
    shape = shape_of(kv_heads, d, q_heads)
    queries = prompt * shape.GQA_GROUP
    span = -(-past // (splits * launch.read)) * launch.read
    start_kernel(
        _past_lse, (kv_heads, -(-queries // launch.owned), splits),
        lse, view(q), view(k), queries, past, span, scale * LOG2E,
        SHAPE=shape,
        QUERIES=launch.owned,
        KEYS=launch.read,
        num_warps=launch.warps,
        num_stages=launch.stages,
        enable_fp_fusion=True,
    )  # fmt: skip


def merged(lse: torch.Tensor) -> torch.Tensor:
    """Merges LSEs of ranges, ``[splits, P, q_heads]``, to those of all keys, ``[P, q_heads]``, in base 2."""
    if len(lse) == 1:
        return lse[0]
    top = lse.amax(0)
    return top + (lse - top).exp2().sum(0).log2()


def raise_scores(
    values: torch.Tensor, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, scale: float, *, launch: ScoreLaunch
) -> None:
    """Runs the second pass: raises keys' scores to the highest attention of any query.

    Args:
        values: float32 ``[kv_heads, n]``, last axis contiguous, raised where a key's score is higher.
        q, k: see ``past_lse``; k may be only some of the keys.
        lse: float32 ``[P, q_heads]``, contiguous, of all past keys.
    """
    prompt, q_heads = lse.shape
    past, kv_heads, d = k.shape
    shape = shape_of(kv_heads, d, q_heads)
    start_kernel(
        _raise_scores, (kv_heads, -(-past // launch.owned)),
        values, values.stride(0), view(q), view(k), lse, prompt * shape.GQA_GROUP, past, scale * LOG2E,
        SHAPE=shape,
        KEYS=launch.owned,
        QUERIES=launch.read,
        num_warps=launch.warps,
        num_stages=launch.stages,
        enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["queries", "past", "span"], do_not_specialize_on_alignment=["lse"])
def _past_lse(
    lse, q, k, queries, past, span, scale_log2,
    SHAPE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Program (KV head, tile of queries, split): computes its queries' log-sum-exp over the split's keys."""
    head, split = tl.program_id(0), tl.program_id(2)
    n = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    tile = _queries(q, n, queries, head, SHAPE)
    keys = View(k.data + head * k.head, k.token, k.head)
    first = split * span
    end = tl.minimum(first + span, past)
    whole = tl.maximum(first + (end - first) // KEYS * KEYS, first)
    top, total = tl.full([QUERIES], NEVER, tl.float32), tl.zeros([QUERIES], tl.float32)
    for start in tl.range(first, whole, KEYS):
        x = scores(tile, _keys(keys, start, past, SHAPE, KEYS, False), QUERIES, KEYS)
        top, total = _add(top, total, x, scale_log2)
    if whole < end:
        x = scores(tile, _keys(keys, whole, past, SHAPE, KEYS, True), QUERIES, KEYS)
        x = tl.where((whole + tl.arange(0, KEYS) < end)[None, :], x, NEVER)
        top, total = _add(top, total, x, scale_log2)
    place = split.to(tl.int64) * (queries // SHAPE.GQA_GROUP * SHAPE.Q_HEADS) + _place(n, head, SHAPE)
    # A range without keys, after the last ones, gets no weight.
    tl.store(lse + place, top + tl.log2(tl.maximum(total, 1e-30)), mask=n < queries)


@triton.jit
def _add(top, total, x, scale_log2):
    """Updates an online softmax with products x [QUERIES, KEYS]."""
    higher = tl.maximum(top, tl.max(x, 1) * scale_log2)
    total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(x * scale_log2 - higher[:, None]), 1)
    return higher, total


@triton.jit(do_not_specialize=["values_head", "queries", "past"], do_not_specialize_on_alignment=["values", "lse"])
def _raise_scores(
    values, values_head, q, k, lse, queries, past, scale_log2,
    SHAPE: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Program (KV head, tile of keys): raises its keys' scores over all queries of the head's group."""
    head = tl.program_id(0)
    first = tl.program_id(1) * KEYS
    keys = _keys(View(k.data + head * k.head, k.token, k.head), first, past, SHAPE, KEYS, True)
    # Keep the maximum of each place in a tile of products; reduce once, at the end.
    best = tl.full([KEYS, QUERIES], float("-inf"), tl.float32)
    for start in tl.range(0, queries, QUERIES):
        n = start + tl.arange(0, QUERIES)
        # Every exponent of a missing query is -inf.
        less = tl.load(lse + _place(n, head, SHAPE), mask=n < queries, other=float("inf"))
        x = scores(keys, _queries(q, n, queries, head, SHAPE), KEYS, QUERIES)
        best = tl.maximum(best, x * scale_log2 - less[None, :])
    key = first + tl.arange(0, KEYS)
    place = values + head.to(tl.int64) * values_head + key
    inside = key < past
    tl.store(place, tl.maximum(tl.load(place, mask=inside, other=0.0), tl.exp2(tl.max(best, 1))), mask=inside)


@triton.jit
def _place(n, head, SHAPE: tl.constexpr):
    """Returns the index in [P, q_heads] of a KV head's query n; queries are ordered by token, then by head."""
    return n // SHAPE.GQA_GROUP * SHAPE.Q_HEADS + head * SHAPE.GQA_GROUP + n % SHAPE.GQA_GROUP


@triton.jit
def _queries(q, n, queries, head, SHAPE: tl.constexpr):
    """Loads a KV head's queries n, BF16 [n, DP]; zeros for missing ones."""
    dim = tl.arange(0, SHAPE.DP)
    token, q_head = n // SHAPE.GQA_GROUP, head * SHAPE.GQA_GROUP + n % SHAPE.GQA_GROUP
    address = q.data + token.to(tl.int64) * q.token + q_head * q.head
    inside = (n < queries)[:, None] & (dim < SHAPE.D)[None, :]
    return tl.load(address[:, None] + dim[None, :], mask=inside, other=0.0)


@triton.jit
def _keys(k, first, past, SHAPE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr):
    """Loads keys from ``first`` on, BF16 [KEYS, DP]; with MASKED, zeros for missing ones."""
    key, dim = first + tl.arange(0, KEYS), tl.arange(0, SHAPE.DP)
    address = (k.data + key.to(tl.int64) * k.token)[:, None] + dim[None, :]
    inside = (dim < SHAPE.D)[None, :]
    if MASKED:
        return tl.load(address, mask=inside & (key < past)[:, None], other=0.0)
    elif SHAPE.D != SHAPE.DP:
        return tl.load(address, mask=inside, other=0.0)
    else:
        return tl.load(address)
