"""Load a transformers model and a text, calibrate, and write the folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.base import Rotations
from sglang_kvq.rotations.calibrate import CalibrationSettings, Progress, calibrate
from sglang_kvq.rotations.files import save_rotations

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def calibrate_to_folder(
    model_path: str,
    text: Path,
    output: Path,
    settings: CalibrationSettings,
    *,
    text_share: float = 1.0,
    base_model: str | None = None,
    revision: str | None = None,
    device: str = "",
    dtype: str = "",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Rotations:
    """What ``kvq calibrate`` does; returns what it wrote.

    Args:
        text_share: how much of the text, from its beginning, may be used; recorded with the corpus.
        base_model: name to record; None records ``model_path``, or a local folder's own name.
        device: "cuda", "cpu", "auto" (spread over all GPUs) or "" for a GPU if there is one.
        dtype: "auto", "bfloat16", "float32", or "" for the model's own on a GPU and float32 on a CPU.

    Raises:
        KVQuantError: model or text not loadable, output exists, or as ``calibrate``.
    """
    if output.exists() and not overwrite:  # before the hour of work, not after
        raise KVQuantError(f"{output} exists; choose another --output, or pass --overwrite to replace it.")
    if not 0 < text_share <= 1:
        raise KVQuantError(f"--text-share {text_share}: must be above 0 and at most 1.")
    corpus = read_text(text)
    model, tokenizer = load_model(model_path, revision=revision, device=device, dtype=dtype)
    ids = tokenize(tokenizer, corpus[: int(len(corpus) * text_share)])
    rotations = calibrate(model, ids, settings, progress)
    name = f"{text.parent.name}/{text.name}" if text.parent.name else text.name
    meta = replace(
        rotations.meta,
        base_model=base_model or (Path(model_path).name if Path(model_path).exists() else model_path),
        revision=revision or getattr(model.config, "_commit_hash", None),
        corpus=name if text_share == 1 else f"{name}, first {text_share:.0%} of its characters",
    )
    rotations = replace(rotations, meta=meta)
    save_rotations(rotations, output, kv_heads=meta.model["num_key_value_heads"], overwrite=overwrite)
    return rotations


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
    except (OSError, ValueError, KeyError) as error:
        raise KVQuantError(
            f"{path}: transformers cannot load this model ({(str(error).splitlines() or ['?'])[0]}); give a hub id or a "
            "folder with config.json, weights and tokeniser."
        ) from error
    return (model if device == "auto" else model.to(device)).eval(), tokenizer


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """Token ids int64 ``[n]``, without the warning about the model's length: contexts are cut later."""
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)


def read_text(path: Path) -> str:
    """The file as UTF-8.

    Raises:
        KVQuantError: it does not exist or is not text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KVQuantError(f"--text {path}: not readable as UTF-8 text ({error}); give a plain text file.") from error
