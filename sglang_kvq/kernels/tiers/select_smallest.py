"""Finds the k smallest int64 keys by bisection, in one program that chooses slots or entries."""

import triton
import triton.language as tl

from sglang_kvq import constants

NEVER = tl.constexpr(constants.NEVER)


@triton.jit
def bisect(keys, count, takes, low, high, BLOCK: tl.constexpr):
    """Returns the least key in low .. high with at least ``takes`` of ``keys`` int64 [count] at or below it."""
    middle = low  # a free item, or the oldest, is often enough
    while low < high:
        enough = count_below(keys, count, middle + 1, BLOCK) >= takes
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
        middle = low + (high - low) // 2
    return low


@triton.jit
def count_below(keys, count, bound, BLOCK: tl.constexpr):
    """Returns how many keys are below ``bound``."""
    below = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        below += (tl.load(keys + i, mask=i < count, other=NEVER) < bound).to(tl.int32)
    return tl.sum(below, 0)


@triton.jit
def among_least(key, bound, passed, equals):
    """Marks a block's keys that are below the bound, or among the first ``equals`` keys equal to it.

    passed: number of equal keys in earlier blocks.

    Returns:
        int32, 1 or 0, for each key; the number of equal keys so far.
    """
    equal = (key == bound).to(tl.int32)
    take = (key < bound) | ((equal > 0) & (passed + tl.cumsum(equal, 0) <= equals))
    return take.to(tl.int32), passed + tl.sum(equal, 0)
