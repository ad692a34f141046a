"""Tests that ``--kv-quant`` serves every family correctly on this host's GPUs: one command, at most 8 minutes.

    python -m tests.gpu --out benchmarks/results/gpu_h200.json

It needs SGLang, this checkout and a GPU. Models are tiny, random and made here; nothing is downloaded or installed.
CUDA graphs and overlap scheduling are on. With two GPUs (``--gpus 2``, or as many as the host has) it also runs tensor
and data parallelism and pipeline stages. ``--device cpu`` runs smaller cases on SGLang's CPU engine, to show that this
program works.

The exit status is 0 if every case passed. A case that did not run in time has failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from packaging.version import Version

from benchmarks import record
from benchmarks.answers import Bound, Difference
from benchmarks.tiny_hybrids import SERVER_FLAGS
from benchmarks.tiny_models import MODELS, TinyModel
from benchmarks.tiny_server import BUSY_CHECK, STRICT, TinyServer, gpu_names, plugin_path, versions
from tests import newcomer
from tests.gpu import adapters, crowd, families, speculation

#: Cores that a starting server keeps busy: it compiles kernels and loads torch in three processes. Then the number of
#: servers that start at once on any host.
CORES_TO_START, LEAST_STARTING = 4, 5
#: Seconds of the time that are kept for stopping and writing.
RESERVE = 15
#: Makes graphs as large as the largest batch, so that every batch is decoded in a graph. Larger ones would only take
#: longer to start.
GRAPHS = ("--cuda-graph-max-bs-decode",)
CASE_MODEL, HYBRID_MODEL, NEWCOMER = "qwen3", "qwen3_next", newcomer.STANDIN.name
ADAPTED = "llama"
#: The row of a task that has no result.
NOT_ENDED = {
    "model": "",
    "case": "",
    "tp": 1,
    "dp": 1,
    "pp": 1,
    "passed": False,
    "max_logprob_diff": None,
    "noise": None,
    "tokens": 0,
    "seconds": None,
    "detail": "not in the time given",
}
#: For models with windows, SGLang's backend for a CPU mistakes locations of one pool for the other's.
WINDOWS_IN_PLAIN_POOL = "--disable-hybrid-swa-memory"
#: Models that SGLang refuses to serve on a CPU.
GPU_ONLY = ("gpt_oss",)
NGRAM = speculation.flags("ngram", Path())
#: Models whose answers with drafts are compared with those without, by their names in ``--only``. A model with nothing
#: but a KV cache drafts for itself.
DRAFTED = {"speculation": CASE_MODEL, "spec_gpt_oss": "gpt_oss", "spec_qwen3_next": HYBRID_MODEL}
DRAFTED_ON_CPU = {"speculation": CASE_MODEL, "spec_mellum": "mellum"}


@dataclass(frozen=True)
class Layout:
    """A distribution of a model over GPUs; ``name`` begins the names of its rows' cases."""

    name: str = ""
    tp: int = 1
    dp: int = 1
    flags: tuple[str, ...] = ()
    stages: int = 1

    @property
    def gpus(self) -> int:
        return self.tp * self.stages

    def command(self) -> list[str]:
        if self.gpus == 1:
            return []
        # NCCL only: multicast and peer memory are not under test, and not every host supports them.
        return [
            *("--tp-size", str(self.tp), "--dp-size", str(self.dp), "--pp-size", str(self.stages)),
            *("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion", *self.flags),
        ]


ONE = Layout()
#: Two pipeline stages, whose micro-batches take turns.
STAGES = Layout("stages", stages=2)
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
SPREAD = (
    ("llama", Layout("tp 2", 2)),
    ("qwen3_moe", Layout("dp attention", 2, 2, ("--enable-dp-attention",))),
    # Each worker has whole dense layers, so tokens are padded to a multiple of the attention's workers.
    ("gpt_oss", Layout("tp 2", 2)),
    ("glm4_moe", Layout("padded tokens", 2, 1, ("--moe-dense-tp-size", "1"))),
    ("glm4_moe", Layout("dp attention, padded", 4, 2, ("--enable-dp-attention", "--moe-dense-tp-size", "1"))),
    ("llama", STAGES),
    ("qwen3_moe", STAGES),
)
#: Crowded servers with pipeline stages.
STAGED = ("crowd in stages", "pressed in stages")


