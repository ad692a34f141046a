"""Checks that transformers found a weight for each parameter, and a parameter for each weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_kvq.errors import KVQuantError

#: Names in a message.
_NAMED = 3


def check_loaded(path: str, info: dict[str, Any]) -> None:
    """Refuse a model that is not what its checkpoint holds.

    transformers itself leaves out what is harmless: tied weights, RoPE's buffers, and what the model's class declares
    that it ignores (``_keys_to_ignore_on_load_unexpected``), such as MTP heads.

    Args:
        path: the model's name, for messages.
        info: what ``from_pretrained(..., output_loading_info=True)`` gives.

    Raises:
        KVQuantError: it names the weights, and the remedy.
    """
    problems = list(_problems(info))
    if problems:
        raise KVQuantError(f"{path}: {'; '.join(problems)}. {_remedy(info)}")


def _problems(info: dict[str, Any]) -> Iterator[str]:
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    other = sorted(map(_mismatch, info["mismatched_keys"]))
    for names, what in (
        (missing, "not in its files, so they would be random"),
        (unexpected, "in its files without a place in the model"),
        (other, "of another shape than config.json says"),
    ):
        if names:
            more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            yield f"{len(names)} weight{'s' * (len(names) > 1)} {what} ({', '.join(names[:_NAMED])}{more})"


def _mismatch(found: str | tuple[str, Any, Any]) -> str:
    """A weight's name, and its shapes if transformers tells them, which it does since version 5."""
    if isinstance(found, str):
        return found
    name, in_file, in_model = found
    return f"{name}: {list(in_file)}, not {list(in_model)}"


def _remedy(info: dict[str, Any]) -> str:
    if any("scale" in name or "zero_point" in name for name in info["unexpected_keys"]):
        return "It is quantized in a way that transformers does not read: calibrate the unquantized model."
    if info["mismatched_keys"]:
        return "config.json and the weights belong to different models: fetch both again."
    return (
        "Fetch the whole model again. If these files are a part of a larger model, calibrate that one; or use a "
        "version of transformers that reads them."
    )
