"""Mixed precision: which layers' keys and values get 4 bits instead of 2, within a budget of allocated bits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.page import PageFormat

#: The two widths that are mixed.
NARROW, WIDE = 2, 4


def mixed_formats(
    formats: Sequence[PageFormat], sensitivity: Mapping[str, Mapping[str, Sequence[float]]], target: float, source: str
) -> tuple[PageFormat, ...]:
    """Widen where the error falls most per added byte, until the next would exceed the target.

    Args:
        formats: one per layer, all of ``NARROW`` bits. A widened code is not clipped.
        sensitivity: {"k": {"2": [..], "4": [..]}, "v": ...}: per layer, the rise of the model's error when only that layer's
            keys (values) are coded at that width.
        target: allocated record bits per element, scales and zeros included, averaged over layers, keys and values.
        source: where the sensitivities come from, for messages.

    Returns:
        the formats; their mean ``bits_per_element`` is at most ``target``.

    Raises:
        KVQuantError: the target is out of reach, or the sensitivities do not fit the layers.
    """
    candidates = []
    for layer, format in enumerate(formats):
        for part in ("k", "v"):
            wide = widened(format, part)
            gain = _rise(sensitivity, part, NARROW, layer, len(formats), source)
            gain -= _rise(sensitivity, part, WIDE, layer, len(formats), source)
            candidates.append((gain / (wide.record_bytes - format.record_bytes), layer, part))
    elements = len(formats) * formats[0].elements
    least = sum(f.record_bytes for f in formats) * 8 / elements
    most = least + sum(_extra(formats[layer], part) for _, layer, part in candidates) * 8 / elements
    if not least <= target <= most:
        raise KVQuantError(
            f"--kv-quant-bits auto:{target:g}: these layers allocate {least:g} bits per element with all codes at "
            f"{NARROW} bits and {most:g} with all at {WIDE} (scales included, head_dim {formats[0].head_dim}); choose a "
            "target between them."
        )
    result, left = list(formats), math.floor(target * elements / 8 + 1e-6) - sum(f.record_bytes for f in formats)
    for gain, layer, part in sorted(candidates, key=lambda c: (-c[0], c[1], c[2])):
        extra = _extra(formats[layer], part)
        if gain > 0 and extra <= left:
            result[layer], left = widened(result[layer], part), left - extra
    return tuple(result)


def widened(format: PageFormat, part: str) -> PageFormat:
    """The format with ``part``, "k" or "v", at ``WIDE`` bits and unclipped: clips are chosen for ``NARROW`` ones."""
    return replace(format, **{part: replace(getattr(format, part), bits=WIDE), f"clip_{part}": 1.0})


def _extra(format: PageFormat, part: str) -> int:
    return widened(format, part).record_bytes - format.record_bytes


def _rise(sensitivity: Mapping, part: str, bits: int, layer: int, layers: int, source: str) -> float:
    values = sensitivity.get(part, {}).get(str(bits), ())
    if len(values) != layers or not math.isfinite(values[layer]):
        raise KVQuantError(
            f"{source}: its sensitivities of {part} at {bits} bits are not one finite number for each of {layers} layers; "
            "recreate the rotations with `kvq calibrate`."
        )
    return values[layer]
