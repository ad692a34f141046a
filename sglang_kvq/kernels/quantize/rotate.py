"""Rotation of queries, keys and values, optionally stored directly in the BF16 pages.

    out[t, h] = bf16(x[t, h] R[h] - m[h]),    x BF16 [T, heads, D], R float32 [kv_heads or 1, D, D]

m float32 [kv_heads or 1, D] is the keys' mean, if they have one. It is subtracted from the float32 sum before rounding.
R = R_hi + R_lo, two BF16 matrices. x is BF16 already, so two BF16 products summed in float32 lose only R's bits below
2^-17. That is eight times finer than TF32 at the same cost.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_kvq.kernels.device.arguments import view
from sglang_kvq.kernels.device.common import NO_OVERLAP, PAGE, Overlap, dot, to_bf16
from sglang_kvq.kernels.device.launch import Constants, start_kernel
from sglang_kvq.kernels.device.shape import shape_of

_TOKENS = 64  # rows of a tile, for every batch: a token's codes must not depend on its neighbors
#: Up to so many tokens latency dominates. Then more programs load less each.
FEW_TOKENS = 4 * _TOKENS


def split_rotation(rotation: torch.Tensor) -> torch.Tensor:
    """Splits float32 ``[..., heads, D, D]`` into BF16 ``[..., 2, heads, D, D]``, high and low parts."""
    high = rotation.bfloat16()
    low = (rotation - high.float()).bfloat16()
    return torch.stack([high, low], dim=-4).contiguous()


class Store(NamedTuple):
    """Destination of keys and values.

    Attributes:
        bf16_pages: BF16 ``[slots + 1, 2, kv_heads, PAGE_SIZE, D]``, of one layer; slot: elements from slot to slot.
        places, page_slot: tables of ``PagePool``.
        loc: int ``[T]``, SGLang's locations.
    """

    bf16_pages: torch.Tensor
    slot: int
    places: torch.Tensor
    page_slot: torch.Tensor
    loc: torch.Tensor


def rotate(
    x: tuple[torch.Tensor, ...],
    rotations: tuple[torch.Tensor | None, ...],
    store: Store | None = None,
    overlap: Overlap = NO_OVERLAP,
    mean: torch.Tensor | None = None,
    keep: bool = False,
    space: tuple[torch.Tensor | None, ...] = (None, None, None),
) -> tuple[torch.Tensor, ...]:
    """Rotates up to three tensors in one launch.

    Args:
        x: q ``[T, q_heads, D]``, k and v ``[T, kv_heads, D]``, BF16; only the last axis must be contiguous.
        rotations: for each, ``split_rotation``'s result for this layer, ``[2, kv_heads or 1, D, D]``, or None for the
            identity.
        store: destination of keys and values, which are written only there unless ``keep``. Those of a page without a
            BF16 copy go to slot 0.
        overlap: an early start loads rotations and looks up destinations before the previous launch has ended. The next
            launch starts with this one.
        mean: subtracted from rotated keys, float32 ``[kv_heads or 1, D]``, contiguous; None for nothing.
        keep: with ``store``, True to also return the rotated keys and values, and to skip pages without a BF16 copy.
        space: contiguous tensors for the results; None, or a tensor of another shape, for a new one.

    Returns:
        the rotated tensors, contiguous; an unrotated one is returned unchanged.
    """
    q, k, _ = x
    tokens, q_heads, d = q.shape
    kv_heads = k.shape[1]
    if mean is not None and rotations[1] is None:
        raise ValueError("mean given without r_k: the mean is subtracted from rotated keys only. Pass a key rotation.")
    out = tuple([y if r is None else _result(y, given) for y, r, given in zip(x, rotations, space)])
    matrices = tuple([0 if r is None else r.shape[1] for r in rotations])
    means = 0 if mean is None else mean.shape[0]
    how = _how(q_heads, kv_heads, d, tokens <= FEW_TOKENS, matrices, means, store is not None, keep, overlap)
    if tokens == 0 or how is None:
        return out
    first, programs, constants = how
    grid = (min(-(-tokens // _TOKENS), 16), programs)
    start_kernel(
        _rotate, grid,
        tuple(map(view, x)), out, tuple([q if r is None else r for r in rotations]), store or Store(q, 1, q, q, q),
        q if mean is None else mean, tokens, first,
        constants=constants,
    )  # fmt: skip
    return out


@cache
def _how(
    q_heads: int, kv_heads: int, d: int, few: bool, matrices: tuple[int, ...], means: int, stores: bool, keep: bool,
    overlap: Overlap,
) -> tuple[int, int, Constants] | None:  # fmt: skip
    """Returns a launch's first head, its programs per tile of tokens, and its constants; None if nothing has work.

    Heads are numbered q, k, v, and the launch covers those with work. If a model rotates keys but not values, values
    are skipped, or only copied to the BF16 pages.

    Args:
        few: at most ``FEW_TOKENS``. A column's bits do not depend on the block.
        matrices: how many matrices rotate q, k and v; means: how many vectors are subtracted from keys.
    """
    busy = [matrices[0] > 0, matrices[1] > 0 or stores, matrices[2] > 0 or stores]
    if not any(busy):
        return None
    bounds = [0, q_heads, q_heads + kv_heads, q_heads + 2 * kv_heads]
    first, last = bounds[busy.index(True)], bounds[3 - busy[::-1].index(True)]
    block = 32 if d == 96 or few else 64
    return first, (last - first) * (d // block), Constants(
        SHAPE=shape_of(kv_heads, d, q_heads),
        ROTATIONS=matrices,
        MEANS=means,
        STORE=stores,
        KEEP=keep,
        EARLY=overlap.early,
        LETS_NEXT=overlap.lets_next,
        TOKENS=_TOKENS,
        BLOCK=block,
        num_warps=4,
        num_stages=1,  # R's two parts and one tile of rows are 96 KiB at D = 256
        launch_pdl=overlap.early,
    )  # fmt: skip


def _result(x: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
    if given is not None and given.shape == x.shape:
        return given
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


class Head(NamedTuple):
    """One head of q, k or v.

    Attributes:
        x, out: pointers to its first token's row; x_token, out_token: strides.
        rotation: the high part of its matrix.
        mean: subtracted from its rotated rows, if given.
        bf16_page: its part of slot 0.
    """

    x: tl.tensor
    x_token: tl.tensor
    out: tl.tensor
    out_token: tl.tensor
    rotation: tl.tensor
    mean: tl.tensor
    bf16_page: tl.tensor


@triton.jit(do_not_specialize=["tokens"])
def _rotate(
    x, out, rotations, store, mean, tokens, first_head,
    SHAPE: tl.constexpr, ROTATIONS: tl.constexpr, MEANS: tl.constexpr, STORE: tl.constexpr, KEEP: tl.constexpr,
    EARLY: tl.constexpr, LETS_NEXT: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (i, j): token tiles i, i + programs, ... of one head and one block of output columns."""
    D: tl.constexpr = SHAPE.D
    KV_HEADS: tl.constexpr = SHAPE.KV_HEADS
    if LETS_NEXT:
        tl.extra.cuda.gdc_launch_dependents()
    head = first_head + tl.program_id(1) // (D // BLOCK)
    column = tl.program_id(1) % (D // BLOCK) * BLOCK
    q, k, v = x
    if head < SHAPE.Q_HEADS:
        _rotate_head(
            _head(
                q, head, out[0], SHAPE.Q_HEADS, rotations[0], head // SHAPE.GQA_GROUP, mean, store.bf16_pages, D,
                ROTATIONS[0], 0,
            ),
            store, tokens, column, SHAPE, ROTATIONS[0], 0, False, False, EARLY, TOKENS, BLOCK,
        )  # fmt: skip
    elif head < SHAPE.Q_HEADS + KV_HEADS:
        head -= SHAPE.Q_HEADS
        bf16_page = store.bf16_pages + head * PAGE * D
        _rotate_head(
            _head(k, head, out[1], KV_HEADS, rotations[1], head, mean, bf16_page, D, ROTATIONS[1], MEANS),
            store, tokens, column, SHAPE, ROTATIONS[1], MEANS, STORE, KEEP, EARLY, TOKENS, BLOCK,
        )  # fmt: skip
    else:
        head -= SHAPE.Q_HEADS + KV_HEADS
        bf16_page = store.bf16_pages + (KV_HEADS + head) * PAGE * D
        _rotate_head(
            _head(v, head, out[2], KV_HEADS, rotations[2], head, mean, bf16_page, D, ROTATIONS[2], 0),
            store, tokens, column, SHAPE, ROTATIONS[2], 0, STORE, KEEP, EARLY, TOKENS, BLOCK,
        )  # fmt: skip


@triton.jit
def _head(
    x, head, out, HEADS: tl.constexpr, rotation, kv_head, mean, bf16_page, D: tl.constexpr, ROTATIONS: tl.constexpr,
    MEANS: tl.constexpr,
):  # fmt: skip
    """Returns the ``Head`` of x and out; ROTATIONS and MEANS are the numbers of matrices and of means."""
    if ROTATIONS > 1:
        rotation += kv_head * D * D
    if MEANS > 1:
        mean += kv_head * D
    return Head(x.data + head * x.head, x.token, out + head * D, HEADS * D, rotation, mean, bf16_page)


@triton.jit
def _rotate_head(
    mine, store, tokens, column, SHAPE: tl.constexpr, ROTATIONS: tl.constexpr, MEANS: tl.constexpr,
    STORE: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes columns ``column .. column + BLOCK`` of x R - m for this program's tiles; mine: a ``Head``.

    Loads R and m; then looks up each tile's destination, multiplies and stores.
    """
    D: tl.constexpr = SHAPE.D
    if ROTATIONS > 0 or STORE:
        inner = tl.arange(0, SHAPE.DP)
        outer = column + tl.arange(0, BLOCK)
        if ROTATIONS > 0:
            r = mine.rotation + inner[:, None] * D + outer[None, :]  # [DP, BLOCK]
            high = tl.load(r, mask=(inner < D)[:, None], other=0.0)
            low = tl.load(r + ROTATIONS * D * D, mask=(inner < D)[:, None], other=0.0)
        if MEANS > 0:
            mean = tl.load(mine.mean + outer)
        for start in range(tl.program_id(0) * TOKENS, tokens, tl.num_programs(0) * TOKENS):
            token = (start + tl.arange(0, TOKENS)).to(tl.int64)
            live = token < tokens
            source = mine.x + token[:, None] * mine.x_token
            if STORE:
                location = tl.load(store.loc + token, mask=live, other=0)
                place = tl.load(store.places + location // PAGE, mask=live, other=0)
                slot = tl.load(store.page_slot + place, mask=live, other=0)
                stored = live
                if KEEP:
                    stored = slot > 0
                slot = tl.maximum(slot, 0).to(tl.int64)
                target = mine.bf16_page + slot * store.slot + location % PAGE * D
            if EARLY:
                tl.extra.cuda.gdc_wait()
            if ROTATIONS > 0:
                rows = tl.load(source + inner[None, :], mask=live[:, None] & (inner < D)[None, :], other=0.0)
                acc = tl.zeros([TOKENS, BLOCK], tl.float32)
                acc = dot(rows, high, dot(rows, low, acc))
                if MEANS > 0:
                    acc -= mean[None, :]
                y = to_bf16(acc)
            else:
                y = tl.load(source + outer[None, :], mask=live[:, None], other=0.0)
            if STORE:
                tl.store(target[:, None] + outer[None, :], y, mask=stored[:, None])
            if ROTATIONS > 0 and (KEEP or not STORE):
                out = mine.out + token * mine.out_token
                tl.store(out[:, None] + outer[None, :], y, mask=live[:, None])
