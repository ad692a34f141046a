"""Keys and values as a served cache returns them: through a method's records and back, in the model's basis."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.episodes.past import RoundTrip
from sglang_kvq.config import PAGE_SIZE, KVQuantConfig
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.record import RecordFormat
from sglang_kvq.rotations.resolve import resolve_formats, resolve_rotations


def formats_of(method: str, model_path: str, hf_config: Any) -> tuple[RecordFormat, ...]:
    """Page formats of a model's layers by ``--kv-quant METHOD``."""
    config = KVQuantConfig(method)
    return resolve_formats(config, resolve_rotations(config, model_path, hf_config), hf_config)


def bits_per_element(method: str, model_path: str, hf_config: Any) -> float:
    """Of what is stored, scales included, averaged over layers; 16 for "none"."""
    if method == "none":
        return 16.0
    formats = formats_of(method, model_path, hf_config)
    return sum(one.bits_per_element for one in formats) / len(formats)


def round_trip_of(method: str, model_path: str, hf_config: Any, device: torch.device) -> RoundTrip | None:
    """``RoundTrip`` by ``--kv-quant METHOD``; None for "none". Sinks, and a last partial page, stay as they are.

    Codes are per token, so a token that is quantized once may later lie in another page.

    Raises:
        KVQuantError: a method whose codes are shared by several tokens, or rotations that are missing.
    """
    if method == "none":
        return None
    config = KVQuantConfig(method)
    formats = formats_of(method, model_path, hf_config)
    if not all(isinstance(one, PageFormat) and one.k.axis == one.v.axis == "token" for one in formats):
        raise KVQuantError(
            f"--kv-quant {method}: its codes are not of single tokens, which therefore cannot move; use oscar."
        )
    rotations = resolve_rotations(config, model_path, hf_config)

    def through_pages(layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whole pages, float32 ``[rows, kv_heads, n, D]``."""
        if rotations is not None:
            k, v = k @ rotations.k[layer].to(device), v @ rotations.v[layer].to(device)
        pages = (x.bfloat16().float().unflatten(2, (-1, PAGE_SIZE)) for x in (k, v))
        read = formats[layer].dequantize_pages(formats[layer].quantize_pages(*pages))
        k, v = (x.flatten(2, 3).bfloat16().float() for x in read)
        if rotations is not None:
            k, v = k @ rotations.queries[layer].to(device).mT, v @ rotations.outputs[layer].to(device).mT
        return k, v

    def round_trip(layer: int, first: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        start = max(0, min(config.sink_tokens - first, k.shape[2]))
        end = start + (k.shape[2] - start) // PAGE_SIZE * PAGE_SIZE
        if end == start:
            return k, v
        read = through_pages(layer, k[:, :, start:end].float(), v[:, :, start:end].float())
        parts = ((x[:, :, :start], y.to(x.dtype), x[:, :, end:]) for x, y in zip((k, v), read))
        new_k, new_v = (torch.cat(part, 2) for part in parts)
        return new_k, new_v

    return round_trip
