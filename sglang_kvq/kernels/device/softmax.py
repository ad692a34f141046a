"""Online softmax: the state that attention kernels carry from one tile of keys to the next, in base 2."""

from typing import NamedTuple

import triton
import triton.language as tl

from sglang_kvq.kernels.device.common import dot, to_bf16

#: Scores in base 2 are products of q, k, the softmax's scale and this.
LOG2E = 1.4426950408889634
#: Score of an unseen key.
NEVER = tl.constexpr(-1e30)
_LOG2E = tl.constexpr(LOG2E)
#: log2 of the largest p right after sums are rescaled. They are rescaled again when a p reaches 2^15: the float32 bits
#: of this 15 follow. FP16 can hold such a p times a factor below two.
_WEIGHT_LOG2 = tl.constexpr(9.0)
_LIMIT_BITS = tl.constexpr(0x41700000)
#: Integer that is not above the bits of any number.
_ANY = tl.constexpr(-(2**31))


class Softmax(NamedTuple):
    """State of every row (or column) after some keys.

    Attributes:
        acc: float32, sum of p v; the largest score's p is 1.
        total: float32, sum of p.
        top: float32, the largest score.
    """

    acc: tl.tensor
    total: tl.tensor
    top: tl.tensor


@triton.jit
def no_keys(ROWS: tl.constexpr, DIMS: tl.constexpr):
    """Returns the state of ROWS rows before the first key."""
    return Softmax(tl.zeros([ROWS, DIMS], tl.float32), tl.zeros([ROWS], tl.float32), tl.full([ROWS], NEVER, tl.float32))


@triton.jit
def scores(q, k, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Returns q k, float32 [ROWS, KEYS], for q [ROWS, dims] and k [KEYS, dims]."""
    return dot(q, tl.trans(k), tl.zeros([ROWS, KEYS], tl.float32))


@triton.jit
def attend(state, q, k, v, seen, scale_log2, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Adds BF16 keys k [KEYS, dims] and values v [KEYS, VP] to the state, where ``seen``, [ROWS or 1, KEYS]."""
    x = tl.where(seen, scores(q, k, ROWS, KEYS), NEVER)
    top = tl.maximum(state.top, tl.max(x, 1) * scale_log2)
    decay = tl.exp2(state.top - top)
    p = tl.exp2(x * scale_log2 - top[:, None])
    total = state.total * decay + tl.sum(p, 1)
    return Softmax(dot(to_bf16(p), v, state.acc * decay[:, None]), total, top)


@triton.jit
def have_risen(x, always):
    """Tells if sums must be rescaled: if ``always``, or if a score x is too high.

    x is relative to the maximum at the last rescaling. The bits of positive numbers order like the numbers. As
    integers, the maximum of three takes one instruction, and that of a warp another.
    """
    return tl.max(x.to(tl.int32, bitcast=True)) >= tl.where(always, _ANY, _LIMIT_BITS)


@triton.jit
def raised(x, begins, AXIS: tl.constexpr):
    """Returns how far a rescaling raises the maximum to which scores are relative; an item's first may lower it."""
    return tl.maximum(tl.max(x, AXIS) - _WEIGHT_LOG2, tl.where(begins, NEVER, 0.0))


@triton.jit
def load_sink(sinks, head):
    """Loads learned sinks of these query heads, as scores in base 2."""
    return tl.load(sinks + head).to(tl.float32) * _LOG2E


@triton.jit
def with_sink(state, sink):
    """Adds one key whose value is zero: ``sink`` is its score in base 2, of each row or of all."""
    top = tl.maximum(state.top, sink)
    decay = tl.exp2(state.top - top)
    return Softmax(state.acc * decay[:, None], state.total * decay + tl.exp2(sink - top), top)


@triton.jit
def first_columns(state, COLUMNS: tl.constexpr, HEADS: tl.constexpr):
    """Keeps the first HEADS of a state's COLUMNS, all or half of them; the others only pad a product."""
    if COLUMNS == HEADS:
        return state
    else:
        DIMS: tl.constexpr = state.acc.shape[0]
        h = tl.arange(0, COLUMNS)
        acc = tl.sum(tl.where((h < HEADS)[None, :], state.acc, 0.0).reshape(DIMS, 2, HEADS), 1)
        total = tl.sum(tl.where(h < HEADS, state.total, 0.0).reshape(2, HEADS), 0)
        return Softmax(acc, total, tl.max(tl.where(h < HEADS, state.top, NEVER).reshape(2, HEADS), 0))
