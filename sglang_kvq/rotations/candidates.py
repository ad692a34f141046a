"""Methods as a fake-quantised model sees them: rotations and page formats of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.methods import METHOD_NAMES, RotationKind, get_method
from sglang_kvq.rotations.base import Rotations
from sglang_kvq.rotations.hadamard import hadamard_rotations


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
            r = self.rotations.k[layer].to(k.device)
            q, k = q @ r.repeat_interleave(q.shape[0] // k.shape[0], 0), k @ r
        if self.rotations.v is not None:
            v = v @ self.rotations.v[layer].to(v.device)
        return q, k, v


def candidates_of(
    methods: Sequence[str], rotations: Rotations, layers: int, kv_heads: int, head_dim: int
) -> list[Candidate]:
    """Candidates by name; the learned rotations are ``rotations``. Those that use them come last.

    Raises:
        KVQuantError: unknown method.
    """
    names = list(methods or METHOD_NAMES)
    names.sort(key=lambda name: get_method(name).rotation is RotationKind.LEARNED)
    return [_candidate(name, rotations, layers, kv_heads, head_dim) for name in names]


def _candidate(name: str, learned: Rotations, layers: int, kv_heads: int, head_dim: int) -> Candidate:
    method = get_method(name)
    clips = [(method.clip_k,) * layers, (method.clip_v,) * layers]
    rotations = None
    if method.rotation is RotationKind.LEARNED:
        rotations = learned
        clips = [[c if c is not None else d for c, d in zip(*pair)] for pair in zip(learned.meta.clips(layers), clips)]
    elif method.rotation is RotationKind.HADAMARD:
        rotations = hadamard_rotations(layers, head_dim)
    elif method.rotation is not RotationKind.NONE:
        raise KVQuantError(f"--methods {name}: its rotations ({method.rotation.value}) cannot be measured here.")
    worker = rotations.for_worker(range(layers), kv_heads, 0, kv_heads) if rotations else LayerRotations()
    formats = [PageFormat(head_dim, min(head_dim, 128), k, v) for k, v in zip(*clips)]
    return Candidate(name, worker, formats)
