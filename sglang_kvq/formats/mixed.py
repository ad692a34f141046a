"""Mixed precision: chooses the layers whose keys or values get 3 or 4 bits instead of 2, within a bit budget."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.code import BITS
from sglang_kvq.formats.page import PageFormat

#: The rise of the model's error per layer, by part ("k", "v") and width.
Sensitivity: TypeAlias = Mapping[str, Mapping[str, Sequence[float]]]

#: The narrowest and the widest code that are mixed.
NARROW, *_, WIDE = BITS


def mixed_formats(
    formats: Sequence[PageFormat], sensitivity: Mapping[str, Mapping[str, Sequence[float]]], target: float, source: str
) -> tuple[PageFormat, ...]:
    """Widens codes bit by bit, each time where the model's error falls most, until a bit would exceed the target.

    A bit costs the same bytes everywhere, and each further bit gains less than the one before. The greedy choice is
    therefore optimal if the errors of layers add up.

    Args:
        formats: one per layer, all of ``NARROW`` bits. A widened code is not clipped.
        sensitivity: {"k": {"2": [..], "4": [..]}, "v": ...}. Each list has, per layer, the rise of the model's error
            when only that layer's keys (values) have that width. A missing "3" is the geometric mean of the other
            two, because each further bit divides a code's error by about the same factor.
        target: allocated record bits per element, scales and offsets included, averaged over layers, keys and values.
        source: where the sensitivities come from, for messages.

    Returns:
        the formats; their mean ``bits_per_element`` is at most ``target``.

    Raises:
        KVQuantError: the target is out of reach, or the sensitivities do not fit the layers.
    """
    layers, elements = len(formats), len(formats) * formats[0].elements
    least, most = (sum(f.record_bytes for f in each) for each in (formats, [_widest(f) for f in formats]))
    if not least * 8 / elements <= target <= most * 8 / elements:
        raise KVQuantError(
            f"--kv-quant-bits auto:{target:g}: these layers allocate {least * 8 / elements:g} bits per element with "
            f"all codes at {NARROW} bits and {most * 8 / elements:g} with all at {WIDE} (scales included, "
            f"head_dim {formats[0].head_dim}). Choose a target between them."
        )
    rises = {part: _rises(sensitivity, part, layers, source) for part in ("k", "v")}

    def gain(part: str, layer: int, bits: int) -> float:
        return rises[part][bits][layer] - rises[part][bits + 1][layer]

    steps = [(-gain(part, layer, NARROW), layer, part, NARROW) for layer in range(layers) for part in ("k", "v")]
    heapq.heapify(steps)
    result, left = list(formats), math.floor(target * elements / 8 + 1e-6) - least
    while steps:
        fall, layer, part, bits = heapq.heappop(steps)
        wider = widened(result[layer], part, bits + 1)
        extra = wider.record_bytes - result[layer].record_bytes
        if fall >= 0 or extra > left:
            break
        result[layer], left = wider, left - extra
        if bits + 1 < WIDE:
            heapq.heappush(steps, (-gain(part, layer, bits + 1), layer, part, bits + 1))
    return tuple(result)


def widened(format: PageFormat, part: str, bits: int) -> PageFormat:
    """Sets ``part`` ("k" or "v") to ``bits`` and removes its clipping: clips are chosen for ``NARROW`` codes."""
    return replace(format, **{part: replace(getattr(format, part), bits=bits), f"clip_{part}": 1.0})


def _widest(format: PageFormat) -> PageFormat:
    return widened(widened(format, "k", WIDE), "v", WIDE)


def _rises(sensitivity: Sensitivity, part: str, layers: int, source: str) -> dict[int, Sequence[float]]:
    """Returns for each width the rises of the model's error, one per layer."""
    known = {bits: sensitivity.get(part, {}).get(str(bits)) for bits in BITS}
    if known[3] is None and known[2] is not None and known[4] is not None:
        # A measured rise below 0 is noise.
        known[3] = [math.sqrt(max(a, 0.0) * max(b, 0.0)) for a, b in zip(known[2], known[4])]
    rises: dict[int, Sequence[float]] = {}
    for bits, values in known.items():
        if values is None or len(values) != layers or not all(map(math.isfinite, values)):
            raise KVQuantError(
                f"{source}: its sensitivities of {part} at {bits} bits are not one finite number for each of {layers} "
                "layers. Recreate the rotations with `kvq calibrate`."
            )
        rises[bits] = values
    return rises
