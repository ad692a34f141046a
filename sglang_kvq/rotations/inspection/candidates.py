"""Methods in the form that a fake-quantized model needs: rotations and page formats of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.formats.record import RecordFormat
from sglang_kvq.methods import METHOD_NAMES, RotationKind, get_method
from sglang_kvq.rotations.base import Rotations
from sglang_kvq.rotations.identity import geometry_of
from sglang_kvq.rotations.resolve import check_kind, resolve_formats, resolve_rotations, rotations_of_worker


@dataclass(frozen=True)
class Candidate:
    """A method on one model, with rotations and formats of all layers."""

    name: str
    rotations: LayerRotations
    formats: Sequence[RecordFormat]


def candidates_of(methods: Sequence[str], learned: Rotations, hf_config: Any) -> list[Candidate]:
    """Returns candidates by name; those that use the learned rotations come last.

    Each method is ``NAME`` or ``NAME:BITS``. If none is given, all methods that the rotations suit are returned, at
    their default widths.

    Raises:
        KVQuantError: a method or width is unknown, or the rotations are for another model or other methods.
    """
    suited = [name for name in METHOD_NAMES if takes(name, learned)]
    candidates = [candidate_of(name, learned, hf_config) for name in methods or suited]
    return sorted(candidates, key=lambda c: get_method(c.name.partition(":")[0]).rotation is RotationKind.LEARNED)


def takes(spec: str, learned: Rotations) -> bool:
    """Returns whether a method can be measured with these rotations: it uses their kind, or no learned rotations."""
    method = get_method(spec.partition(":")[0])
    return method.rotation is not RotationKind.LEARNED or method.planes == learned.is_transform


def candidate_of(spec: str, learned: Rotations | None, hf_config: Any) -> Candidate:
    """Returns one method on one model; only methods with learned rotations use ``learned``."""
    name, _, bits = spec.partition(":")
    config, geometry = KVQuantConfig(name, bits=bits or None), geometry_of(hf_config)
    if get_method(name).rotation is RotationKind.LEARNED:
        rotations = learned
        if learned is not None:
            check_kind(config, learned)
    else:
        rotations = resolve_rotations(config, "", hf_config)
    worker, formats = LayerRotations(), resolve_formats(config, rotations, hf_config)
    if rotations:
        heads = geometry.kv_heads
        worker = rotations_of_worker(rotations, formats, range(geometry.layers), heads, 0, heads)
    return Candidate(spec, worker, formats)
