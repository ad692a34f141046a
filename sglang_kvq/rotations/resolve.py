"""Chooses rotations, clip quantiles and page formats from the flags and a model's config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.code import INT2
from sglang_kvq.formats.mixed import mixed_formats
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.planes import PlaneCode, PlaneFormat
from sglang_kvq.formats.record import RecordFormat
from sglang_kvq.methods import RotationKind, get_method
from sglang_kvq.rotations.base import RotationMeta, Rotations
from sglang_kvq.rotations.identity import geometry_of, layer_numbers
from sglang_kvq.rotations.maths.fixed import hadamard_rotations, random_rotations
from sglang_kvq.rotations.maths.transform import choose_widths, fold_steps, pattern_costs
from sglang_kvq.rotations.storage.files import load_once
from sglang_kvq.rotations.storage.zoo import find_rotations, with_folder


def resolve_rotations(config: KVQuantConfig, model_path: str, hf_config: Any) -> Rotations | None:
    """Returns the rotations of ``--kv-quant`` for a model; None if the method rotates nothing.

    Rotations from files are read once per process and shared: do not write to them.

    Raises:
        KVQuantError: none are known, or the given ones do not fit.
    """
    method = get_method(config.method)
    layers, kv_heads, head_dim = geometry_of(hf_config)
    if method.rotation is not RotationKind.LEARNED and config.rotations is not None:
        raise KVQuantError(
            f"--kv-quant-rotations {config.rotations}: --kv-quant {method.name} uses no rotation files. "
            "Leave the flag out, or use --kv-quant oscar."
        )
    if method.rotation is RotationKind.NONE:
        return None
    if method.rotation is RotationKind.HADAMARD:
        return hadamard_rotations(layers, head_dim)
    if method.rotation is RotationKind.RANDOM:
        return random_rotations(layers, kv_heads, head_dim, config.seed or 0)
    location = locate_rotations(config, model_path, hf_config)
    numbers = layer_numbers(hf_config)
    rotations = load_once(location, layers=layers, kv_heads=kv_heads, head_dim=head_dim, numbers=numbers)
    check_kind(config, rotations)
    return rotations


def locate_rotations(config: KVQuantConfig, model_path: str, hf_config: Any) -> str:
    """Returns where a method's learned rotations for a model are: ``--kv-quant-rotations``, or those known for it."""
    if config.rotations is not None:
        return with_folder(config.rotations, model_path)
    return find_rotations(model_path, hf_config, transform=get_method(config.method).planes)


def check_kind(config: KVQuantConfig, rotations: Rotations) -> None:
    """Refuses learned rotations that are for other methods than ``config``'s."""
    wants = get_method(config.method).planes
    if rotations.is_transform == wants:
        return
    model = rotations.meta.base_model or "MODEL"
    if wants:
        raise KVQuantError(
            f"{rotations.meta.source or 'these rotations'}: they are not for transform coding (objective "
            f"{rotations.meta.objective}), which --kv-quant {config.method} needs: make suitable ones with `kvq "
            f"calibrate {model} --composition transform`, or serve these with --kv-quant oscar."
        )
    raise KVQuantError(
        f"{rotations.meta.source or 'these rotations'}: they are for transform coding, not for --kv-quant "
        f"{config.method}: serve them with --kv-quant transform, or make others with `kvq calibrate {model}`."
    )


def rotations_of_worker(
    rotations: Rotations,
    formats: Sequence[RecordFormat],
    layers: range,
    kv_heads_total: int,
    head_start: int,
    head_count: int,
) -> LayerRotations:
    """Returns ``Rotations.for_worker`` with the planes' quantizer steps folded in."""
    worker = rotations.for_worker(layers, kv_heads_total, head_start, head_count)
    planes = [f for f in formats if isinstance(f, PlaneFormat)]
    if not planes:
        return worker
    return fold_steps(worker, *(torch.tensor(widths) for widths in zip(*((f.k.widths, f.v.widths) for f in planes))))


