"""Finds the size of a model's weights without reading them: from headers of safetensors, or from the config alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_kvq.errors import KVQuantError, first_line
from sglang_kvq.rotations.calibration.model_files import weight_files

#: Bytes of an element of each stored dtype in a server that runs in bfloat16; other dtypes take one byte.
_ELEMENT = {"F64": 2, "F32": 2, "F16": 2, "BF16": 2, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}
#: Dtypes with two elements per byte.
_HALF_BYTES = ("F4",)


@dataclass(frozen=True)
class Weights:
    """Sizes of a model's weights.

    Attributes:
        total: bytes of all tensors.
        experts: bytes of the experts, which are read only for tokens that are routed to them.
        lookup: bytes of the input embedding, of which a step reads a few rows; 0 if it is also the output layer.
        source: the source of these figures, in words.
    """

    total: int
    experts: int
    lookup: int
    source: str

    def read_by(self, tokens: int, model: Any) -> float:
        """Returns the expected bytes that a decode step of ``tokens`` tokens reads, if experts are chosen at random.

        Args:
            model: the text part of the model's config.
        """
        count = next((getattr(model, n) for n in ("num_experts", "num_local_experts") if hasattr(model, n)), None)
        share = 1.0
        if self.experts and count:
            share = 1 - (1 - getattr(model, "num_experts_per_tok", count) / count) ** tokens
        return self.total - self.lookup - self.experts * (1 - share)


def find_weights(path: str, hf_config: Any, *, trust_remote_code: bool = False) -> Weights:
    """Finds the size of a model's weights.

    Args:
        path: hub id or folder.
        hf_config: its transformers config.

    Raises:
        KVQuantError: neither the files nor the config show the size.
    """
    folder = Path(path)
    if not folder.is_dir():
        return _sum(_on_hub(path), "headers on the hub")
    files = weight_files(folder)
    if files:
        return _sum(_in_files(files), "headers of its files")
    return _sum(_by_config(path, hf_config, trust_remote_code), "its config, in bfloat16")


def _sum(tensors: Iterable[tuple[str, str, Sequence[int]]], source: str) -> Weights:
    """Adds up the sizes of tensors, given as name, dtype in safetensors' notation, and shape."""
    sizes = {name: _bytes(dtype, shape) for name, dtype, shape in tensors}
    ends_apart = any(name.endswith("lm_head.weight") for name in sizes)
    return Weights(
        sum(sizes.values()),
        sum(size for name, size in sizes.items() if ".experts." in name),
        sum(size for name, size in sizes.items() if name.endswith("embed_tokens.weight")) if ends_apart else 0,
        source,
    )


def _bytes(dtype: str, shape: Sequence[int]) -> int:
    elements = math.prod(shape)
    return elements // 2 if dtype in _HALF_BYTES else elements * _ELEMENT.get(dtype, 1)


def _on_hub(path: str) -> Iterator[tuple[str, str, Sequence[int]]]:
    from huggingface_hub import get_safetensors_metadata

    try:
        found = get_safetensors_metadata(path)
    except Exception as error:  # errors of the HTTP library that huggingface_hub uses
        raise KVQuantError(
            f"{path}: cannot read the size of its weights from the hub ({type(error).__name__}: {first_line(error)}). "
            "Pass --weights GIB."
        ) from None
    for file in found.files_metadata.values():
        for name, tensor in file.tensors.items():
            yield name, tensor.dtype, tensor.shape


def _in_files(files: Sequence[Path]) -> Iterator[tuple[str, str, Sequence[int]]]:
    from safetensors import SafetensorError, safe_open

    for path in files:
        try:
            with safe_open(path, "np") as file:
                for name in file.keys():  # noqa: SIM118  (not a dict)
                    tensor = file.get_slice(name)
                    yield name, tensor.get_dtype(), tensor.get_shape()
        except SafetensorError as error:
            raise KVQuantError(f"{path}: damaged ({first_line(error)}). Download it again.") from None


def _by_config(path: str, hf_config: Any, trust_remote_code: bool) -> Iterator[tuple[str, str, Sequence[int]]]:
    """Yields the tensors of a model that is built from its config on the meta device, without memory for weights."""
    import torch
    from transformers import AutoModelForCausalLM

    if getattr(hf_config, "quantization_config", None):
        raise KVQuantError(
            f"{path}: the folder has no weights, and its config says they are quantized. Pass --weights GIB."
        )
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # transformers'
                hf_config, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # transformers may raise anything for a class that it lacks
        raise KVQuantError(
            f"{path}: the folder has no weights, and transformers cannot build the model from its config "
            f"({first_line(error)}). Pass --weights GIB."
        ) from None
    for name, tensor in model.named_parameters():  # names shared parameters once
        yield name, "BF16", tuple(tensor.shape)
