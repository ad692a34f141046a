"""Decides from a model's config whether transformers can run the model for calibration.

``kvq calibrate``, ``kvq doctor --model`` and ``kvq plan`` ask this module, so the last two name no command that the
first would refuse.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.identity import WINDOWS, calibrate_options, has_windows, why_no_transform

CAUSAL, VISION = "AutoModelForCausalLM", "AutoModelForImageTextToText"

#: The file in which ModelOpt describes its quantization, if config.json does not; transformers does not read it.
OTHER_QUANTIZATION = "hf_quant_config.json"


def auto_class(path: str, hf_config: Any, trust_remote_code: bool) -> str:
    """Returns the name of the transformers class that loads a model for calibration.

    A vision-language model is run on text alone. The config is transformers' or SGLang's own.

    Raises:
        KVQuantError: no class fits, or only the model's own code has one; or weights of a format that transformers
            does not read.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    check_quantization(path, hf_config)
    kind, code = getattr(hf_config, "model_type", None), getattr(hf_config, "auto_map", None) or {}
    known = (
        (CAUSAL, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        (VISION, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    )
    for name, kinds in known:
        if kind in kinds or (trust_remote_code and name in code):
            return name
    if CAUSAL in code or VISION in code:
        raise needs_code(path)
    raise KVQuantError(
        f"{path}: transformers {transformers.__version__} has no class that generates text for model_type {kind}, so "
        "it cannot be calibrated. Use a newer transformers if there is one for it, or --kv-quant int4, which needs "
        "no rotations."
    )


def why_not(path: str, hf_config: Any, trust_remote_code: bool, *, transform: bool = False) -> str | None:
    """Returns why ``kvq calibrate`` would refuse a model, or None; it may need ``--engine sglang`` (``has_windows``).

    The arguments are those of ``auto_class``; ``transform`` asks for ``--composition transform``.
    """
    try:
        if not has_windows(hf_config):
            auto_class(path, hf_config, trust_remote_code)
        elif transform:
            return f"{path}: {why_no_transform(hf_config)}"
    except KVQuantError as error:
        return str(error)
    return None


def calibrate_command(path: str, hf_config: Any, trust_remote_code: bool, *, transform: bool = False) -> str:
    """Returns the command that makes rotations of a model for which ``why_not`` with these arguments is None."""
    options = calibrate_options(hf_config, transform=transform)
    options += ["--trust-remote-code"] if trust_remote_code else []
    return shlex.join(["kvq", "calibrate", path, *options, "--text", "FILE", "--output", "rotations"])


def check_windows(path: str, hf_config: Any) -> None:
    """Refuses to run a model that ``has_windows`` in transformers."""
    if has_windows(hf_config):
        raise KVQuantError(
            f"{path}: {WINDOWS}. Calibrate with `kvq calibrate --engine sglang`, or use --kv-quant int4, which "
            "needs no rotations."
        )


def needs_code(path: str) -> KVQuantError:
    """Returns the error for a model that comes with its own code."""
    return KVQuantError(
        f"{path}: this model comes with code of its own. Read it, and pass --trust-remote-code to run it."
    )


def check_quantization(path: str, hf_config: Any) -> None:
    """Refuses a checkpoint whose quantization transformers would ignore."""
    found = getattr(hf_config, "quantization_config", None)
    if found is None:
        if (Path(path) / OTHER_QUANTIZATION).is_file():
            raise unread(path, f"quantized, by {OTHER_QUANTIZATION} alone")
        return
    from transformers.quantizers import auto

    quantizer: Any = auto.AutoHfQuantizer
    fields = found if isinstance(found, dict) else found.to_dict()
    try:
        reads = quantizer.supports_quant_method(fields)
    except ValueError:  # no method is named
        reads = False
    if not reads:
        raise unread(path, f"quantized by {fields.get('quant_method', 'a method without a name')}")


def unread(path: str, what: str) -> KVQuantError:
    """Returns the error for quantized weights, whose codes transformers would take for weights."""
    return KVQuantError(
        f"{path}: its weights are {what}, which transformers does not read: it would take the codes for weights. "
        "Calibrate the unquantized model; its rotations fit this one."
    )
