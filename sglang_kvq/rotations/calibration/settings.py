"""Settings of a calibration: its text, the contexts that are drawn from it, and the positions where they begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_kvq.constants import HEAD_DIMS, PAGE_SIZE
from sglang_kvq.errors import KVQuantError, unknown
from sglang_kvq.rotations.maths.compose import OBJECTIVES

#: Most positions that contexts are spread over, unless ``CalibrationSettings.positions`` is larger.
MOST_POSITIONS = 32768

#: Suffixes of the files that are read in a folder given as text.
SUFFIXES = (".txt", ".md", ".rst", ".py")


def read_corpus(paths: Sequence[Path], share: float = 1.0) -> tuple[str, str]:
    """Returns the first ``share`` of each file and folder, one after another, and the name to record.

    Raises:
        KVQuantError: a path is missing, has no text or is not UTF-8, or the share is not above 0 and at most 1.
    """
    if not 0 < share <= 1:
        raise KVQuantError(f"--text-share {share}: must be above 0 and at most 1.")
    texts = []
    for path in paths:
        text = read_folder(path) if path.is_dir() else read_text(path)
        if not text.strip():
            raise KVQuantError(f"--text {path}: no text in it. Give a text like what will be served.")
        texts.append(text[: int(len(text) * share)])
    name = ", ".join(f"{path.parent.name}/{path.name}" if path.parent.name else path.name for path in paths)
    return "\n\n".join(texts), name if share == 1 else f"{name}, first {share:.0%} of its characters"


def read_folder(folder: Path) -> str:
    """Returns the text of all text files below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    if not files:
        raise KVQuantError(f"--text {folder}: no {', '.join(SUFFIXES)} file in this folder. Give a text file.")
    return "\n\n".join(read_text(path) for path in files)


def read_text(path: Path) -> str:
    """Returns the text of a UTF-8 file."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise KVQuantError(
            f"--text {path}: {error.strerror or error}. Give a text file that this user may read."
        ) from error
    except UnicodeDecodeError as error:
        raise KVQuantError(f"--text {path}: not UTF-8 text ({error}). Convert it, or give another file.") from error


@dataclass(frozen=True)
class CalibrationSettings:
    """Settings of a calibration.

    Attributes:
        tokens: tokens of text to use, in contexts of ``context`` tokens that do not overlap.
        positions: number of positions over which the beginnings of contexts are spread. 0 means as many as the model
            was made for, up to ``MOST_POSITIONS``.
        seed: 0 spreads the contexts evenly over the corpus; any other number draws them at random.
        granularity: "per-head" (one rotation per layer and KV head) or "per-layer" (shared by a layer's heads).
        composition: a key of ``compose.OBJECTIVES``.
        clips: "per-layer", or "global" for one ratio for the keys of all layers and one for the values.
        clip_grid: clip quantiles to try.
        clip_contexts: contexts that the grid is measured on, ``clip_blocks`` pages of queries in each.
        sensitivity_contexts: contexts of at most ``sensitivity_context`` tokens that sensitivities are measured on;
            0 measures no sensitivities.
        sensitivity_draws: backward passes over each of these contexts.
        sink, recent: BF16 tokens at both ends, as in the server.
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
        for flag, value, choices in (
            ("--granularity", self.granularity, ("per-head", "per-layer")),
            ("--composition", self.composition, tuple(OBJECTIVES)),
            ("--clips", self.clips, ("per-layer", "global")),
        ):
            if value not in choices:
                raise unknown(flag, value, choices)
        if self.clips != "per-layer" and self.composition == "transform":
            raise KVQuantError(f"--clips {self.clips}: --composition transform clips nothing. Leave --clips out.")
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
    """Returns contexts of the corpus without overlap, int64 ``[n, context]``: evenly spread (seed 0) or random."""
    count = settings.tokens // settings.context
    slack = ids.numel() - count * settings.context
    if slack < 0:
        raise KVQuantError(
            f"the corpus has {ids.numel()} tokens, calibration needs {count * settings.context}. Give more text, or "
            f"lower --tokens (to at least {settings.context}, one --context)."
        )
    if settings.seed == 0:
        starts = evenly(ids.numel() - settings.context, count)
    else:  # sorted gaps divide the slack, so contexts do not overlap
        generator = torch.Generator().manual_seed(settings.seed)
        gaps = torch.randint(slack + 1, (count,), generator=generator).sort().values
        starts = (gaps + torch.arange(count) * settings.context).tolist()
    return torch.stack([ids[start : start + settings.context] for start in starts])


def evenly(last: int, count: int) -> list[int]:
    """Returns ``count`` numbers spread evenly from 0 to ``last``; a float32 would round those above 2^24."""
    return [i * last // max(count - 1, 1) for i in range(count)]


def first_positions(settings: CalibrationSettings, count: int, hf_config: Any) -> list[int]:
    """Returns the positions where ``count`` contexts begin, from 0; each doubling of the length has equally many.

    Short prompts have only the first positions, so evenly spread positions would represent only the longest prompts.
    """
    most = max(settings.positions or positions_of(hf_config), settings.context) / settings.context
    return [round(settings.context * (most ** (i / max(count - 1, 1)) - 1)) for i in range(count)]


def positions_of(hf_config: Any) -> int:
    """Returns how many positions the model was made for, up to ``MOST_POSITIONS``; 0 if its config does not say.

    If RoPE itself changes beyond the length that it was trained with (longrope, dynamic), only that length counts.
    """
    text = hf_config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    known: int = getattr(text, "max_position_embeddings", None) or 0
    if rope.get("rope_type") in ("longrope", "dynamic"):
        known = min(known, rope.get("original_max_position_embeddings") or known)
    return min(known, MOST_POSITIONS)


def check_length(flag: str, length: int, hf_config: Any) -> None:
    """Refuses contexts that are longer than a model's table of position embeddings. RoPE has no such table."""
    text = hf_config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    rope = any(getattr(text, name, None) for name in ("rope_parameters", "rope_scaling", "rope_theta"))
    if most and not rope and length > most:
        raise KVQuantError(f"{flag} {length}: this model has {most} positions. Pass at most {most}.")


def check_finite(measured: torch.Tensor, what: str, otherwise: str = "") -> None:
    """Refuses measurements ``[layers, n]`` that are not finite; ``otherwise`` ends the message with another fix.

    Raises:
        KVQuantError: the message names the first layer.
    """
    wrong = (~torch.isfinite(measured)).any(-1)
    if wrong.any():
        raise KVQuantError(
            f"layer {int(wrong.nonzero()[0])}: {what} is not finite; the model overflows in its dtype. Pass --dtype "
            f"float32{otherwise}."
        )


def check_head_dim(head_dim: int) -> None:
    """Refuses a head_dim that ``--kv-quant`` cannot serve."""
    if head_dim not in HEAD_DIMS:
        raise KVQuantError(
            f"head_dim {head_dim} is not supported by --kv-quant. Supported: {', '.join(map(str, HEAD_DIMS))}."
        )
