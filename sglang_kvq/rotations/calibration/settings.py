"""Settings of a calibration, and the parts and positions of a text that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_kvq.constants import HEAD_DIMS, PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.maths.compose import OBJECTIVES

#: Positions that contexts are spread over at most, unless ``CalibrationSettings.positions`` says more.
MOST_POSITIONS = 32768


@dataclass(frozen=True)
class CalibrationSettings:
    """Settings of a calibration.

    Attributes:
        tokens: tokens of text to use, in contexts of ``context`` tokens that do not overlap.
        context: tokens per context; more than sink + recent, so that some history is quantized.
        positions: RoPE turns keys with their position, but attention sees only differences of positions: so the moments
            are averaged over contexts that begin at positions spread over this many, and so are clips and
            sensitivities. 0 means as many as the model was made for, up to ``MOST_POSITIONS``.
        seed: 0 spreads the contexts evenly over the corpus; any other number draws them at random.
        granularity: "per-head" (one rotation per layer and KV head) or "per-layer" (shared by a layer's heads).
        composition: one of ``compose.COMPOSITIONS``.
        clips: "per-layer", or "global" for one ratio for the keys of all layers and one for the values; with the
            composition "transform" nothing is clipped.
        clip_grid: clip quantiles to try.
        clip_contexts: contexts that the grid is measured on, ``clip_blocks`` pages of queries in each.
        sensitivity_contexts: contexts of at most ``sensitivity_context`` tokens that sensitivities are measured on;
            0 leaves them out.
        sensitivity_draws: backward passes over each of these.
        sink, recent: BF16 tokens at both ends, as the server will have.
    """

    tokens: int = 32768
    context: int = 2048
    positions: int = 0
    seed: int = 0
    granularity: str = "per-head"
    composition: str = "balanced"
    clips: str = "per-layer"
    clip_grid: tuple[float, ...] = (0.80, 0.84, 0.86, 0.88, 0.90, 0.92, 0.94, 0.96, 1.0)
    clip_contexts: int = 4
    clip_blocks: int = 2
    sensitivity_contexts: int = 3
    sensitivity_context: int = 768
    sensitivity_draws: int = 2
    sink: int = 64
    recent: int = 256

    def __post_init__(self) -> None:
        if self.granularity not in ("per-head", "per-layer"):
            raise KVQuantError(f"--granularity {self.granularity}: unknown; choose per-head or per-layer.")
        if self.composition not in OBJECTIVES:
            raise KVQuantError(f"--composition {self.composition}: unknown; choose one of {', '.join(OBJECTIVES)}.")
        if self.clips not in ("per-layer", "global"):
            raise KVQuantError(f"--clips {self.clips}: unknown; choose per-layer or global.")
        if self.clips != "per-layer" and self.composition == "transform":
            raise KVQuantError(f"--clips {self.clips}: --composition transform clips nothing; leave --clips out.")
        if self.seed < 0:
            raise KVQuantError(f"--seed {self.seed}: must be 0 (evenly spaced contexts) or more.")
        if self.positions and self.positions < self.context:
            raise KVQuantError(f"--positions {self.positions}: must be at least one --context, {self.context}.")
        least = self.sink + self.recent + 2 * PAGE_SIZE
        if self.context < least:
            raise KVQuantError(f"--context {self.context}: must be at least {least}, or no history is quantized in it.")
        if self.tokens < self.context:
            raise KVQuantError(f"--tokens {self.tokens}: must be at least one context of {self.context} tokens.")


def draw_contexts(ids: torch.Tensor, settings: CalibrationSettings) -> torch.Tensor:
    """Contexts of the corpus without overlap, int64 ``[n, context]``: evenly spread (seed 0) or drawn at random.

    Raises:
        KVQuantError: the corpus, ``ids`` int64 ``[tokens]``, is too short.
    """
    count = settings.tokens // settings.context
    slack = ids.numel() - count * settings.context
    if slack < 0:
        raise KVQuantError(
            f"the corpus has {ids.numel()} tokens, calibration needs {count * settings.context}; give more text, or "
            f"lower --tokens (to at least {settings.context}, one --context)."
        )
    if settings.seed == 0:
        starts = torch.linspace(0, ids.numel() - settings.context, count).long()
    else:  # sorted gaps that share the slack: every choice without overlap is as likely
        generator = torch.Generator().manual_seed(settings.seed)
        gaps = torch.randint(slack + 1, (count,), generator=generator).sort().values
        starts = gaps + torch.arange(count) * settings.context
    return torch.stack([ids[start : start + settings.context] for start in starts.tolist()])


def first_positions(settings: CalibrationSettings, count: int, hf_config: Any) -> list[int]:
    """Returns positions of ``count`` contexts' first tokens, from 0; each doubling of the length has equally many.

    Short prompts have only the first positions, so evenly spread ones would be about the longest prompts alone.
    """
    most = max(settings.positions or positions_of(hf_config), settings.context) / settings.context
    return [round(settings.context * (most ** (i / max(count - 1, 1)) - 1)) for i in range(count)]


def positions_of(hf_config: Any) -> int:
    """Returns the positions that the model was made for, up to ``MOST_POSITIONS``; 0 if it does not say.

    Where RoPE itself changes beyond the length that it was trained with (longrope, dynamic), no more than those.
    """
    text = hf_config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    known: int = getattr(text, "max_position_embeddings", None) or 0
    if rope.get("rope_type") in ("longrope", "dynamic"):
        known = min(known, rope.get("original_max_position_embeddings") or known)
    return min(known, MOST_POSITIONS)


def check_head_dim(head_dim: int) -> None:
    """Refuse a head_dim that ``--kv-quant`` cannot serve.

    Raises:
        KVQuantError: it names the supported ones.
    """
    if head_dim not in HEAD_DIMS:
        raise KVQuantError(
            f"head_dim {head_dim} is not supported by --kv-quant; supported: {', '.join(map(str, HEAD_DIMS))}."
        )
