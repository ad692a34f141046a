"""Merge of the partial results of a decode step by their log-sum-exp.

    out = sum_i 2^(lse_i - max lse) o_i / sum_i 2^(lse_i - max lse)

A learned sink is one more result in the sums, with o zero and the sink as its lse.
"""

import torch
import triton
import triton.language as tl

from sglang_kvq.kernels.device.common import NO_OVERLAP, Overlap, to_bf16
from sglang_kvq.kernels.device.launch import start_kernel
from sglang_kvq.kernels.device.softmax import load_sink

#: Elements of the partial results that a warp holds.
_PER_WARP = 2048
#: Maximum number of partial results that a program reads at a time.
_MOST = 256
#: The number in a prefill, whatever its batch: each number is a kernel of its own, and a request would wait for it.
_IN_PREFILL = 16


def items_at_a_time(items: int, batch: int) -> int:
    """Returns how many partial results a program reads at a time in a step; each number is a kernel of its own.

    It is the number of a request's items if all requests are equally long. One with more takes several iterations.
    """
    return min(_MOST, triton.next_power_of_2(-(-items // batch)))


def merge_splits(
    out: torch.Tensor,
    partial: torch.Tensor,
    lse: torch.Tensor,
    spans: torch.Tensor,
    overlap: Overlap = NO_OVERLAP,
    least: int = 1,
    sinks: torch.Tensor | None = None,
) -> None:
    """Merges each request's items to one row.

    Args:
        out: BF16 ``[B, q_heads, D]``.
        partial: float32 ``[items, q_heads, D]``; lse: float32 ``[items, q_heads]``, base 2.
        spans: int32 ``[B, 2]`` (``split_work.split_work``): a request's first item and number of items, at least one.
        overlap: an early start reads the spans before the previous launch has ended.
        least: rows with fewer items than this are not written; above 1 in a prefill.
        sinks: float ``[q_heads]``; None for none.
    """
    batch, heads, d = out.shape
    chunk = items_at_a_time(len(partial), batch) if least == 1 else _IN_PREFILL
    columns = triton.next_power_of_2(d)
    if chunk > 16:  # few rows: spread each over several programs
        columns = min(columns, 32)
    start_kernel(
        _merge, (batch * heads, -(-d // columns)),
        out, partial, lse, spans, lse if sinks is None else sinks,
        HEADS=heads,
        CHUNK=chunk,
        D=d,
        COLUMNS=columns,
        EARLY=overlap.early,
        LEAST=least,
        SINKS=sinks is not None,
        num_warps=min(8, max(1, chunk * columns // _PER_WARP)),
        launch_pdl=overlap.early,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["spans"])
def _merge(
    out, partial, lse, spans, sinks,
    HEADS: tl.constexpr, CHUNK: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
    LEAST: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Program (request * HEADS + head, c): dims c * COLUMNS .. of that row."""
    request, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    first, count = tl.load(spans + 2 * request), tl.load(spans + 2 * request + 1)
    if count < LEAST:
        return
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i, dim = tl.arange(0, CHUNK), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros([COLUMNS], tl.float32)
    total, top = 0.0, -1e30
    for start in range(0, count, CHUNK):
        row = ((first + start + i) * HEADS + head).to(tl.int64)
        inside = start + i < count
        x = tl.load(lse + row, mask=inside, other=float("-inf"))
        o = tl.load(
            partial + row[:, None] * D + dim[None, :], mask=inside[:, None] & (dim < D)[None, :], other=0.0
        )  # [CHUNK, COLUMNS]
        new_top = tl.maximum(top, tl.max(x, 0))
        decay, weight = tl.exp2(top - new_top), tl.exp2(x - new_top)
        acc = acc * decay + tl.sum(o * weight[:, None], 0)
        total = total * decay + tl.sum(weight, 0)
        top = new_top
    if SINKS:
        sink = load_sink(sinks, head)
        new_top = tl.maximum(top, sink)
        decay = tl.exp2(top - new_top)
        acc, total = acc * decay, total * decay + tl.exp2(sink - new_top)
    tl.store(out + tl.program_id(0).to(tl.int64) * D + dim, to_bf16(acc / total), mask=dim < D)
