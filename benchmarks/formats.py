"""Times the decode kernel with every method's codes and at other geometries, as ``benchmarks/kernels.py`` does.

    python benchmarks/formats.py --out benchmarks/results/kernels_h200.json

Codes other than uniform 2-bit ones take more instructions per element. More query heads per KV head, or wider heads,
take more registers. This benchmark shows the cost of each. Rows are added to the file as ``decode (...)``;
``bandwidth_fraction`` counts the bytes of that format. ``--sweep`` instead compares launches, for
``decode.decode_launch``:

    python benchmarks/formats.py --sweep --out benchmarks/results/launches_h200.json
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import baseline, record
from benchmarks.kernel_bench.rows import row_of, show
from benchmarks.kernel_bench.shapes import KV_HEADS, Q_HEADS, D, DecodeShape
from benchmarks.kernel_bench.timer import Timer, copy_bandwidth
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.kernels.decode.decode_attention import DecodeLaunch, decode_launch
from sglang_kvq.kernels.device.codes import record_of
from sglang_kvq.methods import get_method

SHAPES = [(64, 16384), (8, 32768)]
#: Registers that --sweep tries, with as many programs as they allow; shared memory may hold fewer.
REGISTERS = [144, 168, 184, 200, 255]


@dataclass(frozen=True)
class Case:
    """A measured case: records of ``method`` at ``bits``, and query heads over KV heads."""

    name: str
    method: str = "oscar"
    bits: int = 2
    q_heads: int = Q_HEADS
    kv_heads: int = KV_HEADS
    head_dim: int = D
    group: int = 0

    @property
    def format(self) -> PageFormat:
        k, v = get_method(self.method).codes(self.bits)
        return PageFormat(self.head_dim, self.group or min(self.head_dim, 128), 1.0, 1.0, k, v)


CODES = [
    *(
        Case(f"{method} {bits}", method, bits)
        for method in ("oscar", "oscar-lloyd-max", "turboquant")
        for bits in (2, 3, 4)
    ),
    *(Case("kivi 2", "kivi"), Case("kivi 4", "kivi", 4), Case("int4", "int4", 4)),
    *(Case(f"oscar 2, groups of {group}", group=group) for group in (32, 64)),
    Case("oscar-lloyd-max 2, groups of 32", "oscar-lloyd-max", group=32),
]
GEOMETRIES = [
    *(
        Case(f"{q} over {kv} heads", q_heads=q, kv_heads=kv)
        for q, kv in ((32, 32), (32, 16), (40, 8), (64, 8), (128, 8))
    ),
    *(Case(f"head_dim {d}", head_dim=d) for d in (64, 96)),
    Case("head_dim 256", q_heads=16, kv_heads=4, head_dim=256),
    Case("oscar-lloyd-max 3, 64 over 8 heads", "oscar-lloyd-max", 3, q_heads=64),
    Case("oscar-lloyd-max 2, head_dim 64", "oscar-lloyd-max", head_dim=64),
    Case("oscar-lloyd-max 2, head_dim 256", "oscar-lloyd-max", q_heads=16, kv_heads=4, head_dim=256),
]


def rows_of(timer: Timer, bandwidth: float, cases: list[Case], compare: bool):
    for case in cases:
        for batch, context in SHAPES:
            shape = DecodeShape([context] * batch, case.format, case.q_heads, case.kv_heads)
            ours, error = shape.measure(timer)
            q, size = shape.q, shape.size
            del shape
            theirs = None
            if compare and case.head_dim != 96:  # FlashInfer has no kernel for 96
                theirs = baseline.decode_us(timer, q, [context] * batch, case.kv_heads, torch.bfloat16)
            heads = {"q_heads": case.q_heads, "kv_heads": case.kv_heads, "head_dim": case.head_dim}
            bits = {"record_bits_per_element": case.format.bits_per_element}
            yield row_of(
                f"decode ({case.name})", batch, context, ours, theirs, error, size / ours / bandwidth, **heads, **bits
            )


def sweep(timer: Timer, cases: list[Case]):
    """Prints microseconds by stages, registers and programs per SM, the current launch marked; yields rows."""
    for case in cases:
        used = decode_launch(case.head_dim, case.q_heads // case.kv_heads, record_of(case.format), case.kv_heads)
        launches = {DecodeLaunch(stages, n, 65536 // (32 * n)) for n in REGISTERS for stages in {2, used.stages}} | {
            used
        }
        ordered = sorted(launches, key=lambda x: (x.stages, x.registers, x.programs_per_sm))
        names = [f"{x.stages},{x.registers},{x.programs_per_sm}" + "*" * (x == used) for x in ordered]
        print(f"{case.name:>36}" + "".join(f"{name:>10}" for name in names))
        for batch, context in SHAPES:
            shape = DecodeShape([context] * batch, case.format, case.q_heads, case.kv_heads)
            times = [shape.measure(timer, launch)[0] for launch in ordered]
            print(f"{f'{batch} x {context}':>36}" + "".join(f"{us:10.1f}" for us in times), flush=True)
            for x, us in zip(ordered, times):
                launch = {"stages": x.stages, "registers": x.registers, "programs_per_sm": x.programs_per_sm}
                yield {"case": case.name, "batch": batch, "context": context, **launch, "us": round(us, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="JSON file to add rows to")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--alone", action="store_true", help="without FlashInfer, whose kernels take minutes to compile"
    )
    parser.add_argument("--sweep", action="store_true", help="only compare ways to launch")
    args = parser.parse_args()
    cases = [case for case in CODES + GEOMETRIES if args.only in case.name]
    if not cases:
        names = ", ".join(case.name for case in CODES + GEOMETRIES)
        parser.error(f"--only {args.only}: no case has that in its name; there are {names}")
    torch.manual_seed(0)
    timer = Timer(args.repeats)
    if args.sweep:
        rows = list(sweep(timer, cases))
        if args.out:
            record.merge(args.out, "launches", rows, key="case")
        return
    bandwidth, rows = copy_bandwidth(timer), []
    for row in rows_of(timer, bandwidth, cases, not args.alone):
        rows.append(row)
        show(row)
    if args.out:
        record.merge(args.out, "kernels", rows, key="kernel")


if __name__ == "__main__":
    main()
