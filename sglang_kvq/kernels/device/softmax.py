"""Online softmax: what kernels that attend carry from one tile of keys to the next, in base 2."""

from typing import NamedTuple

import triton
import triton.language as tl

from sglang_kvq.kernels.device.common import dot, to_bf16

#: Scores are multiplied by it and the softmax's scale.
LOG2E = 1.4426950408889634
#: The score of what is not seen.
NEVER = tl.constexpr(-1e30)
_LOG2E = tl.constexpr(LOG2E)
#: The largest p, as a power of two, when sums are scaled anew; until one is larger than 2^15, that number's bits, they
#: are not. FP16 holds these, times what is below two.
_WEIGHT_LOG2 = tl.constexpr(9.0)
_LIMIT_BITS = tl.constexpr(0x41700000)
#: What any number's bits are no less than.
_ANY = tl.constexpr(-(2**31))


class Softmax(NamedTuple):
    """Of every row (or column) the state after some keys.

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
    """The state of ROWS rows before the first key."""
    return Softmax(tl.zeros([ROWS, DIMS], tl.float32), tl.zeros([ROWS], tl.float32), tl.full([ROWS], NEVER, tl.float32))


@triton.jit
def scores(q, k, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """q k, float32 [ROWS, KEYS], of q [ROWS, dims] and k [KEYS, dims]."""
    return dot(q, tl.trans(k), tl.zeros([ROWS, KEYS], tl.float32))


@triton.jit
def attend(state, q, k, v, seen, scale_log2, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Add BF16 keys k [KEYS, dims] and values v [KEYS, VP], where seen [ROWS or 1, KEYS]."""
    x = tl.where(seen, scores(q, k, ROWS, KEYS), NEVER)
    top = tl.maximum(state.top, tl.max(x, 1) * scale_log2)
    decay = tl.exp2(state.top - top)
    p = tl.exp2(x * scale_log2 - top[:, None])
    total = state.total * decay + tl.sum(p, 1)
    return Softmax(dot(to_bf16(p), v, state.acc * decay[:, None]), total, top)


@triton.jit
def have_risen(x, always):
    """Whether sums have to be scaled anew: always, or for a score, all relative to what was the largest then.

    Positive numbers are in order as integers too: the maximum of three is one instruction, and that of a warp another.
    """
    return tl.max(x.to(tl.int32, bitcast=True)) >= tl.where(always, _ANY, _LIMIT_BITS)


@triton.jit
def raised(x, begins, AXIS: tl.constexpr):
    """By how much the scores' zero rises when sums are scaled anew; where they begin it may fall as well."""
    return tl.maximum(tl.max(x, AXIS) - _WEIGHT_LOG2, tl.where(begins, NEVER, 0.0))


@triton.jit
def load_sink(sinks, head):
    """Learned sinks of these query heads, as scores in base 2."""
    return tl.load(sinks + head).to(tl.float32) * _LOG2E


@triton.jit
def with_sink(state, sink):
    """Add one key whose value is zero: ``sink`` is its score in base 2, of each row or of all."""
    top = tl.maximum(state.top, sink)
    decay = tl.exp2(state.top - top)
    return Softmax(state.acc * decay[:, None], state.total * decay + tl.exp2(sink - top), top)


@triton.jit
def first_columns(state, COLUMNS: tl.constexpr, HEADS: tl.constexpr):
    """A state whose COLUMNS are heads, without those that fill up a product: HEADS are all or half of them."""
    if COLUMNS == HEADS:
        return state
    else:
        DIMS: tl.constexpr = state.acc.shape[0]
        h = tl.arange(0, COLUMNS)
        acc = tl.sum(tl.where((h < HEADS)[None, :], state.acc, 0.0).reshape(DIMS, 2, HEADS), 1)
        total = tl.sum(tl.where(h < HEADS, state.total, 0.0).reshape(2, HEADS), 0)
        return Softmax(acc, total, tl.max(tl.where(h < HEADS, state.top, NEVER).reshape(2, HEADS), 0))
