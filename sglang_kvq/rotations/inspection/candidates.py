"""Methods as a fake-quantized model sees them: rotations and page formats of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.methods import METHOD_NAMES, RotationKind, get_method
from sglang_kvq.rotations.base import Rotations
from sglang_kvq.rotations.resolve import resolve_formats, resolve_rotations
from sglang_kvq.rotations.storage.zoo import identity


@dataclass(frozen=True)
class Candidate:
    """A method on one model.

    Attributes:
        rotations: float32 ``[layers, kv_heads, D, D]`` each, or None.
        formats: one per layer.
    """

    name: str
    rotations: LayerRotations
    formats: Sequence[PageFormat]

    def rotate(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q ``[q_heads, T, D]``, k and v ``[kv_heads, T, D]`` in the rotated basis, float32."""
        q, k, v = q.float(), k.float(), v.float()
        if self.rotations.k is not None:
            r_q, r_k = (r[layer].to(k.device) for r in (self.rotations.queries, self.rotations.k))
            q, k = q @ r_q.repeat_interleave(q.shape[0] // k.shape[0], 0), k @ r_k
        if self.rotations.v is not None:
            v = v @ self.rotations.v[layer].to(v.device)
        return q, k, v


def candidates_of(methods: Sequence[str], learned: Rotations, hf_config: object) -> list[Candidate]:
    """Candidates by name; those with learned rotations, which are ``learned``, come last.

    Args:
        methods: each ``NAME`` or ``NAME:BITS``, BITS as for ``--kv-quant-bits``; none means all at their default width.
        hf_config: the model's transformers config.

    Raises:
        KVQuantError: unknown method or width; rotations of another model.
    """
    candidates = [candidate_of(name, learned, hf_config) for name in methods or METHOD_NAMES]
    return sorted(candidates, key=lambda c: get_method(c.name.partition(":")[0]).rotation is RotationKind.LEARNED)


def candidate_of(spec: str, learned: Rotations | None, hf_config: object) -> Candidate:
    """One method on one model; ``learned`` are the rotations if it takes such. Arguments as ``candidates_of``."""
    name, _, bits = spec.partition(":")
    config, shape = KVQuantConfig(name, bits=bits or None), identity(hf_config)
    if get_method(name).rotation is RotationKind.LEARNED:
        rotations = learned
    else:
        rotations = resolve_rotations(config, "", hf_config)
    layers, heads = shape["num_hidden_layers"], shape["num_key_value_heads"]
    worker = rotations.for_worker(range(layers), heads, 0, heads) if rotations else LayerRotations()
    return Candidate(spec, worker, resolve_formats(config, rotations, hf_config))
