"""Steps of ``kvq calibrate``: read model and text, calibrate, write the folder."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from sglang_kvq.errors import KVQuantError, first_line
from sglang_kvq.rotations.base import Rotations
from sglang_kvq.rotations.calibration.checkpoint import Checkpoint, fingerprint
from sglang_kvq.rotations.calibration.hf_model import embedding_rows, load_config, load_model, tokenize
from sglang_kvq.rotations.calibration.run import Progress, calibrate
from sglang_kvq.rotations.calibration.settings import CalibrationSettings, read_corpus
from sglang_kvq.rotations.storage.files import check_output, save_rotations


class LastPass(Protocol):
    """A task that needs the model after its rotations are written."""

    def check(self, ids: torch.Tensor) -> None:
        """See before anything runs that the corpus, int64 ``[tokens]``, will do.

        Raises:
            KVQuantError: it will not.
        """

    def run(self, model: Any, ids: torch.Tensor, rotations: Rotations, folder: Path) -> object:
        """Do it, with the rotations that ``folder`` holds."""


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
    engine: dict[str, Any] | None = None,
    progress: Progress | None = None,
    last: LastPass | None = None,
) -> Rotations:
    """Calibrate and write ``output``; returns what it wrote.

    Interrupted, it leaves its sums in ``partial_folder(output)`` and continues from them the next time.

    Args:
        texts: files, or folders of text files, see ``settings.read_corpus``.
        text_share: how much of the text, from its beginning, may be used; recorded with the corpus.
        base_model: name to record; None records ``model_path``, or a local folder's own name.
        device, dtype, trust_remote_code: as for ``load_model``.
        restart: discard what an interrupted run left.
        engine: keywords of ``sglang.Engine``, to run the model there (no sensitivities, no checkpoint); None runs it
            with transformers.
        last: follows when ``output`` is written, so that nothing is lost if it is interrupted; not with an engine.

    Raises:
        KVQuantError: model or text not loadable, output exists, or as ``calibrate`` or ``last``.
    """
    check_output(output, overwrite=overwrite)  # before the hour of work, not after
    report = progress or (lambda name, done, total: None)
    report("reading the text", 0, 1)
    corpus, name = read_corpus(texts, text_share)
    kept = partial_folder(output)
    if restart:
        shutil.rmtree(kept, ignore_errors=True)
    report("loading the model", 0, 1)
    if engine is None:
        model, tokenizer = load_model(
            model_path, revision=revision, device=device, dtype=dtype, trust_remote_code=trust_remote_code
        )
        report("tokenizing", 0, 1)
        config, ids = model.config, tokenize(tokenizer, corpus, embedding_rows(model))
        if last:
            last.check(ids)
        try:
            rotations = calibrate(
                model, ids, settings, report, checkpoint=lambda *run: Checkpoint(kept, fingerprint(*run))
            )
        except torch.OutOfMemoryError as error:
            raise KVQuantError(
                f"--context {settings.context}: not enough GPU memory for contexts of that length "
                f"({first_line(error)}); lower it, pass --no-sensitivity, or --device auto for all GPUs."
                f"{_continues(kept)}"
            ) from error
    else:
        from sglang_kvq.sglang.calibrate_engine import calibrate_on_engine

        config, tokenizer = load_config(model_path, revision=revision, trust_remote_code=trust_remote_code)
        given = {"trust_remote_code": trust_remote_code, **engine, **({"revision": revision} if revision else {})}
        rotations = calibrate_on_engine(
            model_path,
            config,
            tokenize(tokenizer, corpus, embedding_rows(config)),
            settings,
            report,
            **given,
        )
    meta = replace(
        rotations.meta,
        base_model=base_model or (Path(model_path).name if Path(model_path).exists() else model_path),
        revision=revision or getattr(config, "_commit_hash", None),
        corpus=name,
    )
    rotations = replace(rotations, meta=meta)
    report("writing", 0, 1)
    try:
        save_rotations(rotations, output, kv_heads=meta.model["num_key_value_heads"], overwrite=overwrite)
    except KVQuantError as error:
        raise KVQuantError(f"{error}{_continues(kept)}") from error
    shutil.rmtree(kept, ignore_errors=True)
    if last and engine is None:
        last.run(model, ids, rotations, output)
    return rotations


def _continues(kept: Path) -> str:
    """Ends an error message with how to resume, if there is something to resume from."""
    return f" What was measured is in {kept}: the same command continues from there." if kept.exists() else ""


def partial_folder(output: Path) -> Path:
    """Where an interrupted run for ``output`` keeps its sums."""
    return output.with_name(f"{output.name}.partial")
