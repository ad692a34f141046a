"""Short extends over a grid: each way to serve them, beside FlashInfer over BF16, at Qwen3-8B's geometry.

    python benchmarks/extends.py --sweep --out sweep.json                    # some points, every way (4 minutes)
    python benchmarks/extends.py --out benchmarks/results/kernels_h200.json  # the whole grid, as routed

A way whose result differs from float64 on the same codes has no time: the sweep says so and goes on, the grid ends.
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

import torch

from benchmarks import baseline, record
from benchmarks.kernels import ANY_EXTEND, BACKENDS, D, KV_HEADS, Q_HEADS, ShortShape, Timer, make_pool, row_of
from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.attention.ragged import RaggedPrefill
from sglang_kvq.attention.short_extend import ShortExtends
from sglang_kvq.attention.triton_ops import TritonOps
from sglang_kvq.config import PAGE_SIZE
from sglang_kvq.kernels.extend import ExtendLaunch
from sglang_kvq.kernels.gather import gather_pages

REQUESTS = (1, 4, 8, 16, 32, 64)
NEW = (16, 32, 64, 128, 256, 512)
PREFIXES = (2048, 8192, 32768, 131072)
MOST_TOKENS = 4 << 20  # of all prefixes
#: Points of the sweep: requests, new tokens of each, stored prefix.
SWEEP = [
    (1, 16, 32768), (1, 64, 32768), (1, 128, 8192), (1, 256, 32768), (1, 512, 8192), (1, 128, 131072),
    (4, 16, 8192), (4, 64, 32768), (4, 128, 32768), (4, 512, 8192),
    (8, 16, 2048), (8, 64, 8192), (8, 128, 8192), (8, 256, 8192),
    (16, 32, 8192), (16, 128, 32768), (32, 32, 8192), (32, 64, 2048), (64, 16, 8192), (64, 128, 2048),
]  # fmt: skip
#: Ways to launch the kernel that reads pages directly: rows, keys, warps, stages, registers, programs per SM.
LAUNCHES = [
    (64, 32, 4, 3, 168, 3), (64, 32, 4, 3, None, 2), (128, 32, 8, 2, 128, 2), (128, 32, 8, 3, None, 1),
    (256, 32, 8, 2, None, 1), (256, 32, 16, 2, 128, 1),
]  # fmt: skip
#: Ways to attend to a workspace: FlashInfer's backend, tokens of the workspace.
WORKSPACES = [("auto", 32768), ("fa2", 32768), ("auto", 67584), ("fa2", 67584)]


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
    """FlashInfer compiles its kernels, into its cache on disk."""
    import flashinfer

    q, k = (torch.zeros(256, n, D, dtype=torch.bfloat16, device="cuda") for n in (Q_HEADS, KV_HEADS))
    bounds = torch.tensor([0, 256], dtype=torch.int32)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "NHD", backend=backend)
    wrapper.plan(bounds, bounds, Q_HEADS, KV_HEADS, D, causal=True, q_data_type=torch.bfloat16)
    wrapper.run(q, k, k)
    torch.cuda.synchronize()


def name_of(way: tuple) -> str:
    return ",".join("-" if x is None else str(x) for x in way)


def measured(shape: ShortShape, timer: Timer, short: ShortExtends | None, prefill: RaggedPrefill | None) -> float | str:
    """Microseconds, or why there are none."""
    try:
        return round(shape.measure(timer, short, prefill)[0], 1)
    except SystemExit as wrong:
        return str(wrong).split(": ")[-1]
    except Exception as error:  # noqa: BLE001  (a launch that does not fit must not end the sweep)
        return f"{type(error).__name__}: {error}".splitlines()[0][:80]


def theirs(timer: Timer, shape: ShortShape, backends: tuple[str, ...] = BACKENDS) -> dict[str, float]:
    """FlashInfer's microseconds over a BF16 cache, by backend."""
    total = shape.prefix + shape.new
    return {b: round(baseline.prefill_us(timer, shape.q, total, KV_HEADS, shape.requests, (b,)), 1) for b in backends}


