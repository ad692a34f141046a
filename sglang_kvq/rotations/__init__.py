"""Rotations of the head dimension: fixed, loaded from files, or calibrated on a model.

This package does not import sglang or transformers at import time; calibration and evaluation need transformers.
"""

from sglang_kvq.rotations.base import RotationMeta, Rotations
from sglang_kvq.rotations.maths.fixed import hadamard_matrix, hadamard_rotations
from sglang_kvq.rotations.storage.files import load_rotations, save_rotations
from sglang_kvq.rotations.storage.zoo import find_rotations

__all__ = [
    "RotationMeta",
    "Rotations",
    "find_rotations",
    "hadamard_matrix",
    "hadamard_rotations",
    "load_rotations",
    "save_rotations",
]
