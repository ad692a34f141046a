"""Compares launches of decode steps with 5 to 16 query heads per KV head, and with heads of 64.

Every candidate is compiled first, many at a time, in separate processes, and so are FlashInfer's kernels. Then each
candidate is checked and measured. A candidate that the compiler refuses, or whose result is wrong, is reported and left
out. Candidates that do not fit the given time are also left out and named.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace

import torch

from benchmarks import baseline
from benchmarks.kernel_bench import fp8
from benchmarks.kernel_bench.rows import row_of
from benchmarks.kernel_bench.shapes import DecodeShape
from benchmarks.kernel_bench.timer import Timer
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.kernels.decode.decode_attention import DecodeLaunch, decode_launch, suits_half
from sglang_kvq.kernels.device.codes import record_of


@dataclass(frozen=True)
class Geometry:
    """Heads of an attention layer.

    Attributes:
        floor: least ratio to FlashInfer over BF16 that decode should reach.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    floor: float | None = None

    def __str__(self) -> str:
        return f"{self.q_heads} over {self.kv_heads} of {self.head_dim}"

    @property
    def format(self) -> PageFormat:
        return PageFormat(self.head_dim, self.head_dim, 0.96, 0.92)

    @property
    def candidates(self) -> list[DecodeLaunch]:
        """Returns the current launch, then the others, the most promising ones first."""
        group, record = self.q_heads // self.kv_heads, record_of(self.format)
        used = decode_launch(self.head_dim, group, record, self.kv_heads)
        fields = ("stages", "registers", "programs_per_sm", "half_pages")
        some = NARROW if self.head_dim <= 64 else FEW if group <= 8 else MANY
        tried = [replace(used, **dict(zip(fields, x))) for x in some]
        return [used, *(x for x in tried if x != used and suits_half(record, self.head_dim))]


GEOMETRIES = [
    Geometry(12, 1, 128, 3.0),
    Geometry(64, 8, 64, 3.5),
    Geometry(32, 4, 128, 4.5),
    Geometry(8, 1, 128, 3.5),
    Geometry(48, 8, 128, 4.5),
    Geometry(28, 4, 128, 4.0),
    Geometry(32, 8, 64),
    Geometry(32, 8, 128),
]
#: Requests, and tokens of each.
SHAPES = [(32, 16384), (16, 32768)]
#: Stages, registers, programs per SM and pages of products in FP16 (0: INT8), for up to 8 query heads per KV head, for
#: up to 16, and for heads of 64.
FEW = [
    (4, 255, 8, 1),
    (4, 168, 12, 1),
    (3, 255, 8, 2),
    (2, 168, 12, 2),
    (3, 128, 16, 1),
    (3, 168, 12, 1),
    (2, 128, 16, 1),
    (2, 255, 8, 2),
]
MANY = [
    (3, 255, 8, 2),
    (3, 255, 8, 1),
    (4, 255, 8, 1),
    (2, 255, 8, 2),
    (3, 168, 12, 1),
    (2, 168, 12, 1),
]
NARROW = [
    (3, 128, 16, 2),
    (2, 128, 16, 2),
    (3, 128, 16, 1),
    (3, 168, 12, 2),
    (4, 128, 16, 1),
    (2, 168, 12, 2),
    (3, 96, 20, 1),
    (4, 168, 12, 1),
]
#: Seconds for everything except imports, and the part of them left for FlashInfer.
SECONDS, BESIDE = 130.0, 20.0


def heads_rows(timer: Timer, bandwidth: float, others: Sequence[str] = ()) -> Iterator[dict]:
    """Yields rows of every geometry and shape with its current launch, with FlashInfer's times over BF16 and FP8.

    others: kernels of ``fp8.KERNELS`` to measure too.
    """
    for geometry in GEOMETRIES:
        for batch, context in SHAPES:
            lengths = [context] * batch
            shape = DecodeShape(lengths, geometry.format, geometry.q_heads, geometry.kv_heads)
            us, error = shape.measure(timer)
            q, share = shape.q, shape.size / us / bandwidth
            del shape
            theirs, over_fp8 = (baseline.decode_us(timer, q, lengths, geometry.kv_heads, x) for x in baseline.DTYPES)
            more = {"flashinfer_fp8_us": over_fp8 and round(over_fp8, 2)}
            more |= {"ratio_fp8": over_fp8 and round(over_fp8 / us, 3)}
            more |= fp8.columns(timer, q, lengths, geometry.kv_heads, others)
            bound = fp8.bound_us(lengths, geometry.kv_heads, geometry.head_dim, bandwidth)
            more |= fp8.compared({**more, "ours_us": us}, bound)
            name = f"decode ({geometry.q_heads} over {geometry.kv_heads} heads of {geometry.head_dim})"
            heads = {"q_heads": geometry.q_heads, "kv_heads": geometry.kv_heads, "head_dim": geometry.head_dim}
            yield row_of(name, batch, context, us, theirs, error, share, **heads, floor=geometry.floor, **more)


def describe(launch: DecodeLaunch) -> str:
    kind = f"FP16 {launch.half_pages}p" if launch.half_pages else "INT8"
    return f"{kind} {launch.stages}st {launch.registers}r {launch.programs_per_sm}"


def compile_candidate(geometry: Geometry, launch: DecodeLaunch) -> str | None:
    """Runs a launch once over a few pages to fill Triton's cache, with arguments specialized as in measurements.

    Returns:
        The reason if it cannot be measured, else None.
    """
    try:
        shape = DecodeShape([1024] * 2, geometry.format, geometry.q_heads, geometry.kv_heads)
        shape.measure(_once, launch)
    except (Exception, SystemExit) as failure:
        return _reason(failure)
    return None


