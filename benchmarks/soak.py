"""Hours of use in minutes: mixed traffic on a server with little room, whose answers are compared.

    python benchmarks/soak.py --minutes 8 --out benchmarks/results/soak_h200.json

Clients send prompts of 16 to 12,000 tokens with prefixes from a changing tree, conversations, sessions, several samples
of a prompt, and requests that they abort or abandon. The pool is small, so that eviction and retraction happen. A
second server with the same settings serves one request at a time: it caches an answer's prompt and returns the
log-probabilities of the answer's tokens (``benchmarks/answers.py``). First, the differences of requests that run alone
are measured; they bound the rest, and an answer beyond the bound is wrong (``benchmarks/soak_check.py``). Every minute
the traffic stops, and then nothing may be held. With SGLang 0.5.22 and 0.5.23 the server's records and BF16 pages share
the memory, unless ``--streaming`` or ``--pair`` is given. Then the boundary between them must move
(``benchmarks/crowded.py``). On a CPU, ``--late`` lets HiCache's copies happen late (``tests/e2e/late_copies.py``).

``--minutes`` counts traffic only. Starting two servers and measuring take 1 minute and two to three times ``--alone``
more, and everything ends by ``--limit``. The tiny model's answers depend strongly on its cache
(``benchmarks/tiny_models.py``). The row's ``wrong_page_seen`` is the share of answers that the bound finds wrong, in
all their ways, if one page of their prompt is exchanged. ``--fault`` exchanges a page of every tenth prompt before
comparing, and must fail.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import ChainMap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import copy_check, crowded, record
from benchmarks.pair_server import ENGINES, PairServer, mode, on_a_cpu
from benchmarks.soak_check import WRONG_PAGES, Checker
from benchmarks.soak_traffic import Answer, Scale, Traffic
from benchmarks.tiny_hybrids import SERVER_FLAGS
from benchmarks.tiny_models import MODELS
from benchmarks.tiny_server import IDLE_CHECK, TinyServer, gpu_names, plugin_path, versions, with_plugin
from launch.server import ServerError
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.server_process import ServerFailed, free_port
from tests.e2e import late_copies

GPU = Scale(16, 12000, (4, 48), (200, 400), 32768, 2048, 16, 24, 24, 0.3, 60.0, 90)
#: Shorter prompts, in which a page counts for more: pages from the host are read less exactly, so bounds are wider.
HICACHE = replace(GPU, longest=3000)
#: Chunks exceed ``--kv-quant-recent``. Otherwise the server would reserve so many BF16 pages for prefill that no cached
#: page ever lost its copy.
CPU = Scale(16, 700, (4, 12), (20, 40), 2560, 320, 4, 5, 8, 3.0, 60.0, 12)
#: An SGLang test setting retracts requests as if memory had run out, because releases differ in how close they let it
#: come.
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "300"}


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


class Soak:
    """Runs the soak and keeps its row, which is written whatever happens."""

    def __init__(self, args: argparse.Namespace, folder: Path, gpus: int) -> None:
        self.args, self.folder, self.gpus, self.cpu = args, folder, gpus, args.device == "cpu"
        self.scale = CPU if self.cpu else HICACHE if args.hicache else GPU
        self.begin = time.monotonic()
        self.limit = self.begin + 60 * (args.limit or args.minutes + 1.5) - 20
        self.compares = not args.shrink
        own = args.reference == "same" or (args.reference == "auto" and self.cpu and not args.pair)
        self.second = self.compares and not own
        tiny = MODELS[args.model]
        layers = args.layers or tiny.layers
        self.model = tiny if layers == tiny.layers else replace(tiny, name=f"{tiny.name}_{layers}", layers=layers)
        self.traffic: Traffic | None = None
        self.checker: Checker | None = None
        self.server: TinyServer | PairServer | None = None
        self.seconds, self.leaked, self.pauses = 0.0, 0, 0
        self.copies: dict[str, dict[str, int]] = {}  # copied pages: how many were compared, and how many differed
        self.moves: int | None = None  # of the boundary; None if the memory is not shared
        self.late: dict[str, int] = {}  # copies that happened late, and moves that waited for them
        self.stopped: list[str] = []
        self.waiting: queue.Queue[Answer] = queue.Queue(maxsize=32)
        self.kept: list[Answer] = []
        self.offered = 0
        self.lock = threading.Lock()
        self.done = threading.Event()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:4.0f} s] {text}", flush=True)

    def flags(self, pool: int) -> list[str]:
        """Returns flags of all servers; ``pool`` is in tokens."""
        s = self.scale
        graphs = [] if self.cpu else ["--cuda-graph-max-bs-decode", str(s.requests)]
        return [
            *("--kv-quant", self.args.method, "--chunked-prefill-size", str(s.chunk)),
            *("--max-total-tokens", str(pool), "--context-length", str(s.longest + s.long_answer[1] + 64)),
            *("--max-running-requests", str(s.requests), "--schedule-conservativeness", "0.05"),
            *graphs,
            *(SERVER_FLAGS if self.model.is_hybrid else ()),
        ]

    def own_flags(self) -> list[str]:
        """Returns flags of the server with traffic only; the reference answers without drafts and HiCache.

        While the boundary moves, windows stay whole if answers are compared, because the reference cannot repeat when
        they shrank.
        """
        if self.args.streaming:
            return ["--enable-streaming-session"]
        whole = ["--kv-quant-recent-min", str(KVQuantConfig.recent_tokens)] if self.compares else []
        return [*whole, *(self.tiers() if self.args.hicache else self.drafts())]

    def tiers(self) -> list[str]:
        """Returns flags of the server whose pages also go to the host, if one does."""
        if not self.args.hicache:
            return []
        storage = ["--hicache-storage-backend", "file"] if self.args.hicache == "file" else []
        return ["--enable-hierarchical-cache", "--hicache-ratio", "2", "--enable-cache-report", *storage]

    def drafts(self) -> list[str]:
        """Returns flags of the server that drafts, if one does."""
        if self.args.speculation == "none":
            return []
        return [
            *("--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1"),
            *("--speculative-num-draft-tokens", "5"),
        ]

    def make_pair(self, gpus: tuple[int, int]) -> PairServer:
        """Returns a pair whose decode server retracts and drafts; n-grams need nothing from the prefill server.

        HiCache is on the prefill server, because prompts are read there.
        """
        port, env = free_port(), {}
        if self.cpu:
            known = plugin_path(self.folder).get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
            env["PYTHONPATH"] = on_a_cpu(self.folder, known, drafts=bool(self.drafts()))
        prefill = [*mode(self.args.pair), "prefill", "--disaggregation-bootstrap-port", str(port), *self.tiers()]
        one = self.make("prefill", gpus[0], env, prefill)
        decode = [*mode(self.args.pair), "decode", *self.drafts()]
        return PairServer(one, self.make("decode", gpus[1], {**RETRACT, **env}, decode), port)

    def make_reference(self, gpu: int) -> TinyServer:
        """Returns the second server.

        It forces answers in a prefill, which must read no more pages in BF16 than decoding did. Requests that take all
        BF16 copies must not evict the pages that they are taken from, so its pool is larger.
        """
        own = ["--enable-streaming-session", "--kv-quant-prefill-window", "0"]
        return self.make("reference", gpu, {}, own, room=2)

    def make(self, name: str, gpu: int, env: dict[str, str], own: Sequence[str], room: int = 1) -> TinyServer:
        """Returns a server; ``room`` multiplies the size of its pool."""
        model = self.model.write(self.folder)
        # The check runs whenever the server is idle. tests/gpu also checks between steps, which would slow the traffic.
        base = {IDLE_CHECK: "1", **plugin_path(self.folder)}
        flags = [*self.flags(room * self.scale.pool), *own]
        base["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(self.folder / "pages")
        env = {**base, **env}
        plugins = [crowded] if name == "server" else []
        if self.args.hicache and name in ("server", "prefill"):
            plugins += [copy_check, late_copies] if self.args.late else [copy_check]
        for plugin in plugins:
            known = env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
            env["PYTHONPATH"] = with_plugin(self.folder, Path(plugin.__file__), known)
        return TinyServer(model, flags, cpu=self.cpu, log=self.folder / f"{name}.log", env=env, gpus=[gpu])

    def offer(self, answer: Answer) -> None:
        """Offers an answer for comparison: to the second server now, or as one of a random sample for later."""
        if not self.compares:
            return
        if self.second:
            with suppress(queue.Full):
                self.waiting.put_nowait(answer)
            return
        with self.lock:
            self.offered += 1
            if len(self.kept) < 400:
                self.kept.append(answer)
            elif (place := random.randrange(self.offered)) < 400:
                self.kept[place] = answer

    def compare(self) -> None:
        while not self.done.is_set():
            with suppress(queue.Empty):
                self.checker.check(self.waiting.get(timeout=0.2))

    def held(self) -> None:
        """Counts what is held, in tokens, while nothing runs."""
        try:
            left = self.server.held_when_empty()
            states = [state.get("kv_quant", {}) for state in self.server.states()]
            self.leaked += sum(sum(state.get("tiers", {}).values()) for state in states) + _used(self.server)
            told = ChainMap(*states)
            self.copies, self.late = told.get("copies", {}), told.get("late", {})
            self.moves = told.get("boundary_moves")
        except (ServerError, ServerFailed, OSError) as error:
            left = [str(error)[:1500]]
        if left:
            self.stopped += left
            self.say(f"held when drained: {left}")
            # If a leak ended the server, only its log has the numbers.
            for line in left:
                numbers = re.findall(r"(\d+) tokens? leaked", line)
                self.leaked += sum(map(int, numbers)) or (1 if "leak" in line.lower() and not self.leaked else 0)

    def run(self) -> bool:
        second_gpu = 1 if self.gpus > 1 else 0
        if self.args.pair:
            self.server = self.make_pair((0, second_gpu))
        else:
            self.server = self.make("server", 0, RETRACT, self.own_flags())
        reference = self.make_reference(second_gpu) if self.second else self.server
        servers = [self.server, reference] if self.second else [self.server]
        try:
            with ThreadPoolExecutor(len(servers)) as pool:  # servers end with its threads
                for job in [pool.submit(s.start, max(self.limit - time.monotonic(), 1)) for s in servers]:
                    job.result()
                self.say(f"{len(servers)} servers started")
                if self.compares:
                    self._measure_alone(reference)
                self._soak()
        finally:
            self.done.set()
            for server in servers:
                server.stop()
            row = self.write()
        return self.show(row)

    def _measure_alone(self, reference: TinyServer | PairServer) -> None:
        self.checker = Checker(reference, self.scale, self.args.fault, bool(self.args.hicache))
        default = (240 if self.cpu else 40) if self.args.hicache else 60 if self.cpu else 25
        self.checker.calibrate(self.server, time.monotonic() + (self.args.alone or default))
        found, bound = self.checker.calibrated, self.checker.bound
        mean, largest = max(d.mean for d in found), max(d.max for d in found)
        wrong = self.checker.wrong_page_mean() or 0.0
        self.say(
            f"{len(found)} requests alone: mean up to {mean:.4f}, max up to {largest:.3f}; "
            f"bound {bound.mean:.4f} and {bound.max:.3f}; "
            f"wrong pages: median {wrong:.3f}, {self.checker.seen()} beyond the bound"
        )

    def _soak(self) -> None:
        self.server.drain()
        without = [] if self.args.streaming else ["streaming"]
        without += ["parallel", "session"] if self.args.pair else []
        self.traffic = Traffic(self.server, self.scale, self.args.seed, self.offer, without)
        comparing = threading.Thread(target=self.compare, daemon=True)
        if self.second:
            comparing.start()
        begin = time.monotonic()
        # Without a second server, the comparison takes its share of the time afterwards.
        whole = self.second or not self.compares
        end = min(begin + 60 * self.args.minutes * (1 if whole else 0.5), self.limit - (15 if whole else 60))
        self.traffic.start()
        pause, shown = begin + self.scale.pause, begin
        while time.monotonic() < end:
            time.sleep(0.5)
            self.seconds = time.monotonic() - begin
            if not self.server.running:
                self.stopped.append(f"the server ended: {self.server.log_tail(25)}")
                break
            if time.monotonic() > pause:
                self._pause()
                pause = time.monotonic() + self.scale.pause
            if time.monotonic() > shown + 10:
                self.progress()
                shown = time.monotonic()
        self.seconds = time.monotonic() - begin
        if not self.traffic.stop(120 if self.cpu else 30):
            self.stopped.append("requests were still running after the traffic ended")
        elif self.server.running:
            self.held()
        if not self.second:
            random.Random(3).shuffle(self.kept)
            while (
                self.kept
                and time.monotonic() < min(self.limit, begin + 60 * self.args.minutes + 60)
                and self.server.running
            ):
                self.checker.check(self.kept.pop())
        else:
            while not self.waiting.empty() and time.monotonic() < self.limit:
                time.sleep(0.1)
            self.done.set()
            comparing.join(timeout=10)
        self.progress()

    def _pause(self) -> None:
        if not self.traffic.pause(120 if self.cpu else 30):
            self.stopped.append("a pause found requests that did not end")
        else:
            self.pauses += 1
            self.held()
        self.traffic.resume()

    def progress(self) -> None:
        c, k = self.traffic.counts, self.checker
        compared = f"{k.compared} compared, {k.wrong} wrong (worst {k.worst}), " if k else ""
        self.say(
            f"{c.requests} requests, {c.aborted} aborted, {c.errors} errors, {self.retractions()} retractions, "
            f"{compared}{self.leaked} leaked"
        )
        self.write()

    def retractions(self) -> int:
        return max(retractions(self.server.log()), self.traffic.counts.retractions if self.traffic else 0)

    def row(self) -> dict:
        c, k = self.traffic.counts if self.traffic else None, self.checker
        latencies = sorted(c.latencies) if c else []
        return {
            "seconds": round(self.seconds, 1),
            "requests": c.requests if c else 0,
            "errors": c.errors if c else None,
            "aborted": c.aborted if c else 0,
            "retractions": self.retractions() if self.server else 0,
            "leaked_tokens": self.leaked,
            "wrong_answers": k.wrong if k else None,
            "p50_ms": at_share(latencies, 0.5),
            "p99_ms": at_share(latencies, 0.99),
            "model": self.model.name,
            "kv_quant": self.args.method,
            "pool_tokens": self.scale.pool,
            "compared": k.compared if k else 0,
            "compared_tokens": k.tokens if k else 0,
            "not_compared": k.failed if k else None,
            "too_many_turns": k.skipped["too_many_turns"] if k else None,
            "retracted_past": k.skipped["retracted"] if k else None,
            "compared_again": k.again if k else None,
            "compared_a_minute": _rounded(k.a_minute(), 1) if k else None,
            "without_logprob": c.incomplete if c else None,
            "bound": round(k.bound.mean, 4) if k else None,
            "bound_max": round(k.bound.max, 4) if k else None,
            "alone_mean": round(max((d.mean for d in k.calibrated), default=0), 5) if k else None,
            "alone_max": round(max((d.max for d in k.calibrated), default=0), 4) if k else None,
            "worst_mean": round(k.worst.mean, 5) if k else None,
            "max_diff": round(k.most, 4) if k else None,
            "alone": len(k.calibrated) if k else None,
            "wrong_pages_tried": len(k.controls[1]) if k else None,
            "wrong_page_mean": _rounded(k.wrong_page_mean(), 4) if k else None,
            "wrong_page_seen": _rounded(k.seen(), 3) if k else None,
            f"wrong_{WRONG_PAGES}_pages_seen": _rounded(k.seen(WRONG_PAGES), 3) if k else None,
            "drained": self.pauses,
            "output_tokens": c.tokens if c else 0,
            "kinds": dict(c.kinds) if c else {},
            "fault": self.args.fault,
            "shrink": self.args.shrink,
            "streaming": self.args.streaming,
            "hicache": self.args.hicache or "",
            "pair": self.args.pair or "",
            "cached_tokens": dict(c.places) if c else {},
            "copies": self.copies,
            "boundary_moves": self.moves,
            "late": self.late,
            "notes": [*self.stopped[:6], *(k.examples if k else []), *(c.messages[:4] if c else [])],
        }

    def write(self) -> dict:
        row = self.row()
        record.write(
            self.args.out, "soak", [row], reference="second server" if self.second else "same server, afterwards"
        )
        return row

    def show(self, row: dict) -> bool:
        for name, value in row.items():
            if name != "notes":
                print(f"{name:18} {value}")
        for note in row["notes"]:
            print(f"note: {note}")
        passed = (
            row["errors"] == 0
            and row["leaked_tokens"] == 0
            and not self.stopped
            and (not self.compares or self._compared_well(row))
            and row["aborted"] > 0
            and (self.cpu or row["retractions"] > 0)
            and (not row["hicache"] or sum(row["cached_tokens"].get(place, 0) for place in ("host", "storage")) > 0)
            and (not row["hicache"] or copy_check.all_equal(row["copies"]))
            and row["boundary_moves"] != 0
            and (not self.args.late or bool(row["late"].get("written") and row["late"].get("loaded")))
        )
        print("passed" if passed else "FAILED", self.args.out, f"{time.monotonic() - self.begin:.0f} s", flush=True)
        return passed

    def _compared_well(self, row: dict) -> bool:
        return (
            row["wrong_answers"] == 0
            and not row["not_compared"]
            and row["compared"] >= (3 if self.cpu else 200)
            and (row["wrong_page_seen"] or 0) >= 0.5
        )


def at_share(latencies: Sequence[float], share: float) -> float | None:
    """Returns the milliseconds that this share of the ascending seconds does not exceed; None if there are none."""
    place = min(int(share * len(latencies)), len(latencies) - 1)
    return round(1e3 * latencies[place], 1) if latencies else None


def retractions(log: str) -> int:
    """Returns how many requests SGLang retracted, according to its log."""
    return sum(map(int, re.findall(r"#retracted_reqs: (\d+)", log)))


def _used(server: TinyServer) -> int:
    """Returns the tokens that SGLang counts as used once it is idle; 0 if the release does not report them."""
    for _ in range(20):
        try:
            loads = server.json("/v1/loads", timeout=30).get("loads", [])
        except (ServerError, AttributeError):
            return 0
        used = sum(load.get("num_used_tokens") or 0 for load in loads)
        if not used:
            return 0
        time.sleep(0.5)
    return used


def guarded(run: Callable[[], bool]) -> int:
    try:
        return 0 if run() else 1
    except Exception:
        traceback.print_exc()
        return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--minutes", type=float, default=8.0, help="minutes of traffic; default %(default)s")
    parser.add_argument(
        "--limit", type=float, help="minutes after which everything has ended; default --minutes plus 1.5"
    )
    parser.add_argument(
        "--alone",
        type=float,
        help="seconds for asking requests alone, and as many for exchanged pages; more if others use the GPU too",
    )
    parser.add_argument("--method", default="int4", help="--kv-quant of the servers; default %(default)s")
    parser.add_argument("--model", default="qwen3", choices=MODELS)
    parser.add_argument(
        "--layers", type=int, help="layers of the model; default its own: deeper ones hide a wrong page"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--reference", choices=("auto", "second", "same"), default="auto", help="which server answers alone"
    )
    parser.add_argument(
        "--speculation", choices=("none", "ngram"), default="none", help="how drafts are made; default %(default)s"
    )
    parser.add_argument(
        "--streaming", action="store_true", help="some clients keep streaming sessions, which divides the memory once"
    )
    parser.add_argument(
        "--shrink", action="store_true", help="windows may shrink, as by default; then no answers are compared"
    )
    parser.add_argument("--hicache", choices=("host", "file"), help="pages also go to host memory, or on to files")
    parser.add_argument("--late", action="store_true", help="copies of --hicache happen late; only on a CPU")
    parser.add_argument(
        "--pair",
        nargs="?",
        const=ENGINES[0],
        choices=ENGINES,
        help="a prefill and a decode server with this transfer backend; %(const)s if none is named",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the traffic")
    parser.add_argument("--fault", action="store_true", help="compare with wrong prompts now and then: must fail")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs and the model here")
    args = parser.parse_args()
    if args.streaming and (args.speculation != "none" or args.hicache or args.pair):
        parser.error("--streaming: servers refuse streaming sessions with drafts, HiCache or a pair. Leave it out.")
    if args.pair and args.reference == "same":
        parser.error("--reference same: a pair gives no log-probabilities of prompts. Use --reference second.")
    if args.shrink and (args.streaming or args.pair or args.fault):
        parser.error(
            "--shrink: windows shrink only in a shared memory, and no answers are compared then. Leave it out."
        )
    if args.late and args.device != "cpu":
        parser.error("--late: only on a CPU. On a GPU, set SGLANG_TEST_HICACHE_H2D_DELAY_CYCLES=2000000 instead.")
    if args.late and not args.hicache:
        parser.error("--late: without HiCache there are no copies. Add --hicache host or --hicache file.")
    names = gpu_names() if args.device == "cuda" else []
    if args.device == "cuda" and not names:
        raise SystemExit("no GPU: nvidia-smi lists none. --device cpu tries the program on SGLang's CPU engine.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="kvq-soak-", ignore_cleanup_errors=True) as temporary:
        folder = (args.logs or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        soak = Soak(args, folder, len(names))
        soak.say(f"{names[0] if names else 'CPU engine'}; {versions()}")
        return guarded(soak.run)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # clients' threads may still wait for a dead server
