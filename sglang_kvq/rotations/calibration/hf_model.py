"""A transformers model, its config and its tokeniser, or an error that says what to do."""

from __future__ import annotations

from typing import Any

import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.messages import first_line


def load_model(path: str, *, revision: str | None = None, device: str = "", dtype: str = "") -> tuple[Any, Any]:
    """A causal language model in evaluation mode, and its tokeniser.

    Args:
        path: hub id or folder.
        device: "cuda", "cpu", "auto" (spread over all GPUs) or "" for a GPU if there is one.
        dtype: "auto", "bfloat16", "float32", or "" for the model's own on a GPU and float32 on a CPU.

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
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, revision=revision, dtype=dtype, device_map="auto" if device == "auto" else None
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise KVQuantError(
            f"{path}: transformers cannot load this model ({first_line(error)}); give a hub id or a "
            "folder with config.json, weights and tokeniser. Without a network: download the model where there is one "
            "and give its folder."
        ) from error
    return (model if device == "auto" else model.to(device)).eval(), tokenizer


def load_config(path: str, *, revision: str | None = None) -> tuple[Any, Any]:
    """A model's config and tokeniser, without its weights.

    Raises:
        KVQuantError: as ``load_model``.
    """
    try:
        from transformers import AutoConfig, AutoTokenizer

        config = AutoConfig.from_pretrained(path, revision=revision)
        return config, AutoTokenizer.from_pretrained(path, revision=revision)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise KVQuantError(
            f"{path}: transformers cannot read this model's config and tokeniser ({first_line(error)}); "
            "give a hub id or a folder with both."
        ) from error


def tokenize(tokenizer: Any, text: str) -> torch.Tensor:
    """Token ids int64 ``[n]``, without the warning about the model's length: contexts are cut later."""
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
