"""Kernels for ``test_pairs``, which imports them while Triton's interpreter is on."""

import triton
import triton.language as tl

from sglang_kvq.kernels.device import bf16_pairs as pairs


@triton.jit
def round_down(out, bound):
    i = tl.arange(0, 1024) + 1024 * tl.program_id(0)
    tl.store(out + i, pairs.round_down(tl.load(bound + i)))


@triton.jit
def compare(above, at_least, x, bound, edge, PACKED: tl.constexpr):
    """Counts each row's numbers above the bound, and its magnitudes of at least the edge, as float32."""
    row = tl.program_id(0)
    x = tl.load(x + row * 64 + tl.arange(0, 64))[None, :]
    size, one = pairs.magnitudes(x), tl.arange(0, 1)
    ones = pairs.above(x, tl.load(bound + row + one)[:, None], PACKED)
    tl.store(above + row + one, pairs.count(ones, PACKED))
    ones = pairs.at_least(size, tl.load(edge + row + one)[:, None], PACKED)
    tl.store(at_least + row + one, pairs.count(ones, PACKED))
