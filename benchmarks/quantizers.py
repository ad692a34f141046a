"""Measures every kind of code on Gaussian rows, with clips and gains, and TurboQuant's second quantizer (QJL).

    python benchmarks/quantizers.py --out benchmarks/results/quantizers.json

A random rotation, or a Hadamard matrix on enough unequal coordinates, makes rows like these. Takes about a minute on a
CPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import record
from benchmarks.qjl import inner_products, projection, sketch_keys
from sglang_kvq.formats.code import CodeFormat
from sglang_kvq.formats.quantize import clip_rank, dequantize_rows, quantize_rows

UNIFORM, LLOYD, SPHERE = (
    {},
    {"levels": "lloyd-max", "statistic": "moments"},
    {"levels": "sphere", "statistic": "norm"},
)
CLIPS = (1.0, 0.98, 0.96, 0.92, 0.88, 0.86)
#: Number of queries that each row is multiplied by.
QUERIES = 64


def compare(exact: torch.Tensor, found: torch.Tensor) -> dict[str, float]:
    """Returns the squared error of scores q k over their mean square, and the slope of found scores over exact ones."""
    power = exact.square().mean(dtype=torch.float64)
    return {
        "score_error": float((found - exact).square().mean(dtype=torch.float64) / power),
        "score_slope": float((found * exact).mean(dtype=torch.float64) / power),
    }


def measure(rows: torch.Tensor, q: torch.Tensor, code: CodeFormat, clip: float) -> dict[str, Any]:
    """Measures one code: its relative squared error, and the least possible for a Gaussian, 2^(-2 bits)."""
    d = rows.shape[-1]
    values = dequantize_rows(*quantize_rows(rows, d, clip_rank(d, clip), code), code)
    exact = rows.float()
    error = float((values - exact).square().sum(dtype=torch.float64) / exact.square().sum(dtype=torch.float64))
    kind = {"levels": code.levels, "statistic": code.statistic, "bits": code.bits, "clip": clip, "gain": code.gain}
    return {**kind, "error": error, "bound": 4.0**-code.bits, **compare(q @ exact.T, q @ values.T)}


def measure_qjl(rows: torch.Tensor, q: torch.Tensor, code: CodeFormat, draws: int = 4) -> dict[str, Any]:
    """Measures a code of one bit less with the sketch of its residual, averaged over several projections."""
    exact = q @ rows.float().T
    found = []
    for seed in range(draws):
        s = projection(rows.shape[-1], seed)
        found.append(compare(exact, inner_products(q, sketch_keys(rows, code, s), s)))
    mean = {name: sum(one[name] for one in found) / draws for name in found[0]}
    return {"levels": "sphere with QJL", "statistic": "norm", "bits": code.bits, "clip": 1.0, "gain": 1.0, **mean}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--rows", type=int, default=65536)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(args.seed)
    rows = torch.randn(args.rows, args.head_dim, generator=generator).bfloat16()
    q = torch.randn(QUERIES, args.head_dim, generator=generator)
    cases = [(CodeFormat(2, **kind), clip) for kind in (UNIFORM, LLOYD) for clip in CLIPS]
    cases += [(CodeFormat(bits, **kind), 1.0) for bits in (3, 4) for kind in (UNIFORM, LLOYD)]
    cases += [(CodeFormat(bits, **SPHERE), 1.0) for bits in (2, 3, 4)]
    cases += [(CodeFormat(4), 0.86)]
    cases += [(CodeFormat(2, **kind, gain=1.1), 1.0) for kind in (LLOYD, SPHERE)]
    found = [measure(rows, q, code, clip) for code, clip in cases]
    found += [measure_qjl(rows, q, CodeFormat(bits, **SPHERE)) for bits in (3, 4)]
    rounded = [{name: float(f"{x:.5g}") if isinstance(x, float) else x for name, x in row.items()} for row in found]
    for row in rounded:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    more = {"source": "Gaussian", "rows_measured": args.rows, "head_dim": args.head_dim, "seed": args.seed}
    record.write(args.out, "quantizers", rounded, **more)


if __name__ == "__main__":
    main()
