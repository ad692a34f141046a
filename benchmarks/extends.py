"""Times short extends over a grid: each way to serve them, and FlashInfer over BF16, at Qwen3-8B's geometry.

    python benchmarks/extends.py --out benchmarks/results/kernels_h200.json  # the whole grid, as routed (4 minutes)
    python benchmarks/extends.py --quick --out quick.json                    # some points (1 minute)
    python benchmarks/extends.py --sweep --out sweep.json                    # some points, every way (4 minutes)
    python benchmarks/extends.py --fit quick.json                            # constants of extend_costs.py
    python benchmarks/extends.py --fit benchmarks/results/kernels_h200.json  # those in use

If FlashInfer is not installed, --quick runs without it. If a result differs from float64 on the same codes, it has no
time: --quick and --sweep report this and continue, and the whole grid ends.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from benchmarks import baseline, record
from benchmarks.kernel_bench.extend import BACKENDS
from benchmarks.kernel_bench.rows import row_of
from benchmarks.kernel_bench.shapes import ANY_EXTEND, KV_HEADS, Q_HEADS, D, ShortShape, make_pool
from benchmarks.kernel_bench.timer import Timer
from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.attention.planning.extend_costs import Geometry, dequantized_terms, direct_terms, fit
from sglang_kvq.attention.planning.short_extend import ShortExtends
from sglang_kvq.attention.ragged import RaggedPrefill, workspace_tokens
from sglang_kvq.attention.triton_ops import TritonOps
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.kernels.extend.extend_attention import NARROW, ExtendLaunch
from sglang_kvq.kernels.extend.gather_pages import PageRead, gather_pages

REQUESTS = (1, 4, 8, 16, 32, 64)
NEW = (16, 32, 64, 128, 256, 512)
PREFIXES = (2048, 8192, 32768, 131072)
MOST_TOKENS = 4 << 20  # limit for the sum of all prefixes
#: Points of the sweep: requests, new tokens of each, stored prefix.
SWEEP = [
    (1, 16, 32768), (1, 64, 32768), (1, 128, 8192), (1, 256, 32768), (1, 512, 8192), (1, 128, 131072),
    (4, 16, 8192), (4, 64, 32768), (4, 128, 32768), (4, 512, 8192),
    (8, 16, 2048), (8, 64, 8192), (8, 128, 8192), (8, 256, 8192),
    (16, 32, 8192), (16, 128, 32768), (32, 32, 8192), (32, 64, 2048), (64, 16, 8192), (64, 128, 2048),
]  # fmt: skip
#: Launches of the kernel that reads pages directly: rows, keys, warps, stages, registers, programs per SM.
LAUNCHES = [
    (64, 32, 4, 3, 168, 3), (64, 32, 4, 3, None, 2), (128, 32, 8, 2, 128, 2), (128, 32, 8, 3, None, 1),
    (256, 32, 8, 2, None, 1), (256, 32, 16, 2, 128, 1),
]  # fmt: skip
#: Launches that --quick compares with the first.
QUICK_LAUNCHES = [(128, 32, 8, 2, 128, 2), (256, 32, 8, 2, None, 1)]
#: FlashInfer's backends for attention to a workspace, and tokens of the workspace; the last pair is used.
CAPACITY = workspace_tokens(KV_HEADS, D)
WORKSPACES = [("auto", 32768), ("auto", CAPACITY)]


def grid() -> Iterator[tuple[int, int, int]]:
    for prefix in PREFIXES:
        for requests in REQUESTS:
            if requests * prefix <= MOST_TOKENS:
                yield from ((requests, new, prefix) for new in NEW)


def flashinfer(backend: str, capacity: int) -> RaggedPrefill:
    import flashinfer

    prefill = RaggedPrefill(flashinfer, Q_HEADS, KV_HEADS, D, torch.device("cuda"), capacity, lambda call: backend)
    prefill.suits = lambda new_lens: True
    return prefill


def build(backend: str) -> None:
    """Makes FlashInfer compile its kernels into its cache on disk."""
    import flashinfer

    q, k = (torch.zeros(256, n, D, dtype=torch.bfloat16, device="cuda") for n in (Q_HEADS, KV_HEADS))
    bounds = torch.tensor([0, 256], dtype=torch.int32)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "NHD", backend=backend
    )
    wrapper.plan(bounds, bounds, Q_HEADS, KV_HEADS, D, causal=True, q_data_type=torch.bfloat16)
    wrapper.run(q, k, k)
    torch.cuda.synchronize()


def name_of(way: tuple) -> str:
    return ",".join("-" if x is None else str(x) for x in way)


def compiled(shorts: dict[str, ShortExtends], timer: Timer, backends: tuple[str, ...]) -> None:
    """Compiles all kernels before anything is measured; FlashInfer compiles at the same time as ours."""
    begin = time.monotonic()
    builds = [subprocess.Popen([sys.executable, __file__, "--build", backend]) for backend in backends]
    tiny = ShortShape(1, 16, 2048)
    for name, short in shorts.items():
        print(f"{name}: {measured(tiny, timer, short, None)} us for {tiny.name}", flush=True)
    statuses = [x.wait() for x in builds]
    if any(statuses):
        raise SystemExit("FlashInfer does not build here; see above.")
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)


def measured(shape: ShortShape, timer: Timer, short: ShortExtends | None, prefill: RaggedPrefill | None) -> float | str:
    """Returns microseconds, or the reason why there are none."""
    try:
        return round(shape.measure(timer, short, prefill)[0], 1)
    except SystemExit as wrong:
        return str(wrong).split(": ")[-1]
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:80]


def theirs(timer: Timer, shape: ShortShape, backends: tuple[str, ...] = BACKENDS) -> dict[str, float]:
    """Returns FlashInfer's microseconds over a BF16 cache, by backend."""
    total = shape.prefix + shape.new
    return {b: round(baseline.prefill_us(timer, shape.q, total, KV_HEADS, shape.requests, (b,)), 1) for b in backends}