def compile_baseline(head_dim: int) -> str | None:
    """Compiles FlashInfer's kernel in the same way."""
    try:
        q = torch.zeros(2, 8, head_dim, device="cuda").bfloat16()
        baseline.decode_us(_once, q, [1024] * 2, 1, torch.bfloat16)
    except Exception as failure:
        return _reason(failure)
    return None


def _once(run: Callable[[], object]) -> float:
    run()
    torch.cuda.synchronize()
    return 0.0


def sweep_heads(timer: Timer, bandwidth: float, seconds: float = SECONDS) -> Iterator[list[dict]]:
    """Prints a table; yields a row of each candidate at each shape, and then the same rows with FlashInfer's times."""
    end = time.monotonic() + seconds
    jobs = [(geometry, launch) for geometry in GEOMETRIES for launch in geometry.candidates]
    workers = max(2, min(len(os.sched_getaffinity(0)) - 2, 14))
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    beside = {d: pool.submit(compile_baseline, d) for d in sorted({geometry.head_dim for geometry in GEOMETRIES})}
    compiled = {job: pool.submit(compile_candidate, *job) for job in jobs}
    wait(compiled.values(), timeout=seconds / 2)
    print(f"compiled after {seconds - (end - time.monotonic()):.0f} s by {workers} processes", flush=True)
    rows: list[dict] = []
    for geometry in GEOMETRIES:
        for batch, context in SHAPES:
            rows += _measure(timer, bandwidth, geometry, batch, context, compiled, end - BESIDE)
    yield rows
    wait(beside.values(), timeout=max(end - time.monotonic() - BESIDE / 2, 0))
    yield list(_compared(timer, rows, beside, end))
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in multiprocessing.active_children():  # FlashInfer's compiler may still run
        worker.terminate()


def _measure(
    timer: Timer,
    bandwidth: float,
    geometry: Geometry,
    batch: int,
    context: int,
    compiled: dict[tuple[Geometry, DecodeLaunch], Future],
    end: float,
) -> Iterator[dict]:
    """Yields a row of each candidate that compiles, is right and fits the time."""
    if time.monotonic() > end:
        print(f"{geometry} {batch} x {context}: left out, no time", flush=True)
        return
    shape = DecodeShape([context] * batch, geometry.format, geometry.q_heads, geometry.kv_heads)
    for n, launch in enumerate(geometry.candidates):
        name = f"{geometry} {batch} x {context}, {describe(launch)}"
        job = compiled[geometry, launch]
        reason = job.result() if job.done() and not job.exception() else None
        if reason or time.monotonic() > end:
            print(f"{name}: left out, {reason or 'no time'}", flush=True)
            continue
        try:
            us, error = shape.measure(timer, launch)
        except (Exception, SystemExit) as failure:
            print(f"{name}: left out, {_reason(failure)}", flush=True)
            continue
        share = shape.size / us / bandwidth
        print(f"{name + '*' * (n == 0):58} {us:8.2f} us {share:6.1%}  error {error:.1e}", flush=True)
        yield {
            "case": f"{geometry} {batch} x {context}",
            "q_heads": geometry.q_heads,
            "kv_heads": geometry.kv_heads,
            "head_dim": geometry.head_dim,
            "batch": batch,
            "context": context,
            "stages": launch.stages,
            "registers": launch.registers,
            "programs_per_sm": launch.programs_per_sm,
            "half_pages": launch.half_pages,
            "bf16_page_cost": launch.bf16_page_cost,
            "in_use": n == 0,
            "us": round(us, 2),
            "bandwidth_fraction": round(share, 3),
            "rel_error": error,
            "floor": geometry.floor,
        }


def _reason(failure: BaseException) -> str:
    text = f"{type(failure).__name__}: {failure}".strip().splitlines()
    return " / ".join(dict.fromkeys([text[0], text[-1]]))[:300]


def _compared(timer: Timer, rows: list[dict], beside: dict[int, Future], end: float) -> Iterator[dict]:
    """Yields rows with FlashInfer's time if available, and prints a line for each shape with its best candidate."""
    for head_dim, job in beside.items():
        if not job.done() or job.exception() or job.result():
            why = (job.exception() or job.result()) if job.done() else "still compiling"
            print(f"FlashInfer with heads of {head_dim}: {why}", flush=True)
    print(f"\n{'shape':37} {'in use':>9} {'best':>9} {'BF16':>9} {'ratio':>7} {'floor':>6} {'bandw.':>7}  best launch")
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case]
        first, best = mine[0], min(mine, key=lambda row: row["us"])
        theirs, job = None, beside[first["head_dim"]]
        if job.done() and not job.exception() and not job.result() and time.monotonic() < end:
            q = torch.randn(first["batch"], first["q_heads"], first["head_dim"], device="cuda").bfloat16()
            lengths = [first["context"]] * first["batch"]
            theirs = baseline.decode_us(timer, q, lengths, first["kv_heads"], torch.bfloat16)
        used = next((row["us"] for row in mine if row["in_use"]), float("nan"))
        launch = DecodeLaunch(*(best[x] for x in ("stages", "registers", "programs_per_sm", "half_pages")))
        ratio = f"{theirs / best['us']:6.2f}x" if theirs else f"{'-':>7}"
        print(
            f"{case:37} {used:9.1f} {best['us']:9.1f} {theirs or float('nan'):9.1f} {ratio} {best['floor'] or '-':>6} "
            f"{best['bandwidth_fraction']:7.1%}  {describe(launch)}",
            flush=True,
        )
        for row in mine:
            more = {"flashinfer_bf16_us": round(theirs, 2), "ratio": round(theirs / row["us"], 3)} if theirs else {}
            yield row | more
