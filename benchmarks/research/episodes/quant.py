"""Passes keys and values through a method's records and back to the model's basis, as a served cache returns them."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.research.episodes.past import RoundTrip
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.rotations.inspection.candidates import Candidate, candidate_of
from sglang_kvq.rotations.maths.fake_quant import page_round_trip
from sglang_kvq.rotations.resolve import resolve_rotations


def method_of(spec: str, model_path: str, hf_config: Any) -> Candidate:
    """Resolves page formats and rotations of a model's layers from ``--kv-quant NAME`` or ``NAME:BITS``."""
    name, _, bits = spec.partition(":")
    rotations = resolve_rotations(KVQuantConfig(name, bits=bits or None), model_path, hf_config)
    return candidate_of(spec, rotations, hf_config)


def bits_per_element(spec: str, model_path: str, hf_config: Any) -> float:
    """Returns the stored bits, scales included, averaged over layers; 16 for "none"."""
    if spec == "none":
        return 16.0
    formats = method_of(spec, model_path, hf_config).formats
    return sum(one.bits_per_element for one in formats) / len(formats)


def round_trip_of(spec: str, model_path: str, hf_config: Any, device: torch.device) -> RoundTrip | None:
    """Returns the ``RoundTrip`` of ``--kv-quant NAME[:BITS]``; None for "none".

    Sinks and a last partial page stay exact.

    Codes are per token, so a token that is quantized once may later lie in another page.

    Raises:
        KVQuantError: the method's codes are shared by several tokens, or rotations are missing.
    """
    if spec == "none":
        return None
    method = method_of(spec, model_path, hf_config)
    if any(code.axis != "token" for one in method.formats if isinstance(one, PageFormat) for code in (one.k, one.v)):
        raise KVQuantError(
            f"--kv-quant {spec}: its codes are shared by several tokens, so single tokens cannot move. Use oscar."
        )
    r = method.rotations.to(device)

    def through_pages(layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Passes whole pages, float32 ``[rows, kv_heads, n, D]``, through records."""
        mean = 0.0 if r.k_mean is None else r.k_mean[layer][:, None]
        if r.k is not None:
            k = k @ r.k[layer]
        if r.v is not None:
            v = v @ r.v[layer]
        stored = (x.bfloat16().float().flatten(0, 1) for x in (k - mean, v))
        k, v = (x.unflatten(0, k.shape[:2]) for x in page_round_trip(method.formats[layer], *stored))
        k = k + mean
        if r.queries is not None:
            k = k @ r.queries[layer].mT
        if r.outputs is not None:
            v = v @ r.outputs[layer].mT
        return k, v

    def round_trip(layer: int, first: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        start = max(0, min(KVQuantConfig.sink_tokens - first, k.shape[2]))
        end = start + (k.shape[2] - start) // PAGE_SIZE * PAGE_SIZE
        if end == start:
            return k, v
        read = through_pages(layer, k[:, :, start:end].float(), v[:, :, start:end].float())
        parts = ((x[:, :, :start], y.to(x.dtype), x[:, :, end:]) for x, y in zip((k, v), read))
        new_k, new_v = (torch.cat(part, 2) for part in parts)
        return new_k, new_v

    return round_trip
