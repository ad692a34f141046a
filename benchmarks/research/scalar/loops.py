"""Counts the instructions that decode one value, for sm_90, on any machine: scalar codes, a table, a computed code.

    python -m benchmarks.research.scalar.loops --out benchmarks/results/below_scalar_loops.json

A program of one warp decodes 64 rows of 128 values of 2 bits and adds their products with a query. Variants differ only
in how they compute a value from its bits:

    scalar    one AND for two codes, as subnormal FP16 numbers (docs/notes/kernels.md)
    table     the last 8 bits are an index into 256 FP16 numbers (a trellis)
    pairs     the last 10 bits are an index into 1,024 pairs of FP16 numbers: one look-up for two values
    computed  the last 16 bits, multiplied and masked, give two FP16 numbers that are added (QTIP's 3INST)
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks import record

TARGET = GPUTarget("cuda", 90, 32)
ROWS, VALUES, WORDS = 64, 128, 8
VARIANTS = ("scalar", "table", "pairs", "computed")
#: Words of shared memory that a table takes, and look-ups per value.
TABLE_WORDS, LOOK_UPS = {"table": 128, "pairs": 1024}, {"table": 1.0, "pairs": 0.5}
#: Values that a lane decodes.
PER_LANE = ROWS * VALUES // 32


@triton.jit
def _window(word, before, END: tl.constexpr, BITS: tl.constexpr):
    """Returns the ``BITS`` bits of a word up to ``END``, lowest first; early windows begin in the word before."""
    if END >= BITS:
        found = word >> (END - BITS)
    else:
        found = (word << (BITS - END)) | (before >> (32 - BITS + END))
    return found & ((1 << BITS) - 1)


@triton.jit
def _halves(pair):
    """Returns the two FP16 numbers in a word."""
    return (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True), (pair >> 16).to(tl.int16).to(
        tl.float16, bitcast=True
    )


@triton.jit
def _computed(window):
    """Returns a nearly normally distributed number from 16 bits (QTIP, arXiv 2406.11235)."""
    a, b = _halves(((window * 89226354 + 64248484) & 0x8FFF8FFF) ^ 0x3B603B60)
    return a + b


@triton.jit
def decode(codes, query, table, out, VARIANT: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Adds each word's products with the query: codes int32 ``[ROWS, WORDS]``, query FP16 ``[16 WORDS]``."""
    rows, words = tl.arange(0, ROWS), tl.arange(0, WORDS)
    at = rows[:, None] * WORDS + words[None, :]
    word = tl.load(codes + at).to(tl.uint32, bitcast=True)
    before = tl.load(codes + rows[:, None] * WORDS + ((words + WORDS - 1) % WORDS)[None, :]).to(tl.uint32, bitcast=True)
    total = tl.zeros((ROWS, WORDS), tl.float32)
    for t in tl.static_range(0, 16, 2):
        first = tl.load(query + words * 16 + t)[None, :]
        second = tl.load(query + words * 16 + t + 1)[None, :]
        if VARIANT == "scalar":
            a, b = _halves(word & (0x00030003 << t))
        elif VARIANT == "table":
            a = tl.load(table + _window(word, before, 2 * t + 2, 8)).to(tl.float16, bitcast=True)
            b = tl.load(table + _window(word, before, 2 * t + 4, 8)).to(tl.float16, bitcast=True)
        elif VARIANT == "pairs":
            pairs = table.to(tl.pointer_type(tl.uint32))
            a, b = _halves(tl.load(pairs + _window(word, before, 2 * t + 4, 10)))
        else:
            a = _computed(_window(word, before, 2 * t + 2, 16))
            b = _computed(_window(word, before, 2 * t + 4, 16))
        total += (a * first + b * second).to(tl.float32)
    tl.store(out + at, total)


def counted(variant: str) -> dict[str, Any]:
    """Compiles one variant; returns its instructions, in total and by kind, and registers."""
    signature = {"codes": "*i32", "query": "*fp16", "table": "*i16", "out": "*fp32"}
    constants = {"VARIANT": variant, "ROWS": ROWS, "WORDS": WORDS}
    source = ASTSource(
        fn=decode,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs={(decode.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(n,): [["tt.divisibility", 16]] for n in range(4)},
    )
    kernel = triton.compile(source, target=TARGET, options={"num_warps": 1})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    operations = re.findall(r"/\*[0-9a-f]{4,5}\*/ +(?:@!?U?P\w+ +)?([A-Z0-9_.]+)", code)
    body = operations[: operations.index("EXIT") + 1] if "EXIT" in operations else operations
    kinds = Counter(name.split(".")[0] for name in body)
    return {"variant": variant, "instructions": len(body), "kinds": dict(kinds.most_common()),
            "registers": int(re.findall(r"REG:(\d+)", code)[-1])}  # fmt: skip


def conflicts(words: int, draws: int = 4000) -> float:
    """Returns the average cycles of a warp's look-ups in a table of ``words`` words of shared memory.

    Lanes draw words at random; a bank delivers one word per cycle, to all lanes that want it.
    """
    wanted = torch.randint(words, (draws, 32), generator=torch.Generator().manual_seed(0))
    wanted = torch.zeros(draws, -(-words // 32) * 32).scatter_(1, wanted, 1.0)
    return float(wanted.view(draws, -1, 32).sum(1).amax(1).mean())


def main() -> None:
    """Prints and writes what each variant adds to the scalar code, per value."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {variant: counted(variant) for variant in VARIANTS}
    rows = []
    for variant, one in found.items():
        more = (one["instructions"] - found["scalar"]["instructions"]) / PER_LANE
        words = TABLE_WORDS.get(variant, 0)
        look_ups = LOOK_UPS.get(variant, 0.0)
        row = {**one, "more_per_value": more, "look_ups_per_value": look_ups, "table_bytes": 4 * words}
        row["cycles_per_look_up"] = conflicts(words) if words else None
        rows.append(row)
        print(f"{variant:9} {one['instructions']:5} instructions, {more:+.2f} for a value; look-ups {look_ups}, "
              f"cycles of a warp's look-up {row['cycles_per_look_up']}; {one['kinds']}")  # fmt: skip
    if args.out:
        record.write(args.out, args.out.stem, rows)


if __name__ == "__main__":
    main()