def points(
    timer: Timer, columns: dict[str, tuple[ShortExtends | None, RaggedPrefill | None]], backends: tuple[str, ...]
) -> list[dict]:
    """Returns a row per point of ``SWEEP``: microseconds of FlashInfer's backends and of each way."""
    print(f"{'':22}" + "".join(f"{x:>17}" for x in [*(f"theirs {b}" for b in backends), *columns]))
    rows = []
    for point in SWEEP:
        shape = ShortShape(*point)
        row = {"batch": point[0], "new_tokens": point[1], "prefix": point[2]}
        row |= {f"theirs {b}": us for b, us in theirs(timer, shape, backends).items()}
        row |= {name: measured(shape, timer, *way) for name, way in columns.items()}
        print(
            f"{shape.name:22}"
            + "".join(f"{x if isinstance(x, float) else x[-16:]:>17}" for x in list(row.values())[3:]),
            flush=True,
        )
        rows.append(row)
    return rows


def direct_ways(launches: list[tuple]) -> dict[str, ShortExtends]:
    return {name_of(x): replace(ANY_EXTEND, launch=ExtendLaunch(*x)) for x in launches}


def sweep(timer: Timer) -> list[dict]:
    shorts = direct_ways(LAUNCHES)
    compiled(shorts, timer, BACKENDS)
    columns = {name: (short, None) for name, short in shorts.items()}
    columns |= {name_of(x): (None, flashinfer(*x)) for x in WORKSPACES}
    return points(timer, columns, BACKENDS) + gathers(timer)


def quick(timer: Timer) -> list[dict]:
    """Measures extends as routed, and each way alone; without FlashInfer, our own kernel attends to the workspace."""
    backends = BACKENDS if baseline.version() else ()
    shorts = direct_ways(QUICK_LAUNCHES)
    compiled({"direct": ANY_EXTEND, **shorts}, timer, backends)
    prefill = flashinfer(*WORKSPACES[-1]) if backends else None
    columns = {"as routed": (ShortExtends(), prefill), "direct": (ANY_EXTEND, None), "dequantized": (None, prefill)}
    columns |= {name: (short, None) for name, short in shorts.items()}
    rows = points(timer, columns, backends)
    for row in rows:
        ours, us = row["as routed"], [row[f"theirs {b}"] for b in backends]
        ways = [row[x] for x in ("direct", "dequantized") if isinstance(row[x], float)]
        if isinstance(ours, float):
            ratio = f"{ours / min(us):5.2f} of FlashInfer over BF16, " if us else ""
            name = f"{row['batch']} x {row['new_tokens']} after {row['prefix']}"
            print(f"{name:22} {ratio}{ours / min(ways):5.2f} of the better way")
    return rows + gathers(timer)


def fit_rows(path: str) -> list[dict]:
    """Returns rows of --quick or --sweep, or of a recorded grid, which names the way that was taken."""
    found = json.loads(Path(path).read_text())
    if isinstance(found, list):
        return [row for row in found if "kernel" not in row]
    ways = {"pages": "direct", "workspace": "dequantized"}
    grid_rows = [row for row in found["rows"] if row["kernel"] == "extend (grid)"]
    return [
        {
            "batch": r["batch"],
            "new_tokens": r["new_tokens"],
            "prefix": r["context"] - r["new_tokens"],
            ways[r["way"]]: r["ours_us"],
        }
        for r in grid_rows
    ]


