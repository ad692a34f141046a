"""Measures the bandwidth of copies of pages to and from host memory at Qwen3-8B's geometry, and of torch's copies.

    python benchmarks/host_rows.py --out benchmarks/results/host_rows_h100.json
    python benchmarks/host_rows.py --beside --out benchmarks/results/host_rows_h100.json
    python benchmarks/host_rows.py --device cpu --pages 4 --layers 3          # no kernel: the copies in torch alone

Copies shuffled pages of all layers to and from shuffled rows of pinned host memory. Every copy is first checked byte by
byte; a wrong one gets no speed. ``torch`` makes the same copies through a staging tensor, and the host waits. ``whole``
is one copy of as many consecutive bytes, which shows what the bus carries. ``--programs`` sets how many programs share
a load, or gather the pages of a backup, in order to choose ``kernels.tiers.host_rows._PROGRAMS``. Times are medians and
include launches. Takes about a minute on one GPU.

``--beside`` measures copies and decode steps at the same time, on two streams. A step is a CUDA graph of all layers:
the attention of 48 requests of 12,000 tokens, and a product that reads as many weights as a layer of Qwen3-8B has.
``slower`` is the time of a step during copies, relative to its time alone; ``gb_per_s`` is the copies' bandwidth.
``backup by a kernel`` writes to host memory without the copy engine; ``one copy`` uses only that engine, for as many
consecutive bytes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import record
from sglang_kvq.cache.host_pages import HostLayout
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.formats.code import CodeFormat
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.record import RecordFormat

LAYERS, KV_HEADS, D = 36, 8, 128
TWO, THREE, FOUR = (PageFormat(D, D, k=CodeFormat(bits), v=CodeFormat(bits)) for bits in (2, 3, 4))
#: Formats of consecutive layers, repeated. Mixed widths need a table of sizes; equal widths need only a stride.
FORMATS: dict[str, tuple[RecordFormat, ...]] = {"2.25 bits": (TWO,), "mixed widths": (TWO, FOUR, TWO, THREE)}


class Scene:
    """Pages in a pool, and twice as many rows of host memory; ``reference`` makes the copies in torch."""

    def __init__(self, formats: tuple[RecordFormat, ...], layers: int, pages: int, device: torch.device) -> None:
        table = torch.zeros(1, PAGE_SIZE, dtype=torch.int32, device=device)
        some = [formats[i % len(formats)] for i in range(layers)]
        self.pool = PagePool.allocate(some, kv_heads=KV_HEADS, pages=2 * pages, slots=1, req_to_token=table)
        for store in self.pool.stores:
            store.records.random_(256)
        self.layout, self.device = HostLayout(self.pool), device
        shape = (2 * pages, self.layout.page_bytes)
        self.host = torch.zeros(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
        order = torch.randperm(2 * pages, device=device) + 1
        self.source, self.target = order[:pages].contiguous(), order[pages:].contiguous()
        self.there = torch.randperm(2 * pages)[:pages].contiguous()
        self.there_on_device = self.there.to(device)
        self.bytes = pages * self.layout.page_bytes

    def backup(self) -> None:
        self.layout.backup(self.pool, self.source, self.host, self.there)

    @cached_property
    def table(self) -> torch.Tensor:
        from sglang_kvq.kernels.tiers import host_rows

        return host_rows.row_table(self.pool.records, self.layout.offsets)

    def backup_by_a_kernel(self) -> None:
        """Writes to host memory with the kernel that gathers, as backups did earlier."""
        from sglang_kvq.kernels.tiers import host_rows

        host_rows.gather_rows(self.table, self.source, self.host, self.there_on_device)

    def load(self) -> None:
        for layer in range(self.pool.layers):
            self.layout.load_layer(self.pool, layer, self.host, self.there_on_device, self.target)

    def backup_in_torch(self) -> None:
        rows = [records[self.source].flatten(1) for records in self.pool.records]
        self.host[self.there] = torch.cat(rows, dim=1).cpu()

    def load_in_torch(self) -> None:
        rows = self.host[self.there].to(self.device)
        for records, part in zip(self.pool.records, rows.split(list(self.layout.row_bytes), dim=1)):
            records[self.target] = part.unflatten(1, records.shape[1:])

    def check(self) -> None:
        """Checks a backup and a load against the bytes that rows and pages must hold.

        Raises:
            SystemExit: a byte is wrong.
        """
        want = [records[self.source].clone() for records in self.pool.records]
        self.backup()
        _wait(self.device)
        rows = torch.cat([x.flatten(1) for x in want], dim=1).cpu()
        if not torch.equal(self.host[self.there], rows):
            raise SystemExit("backup: rows of the host differ from the records; no speed for a wrong result.")
        self.load()
        _wait(self.device)
        if not all(torch.equal(records[self.target], x) for records, x in zip(self.pool.records, want)):
            raise SystemExit("load: records differ from those backed up; no speed for a wrong result.")

    def whole(self, back: bool) -> Callable[[], object]:
        """Returns one copy of as many bytes, consecutive on both sides."""
        device = torch.empty(self.bytes, dtype=torch.uint8, device=self.device)
        host = self.host.flatten()[: self.bytes]
        return (lambda: device.copy_(host, non_blocking=True)) if back else lambda: host.copy_(device, True)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_us(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Returns the median microseconds from a launch on an idle device to the end of its work."""
    run()
    spans = []
    for _ in range(repeats):
        _wait(device)
        begin = time.perf_counter()
        run()
        _wait(device)
        spans.append(1e6 * (time.perf_counter() - begin))
    return sorted(spans)[repeats // 2]


def rows_of(args: argparse.Namespace) -> Iterator[dict]:
    device = torch.device(args.device)
    for name, formats in FORMATS.items():
        for pages in args.pages:
            scene = Scene(formats, args.layers, pages, device)
            ways = {"backup": (scene.backup, scene.backup_in_torch), "load": (scene.load, scene.load_in_torch)}
            beside = {
                way: (
                    median_us(torchs, device, args.repeats),
                    median_us(scene.whole(way == "load"), device, args.repeats),
                )
                for way, (_, torchs) in ways.items()
            }
            for programs in args.programs if device.type == "cuda" and args.programs else [None]:
                _use(programs)
                scene.check()
                for way, (ours, _) in ways.items():
                    us, (torch_us, whole_us) = median_us(ours, device, args.repeats), beside[way]
                    yield {
                        "case": f"{way}, {name}, {pages} pages" + (f", {programs} programs" if programs else ""),
                        "direction": way, "formats": name, "pages": pages, "programs": programs,
                        "layers": args.layers, "kv_heads": KV_HEADS, "page_bytes": scene.layout.page_bytes,
                        "us": round(us, 1), "gb_per_s": _four_digits(scene.bytes / us / 1e3),
                        "torch_gb_per_s": _four_digits(scene.bytes / torch_us / 1e3),
                        "whole_gb_per_s": _four_digits(scene.bytes / whole_us / 1e3),
                        "ratio_torch": _four_digits(torch_us / us), "ratio_whole": _four_digits(whole_us / us),
                    }  # fmt: skip


#: Approximate parameters of a layer of Qwen3-8B, and its hidden size.
WEIGHTS, HIDDEN = 4096 * 47_104, 4096
#: Requests of a decode step, and tokens of each.
BATCH, CONTEXT = 48, 12_000


class Step:
    """The layers of a decode step in one CUDA graph: attention over quantized pages, and products with weights."""

    def __init__(self, layers: int) -> None:
        from benchmarks.kernel_bench.shapes import DecodeShape
        from sglang_kvq.attention.base import LayerRotations
        from sglang_kvq.attention.triton_ops import TritonOps

        shape = DecodeShape([CONTEXT] * BATCH)
        ops = TritonOps(shape.pool, LayerRotations(), shape.q.shape[1], BATCH)
        ops.plan_attention(shape.rows, shape.lens)
        x = torch.randn(BATCH, HIDDEN, device="cuda").bfloat16()
        weights = torch.randn(HIDDEN, WEIGHTS // HIDDEN, device="cuda").bfloat16()
        self.keep = (shape, ops, x, weights)

        def run() -> None:
            for _ in range(layers):
                ops.decode(0, shape.q, shape.rows, shape.lens, shape.scale)
                x @ weights

        run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            run()

    def us(self, steps: int) -> float:
        """Returns microseconds per step, over ``steps`` steps in a row on the current stream."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(steps):
            self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / steps


#: Steps that are measured together, and copies by which the host is ahead of the device.
STEPS, AHEAD = 50, 4


def copies_beside(step: Step, stream: torch.cuda.Stream, copy: Callable[[], object]) -> tuple[float, float]:
    """Returns microseconds per step while copies run without a pause, and copies per second."""
    begin, end, first = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    stream.wait_stream(torch.cuda.current_stream())
    begin.record()
    for _ in range(STEPS):
        step.graph.replay()
    end.record()
    first.record(stream)
    done: list[torch.cuda.Event] = []
    with torch.cuda.stream(stream):
        while not end.query():
            copy()
            done.append(torch.cuda.Event(enable_timing=True))
            done[-1].record()
            if len(done) > AHEAD:
                done[-1 - AHEAD].synchronize()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / STEPS, len(done) / first.elapsed_time(done[-1]) * 1e3


def beside_rows(args: argparse.Namespace) -> Iterator[dict]:
    """Yields a row for each direction and number of pages and, for copies by kernels, each number of programs."""
    step, stream = Step(args.layers), torch.cuda.Stream()
    for pages in args.pages:
        scene = Scene(FORMATS["2.25 bits"], args.layers, pages, torch.device("cuda"))
        ways = {
            "backup": scene.backup,
            "one copy": scene.whole(back=False),
            "backup by a kernel": scene.backup_by_a_kernel,
            "load": scene.load,
        }
        for way, copy in ways.items():
            for programs in args.programs if args.programs and way != "one copy" else [None]:
                _use(programs)
                scene.check()
                step.us(5)
                alone = statistics.median(step.us(STEPS) for _ in range(3))
                during, speed = copies_beside(step, stream, copy)
                case = f"beside decode, {way}, {pages} pages" + (f", {programs} programs" if programs else "")
                yield {
                    "case": case, "direction": way, "pages": pages, "programs": programs, "layers": args.layers,
                    "page_bytes": scene.layout.page_bytes, "step_us": round(alone, 1),
                    "step_us_beside": round(during, 1), "slower": _four_digits(during / alone),
                    "gb_per_s": _four_digits(speed * scene.bytes / 1e9),
                }  # fmt: skip


def _four_digits(x: float) -> float:
    return float(f"{x:.4g}")


def _use(programs: int | None) -> None:
    if programs is not None:
        from sglang_kvq.kernels.tiers import host_rows

        host_rows._PROGRAMS = programs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--pages", type=int, nargs="+", default=[16, 256, 1024], help="default %(default)s")
    parser.add_argument("--layers", type=int, default=LAYERS, help="default %(default)s")
    parser.add_argument("--programs", type=int, nargs="+", help="default: as served")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--beside", action="store_true", help="copies during decode steps")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU. Use --device cpu for the copies in torch alone.")
    torch.manual_seed(0)
    if args.beside:
        for row in beside_rows(args):
            keep(args.out, row)
            print("  ".join(f"{key} {row[key]}" for key in ("case", "step_us", "slower", "gb_per_s")), flush=True)
        return
    print(f"{'case':>46} {'us':>10} {'GB/s':>7} {'torch':>7} {'whole':>7}")
    for row in rows_of(args):
        keep(args.out, row)
        figures = " ".join(f"{row[key]:7.2f}" for key in ("gb_per_s", "torch_gb_per_s", "whole_gb_per_s"))
        print(f"{row['case']:>46} {row['us']:10.1f} {figures}", flush=True)


def keep(out: str | None, row: dict) -> None:
    """Writes a row immediately, so that an interrupted run keeps its rows."""
    if out:
        record.merge(out, "host_rows", [row], key="case")


if __name__ == "__main__":
    main()
