"""What a quantisation method declares. Data only: pools, pages and kernels are shared."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class RotationKind(Enum):
    """Where a method's rotations of the head dimension come from."""

    NONE = "none"  #: the identity
    HADAMARD = "hadamard"  #: a fixed orthonormal transform, needs no data
    LEARNED = "learned"  #: a calibrated file per model (rotation_zoo, ``--kv-quant-rotations``)


@dataclass(frozen=True)
class Method:
    """A way to store the history of the KV cache.

    Attributes:
        name: the value of ``--kv-quant``.
        summary: one line for ``--help`` and the docs.
        paper: where it comes from.
        rotation: which rotations it needs.
        clip_k, clip_v: default clip quantiles (see ``KVQuantConfig``); 1 clips nothing.
        bits: bits per code.
    """

    name: str
    summary: str
    paper: str
    rotation: RotationKind
    clip_k: float
    clip_v: float
    bits: int = 2