def fitted(rows: list[dict]) -> str:
    """Returns the constants of ``extend_costs.H200`` that fit rows of --quick or --sweep."""
    names = {"direct": (direct_terms, NARROW), name_of(LAUNCHES[0]): (direct_terms, NARROW)}
    names |= {"dequantized": (dequantized_terms, CAPACITY)}
    names |= {name_of(x): (dequantized_terms, x[1]) for x in (*WORKSPACES, ("auto", 67584))}
    lines, geometry = [], Geometry(Q_HEADS, KV_HEADS, D, 132)
    for way in (direct_terms, dequantized_terms):
        some = [
            (way([r["prefix"]] * r["batch"], [r["new_tokens"]] * r["batch"], geometry, names[name][1]), r[name])
            for r in rows
            for name in r
            if name in names and names[name][0] is way and isinstance(r[name], float)
        ]
        terms, us = (np.array(x) for x in zip(*some))
        found = fit(terms, us)
        worst = max(abs(terms @ found / us - 1))
        lines.append(
            f"{way.__name__.removesuffix('_terms')}={found},  # {len(us)} measurements, each within {worst:.0%}"
        )
    return "\n".join(lines)


def gathers(timer: Timer) -> list[dict]:
    """Times dequantization alone."""
    rows = []
    for tokens in (8192, 32768, 65536):
        pool = make_pool([tokens])
        k, v = torch.empty(2, tokens, KV_HEADS, D, dtype=torch.bfloat16, device="cuda")
        index = torch.arange(tokens // PAGE_SIZE, dtype=torch.int32, device="cuda")
        count = torch.full_like(index, PAGE_SIZE)
        reads = PageRead(request=torch.zeros_like(index), index=index, first=index * PAGE_SIZE, count=count)
        pages = torch.stack(reads, 1)
        stored = TritonOps(pool, LayerRotations(), Q_HEADS, 1)._stored(0)
        row = torch.tensor([1], device="cuda")
        us = timer(lambda: gather_pages(k, v, row, pages, *stored))  # noqa: B023
        rows.append({"kernel": "gather", "tokens": tokens, "us": round(us, 1)})
        print(f"gather of {tokens}: {us:.1f} us, {tokens * KV_HEADS * D * 4 / us / 1e3:.0f} GB/s written", flush=True)
    return rows


def record_grid(timer: Timer) -> Iterator[dict]:
    """Yields the rows of the grid, as routed."""
    compiled({"direct": ANY_EXTEND}, timer, BACKENDS)
    prefill = flashinfer(*WORKSPACES[-1])
    geometry = Geometry(Q_HEADS, KV_HEADS, D, torch.cuda.get_device_properties(0).multi_processor_count)
    for requests, new, prefix in grid():
        shape = ShortShape(requests, new, prefix)
        ours, error = shape.measure(timer, ShortExtends(), prefill)
        beside = min(theirs(timer, shape).values())
        flops = 4 * Q_HEADS * D * requests * (new * prefix + new * (new + 1) / 2)
        way = (
            "pages"
            if ShortExtends().suits([prefix] * requests, [new] * requests, geometry, True, CAPACITY)
            else "workspace"
        )
        more = {"new_tokens": new, "tflop_per_s": round(flops / ours / 1e6), "way": way}
        row = row_of("extend (grid)", requests, prefix + new, ours, beside, error, None, **more)
        print(f"{shape.name:22} {way:>9} {ours:9.1f} {beside:9.1f} {ours / beside:6.2f}  {error:.1e}", flush=True)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="some points: as routed, and either way")
    parser.add_argument("--sweep", action="store_true", help="some points: every way")
    parser.add_argument("--fit", metavar="FILE", help="print the constants that a file of --quick or --sweep gives")
    parser.add_argument("--build", metavar="BACKEND", help="only compile FlashInfer's kernels")
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=11)
    args = parser.parse_args()
    if args.build:
        build(args.build)
        return
    if args.fit:
        print(fitted(fit_rows(args.fit)))
        return
    begin = time.monotonic()
    torch.manual_seed(0)
    timer = Timer(args.repeats)
    print(f"{record.device_name()}, FlashInfer {baseline.version() or 'not installed'}", flush=True)
    if args.sweep or args.quick:
        rows = sweep(timer) if args.sweep else quick(timer)
        if args.out:
            Path(args.out).write_text(json.dumps(rows, indent=1) + "\n")
    else:
        rows = list(record_grid(timer))
        if args.out:
            record.merge(args.out, "kernels", rows, key="kernel")
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
