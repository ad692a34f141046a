"""Inputs of decode steps and extends, at Qwen3-8B's geometry by default, and their exact results."""

from __future__ import annotations

import time

import torch

from benchmarks.kernel_bench import oracle
from benchmarks.kernel_bench.timer import Timer
from sglang_kvq.attention.base import ExtendBatch, LayerRotations
from sglang_kvq.attention.compile_kernels import fit_programs
from sglang_kvq.attention.planning.extend_costs import Geometry
from sglang_kvq.attention.planning.short_extend import ShortExtends, plan_short
from sglang_kvq.attention.ragged import RaggedPrefill
from sglang_kvq.attention.triton_ops import TritonOps
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.shared.arena import Arena, padded
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.record import RecordFormat
from sglang_kvq.kernels.decode.decode_attention import DecodeLaunch

Q_HEADS, KV_HEADS, D = 32, 8, 128
SINK, RECENT = 64, 256
FORMAT = PageFormat(D, D, 0.96, 0.92)
BOUND = 5e-3
#: Settings that use the kernel for short extends, whatever the batch.
ANY_EXTEND = ShortExtends(costs=None, most_rows_unpacked=1 << 20, least_prefix=0)


def make_pool(
    lengths: list[int], format: RecordFormat = FORMAT, kv_heads: int = KV_HEADS, shared_layers: int = 0
) -> PagePool:
    """Returns a pool with a request per length on shuffled pages, with random content; rows count from 1.

    shared_layers: number of layers whose records and BF16 pages share one memory, of which only the first has records;
        0: one layer, with separate memories.
    """
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
    count, slots, arena, first_slot = sum(counts), len(windows), None, 1
    if shared_layers:
        page_bytes = padded(shared_layers * kv_heads * format.record_bytes)
        slot_bytes = shared_layers * kv_heads * 2 * PAGE_SIZE * format.head_dim * 2
        arena = Arena.smallest(page_bytes, slot_bytes, slots, count)
        first_slot = arena.first_slot(count)
    sizes = {"pages": count, "slots": first_slot - 1 + slots, "arena": arena}
    pool = PagePool.allocate([format] * (shared_layers or 1), kv_heads=kv_heads, req_to_token=table, **sizes)
    pool.places.copy_(torch.arange(count + 1))
    pool.bf16_pages.normal_()  # before the records, which may share this memory
    some = torch.randn(2, 64, kv_heads, PAGE_SIZE, format.head_dim, device="cuda").bfloat16()
    records = format.quantize_pages(*some)
    pool.records[0][1:] = records[torch.randint(len(records), (count,), device="cuda")]
    pool.page_slot[windows] = torch.randperm(slots, device="cuda", dtype=torch.int32) + first_slot
    pool.row_sink_end[1:], pool.row_history_end[1:] = SINK, torch.tensor(ends, device="cuda")
    pool.read_rows()
    return pool


def checked(name: str, got: torch.Tensor, want: torch.Tensor) -> float:
    """Returns the relative error; ends the run if it exceeds the bound."""
    error = ((got.double() - want.double()).norm() / want.double().norm()).item()
    if not error <= BOUND:
        raise SystemExit(
            f"{name}: relative error {error:.1e} is beyond {BOUND}; no speed is reported for a wrong result."
        )
    return error


class DecodeShape:
    """Inputs of one batch, and exact results for its first and last request."""

    def __init__(
        self,
        lengths: list[int],
        format: RecordFormat = FORMAT,
        q_heads: int = Q_HEADS,
        kv_heads: int = KV_HEADS,
        shared_layers: int = 0,
    ) -> None:
        self.lengths, batch, d = lengths, len(lengths), format.head_dim
        self.pool = make_pool(lengths, format, kv_heads, shared_layers)
        self.rows = torch.arange(1, batch + 1, device="cuda")
        self.lens = torch.tensor(lengths, device="cuda")
        self.scale = d**-0.5
        self.q = torch.randn(batch, q_heads, d, device="cuda").bfloat16()
        self.want = {i: self._exact(i) for i in {0, batch - 1}}
        coded = int((self.pool.row_history_end[1:] - self.pool.row_sink_end[1:]).sum())
        self.size = kv_heads * (coded * format.record_bytes // PAGE_SIZE + (sum(lengths) - coded) * 4 * d)

    def measure(self, timer: Timer, launch: DecodeLaunch | None = None) -> tuple[float, float]:
        """Returns microseconds and the relative error."""
        ops = TritonOps(self.pool, LayerRotations(), self.q.shape[1], len(self.lengths), launch=launch)
        if launch is None:
            fit_programs(ops)  # as a starting server does
        ops.plan_attention(self.rows, self.lens)
        run = lambda: ops.decode(0, self.q, self.rows, self.lens, self.scale)  # noqa: E731
        got = run()
        error = max(
            checked(f"decode {len(self.lengths)} x {max(self.lengths)}", got[i], x) for i, x in self.want.items()
        )
        return timer(run), error

    def _exact(self, i: int) -> torch.Tensor:
        """Computes the attention of request i, float64."""
        mine = slice(i, i + 1)
        return oracle.decode(self.pool, 0, self.q[mine], self.rows[mine], self.lens[mine], self.scale)[0]


class ShortShape:
    """Inputs of a batch of short extends, and exact results for its first and last request."""

    def __init__(self, batch: int, new: int, prefix: int, format: RecordFormat = FORMAT) -> None:
        self.name, self.requests, self.new, self.prefix = f"{batch} x {new} after {prefix}", batch, new, prefix
        self.pool, self.scale = make_pool([prefix] * batch, format), format.head_dim**-0.5
        self.q, self.k, self.v = (
            torch.randn(batch * new, n, format.head_dim, device="cuda").bfloat16()
            for n in (Q_HEADS, KV_HEADS, KV_HEADS)
        )
        none, rows = torch.empty(0, dtype=torch.int64, device="cuda"), torch.arange(1, batch + 1, device="cuda")
        loc = torch.arange(batch * new, device="cuda")
        self.batch = ExtendBatch(rows, [prefix] * batch, [new] * batch, loc, none)
        self.want = {}
        for i in {0, batch - 1}:
            mine = slice(i * new, i * new + new)
            q, k, v = self.q[mine], self.k[mine], self.v[mine]
            self.want[i] = oracle.extend_row(self.pool, 0, i + 1, prefix, q, k, v, self.scale)

    def measure(
        self, timer: Timer, short: ShortExtends | None, prefill: RaggedPrefill | None = None
    ) -> tuple[float, float]:
        """Returns microseconds and the relative error."""
        ops = TritonOps(self.pool, LayerRotations(), Q_HEADS, 1, prefill=prefill, short=short)
        run = lambda: ops.extend(0, self.q, self.k, self.v, self.batch, self.scale)  # noqa: E731
        got = run()
        error = max(checked(f"extend {self.name}", got[i * self.new :][: self.new], x) for i, x in self.want.items())
        return timer(run), error

    def plan_us(self) -> float:
        """Returns the host's microseconds, spent once per batch."""
        start = time.perf_counter()
        for _ in range(20):
            plan_short(self.batch, ANY_EXTEND, Geometry(Q_HEADS, KV_HEADS, D, 132), self.q.device)
        return (time.perf_counter() - start) / 20 * 1e6
