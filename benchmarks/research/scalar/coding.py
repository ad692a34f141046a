"""Codes rows in the whitened basis of ``transform``, with any widths and any coder, at equal bits.

A channel of these rows has variance 1; ``energies`` give the cost of an error in it. Each channel has a width, so
quarters of a row are a special case. A coder gets rows ``[n, D]`` and widths ``[D]`` and returns the rows as read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.research.families.base import History, Method, Stored
from benchmarks.research.families.served import to_model, to_stored
from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.formats.planes import MOST_BITS, PLANES
from sglang_kvq.rotations.base import Rotations
from sglang_kvq.rotations.maths.transform import DISTORTION
from sglang_kvq.rotations.resolve import coding_parts, plane_formats, resolve_rotations

Coder = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
#: Bits of a gain.
GAIN_BITS = 8


@dataclass(frozen=True)
class Coding:
    """A ``Method``: keys and values of every layer with their widths, int64 ``[layers, kv_heads, D]``.

    ``gains`` is the number of gains in a row.
    """

    rotations: LayerRotations
    k_widths: torch.Tensor
    v_widths: torch.Tensor
    code: Coder
    gains: int = 1

    def __call__(self, layer: int, history: History) -> Stored:
        k, v = to_model(self.rotations, layer, *(read for _, read in self.read(layer, history)))
        return Stored(k, v, self.bits(layer, history))

    def bits(self, layer: int, history: History) -> float:
        heads, n, _ = history.k.shape
        of_widths = sum(int(widths[layer].sum()) for widths in (self.k_widths, self.v_widths))
        return n * (of_widths + 2 * heads * self.gains * GAIN_BITS)

    def read(self, layer: int, history: History) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns whitened rows ``[kv_heads, n, D]`` and the rows as read, for keys and for values."""
        stored = to_stored(self.rotations, layer, history.k, history.v)
        return [
            (x, code_heads(self.code, x.bfloat16().float(), widths[layer]))
            for x, widths in zip(stored, (self.k_widths, self.v_widths))
        ]


def code_heads(code: Coder, x: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
    """Codes rows ``[kv_heads, n, D]`` with widths ``[kv_heads, D]``; heads with equal widths are coded together."""
    if (widths == widths[:1]).all():
        return code(x.flatten(0, 1), widths[0]).view_as(x)
    return torch.stack([code(rows, of) for rows, of in zip(x, widths)])


def transform_of(model_path: str, hf_config: Any, folder: str | None = None) -> Rotations:
    """Returns the model's rotations for transform coding."""
    config = KVQuantConfig("transform", **({"rotations": folder} if folder else {}))
    found = resolve_rotations(config, model_path, hf_config)
    assert found is not None  # a method with learned rotations
    return found


def plane_widths(rotations: Rotations, bits: float, gains: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the widths that the product would choose at ``bits`` per element if a row had ``gains`` gains."""
    layers, heads, dim = rotations.k.shape[:3]
    formats = plane_formats(rotations, bits - (gains - 1) * GAIN_BITS / dim)
    found = []
    for of in ([f.k.widths for f in formats], [f.v.widths for f in formats]):
        quarters = torch.tensor(of).repeat_interleave(dim // PLANES, -1)
        found.append(quarters[:, None].expand(layers, heads, dim))
    return found[0], found[1]


def channel_widths(
    rotations: Rotations, bits: float, *, per_head: bool, group: int = 1, gains: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns widths of least predicted error at ``bits`` per element, over keys, values and layers.

    Each further bit saves less error, so taking the bits that save most is optimal. ``group`` neighboring channels have
    the same width. Without ``per_head`` all heads of a layer have the same widths.
    """
    heads, dim = rotations.k.shape[1:3]
    weights = torch.stack([x.double() * importance[:, None, None] for x, importance in coding_parts(rotations)])
    if not per_head:
        weights = weights.mean(2, keepdim=True)
    weights = weights.unflatten(-1, (-1, group)).mean(-1)
    saved = -torch.tensor(DISTORTION, dtype=torch.float64).diff()
    gain = weights[..., None] * saved
    count = int((bits - gains * GAIN_BITS / dim) * weights.numel())
    order = gain.flatten().argsort(descending=True)[:count]
    taken = torch.zeros(gain.numel(), dtype=torch.int64)
    taken[order] = 1
    widths = taken.view_as(gain).sum(-1).repeat_interleave(group, -1).expand(-1, -1, heads, -1)
    assert int(widths.max()) <= MOST_BITS
    return widths[0], widths[1]


def weighted_errors(
    rotations: Rotations, method: Method, layer: int, history: History
) -> tuple[list[torch.Tensor], float]:
    """Returns squared errors of keys' and of values' channels, float64 ``[kv_heads, D]`` each, and bits.

    Their unit is that of ``foreseen``: importance times energy. As in calibration, a token's weight is the effect of an
    error in it on attention's output: the square of the attention paid to it, on average 1.
    """
    whole, found = rotations.whole(), method(layer, history)
    weights = history.mass.double().square()
    weights = weights / weights.mean(1, keepdim=True)
    pairs = zip(to_stored(whole, layer, history.k, history.v), to_stored(whole, layer, found.k, found.v))
    errors = [
        ((x - read).double().square() * weights[..., None]).mean(1) * energies[layer] * importance[layer]
        for (x, read), (energies, importance) in zip(pairs, coding_parts(rotations))
    ]
    return errors, found.bits


def foreseen(rotations: Rotations, widths: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Returns the error that the calibration predicts for the best uniform quantizer: importance times energy."""
    table = torch.tensor(DISTORTION, dtype=torch.float64)
    parts = zip(coding_parts(rotations), widths)
    return sum(float((energies * importance[:, None, None] * table[w]).sum()) for (energies, importance), w in parts)


def bits_of(rotations: Rotations, widths: tuple[torch.Tensor, torch.Tensor], gains: int = 1) -> float:
    """Returns bits per element of such widths, gains included."""
    return sum(float(w.double().mean()) for w in widths) / 2 + gains * GAIN_BITS / rotations.k.shape[-1]
