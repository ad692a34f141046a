"""A kernel for ``test_keep_sink_tokens``, which imports it while Triton's interpreter is on."""

import triton
import triton.language as tl

from sglang_kvq.kernels.tiers.sink_entries import place_sink_tokens


@triton.jit(do_not_specialize=["step"])
def place(t, count, step, BLOCK: tl.constexpr):
    place_sink_tokens(t, count, step.to(tl.int64), BLOCK)
