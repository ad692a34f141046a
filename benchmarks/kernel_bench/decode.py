"""Decode steps: attention and merge, and the other work of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmarks import baseline
from benchmarks.kernel_bench import fp8
from benchmarks.kernel_bench.rows import row_of
from benchmarks.kernel_bench.shapes import FORMAT, KV_HEADS, Q_HEADS, D, DecodeShape, checked, make_pool
from benchmarks.kernel_bench.timer import Timer
from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.attention.reference import ReferenceOps
from sglang_kvq.attention.triton_ops import TritonOps
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.formats.record import RecordFormat
from sglang_kvq.kernels.decode.decode_attention import DecodeLaunch

#: Requests, and tokens of each.
DECODE = [(64, 16384), (16, 98304), (8, 32768), (32, 8192), (1, 131072), (256, 4096), (1, 1 << 20)]
#: Number of Qwen3-8B's layers.
SHARED_LAYERS = 36
#: Launches that --sweep compares: stages, registers, programs per SM.
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


def decode_rows(timer: Timer, bandwidth: float, others: Sequence[str] = ()) -> Iterator[dict]:
    """Yields a row per shape of ``DECODE``, and one for a batch whose lengths differ by two orders of magnitude.

    others: kernels of ``fp8.KERNELS`` to measure too.
    """
    ragged = [int(1024 * 128 ** (i / 63)) for i in range(64)]
    after_writes = Timer(timer.repeats, writes=True)
    for name, lengths in [*(("decode", [context] * batch) for batch, context in DECODE), ("decode (ragged)", ragged)]:
        shape = DecodeShape(lengths)
        ours, error = shape.measure(timer)
        dirty, _ = shape.measure(after_writes)
        q, size = shape.q, shape.size
        del shape
        theirs, over_fp8 = (baseline.decode_us(timer, q, lengths, KV_HEADS, dtype) for dtype in baseline.DTYPES)
        theirs_dirty = baseline.decode_us(after_writes, q, lengths, KV_HEADS, torch.bfloat16)
        more = {
            "flashinfer_fp8_us": over_fp8 and round(over_fp8, 2),
            "ratio_fp8": over_fp8 and round(over_fp8 / ours, 3),
        }
        more |= fp8.columns(timer, q, lengths, KV_HEADS, others)
        more |= fp8.compared({**more, "ours_us": ours}, fp8.bound_us(lengths, KV_HEADS, D, bandwidth))
        more |= {
            "after_writes_us": round(dirty, 2),
            "flashinfer_bf16_after_writes_us": theirs_dirty and round(theirs_dirty, 2),
        }
        more |= {"ratio_after_writes": theirs_dirty and round(theirs_dirty / dirty, 3)}
        fraction = size / ours / bandwidth
        mean = sum(lengths) // len(lengths)
        more["gb_per_s"] = round(size / ours / 1e3)
        yield row_of(name, len(lengths), mean, ours, theirs, error, fraction, **more)


def shared_rows(timer: Timer, bandwidth: float) -> Iterator[dict]:
    """Yields rows for ``DECODE`` over a memory that records and BF16 pages of 36 layers share.

    ``separate_us`` is the same step with separate memories; ``ratio_separate`` is how much faster the shared one is.
    """
    for batch, context in DECODE:
        times, size, error = [], 0, 0.0
        for layers in (0, SHARED_LAYERS):
            shape = DecodeShape([context] * batch, shared_layers=layers)
            us, error = shape.measure(timer)
            times.append(us)
            size = shape.size
            del shape
            torch.cuda.empty_cache()
        separate, ours = times
        more = {"separate_us": round(separate, 2), "ratio_separate": round(separate / ours, 3)}
        fraction, more["gb_per_s"] = size / ours / bandwidth, round(size / ours / 1e3)
        yield row_of("decode (shared memory)", batch, context, ours, None, error, fraction, **more)


def sweep(timer: Timer) -> None:
    """Prints microseconds by launch."""
    launches = [DecodeLaunch(*x) for x in LAUNCHES]
    print(
        f"{'stages, registers, per SM':>16}"
        + "".join(f"{f'{x.stages}, {x.registers}, {x.programs_per_sm}':>13}" for x in launches)
    )
    for batch, context in DECODE:
        shape = DecodeShape([context] * batch)
        times = [shape.measure(timer, launch)[0] for launch in launches]
        print(f"{f'{batch} x {context}':>25}" + "".join(f"{us:13.1f}" for us in times), flush=True)


def quantize_rows(
    timer: Timer, bandwidth: float, format: RecordFormat = FORMAT, label: str = "", tokens: int = 8192, **more: int
) -> Iterator[dict]:
    """Quantizes pages of ``tokens`` tokens, from activations (one layer) and from BF16 pages.

    label: added to the rows' names; more: further fields of the rows.
    """
    pages, d = tokens // PAGE_SIZE, format.head_dim
    table = torch.zeros(1, PAGE_SIZE, dtype=torch.int32, device="cuda")
    pool = PagePool.allocate([format], kv_heads=KV_HEADS, pages=pages, slots=pages, req_to_token=table)
    pool.bf16_pages.normal_()
    ops, reference = TritonOps(pool, LayerRotations(), Q_HEADS, 1), ReferenceOps(pool, LayerRotations())
    k, v = (pool.bf16_pages[0, 1:, i].transpose(1, 2).flatten(0, 1).contiguous() for i in range(2))
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
            raise SystemExit(
                f"{name}{label}: records differ from the reference; no speed is reported for a wrong result."
            )
        us = timer(run)
        size = tokens * KV_HEADS * (4 * d + format.record_bytes / PAGE_SIZE)
        fraction, speed = size / us / bandwidth, round(size / us / 1e3)
        yield row_of(f"{name}{label}", 1, tokens, us, None, 0.0, fraction, gb_per_s=speed, **more)


def step_rows(timer: Timer, batch: int = 64) -> Iterator[dict]:
    """Yields rows for the rest of a decode step: its plan, once; rotating and storing, in each layer."""
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
