"""Microseconds of the kernels beside FlashInfer's BF16 and FP8 ones, at Qwen3-8B's geometry.

    python benchmarks/kernels.py --out benchmarks/results/kernels_h200.json

Every figure is the median of CUDA-graph replays with the L2 cache flushed before each, by reading: a flush that
writes leaves the cache full of lines that the kernel then has to write back (5 to 8 us), which nothing in a
decode step does; decode rows say what they take after such a flush as well. A kernel whose result is wrong has no
speed: each is checked first (attention against float64 on the same codes, records bit for bit), and an error beyond
the bound ends the run. About 2 minutes on one GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton

from benchmarks import baseline, record
from sglang_kvq.attention import ragged
from sglang_kvq.attention.base import ExtendBatch, LayerRotations
from sglang_kvq.attention.extend_costs import Geometry
from sglang_kvq.attention.ragged import RaggedPrefill
from sglang_kvq.attention.reference import ReferenceOps
from sglang_kvq.attention.short_extend import ShortExtends, plan_short
from sglang_kvq.attention.triton_ops import TritonOps
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.config import PAGE_SIZE
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.kernels.decode import DecodeLaunch
from sglang_kvq.kernels.extend import ExtendLaunch

Q_HEADS, KV_HEADS, D = 32, 8, 128
SINK, RECENT = 64, 256
DECODE = [(64, 16384), (16, 98304), (8, 32768), (32, 8192), (1, 131072), (256, 4096), (1, 1 << 20)]
FORMAT = PageFormat(D, D, 0.96, 0.92)
BOUND = 5e-3
WARM_UP = 0.1  # seconds
#: Stored prefix and new tokens.
EXTEND = [(0, 8192), (8192, 8192), (32768, 2048), (65536, 1024), (8192, 512), (8192, 128), (32768, 64)]
#: Short extends: requests, new tokens of each, stored prefix.
SHORT = [
    (1, 16, 32768), (1, 64, 32768), (1, 128, 8192), (1, 256, 32768),
    (8, 64, 16384), (8, 16, 4096), (8, 128, 8192), (32, 32, 8192), (1, 128, 131072),
]  # fmt: skip
#: What short extends are compared with: on a Hopper GPU FlashInfer chooses fa3, which does not split keys; fa2 does.
BACKENDS = ("auto", "fa2")
#: Ways to launch that --sweep-extend compares: rows, keys, warps, stages, registers, programs per SM.
EXTEND_LAUNCHES = [
    (64, 32, 4, 3, None, 2), (64, 32, 4, 3, 160, 3), (64, 32, 4, 3, 168, 3), (64, 32, 4, 2, 168, 3), (64, 32, 4, 4, 168, 3),
    (64, 32, 4, 2, 128, 4), (128, 32, 8, 3, None, 1), (64, 32, 4, 3, 168, 6), (64, 64, 4, 2, None, 2),
]  # fmt: skip
#: Ways to launch that --sweep compares: stages, registers, programs per SM.
LAUNCHES = [
    (2, 128, 16),
    (2, 144, 13),
    (2, 160, 8),
    (2, 160, 12),
    (2, 168, 12),
    (3, 160, 12),
    (3, 168, 12),
    (3, 168, 24),
]


class Timer:
    """Median time of CUDA-graph replays, L2 flushed before each, by reading a large buffer or by writing it."""

    def __init__(self, repeats: int, writes: bool = False) -> None:
        self.repeats, self.writes = repeats, writes
        self.buffer = torch.zeros(64 << 20, dtype=torch.float32, device="cuda")

    def flush(self) -> None:
        self.buffer.zero_() if self.writes else self.buffer.sum()

    def __call__(self, run: Callable[[], object]) -> float:
        """Microseconds of ``run``."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        begin = time.monotonic()
        while time.monotonic() < begin + WARM_UP:  # what came before, or the compiler's pause, changed the clocks
            graph.replay()
            torch.cuda.synchronize()
        spans = []
        for _ in range(self.repeats):
            self.flush()
            span = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            span[0].record()
            graph.replay()
            span[1].record()
            spans.append(span)
        torch.cuda.synchronize()
        return 1e3 * sorted(a.elapsed_time(b) for a, b in spans)[self.repeats // 2]


def copy_bandwidth(timer: Timer) -> float:
    """Bytes per microsecond of a large elementwise kernel, reads and writes counted.

    Not ``copy_``: inside a CUDA graph that is a memcpy node, which reaches two thirds of what kernels do.
    """
    a = torch.ones(1 << 29, dtype=torch.float32, device="cuda")
    b = torch.empty_like(a)
    return 8 * a.numel() / timer(lambda: torch.add(a, 1.0, out=b))


def make_pool(lengths: list[int], format: PageFormat = FORMAT, kv_heads: int = KV_HEADS) -> PagePool:
    """A request per length on shuffled pages, with random records, sinks and windows; rows from 1."""
    counts = [-(-length // PAGE_SIZE) for length in lengths]
    ends = [max(SINK, (length - RECENT) // PAGE_SIZE * PAGE_SIZE) for length in lengths]
    table = torch.zeros(len(lengths) + 1, max(counts) * PAGE_SIZE, dtype=torch.int32, device="cuda")
    pages = (torch.randperm(sum(counts), device="cuda", dtype=torch.int32) + 1).split(counts)
    windows = []
    for row, (mine, end) in enumerate(zip(pages, ends), start=1):
        tokens = (mine[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device="cuda")).flatten()
        table[row, : len(tokens)] = tokens
        windows += [mine[: SINK // PAGE_SIZE], mine[end // PAGE_SIZE :]]
    windows = torch.cat(windows).long()
    pool = PagePool.allocate([format], kv_heads=kv_heads, pages=sum(counts), slots=len(windows), req_to_token=table)
    some = torch.randn(2, 64, kv_heads, PAGE_SIZE, format.head_dim, device="cuda").bfloat16()
    records = format.quantize_pages(*some)
    pool.records[0][1:] = records[torch.randint(len(records), (sum(counts),), device="cuda")]
    pool.overlays.normal_()
    pool.page_slot[windows] = torch.randperm(pool.slots, device="cuda", dtype=torch.int32) + 1
    pool.row_sink_end[1:], pool.row_history_end[1:] = SINK, torch.tensor(ends, device="cuda")
    pool.read_rows()
    return pool


def stored(pool: PagePool, row: int, head: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 keys and values ``[context, D]`` of one KV head that a row stores."""
    pages = pool.req_to_token[row, :context:PAGE_SIZE].long() // PAGE_SIZE
    start = torch.arange(len(pages), device=pool.device) * PAGE_SIZE
    coded = ((start >= pool.row_sink_end[row]) & (start < pool.row_history_end[row]))[:, None, None]
    overlays = pool.overlays[0, pool.page_slot[pages].clamp(min=0).long(), :, head]
    values = pool.formats[0].dequantize_pages(pool.records[0][pages, head])
    k, v = (
        torch.where(coded, x, overlays[:, i].float()).double().flatten(0, 1)[:context] for i, x in enumerate(values)
    )
    return k, v


def exact(pool: PagePool, row: int, q: torch.Tensor, context: int, scale: float) -> torch.Tensor:
    """float64 attention of q ``[q_heads, D]`` over everything a row stores."""
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for head, group in enumerate(torch.arange(len(q)).chunk(pool.kv_heads)):
        k, v = stored(pool, row, head, context)
        out[group] = (q[group].double() @ k.T * scale).softmax(-1) @ v
    return out


def exact_extend(pool: PagePool, row: int, q, k, v, prefix: int, scale: float) -> torch.Tensor:
    """float64 attention of q ``[new, q_heads, D]`` over a row's prefix and the new k and v, causally."""
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    future = torch.ones(len(q), prefix + len(q), dtype=torch.bool, device=q.device).triu(prefix + 1)
    for head, group in enumerate(torch.arange(Q_HEADS).chunk(KV_HEADS)):
        keys, values = (torch.cat([x, y[:, head].double()]) for x, y in zip(stored(pool, row, head, prefix), (k, v)))
        for h in group.tolist():
            out[:, h] = (q[:, h].double() @ keys.T * scale).masked_fill(future, float("-inf")).softmax(-1) @ values
    return out


def checked(name: str, got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error; ends the run beyond the bound."""
    error = ((got.double() - want.double()).norm() / want.double().norm()).item()
    if not error <= BOUND:
        raise SystemExit(
            f"{name}: relative error {error:.1e} is beyond {BOUND}; no speed is reported for a wrong result."
        )
    return error


def row_of(kernel: str, batch: int, context: int, ours: float, theirs: float | None, error: float, fraction, **more):
    return {
        "kernel": kernel,
        "batch": batch,
        "context": context,
        "q_heads": Q_HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": D,
        "ours_us": round(ours, 2),
        "flashinfer_bf16_us": theirs and round(theirs, 2),
        "ratio": theirs and round(theirs / ours, 3),
        "bandwidth_fraction": fraction and round(fraction, 3),
        "rel_error": error,
        **more,
    }


class DecodeShape:
    """Inputs of one batch, and what is right for its first and last request."""

    def __init__(
        self, lengths: list[int], format: PageFormat = FORMAT, q_heads: int = Q_HEADS, kv_heads: int = KV_HEADS
    ) -> None:
        self.lengths, batch, d = lengths, len(lengths), format.head_dim
        self.pool = make_pool(lengths, format, kv_heads)
        self.rows = torch.arange(1, batch + 1, device="cuda")
        self.lens = torch.tensor(lengths, device="cuda")
        self.scale = d**-0.5
        self.q = torch.randn(batch, q_heads, d, device="cuda").bfloat16()
        self.want = {i: exact(self.pool, i + 1, self.q[i], lengths[i], self.scale) for i in {0, batch - 1}}
        coded = int((self.pool.row_history_end[1:] - self.pool.row_sink_end[1:]).sum())
        self.size = kv_heads * (coded * format.record_bytes // PAGE_SIZE + (sum(lengths) - coded) * 4 * d)

    def measure(self, timer: Timer, launch: DecodeLaunch | None = None) -> tuple[float, float]:
        """Microseconds and relative error."""
        ops = TritonOps(self.pool, LayerRotations(), self.q.shape[1], len(self.lengths), launch=launch)
        ops.plan_attention(self.rows, self.lens)
        run = lambda: ops.decode(0, self.q, self.rows, self.lens, self.scale)  # noqa: E731
        got = run()
        error = max(
            checked(f"decode {len(self.lengths)} x {max(self.lengths)}", got[i], x) for i, x in self.want.items()
        )
        return timer(run), error


def decode_rows(timer: Timer, bandwidth: float):
    """A row per shape of ``DECODE``, and one of a batch whose lengths differ by two orders of magnitude."""
    ragged = [int(1024 * 128 ** (i / 63)) for i in range(64)]
    after_writes = Timer(timer.repeats, writes=True)
    for name, lengths in [*(("decode", [context] * batch) for batch, context in DECODE), ("decode (ragged)", ragged)]:
        shape = DecodeShape(lengths)
        ours, error = shape.measure(timer)
        dirty, _ = shape.measure(after_writes)
        q, size = shape.q, shape.size
        del shape
        theirs, fp8 = (baseline.decode_us(timer, q, lengths, KV_HEADS, dtype) for dtype in baseline.DTYPES)
        theirs_dirty = baseline.decode_us(after_writes, q, lengths, KV_HEADS, torch.bfloat16)
        more = {"flashinfer_fp8_us": fp8 and round(fp8, 2), "ratio_fp8": fp8 and round(fp8 / ours, 3)}
        more |= {
            "after_writes_us": round(dirty, 2),
            "flashinfer_bf16_after_writes_us": theirs_dirty and round(theirs_dirty, 2),
        }
        more |= {"ratio_after_writes": theirs_dirty and round(theirs_dirty / dirty, 3)}
        fraction = size / ours / bandwidth
        mean = sum(lengths) // len(lengths)
        more["gb_per_s"] = round(size / ours / 1e3)
        yield row_of(name, len(lengths), mean, ours, theirs, error, fraction, **more)


def sweep(timer: Timer) -> None:
    """Print microseconds by launch."""
    launches = [DecodeLaunch(*x) for x in LAUNCHES]
    print(
        f"{'stages, registers, per SM':>16}"
        + "".join(f"{f'{x.stages}, {x.registers}, {x.programs_per_sm}':>13}" for x in launches)
    )
    for batch, context in DECODE:
        shape = DecodeShape([context] * batch)
        times = [shape.measure(timer, launch)[0] for launch in launches]
        print(f"{f'{batch} x {context}':>25}" + "".join(f"{us:13.1f}" for us in times), flush=True)


def quantize_rows(timer: Timer, bandwidth: float, tokens: int = 8192):
    """Pages of ``tokens`` tokens, from activations (one layer) and from overlays."""
    pages = tokens // PAGE_SIZE
    table = torch.zeros(1, PAGE_SIZE, dtype=torch.int32, device="cuda")
    pool = PagePool.allocate([FORMAT], kv_heads=KV_HEADS, pages=pages, slots=pages, req_to_token=table)
    pool.overlays.normal_()
    ops, reference = TritonOps(pool, LayerRotations(), Q_HEADS, 1), ReferenceOps(pool, LayerRotations())
    k, v = (pool.overlays[0, 1:, i].transpose(1, 2).flatten(0, 1).contiguous() for i in range(2))
    ids = torch.arange(1, pages + 1, device="cuda")
    first, count = (ids - 1) * PAGE_SIZE, torch.tensor([pages], device="cuda")
    reference.quantize_slots(ids, ids, count)
    want = pool.records[0].clone()
    for name, run in (
        ("quantize_tokens", lambda: ops.quantize_tokens(0, first, ids, k, v)),
        ("quantize_slots", lambda: ops.quantize_slots(ids, ids, count)),
    ):
        pool.records[0].zero_()
        run()
        if not torch.equal(pool.records[0][1:], want[1:]):
            raise SystemExit(f"{name}: records differ from the reference; no speed is reported for a wrong result.")
        us = timer(run)
        size = tokens * KV_HEADS * (4 * D + FORMAT.record_bytes / PAGE_SIZE)
        yield row_of(name, 1, tokens, us, None, 0.0, size / us / bandwidth, gb_per_s=round(size / us / 1e3))


def step_rows(timer: Timer, batch: int = 64):
    """What a decode step does besides: its plan, once; rotation and storing, in each layer."""
    pool = make_pool([1024] * batch)
    r = torch.linalg.qr(torch.randn(1, KV_HEADS, D, D, device="cuda"))[0].contiguous()
    rotations = LayerRotations(r, r)
    ops, reference = TritonOps(pool, rotations, Q_HEADS, batch), ReferenceOps(pool, rotations)
    q, k, v = (
        torch.randn(batch, Q_HEADS + 2 * KV_HEADS, D, device="cuda").bfloat16().split([Q_HEADS, KV_HEADS, KV_HEADS], 1)
    )
    loc = pool.req_to_token[1:, -1].long()
    run = lambda: ops.rotate_and_store(0, loc, q, k, v)  # noqa: E731
    error = checked("rotate_and_store", run(), reference.rotate(0, q, k, v)[0])
    rows = torch.arange(1, batch + 1, device="cuda")
    lens = torch.full_like(rows, 1024)
    yield row_of("split_work", batch, 1024, timer(lambda: ops.plan_attention(rows, lens)), None, 0.0, None)
    yield row_of("rotate_and_store", batch, 1, timer(run), None, error, None)


def extend_rows(timer: Timer, prefill: RaggedPrefill | None):
    """Prefill chunks over quantized prefixes, all with FlashInfer if it is given; context counts both."""
    if prefill:
        prefill.suits = lambda new_lens: True
    for prefix, new in EXTEND:
        pool = make_pool([max(prefix, PAGE_SIZE)])
        ops, reference = (
            TritonOps(pool, LayerRotations(), Q_HEADS, 1, prefill=prefill, short=None),
            ReferenceOps(pool, LayerRotations()),
        )
        q, k, v = (torch.randn(new, n, D, device="cuda").bfloat16() for n in (Q_HEADS, KV_HEADS, KV_HEADS))
        none = torch.empty(0, dtype=torch.int64, device="cuda")
        batch = ExtendBatch(
            torch.tensor([1], device="cuda"), [prefix], [new], torch.arange(new, device="cuda"), none, none
        )
        run = lambda: ops.extend(0, q, k, v, batch, D**-0.5)  # noqa: B023, E731
        error = checked(f"extend {prefix} + {new}", run(), reference.extend(0, q, k, v, batch, D**-0.5))
        us = timer(run)
        flops = 4 * Q_HEADS * D * (new * prefix + new * (new + 1) / 2)
        theirs = baseline.prefill_us(timer, q, prefix + new, KV_HEADS)
        name = "extend (flashinfer)" if ops._planned is None else "extend (triton)"
        yield row_of(
            name, 1, prefix + new, us, theirs, error, None, new_tokens=new, tflop_per_s=round(flops / us / 1e6)
        )


class ShortShape:
    """Inputs of a batch of short extends, and what is right for its first and last request."""

    def __init__(self, batch: int, new: int, prefix: int) -> None:
        self.name, self.requests, self.new, self.prefix = f"{batch} x {new} after {prefix}", batch, new, prefix
        self.pool = make_pool([prefix] * batch)
        self.q, self.k, self.v = (
            torch.randn(batch * new, n, D, device="cuda").bfloat16() for n in (Q_HEADS, KV_HEADS, KV_HEADS)
        )
        none, rows = torch.empty(0, dtype=torch.int64, device="cuda"), torch.arange(1, batch + 1, device="cuda")
        loc = torch.arange(batch * new, device="cuda")
        self.batch = ExtendBatch(rows, [prefix] * batch, [new] * batch, loc, none, none)
        self.want = {}
        for i in {0, batch - 1}:
            mine = slice(i * new, i * new + new)
            q, k, v = self.q[mine], self.k[mine], self.v[mine]
            self.want[i] = exact_extend(self.pool, i + 1, q, k, v, prefix, D**-0.5)

    def measure(
        self, timer: Timer, short: ShortExtends | None, prefill: RaggedPrefill | None = None
    ) -> tuple[float, float]:
        """Microseconds and relative error."""
        ops = TritonOps(self.pool, LayerRotations(), Q_HEADS, 1, prefill=prefill, short=short)
        run = lambda: ops.extend(0, self.q, self.k, self.v, self.batch, D**-0.5)  # noqa: E731
        got = run()
        error = max(checked(f"extend {self.name}", got[i * self.new :][: self.new], x) for i, x in self.want.items())
        return timer(run), error

    def plan_us(self) -> float:
        """Microseconds of the host, once per batch."""
        start = time.perf_counter()
        for _ in range(20):
            plan_short(self.batch, ANY_EXTEND, Geometry(Q_HEADS, KV_HEADS, D, 132), self.q.device)
        return (time.perf_counter() - start) / 20 * 1e6


#: The kernel for short extends, whatever the batch.
ANY_EXTEND = ShortExtends(costs=None, most_rows_unpacked=1 << 20, least_prefix=0)


def short_rows(timer: Timer, prefill: RaggedPrefill | None):
    """Short extends: pages read directly, against the prefix dequantized first, and against FlashInfer over BF16."""
    for batch, new, prefix in SHORT:
        shape = ShortShape(batch, new, prefix)
        ours, error = shape.measure(timer, ANY_EXTEND)
        before, _ = shape.measure(timer, None, prefill)
        q, plan = shape.q, shape.plan_us()
        del shape
        theirs = baseline.prefill_us(timer, q, prefix + new, KV_HEADS, batch, BACKENDS)
        flops = 4 * Q_HEADS * D * batch * (new * prefix + new * (new + 1) / 2)
        more = {"new_tokens": new, "tflop_per_s": round(flops / ours / 1e6), "host_plan_us": round(plan)}
        more |= {"dequantized_first_us": round(before, 2), "ratio_dequantized_first": round(before / ours, 3)}
        yield row_of("extend (pages)", batch, prefix + new, ours, theirs, error, None, **more)


def sweep_extend(timer: Timer) -> None:
    """Print microseconds by launch."""
    launches = [ExtendLaunch(*x) for x in EXTEND_LAUNCHES]
    print(f"{'rows, keys, warps, stages, registers, per SM':>25}")
    print(" " * 25 + "".join(f"{','.join(map(str, x)).replace('None', '-'):>18}" for x in EXTEND_LAUNCHES))
    for batch, new, prefix in SHORT:
        shape = ShortShape(batch, new, prefix)
        times = []
        for launch in launches:
            try:
                times.append(f"{shape.measure(timer, replace(ANY_EXTEND, launch=launch))[0]:18.1f}")
            except triton.runtime.errors.OutOfResources:
                times.append(f"{'does not fit':>18}")
        print(f"{shape.name:>25}" + "".join(times), flush=True)


def show(row: dict) -> None:
    beside = f"{row['flashinfer_bf16_us']:9.1f} {row['ratio']:6.2f}x" if row["ratio"] else f"{'-':>9} {'-':>7}"
    other = row.get("ratio_fp8") or row.get("ratio_dequantized_first")
    beside += f" {other:6.2f}x" if other else f" {'-':>7}"
    fraction = f"{row['bandwidth_fraction']:6.1%}" if row["bandwidth_fraction"] else f"{'-':>6}"
    shape = f"{row['batch']} x {row['context']}"
    print(
        f"{row['kernel']:19} {shape:>12} {row['ours_us']:9.1f} {beside} {fraction}   {row['rel_error']:.1e}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--sweep", action="store_true", help="only compare ways to launch the decode kernel")
    parser.add_argument("--decode", action="store_true", help="no prefill chunks")
    parser.add_argument("--extend", action="store_true", help="only prefill chunks")
    parser.add_argument("--short", action="store_true", help="with --extend, only short ones")
    parser.add_argument(
        "--sweep-extend", action="store_true", help="only compare ways to launch the kernel for short extends"
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    timer = Timer(args.repeats)
    bandwidth = copy_bandwidth(timer)
    beside = baseline.version() or "not installed"
    print(f"{record.device_name()}, copy bandwidth {bandwidth / 1e3:,.0f} GB/s, FlashInfer {beside}")
    if args.sweep:
        sweep(timer)
        return
    if args.sweep_extend:
        sweep_extend(timer)
        return
    extends = []
    if not args.decode:
        prefill, used = ragged.load(Q_HEADS, KV_HEADS, D, torch.device("cuda"), ragged.workspace_tokens(KV_HEADS, D))
        print(f"long prefill chunks: {used}", flush=True)
        # Short ones first: the others send every chunk to FlashInfer from then on.
        extends = [short_rows(timer, prefill), extend_rows(timer, None)] + (
            [extend_rows(timer, prefill)] if prefill else []
        )
    if args.short:
        extends = extends[:1]
    parts = [decode_rows(timer, bandwidth), quantize_rows(timer, bandwidth), step_rows(timer)]
    print(
        f"{'kernel':19} {'shape':>12} {'ours us':>9} {'BF16 us':>9} {'ratio':>7} {'to FP8*':>7} {'bandw.':>6}   error"
    )
    print("* of short extends: to the prefix dequantized first")
    rows = []
    for part in extends if args.extend else [*parts, *extends]:
        for row in part:
            rows.append(row)
            show(row)
    if args.out:
        record.merge(args.out, "kernels", rows, key="kernel", copy_gb_per_s=round(bandwidth / 1e3))


if __name__ == "__main__":
    main()
