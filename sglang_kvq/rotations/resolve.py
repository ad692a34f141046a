"""Chooses rotations, clip quantiles and page formats from the flags and a model's config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.code import INT2, CodeFormat
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

    Args:
        model_path: as the user gave it: hub id or folder.
        hf_config: the model's transformers config or its dict.

    Raises:
        KVQuantError: none are known, or the given ones do not fit; the message names the fix.

    Rotations from files are read once per process and shared: do not write to them.
    """
    method = get_method(config.method)
    layers, kv_heads, head_dim = geometry_of(hf_config)
    if method.rotation is not RotationKind.LEARNED and config.rotations is not None:
        raise KVQuantError(
            f"--kv-quant-rotations {config.rotations}: --kv-quant {method.name} uses no rotation files; "
            "leave the flag out, or use --kv-quant oscar."
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
    """The location of a method's learned rotations for a model: ``--kv-quant-rotations``, or those known for it.

    Raises:
        KVQuantError: none known; names the fix.
    """
    if config.rotations is not None:
        return with_folder(config.rotations, model_path)
    return find_rotations(model_path, hf_config, transform=get_method(config.method).planes)


def check_kind(config: KVQuantConfig, rotations: Rotations) -> None:
    """Refuses learned rotations that are for other methods than ``config``'s.

    Raises:
        KVQuantError: the message says what they are for, and how to make suitable ones.
    """
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
    """Returns ``Rotations.for_worker`` with the planes' quantizer steps folded in.

    Args:
        formats: from ``resolve_formats``, for ``layers``.
    """
    worker = rotations.for_worker(layers, kv_heads_total, head_start, head_count)
    planes = [f for f in formats if isinstance(f, PlaneFormat)]
    if not planes:
        return worker
    return fold_steps(worker, *(torch.tensor(widths) for widths in zip(*((f.k.widths, f.v.widths) for f in planes))))


def resolve_formats(config: KVQuantConfig, rotations: Rotations | None, hf_config: Any) -> tuple[RecordFormat, ...]:
    """Returns the page format of every layer of a model.

    ``PageFormat`` takes its codes from the method and ``--kv-quant-bits``, its clips from ``resolve_clips``. If pages
    are planes, ``plane_formats`` chooses them.

    Args:
        rotations: from ``resolve_rotations``. Only their meta and energies are read, so methods without files may pass
            None.

    Raises:
        KVQuantError: a group does not divide head_dim, clips do not fit, the sensitivities cannot serve an ``auto``
            target, or planes lack rotations for transform coding.
    """
    method, width = get_method(config.method), config.width
    layers, _, head_dim = geometry_of(hf_config)
    if method.planes:
        if rotations is None:
            raise KVQuantError(
                f"--kv-quant {method.name}: its pages depend on the rotations; give some with --kv-quant-rotations."
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
            f"--kv-quant-bits {config.bits}: {source} hold no layer sensitivities to choose widths by; calibrate them "
            "with `kvq calibrate`, or give a number of bits."
        )
    return mixed_formats(formats, meta.sensitivity, width.target, source)


def plane_formats(rotations: Rotations, bits: float) -> tuple[PlaneFormat, ...]:
    """Chooses each layer's widths: least model error among those that allocate at most ``bits``.

    A pattern's cost in a layer is the sum over all of the model's heads, not only the worker's. All workers therefore
    choose the same widths.

    Args:
        rotations: for transform coding.
        bits: allocated bits per element, gains included, averaged over layers, keys and values.

    Raises:
        KVQuantError: costs are not finite.
    """
    r, importance = rotations, rotations.meta.importance
    if r.k_energies is None or r.v_energies is None or importance is None:
        raise ValueError("planes are for rotations of transform coding")
    head_dim = r.k.shape[-1]
    k_costs, v_costs = (
        pattern_costs(energies, torch.tensor(importance[part], dtype=torch.float64))
        for part, energies in (("k", r.k_energies), ("v", r.v_energies))
    )
    chosen = choose_widths(k_costs, v_costs, bits - 8 / head_dim)
    return tuple(PlaneFormat(head_dim, PlaneCode(k), PlaneCode(v)) for k, v in chosen)


def resolve_clips(config: KVQuantConfig, rotations: Rotations | None, layers: int) -> list[tuple[float, float]]:
    """Returns clip quantiles (keys, values) of each layer: the flags', else the calibration's, else the method's.

    Calibrations and methods specify clips for INT2 codes. Other codes are clipped only if a flag says so.

    Raises:
        KVQuantError: the calibration's list is not one number between 0.5 and 1 per layer.
    """
    method = get_method(config.method)
    k, v = method.codes(config.width.bits)
    measured = (rotations.meta.clip_k, rotations.meta.clip_v) if rotations else (None, None)
    columns = []
    for name, flag, calibrated, default, code in (
        ("clip_k", config.clip_k, measured[0], method.clip_k, k),
        ("clip_v", config.clip_v, measured[1], method.clip_v, v),
    ):
        columns.append(_per_layer(name, _choose(flag, calibrated, default, code), layers, rotations))
    return list(zip(*columns))


def _choose(
    flag: float | None, calibrated: float | tuple[float, ...] | None, default: float, code: CodeFormat
) -> float | tuple[float, ...]:
    if flag is not None:
        return flag
    if code != INT2:
        return 1.0
    return default if calibrated is None else calibrated


def _per_layer(name: str, value: float | tuple[float, ...], layers: int, rotations: Rotations | None) -> list[float]:
    values = list(value) if isinstance(value, (list, tuple)) else [value] * layers
    if len(values) != layers or not all(isinstance(x, (int, float)) and 0.5 <= x <= 1 for x in values):
        raise KVQuantError(
            f"{rotations.meta.source if rotations else 'rotations'}: {name} is {value}, expected a number between 0.5 "
            f"and 1 or a list of {layers}, one per layer; recreate the rotations with `kvq calibrate`."
        )
    return values
