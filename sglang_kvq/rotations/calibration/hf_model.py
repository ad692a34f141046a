"""Load a transformers model and a text, calibrate, and write the folder."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.base import Rotations
from sglang_kvq.rotations.calibration.checkpoint import Checkpoint, fingerprint
from sglang_kvq.rotations.calibration.run import CalibrationSettings, Progress, calibrate
from sglang_kvq.rotations.calibration.text import read_corpus
from sglang_kvq.rotations.storage.files import save_rotations

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


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
    overwrite: bool = False,
    restart: bool = False,
    engine: dict | None = None,
    progress: Progress | None = None,
) -> Rotations:
    """What ``kvq calibrate`` does; returns what it wrote.

    Interrupted, it leaves its sums in ``partial_folder(output)`` and continues from them the next time.

    Args:
        texts: files, or folders of text files, see ``text.read_corpus``.
        text_share: how much of the text, from its beginning, may be used; recorded with the corpus.
        base_model: name to record; None records ``model_path``, or a local folder's own name.
        device: "cuda", "cpu", "auto" (spread over all GPUs) or "" for a GPU if there is one.
        dtype: "auto", "bfloat16", "float32", or "" for the model's own on a GPU and float32 on a CPU.
        restart: discard what an interrupted run left.
        engine: keywords of ``sglang.Engine``, to run the model there (no sensitivities, no checkpoint); None runs it with
            transformers.

    Raises:
        KVQuantError: model or text not loadable, output exists, or as ``calibrate``.
    """
    if output.exists() and not overwrite:  # before the hour of work, not after
        raise KVQuantError(f"{output} exists; choose another --output, or pass --overwrite to replace it.")
    corpus, name = read_corpus(texts, text_share)
    kept = partial_folder(output)
    if restart:
        shutil.rmtree(kept, ignore_errors=True)
    if engine is None:
        model, tokenizer = load_model(model_path, revision=revision, device=device, dtype=dtype)
        config = model.config
        rotations = calibrate(
            model,
            tokenize(tokenizer, corpus),
            settings,
            progress,
            checkpoint=lambda *run: Checkpoint(kept, fingerprint(*run)),
        )
    else:
        from sglang_kvq.sglang.calibrate_engine import calibrate_on_engine

        config, tokenizer = load_config(model_path, revision=revision)
        given = {**engine, **({"revision": revision} if revision else {})}
        rotations = calibrate_on_engine(
            model_path, config, tokenize(tokenizer, corpus), settings, progress or (lambda *done: None), **given
        )
    meta = replace(
        rotations.meta,
        base_model=base_model or (Path(model_path).name if Path(model_path).exists() else model_path),
        revision=revision or getattr(config, "_commit_hash", None),
        corpus=name,
    )
    rotations = replace(rotations, meta=meta)
    save_rotations(rotations, output, kv_heads=meta.model["num_key_value_heads"], overwrite=overwrite)
    shutil.rmtree(kept, ignore_errors=True)
    return rotations


def partial_folder(output: Path) -> Path:
    """Where an interrupted run for ``output`` keeps its sums."""
    return output.with_name(f"{output.name}.partial")


def load_model(
    path: str, *, revision: str | None = None, device: str = "", dtype: str = ""
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model in evaluation mode, and its tokeniser. Arguments as ``calibrate_to_folder``.

    Raises:
        KVQuantError: transformers is missing, or does not know or find the model.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise KVQuantError("calibration needs transformers: pip install 'sglang-kvq[calibrate]'.") from error
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("float32" if device == "cpu" else "auto")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision)
        model = AutoModelForCausalLM.from_pretrained(
            path, revision=revision, dtype=dtype, device_map="auto" if device == "auto" else None
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise KVQuantError(
            f"{path}: transformers cannot load this model ({(str(error).splitlines() or ['?'])[0]}); give a hub id or a "
            "folder with config.json, weights and tokeniser. Without a network: download the model where there is one "
            "and give its folder."
        ) from error
    return (model if device == "auto" else model.to(device)).eval(), tokenizer


def load_config(path: str, *, revision: str | None = None) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """A model's config and tokeniser, without its weights.

    Raises:
        KVQuantError: as ``load_model``.
    """
    try:
        from transformers import AutoConfig, AutoTokenizer

        return AutoConfig.from_pretrained(path, revision=revision), AutoTokenizer.from_pretrained(
            path, revision=revision
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise KVQuantError(
            f"{path}: transformers cannot read this model's config and tokeniser ({(str(error).splitlines() or ['?'])[0]}); "
            "give a hub id or a folder with both."
        ) from error


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """Token ids int64 ``[n]``, without the warning about the model's length: contexts are cut later."""
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
