"""Compares kernels of transform coding with ``oscar``'s at equal heads: decode steps and quantization, by budget.

A budget gives a model's layers records of several widths. Each budget here uses the pairs of widths that it gives
Qwen2.5-Coder-0.5B's layers, at any head_dim; its microseconds are the mean over these layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache

import torch

from benchmarks import baseline
from benchmarks.kernel_bench.decode import quantize_rows
from benchmarks.kernel_bench.rows import row_of
from benchmarks.kernel_bench.shapes import ANY_EXTEND, DecodeShape, ShortShape
from benchmarks.kernel_bench.timer import Timer
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.planes import PlaneCode, PlaneFormat, Widths
from sglang_kvq.formats.record import RecordFormat
from sglang_kvq.rotations.resolve import plane_formats
from sglang_kvq.rotations.storage.files import load_rotations
from sglang_kvq.rotations.storage.zoo import zoo_folder

#: Budgets in bits; ``oscar`` at 2 bits takes 2.25 with heads of 128.
BUDGETS = (2.5, 2.25, 1.6)
HEAD_DIMS = (128, 64)
#: The model in the zoo whose layers' widths are measured.
MODEL = "qwen2.5-coder-0.5b-instruct-transform"
SIZES = {"layers": 24, "kv_heads": 2, "head_dim": 64}
#: Query heads, KV heads, head_dim.
GEOMETRIES = [(32, 8, 128), (64, 8, 128), (32, 8, 64), (64, 8, 64)]
#: Extends: requests, new tokens of each, stored prefix.
EXTENDS = [(8, 64, 16384), (1, 128, 131072)]
SHAPES = [(64, 16384), (16, 98304)]


def plane_format(head_dim: int, widths: tuple[Widths, Widths]) -> PlaneFormat:
    return PlaneFormat(head_dim, PlaneCode(widths[0]), PlaneCode(widths[1]))


@cache
def layers_of(budget: float) -> Counter[tuple[Widths, Widths]]:
    """Counts how many of ``MODEL``'s layers have each pair of key and value widths."""
    rotations = load_rotations(zoo_folder() / MODEL, **SIZES)
    return Counter((format.k.widths, format.v.widths) for format in plane_formats(rotations, budget))


def decode_planes_rows(
    timer: Timer,
    bandwidth: float,
    budgets: Sequence[float] = BUDGETS,
    head_dims: Sequence[int] = HEAD_DIMS,
    compare: bool = True,
) -> Iterator[dict]:
    """Yields rows for ``oscar`` at 2 bits, then each budget's mean, at every geometry and shape."""
    for q_heads, kv_heads, d in (geometry for geometry in GEOMETRIES if geometry[2] in head_dims):
        heads = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": d}
        for batch, context in SHAPES:
            lengths = [context] * batch
            shape = DecodeShape(lengths, PageFormat(d, d, 0.96, 0.92), q_heads, kv_heads)
            oscar, error = shape.measure(timer)
            size = shape.size
            theirs = baseline.decode_us(timer, shape.q, lengths, kv_heads, torch.bfloat16) if compare else None
            bits = shape.pool.formats[0].bits_per_element
            del shape
            name = f"decode (oscar 2, {q_heads} over {kv_heads} heads of {d})"
            yield row_of(name, batch, context, oscar, theirs, error, size / oscar / bandwidth, **heads, bits=bits)
            for budget in budgets:
                layers = layers_of(budget)
                total = bytes_ = bits = worst = 0.0
                each = {}
                for widths, count in layers.items():
                    shape = DecodeShape(lengths, plane_format(d, widths), q_heads, kv_heads)
                    us, error = shape.measure(timer)
                    each["-".join("".join(map(str, w)) for w in widths)] = round(us, 1)
                    total, bytes_, worst = total + us * count, bytes_ + shape.size * count, max(worst, error)
                    bits += shape.pool.formats[0].bits_per_element * count
                    del shape
                n = sum(layers.values())
                name = f"decode (transform {budget}, {q_heads} over {kv_heads} heads of {d})"
                more = {
                    "bits": round(bits / n, 3),
                    "oscar_us": round(oscar, 2),
                    "ratio_oscar": round(oscar * n / total, 3),
                }
                yield row_of(
                    name,
                    batch,
                    context,
                    total / n,
                    theirs,
                    worst,
                    bytes_ / total / bandwidth,
                    **heads,
                    **more,
                    each=each,
                )


def extend_planes_rows(
    timer: Timer, budgets: Sequence[float] = BUDGETS, head_dims: Sequence[int] = HEAD_DIMS
) -> Iterator[dict]:
    """Yields rows for a few new tokens over long prefixes, 32 over 8 heads: read directly, and dequantized first."""
    for d in head_dims:
        formats: dict[str, dict[RecordFormat, int]] = {"oscar 2": {PageFormat(d, d, 0.96, 0.92): 1}} | {
            f"transform {budget}": {plane_format(d, widths): n for widths, n in layers_of(budget).items()}
            for budget in budgets
        }
        for batch, new, prefix in EXTENDS:
            oscar = None
            for name, layers in formats.items():
                direct = first = worst = 0.0
                for format, count in layers.items():
                    shape = ShortShape(batch, new, prefix, format)
                    us, error = shape.measure(timer, ANY_EXTEND)
                    direct, worst = direct + us * count, max(worst, error)
                    first += shape.measure(timer, None)[0] * count
                    del shape
                n = sum(layers.values())
                oscar = oscar or direct / n
                more = {"new_tokens": new, "dequantized_first_us": round(first / n, 2), "head_dim": d}
                more |= {"oscar_us": round(oscar, 2), "ratio_oscar": round(oscar * n / direct, 3)}
                yield row_of(
                    f"extend ({name}, heads of {d})", batch, prefix + new, direct / n, None, worst, None, **more
                )


def quantize_planes_rows(
    timer: Timer, bandwidth: float, budgets: Sequence[float] = BUDGETS, head_dims: Sequence[int] = HEAD_DIMS
) -> Iterator[dict]:
    """Yields ``decode.quantize_rows`` for ``oscar`` and for each budget's most common pair of widths."""
    for d in head_dims:
        formats: dict[str, RecordFormat] = {"oscar 2": PageFormat(d, d, 0.96, 0.92)} | {
            f"transform {budget}": plane_format(d, layers_of(budget).most_common(1)[0][0]) for budget in budgets
        }
        for name, format in formats.items():
            yield from quantize_rows(timer, bandwidth, format, f" ({name}, heads of {d})", head_dim=d)
