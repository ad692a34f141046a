"""Chooses clip ratios per layer by the error of the attention output that each ratio causes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.rotations.base import Rotations
from sglang_kvq.rotations.calibration.settings import CalibrationSettings, check_finite
from sglang_kvq.rotations.maths.fake_quant import RotatedContext, round_trip


class ClipErrors:
    """Attention-output errors of every clip ratio, summed over contexts; each relative to its layer's output."""

    def __init__(self, rotations: Rotations, settings: CalibrationSettings) -> None:
        s = settings
        self.rotations, self.settings = rotations, s
        self._whole = rotations.whole()
        self.state = {"errors": torch.zeros(rotations.k.shape[0], 2, len(s.clip_grid), dtype=torch.float64)}
        self.starts = query_blocks(s.context, s.sink, s.recent, s.clip_blocks)

    @torch.no_grad()
    def add(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
        """Adds one layer of one context; the arguments are an ``AttentionHook``'s, in the model's own basis."""
        s = self.settings
        context = RotatedContext.of(self._whole, layer, q, k, v, scale, sink=s.sink, recent=s.recent)
        errors, size = clip_errors(context, grid=s.clip_grid, starts=self.starts)
        self.state["errors"][layer] += errors / size.clamp(min=torch.finfo(size.dtype).tiny)  # an output may be 0

    def chosen(self, contexts: int) -> Rotations:
        """Returns the rotations with the best clip ratios in their meta.

        Raises:
            KVQuantError: an error is not finite.
        """
        grid, errors = self.settings.clip_grid, self.state["errors"]
        check_finite(errors.flatten(1), "the error of its attention output")
        best = choose_clips(errors, per_layer=self.settings.clips == "per-layer")
        at_best = (errors / contexts).gather(-1, best[..., None])[..., 0]
        clip_k, clip_v = (tuple(grid[i] for i in best[:, part].tolist()) for part in (0, 1))
        rounded = {name: [round(e, 6) for e in at_best[:, part].tolist()] for part, name in enumerate("kv")}
        one = self.settings.clips == "global"
        clips: dict[str, Any] = {"clip_k": clip_k[0] if one else clip_k, "clip_v": clip_v[0] if one else clip_v}
        return replace(self.rotations, meta=replace(self.rotations.meta, errors=rounded, **clips))


def query_blocks(context: int, sink: int, recent: int, count: int) -> list[int]:
    """Returns the starts of ``count`` pages of queries that read quantized history, from mid-context to the end."""
    last = (context - PAGE_SIZE) // PAGE_SIZE
    first = (sink + recent) // PAGE_SIZE + 1
    middle = (first + last) // 2
    return sorted({round(middle + (last - middle) * i / max(count - 1, 1)) * PAGE_SIZE for i in range(count)})


def clip_errors(
    context: RotatedContext, *, grid: tuple[float, ...], starts: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Measures one layer's attention-output error for every clip ratio, at the pages of queries from ``starts``.

    Returns:
        squared errors float64 ``[2, len(grid)]`` (2-bit history keys, then values), and the output's own squared size,
        both on the CPU.
    """
    exact = [context.block(start) for start in starts]
    end = max(starts[-1] - context.recent, context.sink)  # later tokens are no query's history

    def squared_error(k: torch.Tensor | None, v: torch.Tensor | None) -> float:
        outputs = [context.block(start, k, v) for start in starts]
        return sum(float((a - b).square().sum()) for a, b in zip(outputs, exact))

    def quantized(x: torch.Tensor, ratio: float) -> torch.Tensor:
        return torch.cat([round_trip(x[:, :end], 2, ratio), x[:, end:]], 1)

    errors = torch.zeros(2, len(grid), dtype=torch.float64)
    for i, ratio in enumerate(grid):
        errors[0, i] = squared_error(quantized(context.k, ratio), None)
        errors[1, i] = squared_error(None, quantized(context.v, ratio))
    return errors, torch.tensor(sum(float(b.square().sum()) for b in exact), dtype=torch.float64)


def choose_clips(errors: torch.Tensor, *, per_layer: bool) -> torch.Tensor:
    """Returns the index of each layer's best ratio, int64 ``[layers, 2]``, by errors float64 ``[layers, 2, grid]``.

    A layer's own error only approximates the effect on the model, and comes from few queries. Each layer therefore
    minimizes the mean of its own relative error and that of all layers. Without ``per_layer``, all layers get the ratio
    with the least sum of errors.
    """
    if not per_layer:
        return errors.sum(0, keepdim=True).expand_as(errors).argmin(-1)
    relative = errors / errors.mean(-1, keepdim=True).clamp(min=1e-30)
    return (relative + relative.mean(0)).argmin(-1)
