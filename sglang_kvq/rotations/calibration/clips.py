"""Clip ratios per layer, chosen by the attention-output error that each one causes."""

from __future__ import annotations

import torch

from sglang_kvq.config import PAGE_SIZE
from sglang_kvq.rotations.maths.fake_quant import segmented_attention
from sglang_kvq.rotations.maths.round_trip import round_trip


def query_blocks(context: int, sink: int, recent: int, count: int) -> list[int]:
    """Starts of ``count`` pages of queries that read quantized history, from the middle of a context to its end."""
    last = (context - PAGE_SIZE) // PAGE_SIZE
    first = (sink + recent) // PAGE_SIZE + 1
    middle = (first + last) // 2
    return sorted({round(middle + (last - middle) * i / max(count - 1, 1)) * PAGE_SIZE for i in range(count)})


def clip_errors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    grid: tuple[float, ...],
    starts: list[int],
    sink: int,
    recent: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared error of one layer's attention output for every clip ratio, with 2-bit history keys, then values.

    Args:
        q: ``[q_heads, T, D]``; k, v: ``[kv_heads, T, D]``: one context, in the rotated basis.
        starts: first positions of the pages of queries to measure.

    Returns:
        errors float64 ``[2, len(grid)]`` (keys, values) and the output's own squared size, float64 scalar. CPU.
    """
    k, v = k.bfloat16().float(), v.bfloat16().float()
    blocks = [(start, q[:, start : start + PAGE_SIZE].float()) for start in starts]

    def attend(old_k: torch.Tensor, old_v: torch.Tensor) -> list[torch.Tensor]:
        return [segmented_attention(b, s, k, v, old_k, old_v, scale, sink=sink, recent=recent) for s, b in blocks]

    exact = attend(k, v)
    end = max(starts[-1] - recent, sink)  # what lies beyond is nobody's history
    errors = torch.zeros(2, len(grid), dtype=torch.float64)
    for i, ratio in enumerate(grid):
        for part, x in enumerate((k, v)):
            old = torch.cat([round_trip(x[:, :end], 2, ratio), x[:, end:]], 1)
            outputs = attend(old, v) if part == 0 else attend(k, old)
            errors[part, i] = sum(float((a - b).square().sum()) for a, b in zip(outputs, exact))
    return errors, torch.tensor(sum(float(b.square().sum()) for b in exact), dtype=torch.float64)


def choose_clips(errors: torch.Tensor, grid: tuple[float, ...], *, per_layer: bool) -> torch.Tensor:
    """The best ratio of each layer, for keys and values.

    A layer's own error is measured in the norm of its output, which is not quite what the model feels, and on few queries:
    where it is alone in wanting a ratio, following it may cost more than it gains. So each layer minimises the mean of its
    own relative error and that of all layers.

    Args:
        errors: float64 ``[layers, 2, len(grid)]``, relative to each layer's output.
        per_layer: False gives all layers the ratio with the least sum.

    Returns:
        int64 ``[layers, 2]``, indices into the grid.
    """
    if not per_layer:
        return errors.sum(0, keepdim=True).expand_as(errors).argmin(-1)
    relative = errors / errors.mean(-1, keepdim=True).clamp(min=1e-30)
    return (relative + relative.mean(0)).argmin(-1)
