"""Learned sinks for finished attention: scales the result of kernels that do not support sinks.

    out[t, h] *= sigmoid(lse[t, h] - sink[h]) = 1 / (1 + 2^(log2(e) sink[h] - lse2[t, h]))

lse2 is the log-sum-exp in base 2. Our own kernels add a sink to their running softmax instead (``softmax.with_sink``).
"""

import torch
import triton
import triton.language as tl

from sglang_kvq.kernels.device.common import to_bf16
from sglang_kvq.kernels.device.launch import start_kernel
from sglang_kvq.kernels.device.softmax import load_sink

_ELEMENTS = 4096  # elements of a program


def scale_by_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Applies learned sinks to ``out``, in place.

    Args:
        out: BF16 ``[T, q_heads, D]``, contiguous.
        lse: float32 ``[T, q_heads]``, contiguous, base 2.
        sinks: float ``[q_heads]``.
    """
    tokens, heads, d = out.shape
    columns = triton.next_power_of_2(d)
    rows = max(_ELEMENTS // columns, 1)
    start_kernel(
        _scale, (triton.cdiv(tokens * heads, rows),),
        out, lse, sinks, tokens * heads,
        HEADS=heads,
        D=d,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _scale(out, lse, sinks, count, HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Scales rows from program * ROWS on; a row is one head of a token."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, COLUMNS)
    live = row < count
    x = tl.load(lse + row, mask=live, other=0.0)
    factor = 1 / (1 + tl.exp2(load_sink(sinks, row % HEADS) - x))
    address = out + row[:, None] * D + dim[None, :]
    inside = live[:, None] & (dim < D)[None, :]
    o = tl.load(address, mask=inside, other=0.0).to(tl.float32)
    tl.store(address, to_bf16(o * factor[:, None]), mask=inside)
