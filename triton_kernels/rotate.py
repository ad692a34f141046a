"""Queries, keys and values into the rotated basis, optionally straight into the overlays.

    out[t, h] = x[t, h] R[h],    x BF16 [T, heads, D], R float32 [kv_heads or 1, D, D]

R = R_hi + R_lo, two BF16 matrices: x is BF16 already, so two BF16 products summed in float32 lose
nothing but R's bits below 2^-17, eight times finer than TF32 at the same cost.
"""

import torch
import triton
import triton.language as tl

from sglang_kvq.kernels.common import PAGE, dot, to_bf16

_TOKENS = 64  # rows of a tile, whatever the batch: a token's codes must not depend on its neighbours


def split_rotation(rotation: torch.Tensor) -> torch.Tensor:
    """float32 ``[..., heads, D, D]`` to BF16 ``[..., 2, heads, D, D]``, high and low parts."""
    high = rotation.bfloat16()
    low = (rotation - high.float()).bfloat16()
    return torch.stack([high, low], dim=-4).contiguous()


def rotate(
    x: tuple[torch.Tensor, ...],
    rotations: tuple[torch.Tensor | None, ...],
    store: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    overlap: bool = False,
    early: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Rotate up to three tensors in one launch.

    Args:
        x: q ``[T, q_heads, D]``, k and v ``[T, kv_heads, D]``, BF16; only the last axis must be contiguous.
        rotations: for each, ``split_rotation``'s result for this layer, ``[2, kv_heads or 1, D, D]``, or
            None for the identity.
        store: (this layer's overlays ``[slots + 1, 2, kv_heads, PAGE_SIZE, D]``, page_slot, loc ``[T]``):
            keys and values then go there and nowhere else.
        overlap: let the next launch start with this one, if it can (``decode.decode``).
        early: load rotations and look up places while the launch before this one runs (``common.can_overlap``).

    Returns:
        the rotated tensors, contiguous; an unrotated one is returned as it came.
    """
    q, k, v = x
    tokens, q_heads, d = q.shape
    kv_heads = k.shape[1]
    r_q, r_k, r_v = rotations
    out = [y if r is None else torch.empty(y.shape, dtype=y.dtype, device=y.device) for y, r in zip(x, rotations)]
    # Heads are numbered q, k, v, and the launch covers those that have something to do (a model may rotate
    # keys and not values: then values alone are left out, or only copied to the overlays).
    busy = [r_q is not None, r_k is not None or store is not None, r_v is not None or store is not None]
    bounds = [0, q_heads, q_heads + kv_heads, q_heads + 2 * kv_heads]
    if tokens == 0 or not any(busy):
        return tuple(out)
    first, last = bounds[busy.index(True)], bounds[3 - busy[::-1].index(True)]
    overlays, page_slot, loc = store or (q, q, q)
    # Few tokens: latency is all, and more programs load less each. A column's bits do not depend on the block.
    block = 32 if d == 96 or tokens <= 4 * _TOKENS else 64
    grid = (min(triton.cdiv(tokens, _TOKENS), 16), (last - first) * (d // block))
    _rotate[grid](
        q, k, v, *out,
        *(q if r is None else r for r in rotations),
        overlays, page_slot, loc,
        tokens, first,
        *(s for y in x for s in y.stride()[:2]),
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        D=d,
        DP=triton.next_power_of_2(d),
        ROTATIONS=tuple(0 if r is None else r.shape[1] for r in rotations),
        STORE=store is not None,
        OVERLAP=overlap,
        EARLY=early,
        TOKENS=_TOKENS,
        BLOCK=block,
        num_warps=4,
        num_stages=1,  # R's two parts and one tile of rows are 96 KiB at D = 256
        launch_pdl=early,
    )  # fmt: skip
    return tuple(out)


@triton.jit
def _rotate(
    q, k, v, q_out, k_out, v_out, r_q, r_k, r_v, overlays, page_slot, loc,
    tokens, first_head, q_token, q_head, k_token, k_head, v_token, v_head,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    ROTATIONS: tl.constexpr, STORE: tl.constexpr, OVERLAP: tl.constexpr, EARLY: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (i, j): token tiles i, i + programs, ... of one head and one block of output columns."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    head = first_head + tl.program_id(1) // (D // BLOCK)
    column = tl.program_id(1) % (D // BLOCK) * BLOCK
    if head < Q_HEADS:
        _rotate_head(
            q + head * q_head, q_token, q_out + head * D, Q_HEADS * D,
            r_q, head // (Q_HEADS // KV_HEADS), overlays, page_slot, loc, tokens, column,
            D, DP, ROTATIONS[0], False, KV_HEADS, EARLY, TOKENS, BLOCK,
        )  # fmt: skip
    elif head < Q_HEADS + KV_HEADS:
        head -= Q_HEADS
        _rotate_head(
            k + head * k_head, k_token, k_out + head * D, KV_HEADS * D,
            r_k, head, overlays + head * PAGE * D, page_slot, loc, tokens, column,
            D, DP, ROTATIONS[1], STORE, KV_HEADS, EARLY, TOKENS, BLOCK,
        )  # fmt: skip
    else:
        head -= Q_HEADS + KV_HEADS
        _rotate_head(
            v + head * v_head, v_token, v_out + head * D, KV_HEADS * D,
            r_v, head, overlays + (KV_HEADS + head) * PAGE * D, page_slot, loc, tokens, column,
            D, DP, ROTATIONS[2], STORE, KV_HEADS, EARLY, TOKENS, BLOCK,
        )  # fmt: skip


@triton.jit
def _rotate_head(
    x, x_token, out, out_token, rotation, kv_head, overlay, page_slot, loc, tokens, column,
    D: tl.constexpr, DP: tl.constexpr, ROTATIONS: tl.constexpr, STORE: tl.constexpr,
    KV_HEADS: tl.constexpr, EARLY: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head: columns ``column .. column + BLOCK`` of x R for this program's tiles."""
    if ROTATIONS > 0 or STORE:
        inner = tl.arange(0, DP)
        outer = column + tl.arange(0, BLOCK)
        if ROTATIONS > 0:
            r = rotation + inner[:, None] * D + outer[None, :]  # [DP, BLOCK]
            if ROTATIONS > 1:
                r += kv_head * D * D
            high = tl.load(r, mask=(inner < D)[:, None], other=0.0)
            low = tl.load(r + ROTATIONS * D * D, mask=(inner < D)[:, None], other=0.0)
        for start in range(tl.program_id(0) * TOKENS, tokens, tl.num_programs(0) * TOKENS):
            token = (start + tl.arange(0, TOKENS)).to(tl.int64)
            live = token < tokens
            source = x + token[:, None] * x_token
            if STORE:
                place = tl.load(loc + token, mask=live, other=0)
                slot = tl.load(page_slot + place // PAGE, mask=live, other=0)
                slot = tl.maximum(slot, 0).to(tl.int64)
                target = overlay + slot * (2 * KV_HEADS * PAGE * D) + place % PAGE * D
            else:
                target = out + token * out_token
            if EARLY:
                tl.extra.cuda.gdc_wait()
            if ROTATIONS > 0:
                rows = tl.load(source + inner[None, :], mask=live[:, None] & (inner < D)[None, :], other=0.0)
                acc = tl.zeros([TOKENS, BLOCK], tl.float32)
                y = to_bf16(dot(rows, high, dot(rows, low, acc)))
            else:
                y = tl.load(source + outer[None, :], mask=live[:, None], other=0.0)
            tl.store(target[:, None] + outer[None, :], y, mask=live[:, None])