class Suite:
    """Runs tasks in lanes until the deadline and keeps the result file up to date."""

    def __init__(self, args: argparse.Namespace, folder: Path, gpus: int) -> None:
        self.args, self.folder, self.gpus, self.cpu = args, folder, gpus, args.device == "cpu"
        self.begin = time.monotonic()
        self.deadline = self.begin + 60 * args.minutes - RESERVE
        self.rows: list[dict] = []
        self.missing: dict[str, dict] = {}  # rows of tasks that have not ended
        self.said: dict[tuple, families.Said] = {}
        self.drafted: dict[tuple[str, str], speculation.Said] = {}
        self.running: set[TinyServer] = set()
        starting = max(LEAST_STARTING, (os.cpu_count() or 1) // CORES_TO_START)
        self.lanes = args.lanes or starting + 1
        self.lock, self.starting = threading.Lock(), threading.Semaphore(starting)
        self.env = {**STRICT, **plugin_path(folder)}
        if self.cpu:
            from tests import ngrams  # imports SGLang in this process

            self.env |= ngrams.on_cpu(self.env.get("PYTHONPATH"))
        self.families = families.CPU if self.cpu else families.GPU
        self.cases = crowd.CPU if self.cpu else crowd.GPU
        self.turn = 0

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:4.0f} s] {text}", flush=True)

    def add(
        self,
        model: str,
        case: str,
        layout: Layout,
        passed: bool,
        seconds: float,
        found: Difference,
        bound: Bound,
        more: str,
    ) -> None:
        row = {
            "model": model,
            "case": f"{layout.name}: {case}" if layout.name else case,
            "tp": layout.tp,
            "dp": layout.dp,
            "pp": layout.stages,
            "passed": bool(passed),
            "max_logprob_diff": round(found.max, 4),
            "mean_logprob_diff": round(found.mean, 5),
            "noise": round(bound.mean, 4),
            "max_noise": round(bound.max, 4),
            "tokens": found.tokens,
            "seconds": round(seconds, 1),
            "detail": more,
        }
        with self.lock:
            self.rows.append(row)
            self.write()
        mark = "ok    " if passed else "FAILED"
        self.say(f"{mark} {model:10} {row['case']:48} {found.mean:8.4f} (<= {bound.mean:.4f})  {more[:100]}")

    def write(self) -> None:
        rows = [*self.rows, *self.missing.values()]
        record.write(self.args.out, "gpu", rows, gpus=self.gpus, all_passed=all(row["passed"] for row in rows))

    def server(
        self, name: str, model: TinyModel, flags: Sequence[str], layout: Layout, env: dict[str, str]
    ) -> TinyServer:
        with self.lock:
            # Servers with one GPU take the GPUs in turn; others take the first ones.
            gpus = list(range(layout.gpus)) if layout.gpus > 1 else [self.turn % max(self.gpus, 1)]
            self.turn += layout.gpus == 1
            path = model.write(self.folder)  # two servers of a model may start at once
        graphs = () if self.cpu else (*GRAPHS, flags[flags.index("--max-running-requests") + 1])
        log = self.folder / "logs" / f"{name}.log"
        return TinyServer(
            path,
            [*layout.command(), *graphs, *flags],
            cpu=self.cpu,
            log=log,
            env={**self.env, **env},
            gpus=gpus,
        )

    def serve(
        self,
        name: str,
        model: TinyModel,
        flags: Sequence[str],
        use: Callable,
        layout: Layout = ONE,
        env: Mapping[str, str] = NO_VARIABLES,
    ):
        """Starts a server and returns the result of ``use(server)``; any error gets the server's log."""
        server = self.server(name, model, flags, layout, env)
        with self.starting:
            left = self.deadline - time.monotonic()
            if left < 10:
                raise TimeoutError("no time left to start its server")
            with self.lock:
                self.running.add(server)
            begin = time.monotonic()
            server.start(timeout=left)
        try:
            self.say(f"       {name}: started in {time.monotonic() - begin:.0f} s")
            return use(server)
        except Exception as error:
            tail = server.log_tail(30)
            if str(error).find(tail[-200:]) < 0:
                error.args = (f"{error}\n{tail}",)
            raise
        finally:
            server.stop()
            with self.lock:
                self.running.discard(server)

    # -- tasks ------------------------------------------------------------------------------------------------

    def family(self, model: TinyModel, layout: Layout, method: str) -> None:
        """Runs one server of a model; the last of the model's servers makes the rows."""
        plain = method == "none"
        flags = self.families.flags() + ([] if plain else self.families.quantized_flags(method))
        if plain and self.cpu and model.has_windows:
            flags.append(WINDOWS_IN_PLAIN_POOL)
        flags += SERVER_FLAGS if model.is_hybrid else ()
        name = "-".join(filter(None, (model.name, layout.name.replace(" ", "_").replace(",", ""), method)))
        begin = time.monotonic()
        env = {BUSY_CHECK: "0"} if layout.tp > 1 else {}  # the check does not know of a worker's empty batches
        said = self.serve(name, model, flags, lambda server: families.ask(server, self.families, plain), layout, env)
        said.seconds = time.monotonic() - begin
        key = (model.name, layout)
        with self.lock:
            self.said[(*key, method)] = said
            methods = [m for m in ("int4", "int2") if (*key, m) in self.said] if plain else [method]
            pair = (
                [(m, self.said[(*key, m)], self.said[(*key, "none")]) for m in methods]
                if (*key, "none") in self.said
                else []
            )
        left = Difference(0.0, 0.0, 0)
        self.add(
            model.name,
            f"{method}: nothing left when idle and flushed",
            layout,
            not said.left,
            said.seconds,
            left,
            Bound(0, 0),
            "; ".join(said.left),
        )
        for other, ours, theirs in pair:
            for case, passed, found, bound, more in families.compare(ours, theirs, self.families, other):
                self.add(model.name, case, layout, passed, ours.seconds, found, bound, more)

    def drafts(self, way: str, name: str) -> None:
        """Runs one way to draft for a model, or none; the last of the two servers to compare makes the rows."""
        model = MODELS[name]
        plain_model = not (model.has_windows or model.is_hybrid)
        if model.is_hybrid:
            model = replace(model, name=f"{name}_mtp", drafts=True)
        most = plain_model or self.args.all_prompts
        scale = speculation.CPU if self.cpu else speculation.GPU if most else speculation.FEW
        with self.lock:
            draft = model.write(self.folder) if plain_model else speculation.write_echo(self.folder)
        flags = [*self.families.flags(), *self.families.quantized_flags(), *speculation.flags(way, draft)]
        flags += SERVER_FLAGS if model.is_hybrid else ()
        lengths = {"short": self.families.short, "long": self.families.long}
        ask = lambda server: speculation.ask(server, scale, lengths, way)  # noqa: E731
        said = self.serve(f"drafts-{name}-{way}", model, flags, ask)
        with self.lock:
            self.drafted[name, way] = said
            plain = self.drafted.get((name, "none"))
            ours = [w for n, w in self.drafted if n == name and w != "none"] if way == "none" else [way]
        left, none = Difference(0.0, 0.0, 0), Bound(0, 0)
        case = f"drafts ({way}): nothing left when idle and flushed"
        self.add(model.name, case, ONE, not said.left, said.seconds, left, none, "; ".join(said.left))
        for other in ours if plain else []:
            # The echo model's drafts are accepted where an answer repeats a token; a random layer guesses nothing.
            least = 1.1 if plain_model or other == "ngram" else 1.0
            for case, passed, found, bound, more in speculation.compare(self.drafted[name, other], plain, other, least):
                self.add(model.name, case, ONE, passed, said.seconds, found, bound, more)

    def adapters(self) -> None:
        """Runs two servers with LoRA adapters, one after the other."""
        begin, said, model = time.monotonic(), {}, MODELS[ADAPTED]
        more = adapters.flags(self.folder / "adapters", model, self.cpu)
        for name, own in (("none", ()), ("turboquant", adapters.OURS)):
            flags = [*self.families.flags(), *own, *more]
            ask = lambda server: adapters.ask(server, self.families)  # noqa: E731
            said[name] = self.serve(f"adapters-{name}", model, flags, ask)
        for case, passed, found, bound, detail in adapters.compare(said["turboquant"], said["none"], self.families):
            self.add(model.name, case, ONE, passed, time.monotonic() - begin, found, bound, detail)

    def newcomer(self) -> None:
        """Runs README's own commands on this host before all else, because their server takes the GPU's memory."""
        begin, page = time.monotonic(), (newcomer.ROOT / "README.md").read_text()
        node = newcomer.Node(self.folder / "node", cpu=self.cpu).prepare()
        node.run(newcomer.INSTALLS["installed"], node.clone)
        answer = newcomer.use(node, node.clone, page)
        none, more = Difference(0.0, 0.0, 0), f"{answer['usage']['completion_tokens']} tokens answered"
        self.add(
            NEWCOMER, "README's quick start in a clone", ONE, True, time.monotonic() - begin, none, Bound(0, 0), more
        )

    def case(self, name: str) -> None:
        """Runs the cases of one crowded server."""
        # The model is deep, so that a step lasts long enough for the scheduler to get ahead of it.
        flags, steps, env = {
            "crowd": (self.cases.crowd_flags(), crowd.crowd, {}),
            "pressed": (self.cases.pressed_flags(), crowd.pressed, crowd.PRESSED),
            "windows": (self.cases.window_flags(), crowd.pressed_windows, crowd.PRESSED),
            "crowd with drafts": ([*self.cases.crowd_flags(), *NGRAM], crowd.crowd, {}),
            "pressed with drafts": (
                [*self.cases.pressed_flags(sessions=False), *NGRAM],
                partial(crowd.pressed, sessions=False),
                crowd.PRESSED,
            ),
            "hybrid": ([*self.cases.pressed_flags(), *SERVER_FLAGS], crowd.hybrid, crowd.PRESSED),
            "mixed": (self.cases.mixed_flags(), crowd.mixed, {}),
            "crowd in stages": (self.cases.crowd_flags(), crowd.crowd, {}),
            "pressed in stages": (
                self.cases.pressed_flags(sessions=False),
                partial(crowd.pressed, sessions=False),
                crowd.PRESSED,
            ),
        }[name]
        layout = STAGES if name in STAGED else ONE
        family = self.case_model(name)
        few, many = (6, 18) if family == HYBRID_MODEL else (4, 16)  # a hybrid's layers form a pattern that repeats
        model = replace(MODELS[family], name=f"{family}_deep", layers=few if self.cpu else many)
        last = [time.monotonic()]

        def use(server: TinyServer) -> None:
            for case, passed, found, bound, more in steps(server, self.cases, self.deadline - 30):
                if "drafts" in name:
                    case = f"with drafts: {case}"
                self.add(model.name, case, layout, passed, time.monotonic() - last[0], found, bound, more)
                last[0] = time.monotonic()

        self.serve(name, model, flags, use, layout, env)

    def case_model(self, name: str) -> str:
        """Returns the model of a crowded server."""
        if name == "hybrid":
            return HYBRID_MODEL
        return CASE_MODEL if name != "windows" else "mellum" if self.cpu else "gpt_oss"

    def tasks(self) -> list[tuple[str, str, Callable[[], None]]]:
        """Returns (model, what, task) of all tasks; tasks that compile kernels for others come first."""
        only = set(filter(None, self.args.only.split(",")))
        wanted = lambda *names: not only or bool(only & set(names))  # noqa: E731
        ours, plain, later = [], [], []
        first = ("llama", "llama_64", "qwen3_256")
        known = [m for m in MODELS.values() if m.is_served(Version(importlib.metadata.version("sglang")))]
        for model in sorted(known, key=lambda m: m.name not in first):
            if wanted(model.name, "families") and not (self.cpu and model.name in GPU_ONLY):
                task = lambda method, model=model: lambda: self.family(model, ONE, method)  # noqa: E731
                (ours if model.name in first else later).append((model.name, "int4", task("int4")))
                plain.append((model.name, "none", task("none")))
                if model.name == "llama":
                    later.append((model.name, "int2", task("int2")))
        cases = [
            (self.case_model(name), name, lambda name=name: self.case(name))
            for name in ("crowd", "pressed", "windows", "hybrid", "mixed")
            if wanted(name, "cases")
        ]
        if wanted("adapters", "cases") and not self.cpu:  # there SGLang pins memory: see tests/e2e/modes
            cases.append((ADAPTED, "adapters", self.adapters))
        for called, name in (DRAFTED_ON_CPU if self.cpu else DRAFTED).items():
            if wanted(called, "speculation"):
                task = lambda way, name=name: lambda: self.drafts(way, name)  # noqa: E731
                ways = (*speculation.WAYS, *(["nextn"] if MODELS[name].is_hybrid else []))
                if self.cpu:  # where SGLang has no draft models
                    ways = speculation.WAYS[:2]
                cases += [(name, f"drafts, {way}", task(way)) for way in ways]
        if wanted("speculation"):
            cases += [
                (CASE_MODEL, name, lambda name=name: self.case(name))
                for name in ("crowd with drafts", "pressed with drafts")
            ]
        spread = []
        for name, layout in sorted(SPREAD, key=lambda entry: -entry[1].gpus):  # the slowest to start come first
            if layout.gpus <= self.gpus and wanted("parallel", layout.name, f"{layout.name} {name}"):
                for method in ("none", "int4"):
                    task = lambda name=name, layout=layout, method=method: self.family(MODELS[name], layout, method)  # noqa: E731
                    spread.append((name, f"{layout.name}, {method}", task))
        if STAGES.gpus <= self.gpus:
            spread += [
                (CASE_MODEL, name, lambda name=name: self.case(name)) for name in STAGED if wanted("parallel", name)
            ]
        return [*ours, *plain, *cases, *spread, *later]

    def run(self) -> bool:
        tasks = self.tasks()
        first = not self.args.only or "newcomer" in self.args.only.split(",")
        if not tasks and not first:
            raise SystemExit(f"--only {self.args.only}: nothing of that name; see --help")
        for model, what, _ in tasks:
            key = f"{model}: {what}"
            self.missing[key] = {**NOT_ENDED, "model": model, "case": f"{what}: did not end"}
        if first:
            self.missing[f"{NEWCOMER}: newcomer"] = {**NOT_ENDED, "model": NEWCOMER, "case": "newcomer: did not end"}
            self.guarded(NEWCOMER, "newcomer", self.newcomer)
        pool = ThreadPoolExecutor(1 if self.cpu else self.lanes + 2 * (self.gpus > 1))
        futures = [pool.submit(self.guarded, *task) for task in tasks]
        try:
            wait(futures, timeout=max(self.deadline - time.monotonic(), 1))
        finally:
            for future in futures:
                future.cancel()
            with self.lock:
                left = list(self.running)
            for server in left:  # fails the requests of their tasks at once
                server.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            wait([f for f in futures if not f.cancelled()], timeout=8)
            with self.lock:
                self.write()
        return self.summary()

    def guarded(self, model: str, what: str, task: Callable[[], None]) -> None:
        """Runs a task; a failure becomes a row."""
        key = f"{model}: {what}"
        try:
            task()
            with self.lock:
                del self.missing[key]
                self.write()
        except Exception as error:
            late = time.monotonic() > self.deadline
            self.say(
                f"FAILED {key}: {'stopped: out of time' if late else ''}\n"
                + "".join(traceback.format_exception(error))[-4000:]
            )
            with self.lock:
                why = "out of time; " if late else ""
                self.missing[key]["detail"] = (
                    why + str(error).splitlines()[0][:300] if str(error) else type(error).__name__
                )
                self.missing[key]["case"] = f"{what}: failed"
                self.write()

    def summary(self) -> bool:
        rows = [*self.rows, *self.missing.values()]
        failed = [row for row in rows if not row["passed"]]
        print(f"\n{'model':12} {'case':50} {'mean':>8} {'bound':>8} {'max':>8} {'tokens':>7}")
        for row in sorted(rows, key=lambda row: (row["passed"], row["model"])):
            mean, bound, most = (row.get(name) for name in ("mean_logprob_diff", "noise", "max_logprob_diff"))
            numbers = " ".join(f"{value:8.4f}" if value is not None else f"{'-':>8}" for value in (mean, bound, most))
            print(
                f"{row['model']:12} {row['case']:50} {numbers} {row['tokens']:7}"
                + ("" if row["passed"] else f"  FAILED {row['detail'][:160]}")
            )
        print(
            f"{len(rows) - len(failed)} passed, {len(failed)} failed, "
            f"{time.monotonic() - self.begin:.0f} s, {self.args.out}",
            flush=True,
        )
        return not failed


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path, help="JSON file of the results")
    parser.add_argument(
        "--only",
        default="",
        help="some of: newcomer, model names, families, crowd, pressed, windows, hybrid, mixed, adapters, cases, "
        "speculation, spec_gpt_oss, spec_qwen3_next, parallel, or some of it: tp 2, dp attention, stages, "
        "crowd in stages, pressed in stages; comma-separated",
    )
    parser.add_argument("--gpus", type=int, help="number of GPUs to use, or of a CPU's workers; default all GPUs")
    parser.add_argument(
        "--minutes",
        type=float,
        default=8.0,
        help="stop after this many minutes, even if cases are left; default %(default)s",
    )
    parser.add_argument(
        "--all-prompts",
        action="store_true",
        help="test drafts next to windows or recurrent states with 1,000 prompts instead of 200; needs more --minutes",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--lanes", type=int, help="number of servers at a time; the default depends on the host's cores"
    )
    parser.add_argument("--logs", type=Path, help="keep the servers' logs and models here")
    args = parser.parse_args(words)
    names = gpu_names() if args.device == "cuda" else []
    if args.device == "cuda" and not names:
        raise SystemExit("no GPU: nvidia-smi lists none. --device cpu tries the program on SGLang's CPU engine.")
    gpus = min(args.gpus or len(names), len(names)) if args.device == "cuda" else args.gpus or 0
    # A signal ends the servers too, although each is in its own process group.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="kvq-gpu-", ignore_cleanup_errors=True) as temporary:
        folder = args.logs or Path(temporary)
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        suite = Suite(args, folder.resolve(), gpus)
        suite.say(f"{gpus} x {names[0]}" if names else "CPU engine")
        suite.say(versions())
        return 0 if suite.run() else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a thread may still wait for a server that has ended
