"""From the flags and a model's config to the rotations and clip quantiles that will serve it."""

from __future__ import annotations

from sglang_kvq.config import KVQuantConfig
from sglang_kvq.errors import KVQuantError
from sglang_kvq.methods import RotationKind, get_method
from sglang_kvq.rotations.base import Rotations
from sglang_kvq.rotations.files import load_rotations
from sglang_kvq.rotations.hadamard import hadamard_rotations
from sglang_kvq.rotations.zoo import find_rotations, identity


def resolve_rotations(config: KVQuantConfig, model_path: str, hf_config: object) -> Rotations | None:
    """The rotations of ``--kv-quant`` for a model; None when the method rotates nothing.

    Args:
        model_path: as the user gave it: hub id or folder.
        hf_config: the model's transformers config or its dict.

    Raises:
        KVQuantError: none known, or the ones given do not fit; names the fix.
    """
    method = get_method(config.method)
    model = identity(hf_config)
    layers, head_dim = model["num_hidden_layers"], model["head_dim"]
    if method.rotation is not RotationKind.LEARNED and config.rotations is not None:
        raise KVQuantError(
            f"--kv-quant-rotations {config.rotations}: --kv-quant {method.name} uses no rotation files; "
            "leave the flag out, or use --kv-quant oscar."
        )
    if method.rotation is RotationKind.NONE:
        return None
    if method.rotation is RotationKind.HADAMARD:
        return hadamard_rotations(layers, head_dim)
    location = config.rotations or find_rotations(model_path, hf_config)
    return load_rotations(location, layers=layers, kv_heads=model["num_key_value_heads"], head_dim=head_dim)


def resolve_clips(config: KVQuantConfig, rotations: Rotations | None) -> tuple[float, float]:
    """Clip quantiles for keys and values: the flags', else the calibration's, else the method's."""
    method = get_method(config.method)
    measured = (rotations.meta.clip_k, rotations.meta.clip_v) if rotations else (None, None)
    clips = []
    for flag, calibrated, default in zip((config.clip_k, config.clip_v), measured, (method.clip_k, method.clip_v)):
        clips.append(next(c for c in (flag, calibrated, default) if c is not None))
    return clips[0], clips[1]