def resolve_formats(config: KVQuantConfig, rotations: Rotations | None, hf_config: Any) -> tuple[RecordFormat, ...]:
    """Returns the page format of every layer of a model.

    Only the rotations' meta and energies are read, so methods without files may pass None.

    Raises:
        KVQuantError: a group does not divide head_dim, the sensitivities cannot serve an ``auto`` target, or planes
            lack rotations for transform coding.
    """
    method, width = get_method(config.method), config.width
    layers, _, head_dim = geometry_of(hf_config)
    if method.planes:
        if rotations is None:
            raise KVQuantError(
                f"--kv-quant {method.name}: its pages depend on the rotations. Give some with --kv-quant-rotations."
            )
        check_kind(config, rotations)
        return plane_formats(rotations, width.bits)
    k, v = method.codes(width.bits)
    group = config.group_size or min(head_dim, 128)
    run = {"run": config.group_size} if k.axis == "channel" and config.group_size else {}
    clips = resolve_clips(config, rotations, layers)
    formats = tuple(PageFormat(head_dim, group, *clip, k, v, **run) for clip in clips)
    if width.target is None:
        return formats
    meta = rotations.meta if rotations else RotationMeta()
    source = meta.source or "these rotations"
    if not meta.sensitivity:
        raise KVQuantError(
            f"--kv-quant-bits {config.bits}: {source} hold no layer sensitivities to choose widths by. Calibrate them "
            "with `kvq calibrate`, or give a number of bits."
        )
    mixed = mixed_formats(formats, meta.sensitivity, width.target, source)
    flags = {name: clip for name in ("clip_k", "clip_v") if (clip := getattr(config, name)) is not None}
    return tuple(replace(format, **flags) for format in mixed)


def plane_formats(rotations: Rotations, bits: float) -> tuple[PlaneFormat, ...]:
    """Chooses each layer's widths: least model error among those that allocate at most ``bits``.

    ``bits`` are averaged over layers, keys and values, and include gains. A pattern's cost in a layer is the sum over
    all of the model's heads, not only the worker's. All workers therefore choose the same widths.

    Raises:
        KVQuantError: costs are not finite.
    """
    head_dim = rotations.k.shape[-1]
    k_costs, v_costs = (pattern_costs(energies, weights) for energies, weights in coding_parts(rotations))
    chosen = choose_widths(k_costs, v_costs, bits - 8 / head_dim)
    return tuple(PlaneFormat(head_dim, PlaneCode(k), PlaneCode(v)) for k, v in chosen)


def coding_parts(rotations: Rotations) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns energies ``[layers, heads, D]`` and importances, float64 ``[layers]``, of keys, then of values."""
    importance, k, v = rotations.meta.importance, rotations.k_energies, rotations.v_energies
    if k is None or v is None or importance is None:
        raise ValueError("planes are for rotations of transform coding")
    return [(x, torch.tensor(importance[part], dtype=torch.float64)) for part, x in (("k", k), ("v", v))]


def resolve_clips(config: KVQuantConfig, rotations: Rotations | None, layers: int) -> list[tuple[float, float]]:
    """Returns clip quantiles (keys, values) of each layer: the flags', else the calibration's, else the method's.

    Calibrations and methods specify clips for INT2 codes. Other codes are clipped only if a flag says so.
    """
    method = get_method(config.method)
    calibrated = (rotations.meta if rotations else RotationMeta()).clips(layers)
    flags, defaults = (config.clip_k, config.clip_v), (method.clip_k, method.clip_v)
    columns: list[list[float]] = []
    for flag, measured, default, code in zip(flags, calibrated, defaults, method.codes(config.width.bits)):
        own = [default if x is None else x for x in measured] if code == INT2 else [1.0] * layers
        columns.append(own if flag is None else [flag] * layers)
    return list(zip(*columns))
