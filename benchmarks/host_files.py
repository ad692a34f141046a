"""Measures how fast stored pages come from files to host memory, and how much that delays a server's own thread.

    python benchmarks/host_files.py --out benchmarks/results/host_files_h200.json
    python benchmarks/host_files.py --pages 200 --layers 3 --readers 1 4 --folder /mnt/disk --out FILE

Writes pages of Qwen3-8B's geometry with SGLang's file storage, reads them back as a server does, in SGLang's batches,
and compares every byte. ``readers`` is the number of files that are read at once. A page is read into its row of host
memory (``direct``), or into new memory and then copied. SGLang reads one file at a time, and copies.
``disk_gb_per_s`` is the bandwidth after the files' content was dropped from the system's memory,
``memory_gb_per_s`` that of a second reading. Both include checksums. ``step_us`` is the time of a step of pure Python
on the main thread, alone and during both readings: the threads that read share Python's lock with the scheduler. Needs
no GPU and SGLang 0.5.22 or newer. Takes less than a minute.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import record
from benchmarks.capacity import existing_folder
from benchmarks.hicache import forget_files
from benchmarks.host_rows import KV_HEADS, TWO
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.constants import PAGE_SIZE

#: Numbers that a step adds up, and seconds that it waits afterwards, as a scheduler waits for the GPU.
WORK, WAIT = 20_000, 0.0005


class Files:
    """A host pool, SGLang's file storage in ``folder``, and pages in both: those of the pool's first half."""

    def __init__(self, pages: int, layers: int, folder: Path) -> None:
        from sglang.srt.managers.cache_controller import STORAGE_BATCH_SIZE, HiCacheController
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

        from sglang_kvq.sglang.hicache import storage, stores
        from sglang_kvq.sglang.hicache.host_pool import KVQuantHostPool

        table = torch.zeros(1, PAGE_SIZE, dtype=torch.int32)
        pool = PagePool.allocate([TWO] * layers, kv_heads=KV_HEADS, pages=1, slots=1, req_to_token=table)
        sizes = dict(start_layer=0, end_layer=layers, ratio=2.0 * pages, size=0, tag="kvq-bench")
        tiers: Any = SimpleNamespace(pool=pool, sink_cache=None)
        self.host = KVQuantHostPool(tiers, **sizes, allocator_type="default", pool_label="kv")
        rank = dict(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False)
        config = HiCacheStorageConfig(
            **rank, enable_storage_metrics=False, is_page_first_layout=True, model_name="bench", extra_config={}
        )
        backend = HiCacheFile(config, str(folder))
        stores.after_create(backend, None, "file", config, self.host)
        self.controller = SimpleNamespace(storage_host_pool=self.host, storage_backend=backend, page_size=PAGE_SIZE)
        self.names, self.pages = [f"page{i}" for i in range(pages)], pages
        self.batch, self.rows = STORAGE_BATCH_SIZE, self.host.kv_buffer
        self.rows[:pages].random_(256)
        for begin in range(0, pages, self.batch):
            names = self.names[begin : begin + self.batch]
            storage.before_page_set(self.controller, names, _indices(begin, len(names)))
            HiCacheController._generic_page_set(self.controller, names, _indices(begin, len(names)))
        self.direct = True
        self._get, self._original = storage.around_page_get, HiCacheController._generic_page_get

    def read(self) -> None:
        """Reads all pages into the pool's second half.

        Raises:
            SystemExit: a page is missing.
        """
        operation = SimpleNamespace(request_id="bench", is_terminated=lambda: False)
        original = self._original if self.direct else self._into_new_memory
        for begin in range(0, self.pages, self.batch):
            names = self.names[begin : begin + self.batch]
            places = _indices(self.pages + begin, len(names))
            if self._get(original, self.controller, operation, names, places) != len(names):
                raise SystemExit(f"pages {begin} and later: not all came back; no speed for a wrong result.")

    def _into_new_memory(self, *args: Any) -> int:
        with self.host.reading(()):
            count: int = self._original(*args)
        return count

    def check(self) -> None:
        """Compares all bytes that were read with those that were written.

        Raises:
            SystemExit: a byte differs.
        """
        if not torch.equal(self.rows[self.pages : 2 * self.pages], self.rows[: self.pages]):
            raise SystemExit("a page differs from the page that was written; no speed for a wrong result.")
        self.rows[self.pages :].zero_()


def _indices(first: int, pages: int) -> torch.Tensor:
    return torch.arange(first * PAGE_SIZE, (first + pages) * PAGE_SIZE)


def steps_until(done: Callable[[], bool]) -> list[float]:
    """Returns the microseconds of each step of the main thread until ``done``."""
    spans = []
    while not done():
        begin = time.perf_counter()
        sum(range(WORK))
        time.sleep(WAIT)
        spans.append(1e6 * (time.perf_counter() - begin))
    return spans


def beside(run: Callable[[], None]) -> tuple[float, list[float]]:
    """Returns the seconds that ``run`` takes on a thread, and the steps of the main thread meanwhile.

    Raises:
        SystemExit: ``run`` raised it.
    """

    def timed() -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    with ThreadPoolExecutor(1) as thread:
        job = thread.submit(timed)
        spans = steps_until(job.done)
    return job.result(), spans


def rows_of(args: argparse.Namespace, folder: Path) -> Iterator[dict]:
    files = Files(args.pages, args.layers, folder)
    end = time.perf_counter() + 1
    alone = statistics.median(steps_until(lambda: time.perf_counter() > end))
    size = args.pages * files.host.page_bytes / 1e9
    several = [(readers, True) for readers in args.readers or [1, files.host.readers]]
    for readers, direct in ((1, False), *several):
        files.host.readers, files.direct = readers, direct
        forget_files(folder)
        disk, steps = beside(files.read)
        files.check()
        memory, more = beside(files.read)
        files.check()
        steps = sorted(steps + more)
        yield {
            "case": f"{readers} readers{'' if direct else ', copied'}, {args.pages} pages",
            "readers": readers, "direct": direct, "pages": args.pages,
            "layers": args.layers, "page_bytes": files.host.page_bytes,
            "disk_gb_per_s": float(f"{size / disk:.4g}"), "memory_gb_per_s": float(f"{size / memory:.4g}"),
            "step_us": round(alone), "step_us_beside": round(statistics.median(steps)),
            "step_us_beside_p99": round(steps[int(0.99 * (len(steps) - 1))]),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path, help="JSON file; it keeps its other rows")
    parser.add_argument("--pages", type=int, default=3125, help="pages of 64 tokens; default %(default)s")
    parser.add_argument("--layers", type=int, default=12, help="default %(default)s")
    parser.add_argument("--readers", type=int, nargs="+", help="default: 1, and as served")
    parser.add_argument("--folder", type=existing_folder, help="folder for the files; default a temporary one")
    args = parser.parse_args()
    for flag, least in (("pages", args.pages), ("layers", args.layers), ("readers", min(args.readers or [1]))):
        if least < 1:
            parser.error(f"--{flag} {least}: it must be at least 1.")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for row in rows_of(args, Path(folder)):
            record.merge(args.out, "host_files", [row], key="case")
            print("  ".join(f"{name} {value}" for name, value in row.items() if name != "case"), flush=True)


if __name__ == "__main__":
    main()
