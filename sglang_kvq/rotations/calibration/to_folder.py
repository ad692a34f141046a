"""Runs the steps of ``kvq calibrate``: reads model and text, calibrates, and writes the folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sglang_kvq.errors import KVQuantError, first_line
from sglang_kvq.rotations.base import Rotations
from sglang_kvq.rotations.calibration.checkpoint import Checkpoint, discard, fingerprint
from sglang_kvq.rotations.calibration.hf_model import embedding_rows, load_config, load_model, tokenize
from sglang_kvq.rotations.calibration.run import Progress, calibrate, silent
from sglang_kvq.rotations.calibration.settings import CalibrationSettings, read_corpus
from sglang_kvq.rotations.storage.files import check_output, save_rotations
from sglang_kvq.rotations.storage.registry import cached_id, name_of
from sglang_kvq.rotations.storage.schema import ONE_LINE


class Calibrated(NamedTuple):
    """A folder's rotations, with the model (None if an engine ran it) and the corpus that they were measured on."""

    rotations: Rotations
    model: Any
    ids: torch.Tensor


def calibrate_to_folder(
    model_path: str,
    texts: Sequence[Path],
    output: Path,
    settings: CalibrationSettings,
    *,
    text_share: float = 1.0,
    base_model: str | None = None,
    revision: str | None = None,
    device: str = "",
    dtype: str = "",
    trust_remote_code: bool = False,
    overwrite: bool = False,
    restart: bool = False,
    engine: Callable[..., Rotations] | None = None,
    progress: Progress = silent,
    check: Callable[[torch.Tensor], object] | None = None,
) -> Calibrated:
    """Calibrates and writes ``output``.

    If interrupted, it leaves its sums in ``partial_folder(output)`` and continues from them the next time.

    Args:
        texts, text_share: see ``settings.read_corpus``.
        base_model: name to record; None records ``model_path``, or a local folder's own name.
        restart: discard the sums that an interrupted run left.
        engine: runs the model instead of transformers, without sensitivities and checkpoint: ``calibrate_on_engine``.
        check: called with the corpus, int64 ``[tokens]``, before anything runs; it raises if the corpus is unsuitable.

    Raises:
        KVQuantError: the model or text cannot be loaded, the output exists, or an error of ``calibrate`` or ``check``.
    """
    check_output(output, overwrite=overwrite)  # before the hour of work, not after
    base_model = base_model or _recorded_name(model_path)
    if not re.fullmatch(ONE_LINE, base_model):
        raise KVQuantError(f"--base-model {base_model!r}: must be one line without control characters. Give another.")
    progress("reading the text", 0, 1)
    corpus, name = read_corpus(texts, text_share)
    kept = partial_folder(output)
    if restart:
        discard(kept)
    progress("loading the model", 0, 1)
    if engine is None:
        model, tokenizer = load_model(
            model_path, revision=revision, device=device, dtype=dtype, trust_remote_code=trust_remote_code
        )
        config, rows = model.config, embedding_rows(model)
    else:
        model = None
        config, tokenizer = load_config(model_path, revision=revision, trust_remote_code=trust_remote_code)
        rows = embedding_rows(config)
    progress("tokenizing", 0, 1)
    ids = tokenize(tokenizer, corpus, rows)
    if check:
        check(ids)
    if engine is None:
        try:
            rotations = calibrate(
                model, ids, settings, progress, checkpoint=lambda *run: Checkpoint(kept, fingerprint(*run))
            )
        except torch.OutOfMemoryError as error:
            raise KVQuantError(
                f"--context {settings.context}: not enough GPU memory for contexts of that length "
                f"({first_line(error)}). Lower it, pass --no-sensitivity, or --device auto for all GPUs."
                f"{_continues(kept)}"
            ) from error
    else:
        rotations = engine(model_path, config, ids, settings, progress)
    meta = replace(
        rotations.meta,
        base_model=base_model,
        revision=revision or getattr(config, "_commit_hash", None),
        corpus=name,
    )
    rotations = replace(rotations, meta=meta)
    progress("writing", 0, 1)
    try:
        save_rotations(rotations, output, kv_heads=meta.model["num_key_value_heads"], overwrite=overwrite)
    except KVQuantError as error:
        raise KVQuantError(f"{error}{_continues(kept)}") from error
    discard(kept)
    return Calibrated(rotations, model, ids)


def _recorded_name(model_path: str) -> str:
    """Returns the hub id of a model, if its path tells, or its folder's name."""
    return cached_id(model_path) or (name_of(model_path) if Path(model_path).exists() else model_path)


def _continues(kept: Path) -> str:
    """Returns the end of an error message that says how to resume; empty if there are no sums to resume from."""
    return f" What was measured is in {kept}: the same command continues from there." if kept.exists() else ""


def partial_folder(output: Path) -> Path:
    """Returns the folder in which an interrupted run for ``output`` keeps its sums."""
    output = output.resolve()
    return output.with_name(f"{output.name}.partial")
