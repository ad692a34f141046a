"""Layer budgets by sensitivity (EpiCache): how far a layer's keys move if attention loses distant tokens.

The sample is not a text that is evaluated.
"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.research.episodes.past import attend_new
from benchmarks.research.episodes.runner import Runner
from sglang_kvq.errors import KVQuantError

#: Strength with which budgets follow sensitivities, by model type (the released scripts).
SHARPNESS = {"llama": 1.1, "qwen2": 1.3}
#: Share of an even budget that every layer gets.
FLOOR = 0.25


@torch.inference_mode()
def similarities(runner: Runner, ids: list[int], *, window: int, sinks: int) -> np.ndarray:
    """Returns the cosine of each layer's keys under full and windowed attention: float64 ``[layers]``.

    Low values mean sensitive layers.

    It is averaged over heads and over tokens after the first window.

    Args:
        window: a query sees the first ``sinks`` tokens, its own window, and the later half of the window before.

    Raises:
        KVQuantError: the sample is shorter than two windows, so that nothing is lost.
    """
    if len(ids) < 2 * window:
        raise KVQuantError(f"a sample of {len(ids)} tokens for windows of {window}: give two windows or more.")
    at = torch.arange(len(ids), device=runner.device)
    start = at // window * window - window // 2
    mask = (at[None] <= at[:, None]) & ((at[None] >= start[:, None]) | (at[None] < sinks))
    keys: list[list[torch.Tensor]] = [[], []]

    def full(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        keys[0].append(k)
        return attend_new(layer, q, k, v, scale)

    def windowed(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        keys[1].append(k)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)

    tokens = torch.tensor([ids])
    runner.hidden(tokens, 0, full)
    runner.hidden(tokens, 0, windowed)
    pairs = zip(*keys)
    found = [torch.cosine_similarity(a[:, :, window:].float(), b[:, :, window:].float(), dim=-1) for a, b in pairs]
    return np.array([float(x.mean(dtype=torch.float64)) for x in found])


def layer_budgets(similar: np.ndarray, tokens: int, *, sharpness: float, unit: int, least: int) -> tuple[int, ...]:
    """Returns tokens per head of each layer, ``tokens`` on average, in multiples of ``unit``.

    Each layer gets at least ``FLOOR`` of the average.

    The weight of a layer is (1 - n)^sharpness, where n is its similarity scaled to [0, 1]. The tokens above the floors
    are divided by weight, so the total is exact.

    Args:
        least: least tokens of a layer, such as the pinned ones and some more.

    Raises:
        KVQuantError: ``tokens`` is not a multiple of ``unit``, or less than ``least``.
    """
    if tokens % unit or tokens < least:
        raise KVQuantError(f"a budget of {tokens} tokens: must be a multiple of {unit} and at least {least}.")
    spread = float(similar.max() - similar.min())
    weights = np.ones_like(similar) if spread == 0 else (1 - (similar - similar.min()) / spread) ** sharpness
    total = len(similar) * tokens // unit
    floor = max(-(-least // unit), int(FLOOR * tokens / unit))
    units = np.full(len(similar), floor)
    share = weights / weights.sum() * (total - units.sum())
    units += share.astype(int)
    # What rounding down left over goes to the largest fractions.
    rest = total - int(units.sum())
    units[np.argsort(-(share - share.astype(int)), kind="stable")[:rest]] += 1
    return tuple(int(n) * unit for n in units)
