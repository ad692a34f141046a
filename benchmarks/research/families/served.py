"""Passes tokens through the records of the product's own methods and back to the model's basis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.research.families.base import History, Stored
from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.formats.planes import PlaneCode, PlaneFormat, Widths
from sglang_kvq.formats.record import RecordFormat
from sglang_kvq.rotations.base import Rotations
from sglang_kvq.rotations.identity import geometry_of
from sglang_kvq.rotations.maths.fake_quant import page_round_trip
from sglang_kvq.rotations.resolve import resolve_formats, resolve_rotations, rotations_of_worker


@dataclass(frozen=True)
class Served:
    """A method with pages of each layer's format, in the rotated basis."""

    rotations: LayerRotations
    formats: Sequence[RecordFormat]

    def __call__(self, layer: int, history: History) -> Stored:
        if history.k.shape[1] % PAGE_SIZE:
            raise ValueError(f"{history.k.shape[1]} tokens are not whole pages")
        r, format = self.rotations, self.formats[layer]
        k, v = to_stored(r, layer, history.k, history.v)
        k, v = page_round_trip(format, k.bfloat16().float(), v.bfloat16().float())
        k, v = to_model(r, layer, k, v)
        return Stored(k, v, format.bits_per_element * history.elements)


def to_stored(r: LayerRotations, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts keys and values ``[kv_heads, n, D]`` to the basis in which they are stored."""
    k = k if r.k is None else k @ r.k[layer]
    v = v if r.v is None else v @ r.v[layer]
    return k if r.k_mean is None else k - r.k_mean[layer][:, None], v


def to_model(r: LayerRotations, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverts ``to_stored``. Scores q kᵀ are (q Q)(k K)ᵀ, so K's inverse is Qᵀ; if K is orthogonal, Q is K."""
    k = k if r.k_mean is None else k + r.k_mean[layer][:, None]
    of_k = r.k if r.queries is None else r.queries
    of_v = r.v if r.outputs is None else r.outputs
    return k if of_k is None else k @ of_k[layer].mT, v if of_v is None else v @ of_v[layer].mT


def served(spec: str, model_path: str, hf_config: Any, folder: str | None = None) -> Served:
    """Resolves ``NAME[:BITS][/GROUP]`` as a server would; ``folder`` has learned rotations if the zoo has none."""
    spec, _, group = spec.partition("/")
    name, _, bits = spec.partition(":")
    learned = {"rotations": folder} if folder and name in ("oscar", "transform") else {}
    config = KVQuantConfig(name, bits=bits or None, group_size=int(group) if group else None, **learned)
    rotations = resolve_rotations(config, model_path, hf_config)
    formats = resolve_formats(config, rotations, hf_config)
    if rotations is None:
        return Served(LayerRotations(), formats)
    layers, heads, _ = geometry_of(hf_config)
    return Served(_worker(rotations, formats, layers, heads), formats)


def _worker(rotations: Rotations | None, formats: Sequence[RecordFormat], layers: int, heads: int) -> LayerRotations:
    """Returns the rotations of all heads, on the default device."""
    if rotations is None:
        raise ValueError("no learned rotations were found")
    return rotations_of_worker(rotations, formats, range(layers), heads, 0, heads).to(torch.get_default_device())


#: Palu as a preset of ``transform``: the same widths of keys and of values in every layer, with 0-bit planes.
PRESETS: dict[float, tuple[Widths, Widths]] = {
    2.0: ((4, 4, 0, 0), (2, 2, 2, 0)),
    2.5: ((4, 4, 4, 0), (2, 2, 2, 0)),
    4.0: ((4, 4, 4, 4), (4, 4, 4, 0)),
}


def preset(budget: float, model_path: str, hf_config: Any, folder: str | None = None) -> Served:
    """Resolves ``PRESETS`` with the rotations of ``transform``."""
    config = KVQuantConfig("transform", **({"rotations": folder} if folder else {}))
    rotations = resolve_rotations(config, model_path, hf_config)
    layers, heads, dim = geometry_of(hf_config)
    k, v = PRESETS[budget]
    formats = [PlaneFormat(dim, PlaneCode(k), PlaneCode(v))] * layers
    return Served(_worker(rotations, formats, layers, heads), formats)