def sweep(timer: Timer) -> list[dict]:
    begin = time.monotonic()
    # FlashInfer compiles while our kernel does.
    builds = [subprocess.Popen([sys.executable, __file__, "--build", backend]) for backend in BACKENDS]
    shorts = {name_of(x): replace(ANY_EXTEND, launch=ExtendLaunch(*x)) for x in LAUNCHES}
    tiny = ShortShape(1, 16, 2048)
    for name, short in shorts.items():
        print(f"{name}: {measured(tiny, timer, short, None)} us for {tiny.name}", flush=True)
    if any(x.wait() for x in builds):
        raise SystemExit("FlashInfer does not build here; see above.")
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    prefills = {name_of(x): flashinfer(*x) for x in WORKSPACES}
    print(f"{'':22}" + "".join(f"{x:>17}" for x in [*(f"theirs {b}" for b in BACKENDS), *shorts, *prefills]))
    rows = []
    for point in SWEEP:
        shape = ShortShape(*point)
        row = {"batch": point[0], "new_tokens": point[1], "prefix": point[2]}
        row |= {f"theirs {b}": us for b, us in theirs(timer, shape).items()}
        row |= {name: measured(shape, timer, short, None) for name, short in shorts.items()}
        row |= {name: measured(shape, timer, None, prefill) for name, prefill in prefills.items()}
        print(f"{shape.name:22}" + "".join(f"{x if isinstance(x, float) else x[-16:]:>17}" for x in list(row.values())[3:]), flush=True)
        rows.append(row)
    rows += gathers(timer)
    print(f"{time.monotonic() - begin:.0f} s")
    return rows


def gathers(timer: Timer) -> list[dict]:
    """Dequantising alone."""
    rows = []
    for tokens in (8192, 32768, 65536):
        pool = make_pool([tokens])
        k, v = torch.empty(2, tokens, KV_HEADS, D, dtype=torch.bfloat16, device="cuda")
        index = torch.arange(tokens // PAGE_SIZE, dtype=torch.int32, device="cuda")
        pages = torch.stack([torch.zeros_like(index), index, index * PAGE_SIZE, torch.full_like(index, PAGE_SIZE)], 1)
        stored = TritonOps(pool, LayerRotations(), Q_HEADS, 1)._stored(0)
        row = torch.tensor([1], device="cuda")
        us = timer(lambda: gather_pages(k, v, row, pages, **stored))  # noqa: B023
        rows.append({"kernel": "gather", "tokens": tokens, "us": round(us, 1)})
        print(f"gather of {tokens}: {us:.1f} us, {tokens * KV_HEADS * D * 4 / us / 1e3:.0f} GB/s written", flush=True)
    return rows


def record_grid(timer: Timer) -> Iterator[dict]:
    """The grid as routed, with what each route takes."""
    prefill = flashinfer("auto", 32768)
    for requests, new, prefix in grid():
        shape = ShortShape(requests, new, prefix)
        ours, error = shape.measure(timer, ShortExtends(), prefill)
        direct = shape.measure(timer, ANY_EXTEND)[0]
        first = shape.measure(timer, None, prefill)[0]
        beside = min(theirs(timer, shape).values())
        flops = 4 * Q_HEADS * D * requests * (new * prefix + new * (new + 1) / 2)
        more = {"new_tokens": new, "tflop_per_s": round(flops / ours / 1e6)}
        more |= {"direct_us": round(direct, 2), "dequantised_first_us": round(first, 2)}
        row = row_of("extend (grid)", requests, prefix + new, ours, beside, error, None, **more)
        print(f"{shape.name:22} {ours:9.1f} {direct:9.1f} {first:9.1f} {beside:9.1f} {row['ratio']:6.2f}  {error:.1e}", flush=True)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="compare every way at some points")
    parser.add_argument("--build", metavar="BACKEND", help="only compile FlashInfer's kernels")
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=11)
    args = parser.parse_args()
    if args.build:
        build(args.build)
        return
    torch.manual_seed(0)
    timer = Timer(args.repeats)
    print(f"{record.device_name()}, FlashInfer {baseline.version() or 'not installed'}", flush=True)
    if args.sweep:
        rows = sweep(timer)
        if args.out:
            Path(args.out).write_text(json.dumps(rows, indent=1) + "\n")
        return
    print(f"{'us':22} {'as routed':>9} {'direct':>9} {'dequant.':>9} {'BF16':>9} {'ratio':>6}  error")
    rows = list(record_grid(timer))
    if args.out:
        record.merge(args.out, "kernels", rows, key="kernel")


if __name__ == "__main__":
    main()
