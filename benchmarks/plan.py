"""Times the plan of a decode step, made by kernels and by torch, at Qwen3-8B's geometry.

    python benchmarks/plan.py --out benchmarks/results/kernels_h200.json

A step is planned if some request fills a page or begins one. Here one request of the batch does so in each step. It
takes the least recently used BF16 copy, and the page that leaves its window is quantized for all layers. All BF16 pages
are in use. Both planners must first agree in every table and every record. Host time is the time of the call while the
device is idle; device time is that of all kernels and copies, from torch's profiler. Takes under a minute on one GPU;
rows replace those of the same name in the file.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import record
from benchmarks.kernel_bench.rows import row_of
from benchmarks.kernel_bench.shapes import FORMAT, KV_HEADS, Q_HEADS, RECENT, SINK
from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.attention.triton_ops import TritonOps
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.cache.triton_tiers import TritonTierManager
from sglang_kvq.constants import PAGE_SIZE

LAYERS = 36
SHAPES = [(1, 131072), (8, 32768), (64, 16384), (256, 4096)]
#: Steps until every BF16 copy is in use, then timed steps, then profiled steps.
FILL, TIMED, PROFILED = 40, 41, 10
STEPS = FILL + TIMED + PROFILED
KINDS = {"plan_step (triton)": TritonTierManager, "plan_step (torch)": TierManager}


class Batch:
    """Requests in the middle of decoding, one of which begins a page in each step."""

    def __init__(self, batch: int, context: int) -> None:
        self.batch, self.context = batch, context
        self.pages_each = context // PAGE_SIZE + STEPS // batch + 3
        self.rows = torch.arange(1, batch + 1, device="cuda")
        lens = [context + 2 + i * 17 % 60 for i in range(batch)]
        self.start, steps = torch.tensor(lens, device="cuda"), []
        for step in range(STEPS):
            lens[step % batch] = (lens[step % batch] // PAGE_SIZE + 1) * PAGE_SIZE + 1
            steps.append(list(lens))
        self.longest = [max(x) for x in steps]
        self.steps = torch.tensor(steps, device="cuda")
        order = torch.randperm(batch * self.pages_each, device="cuda").view(batch, -1) + 1
        self.table = torch.zeros(batch + 1, self.pages_each * PAGE_SIZE, dtype=torch.int32, device="cuda")
        self.table[1:] = (order[:, :, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device="cuda")).flatten(1)

    def manager(self, kind: type[TierManager]) -> TierManager:
        """Returns a manager with all requests prefilled; ``FILL`` BF16 pages are still free."""
        windows = SINK // PAGE_SIZE + RECENT // PAGE_SIZE + 1
        pages, slots = self.batch * self.pages_each, self.batch * windows + FILL
        pool = PagePool.allocate(
            [FORMAT] * LAYERS, kv_heads=KV_HEADS, pages=pages, slots=slots, req_to_token=self.table
        )
        for layer in pool.bf16_pages:
            layer.normal_(generator=torch.Generator("cuda").manual_seed(1))
        ops = TritonOps(pool, LayerRotations(), Q_HEADS, self.batch)
        tiers = kind(pool, SINK // PAGE_SIZE, RECENT // PAGE_SIZE, ops.quantize_slots)
        history = (self.start // PAGE_SIZE - RECENT // PAGE_SIZE).tolist()
        direct = [
            self.table[row, SINK : end * PAGE_SIZE : PAGE_SIZE] // PAGE_SIZE for row, end in enumerate(history, 1)
        ]
        tiers.plan_extend(self.rows, torch.zeros_like(self.start), self.start, 0, torch.cat(direct).long())
        return tiers

    def plan(self, tiers: TierManager, step: int) -> None:
        tiers.plan_decode(self.rows, self.steps[step], self.longest[step])


def check(ours: TierManager, theirs: TierManager, shape: str) -> None:
    """Ends the run unless both managers are in the same state."""
    pairs = {name: (getattr(ours, name), getattr(theirs, name)) for name in ("slot_page", "row_len", "records_written")}
    pairs |= {
        name: (getattr(ours.pool, name), getattr(theirs.pool, name)) for name in ("row_sink_end", "row_history_end")
    }
    pairs["page_slot"] = (ours.pool.page_slot, theirs.pool.page_slot)
    pairs["page_valid"] = (ours.page_valid[1:], theirs.page_valid[1:])  # page 0's flag means nothing
    pairs["slot_stamp"] = (ours.slot_stamp[1:], theirs.slot_stamp[1:])
    pairs |= {
        f"records of layer {i}": (x[1:], y[1:]) for i, (x, y) in enumerate(zip(ours.pool.records, theirs.pool.records))
    }
    for name, (a, b) in pairs.items():
        if not torch.equal(a, b):
            raise SystemExit(
                f"plan_step {shape}: {name} differs from the reference; no speed is reported for a wrong result."
            )
    if int(ours.errors) or int(theirs.errors) or (ours.slot_page[1:] == 0).any():
        raise SystemExit(f"plan_step {shape}: {int(ours.errors)} errors, or BF16 pages that should be in use are not.")


def measure(batch: Batch, tiers: TierManager) -> dict[str, float]:
    """Returns the device's and the host's (median) microseconds of one planned step, and its launches."""
    spans = []
    for step in range(FILL, FILL + TIMED):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        batch.plan(tiers, step)
        spans.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for step in range(FILL + TIMED, STEPS):
            batch.plan(tiers, step)
        torch.cuda.synchronize()
    launched = [e.time_range.elapsed_us() for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return {
        "us": sum(launched) / PROFILED,
        "host_us": round(1e6 * sorted(spans)[TIMED // 2], 1),
        "launches": round(len(launched) / PROFILED, 1),
    }


def rows() -> Iterator[dict]:
    for size, context in SHAPES:
        batch = Batch(size, context)
        managers = {name: batch.manager(kind) for name, kind in KINDS.items()}
        for step in range(FILL):
            for tiers in managers.values():
                batch.plan(tiers, step)
        check(*managers.values(), f"{size} x {context}")
        for name, tiers in managers.items():
            found = measure(batch, tiers)
            yield row_of(name, size, context, found.pop("us"), None, 0.0, None, **found)
        check(*managers.values(), f"{size} x {context}")
        del managers, tiers
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="JSON file of kernels to write the rows to")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{record.device_name()}\n{'':20} {'shape':>12} {'device us':>10} {'host us':>8} {'launches':>9}")
    found = []
    for row in rows():
        found.append(row)
        shape = f"{row['batch']} x {row['context']}"
        print(
            f"{row['kernel']:20} {shape:>12} {row['ours_us']:10.1f} {row['host_us']:8.1f} {row['launches']:9.1f}",
            flush=True,
        )
    if args.out:
        record.merge(args.out, "kernels", found, key="kernel")


if __name__ == "__main__":
    main()
