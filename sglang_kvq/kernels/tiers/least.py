"""The k least of int64 keys, by bisection: for one program that chooses slots or entries."""

import triton
import triton.language as tl

from sglang_kvq.cache import least

NEVER = tl.constexpr(least.NEVER)


@triton.jit
def bisect(keys, count, takes, low, high, BLOCK: tl.constexpr):
    """The least key, of low .. high, that at least ``takes`` of ``keys`` int64 [count] do not exceed."""
    middle = low  # what is free, or the oldest, is often enough
    while low < high:
        enough = count_below(keys, count, middle + 1, BLOCK) >= takes
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
        middle = low + (high - low) // 2
    return low


@triton.jit
def count_below(keys, count, bound, BLOCK: tl.constexpr):
    """How many keys are below that."""
    below = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        below += (tl.load(keys + i, mask=i < count, other=NEVER) < bound).to(tl.int32)
    return tl.sum(below, 0)


@triton.jit
def among_least(key, bound, passed, equals):
    """Which of a block's keys are below the bound or among the first ``equals`` at it, of which ``passed`` came before.

    Returns:
        int32, 1 or 0, of each key; how many of those at the bound have come now.
    """
    equal = (key == bound).to(tl.int32)
    take = (key < bound) | ((equal > 0) & (passed + tl.cumsum(equal, 0) <= equals))
    return take.to(tl.int32), passed + tl.sum(equal, 0)
