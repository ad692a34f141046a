"""Runs tasks on servers that it starts or is given, and stores every result as soon as it is measured."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation import provenance
from sglang_kvq.evaluation.client import Client, ServerFacts
from sglang_kvq.evaluation.files import digest
from sglang_kvq.evaluation.material import Material
from sglang_kvq.evaluation.progress import Display
from sglang_kvq.evaluation.servers import EvaluatedServer, Launch
from sglang_kvq.evaluation.specs import MethodSpec
from sglang_kvq.evaluation.store import Store, common_settings
from sglang_kvq.evaluation.tasks.base import Bench, ReferenceTask, Task
from sglang_kvq.server_process import ServerFailed

#: Servers that load at the same time; more of them slow each other down at the disk and compiler.
STARTING = 5


class Runner:
    """Runs one comparison.

    Args:
        tasks: in execution order.
        material: shared by all methods.
        failures: one line per method or task that gave no value; the run adds them.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        store: Store,
        material: Material,
        display: Display,
        *,
        concurrency: int = 32,
        timeout: float = 900.0,
    ) -> None:
        self.tasks, self.store, self.material, self.display = tasks, store, material, display
        self.concurrency, self.timeout = concurrency, timeout
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._running: set[EvaluatedServer] = set()
        self._starting = threading.Semaphore(STARTING)
        self._gpus: queue.Queue[str] = queue.Queue()

    # -- servers of our own -------------------------------------------------------------------------------

    def compare(self, specs: Sequence[MethodSpec], launch: Launch) -> None:
        """Starts each method's server, measures what is missing, and stops it. A failure does not affect the others.

        Raises:
            KVQuantError: existing results have other settings; raised before anything starts.
        """
        jobs = []
        planned: dict[tuple[str, str], dict[str, Any]] = {}
        # The reference comes last: its distributions are needed again only if another method is still to be compared.
        compared: set[str] = set()
        for spec in sorted(specs, key=lambda spec: spec.is_reference):
            identity = launch.identity(spec)
            tasks = [task for task in self.tasks if _sees_cache(task, spec)]
            whole = {task.name: whole_identity(identity, task) for task in tasks}
            open_tasks = [task for task in tasks if not self.store.finished(spec.slug, task.name, whole[task.name])]
            planned |= {(spec.slug, name): one for name, one in whole.items()}
            if spec.is_reference and not self.material.has("reference"):
                open_tasks = [task for task in tasks if task in open_tasks or task.name in compared]
            compared |= {task.name for task in open_tasks if isinstance(task, ReferenceTask)}
            if not tasks:
                self.display.say(f"{spec.label}: skipped: no requested task can be measured with this chunk size")
            elif not open_tasks:
                self.store.forget_failure(spec.slug)
                self.display.say(f"{spec.label}: already measured")
            else:
                jobs.append((spec, identity, open_tasks))
        common_settings(self.store.methods(), planned)
        if not any(spec.is_reference and isinstance(task, ReferenceTask) for spec, _, tasks in jobs for task in tasks):
            self.material.settle_reference()  # stored by an earlier run, or not needed

        def work(job: tuple[MethodSpec, dict[str, Any], list[Task]]) -> None:
            spec, identity, tasks = job
            gpu = self._gpus.get()
            try:
                self._measure_own(spec, identity, tasks, launch, gpu)
            finally:
                self._gpus.put(gpu)
                if spec.is_reference:
                    self.material.settle_reference("the run of method none ended before its distributions were stored")
                self.display.finish(spec.label)

        for gpu in (launch.gpus or ("",)) * launch.parallel:
            self._gpus.put(gpu)
        with ThreadPoolExecutor(self._gpus.qsize()) as pool:
            # The reference is first in the list, so it is never waited for by all threads at once.
            futures = [pool.submit(work, job) for job in sorted(jobs, key=lambda job: not job[0].is_reference)]
            try:
                for future in futures:
                    while not wait([future], timeout=0.5).done:
                        pass  # a Ctrl-C that the kernel hands to another thread is seen only when this one wakes up
                    future.result()
            except BaseException:
                self._stop.set()
                self.material.settle_reference("interrupted")
                for waiting in futures:
                    waiting.cancel()
                for server in list(self._running):  # threads that wait for an answer then get an error
                    server.stop()
                raise

    def _measure_own(
        self, spec: MethodSpec, identity: dict[str, Any], tasks: list[Task], launch: Launch, gpu: str
    ) -> None:
        log = self.store.runs(spec.slug) / "server.log"
        try:
            command = EvaluatedServer(launch, spec, log, self._stop.is_set, gpu)
            with contextlib.ExitStack() as running:
                with self._starting:
                    if self._stop.is_set():
                        return
                    self.display.status(spec.label, "starting its server" + (f" on GPU {gpu}" if gpu else ""))
                    server = running.enter_context(command)
                self._running.add(server)
                more = {**spec.calibration(), "versions": provenance.versions() if server.is_ours else None}
                self.measure(server.url, spec.slug, spec.label, identity, tasks, more, spec.is_reference)
                server.check_alive()
        except KVQuantError as error:
            if not self._stop.is_set():
                self._server_failed(spec, str(error), error.log if isinstance(error, ServerFailed) else "")

    # -- any server ---------------------------------------------------------------------------------------

    def measure(
        self,
        url: str,
        slug: str,
        label: str,
        identity: dict[str, Any],
        tasks: Sequence[Task],
        more: dict[str, Any] | None = None,
        is_reference: bool = False,
    ) -> None:
        """Runs tasks on a running server. If a task fails, records this and continues with the others."""
        client = Client(url, timeout=self.timeout)
        facts = client.facts
        known = {name: value for name, value in (more or {}).items() if value is not None}
        self.store.save_server(slug, {"label": label, **server_record(facts), **known})
        waiting = list(tasks)
        while waiting:
            if self._stop.is_set():
                return
            # Until BF16 is measured, tasks that do not compare with it come first.
            task = waiting.pop(0 if is_reference else self._next_task(waiting))
            self.display.status(label, task.name)
            bench = Bench(self.material, self.concurrency, self.display.counter(label, task.name))
            try:
                if is_reference and isinstance(task, ReferenceTask):
                    self.record_reference(task, client, bench)
                retries = client.retries
                outcome = task.run(client, bench)
                retries = client.retries - retries
                if retries:
                    outcome.warnings.append(f"{retries} requests sent again after their connection failed")
                source = dict(zip(("commit", "dirty"), provenance.commit()))
                self.store.save(slug, task.name, whole_identity(identity, task), outcome, source)
            except Exception as error:  # any error is recorded, and the other tasks and methods continue
                if self._stop.is_set():
                    return
                message = provenance.without_paths(str(error) if isinstance(error, KVQuantError) else repr(error))
                with contextlib.suppress(KVQuantError):  # the disk may be full; the message is printed in any case
                    self.store.save_error(slug, task.name, message)
                self._failed(f"{label}, {task.name}", message)
                continue
            spread = "" if outcome.se is None else f" ± {outcome.se:.4f}"
            self.display.say(f"{label}: {task.name} = {outcome.value:.4f}{spread} (n = {outcome.n})")
            for warning in outcome.warnings:
                self.display.say(f"{label}: {task.name}: {warning}")

    def record_reference(self, task: ReferenceTask, client: Client, bench: Bench) -> None:
        """Stores the reference for other methods; releases the methods that wait for it, even after a failure."""
        try:
            task.record_reference(client, bench)
        except BaseException as error:
            self.material.settle_reference(provenance.without_paths(f"the reference failed: {error}"))
            raise
        self.material.settle_reference()

    # -- small things -------------------------------------------------------------------------------------

    def _next_task(self, waiting: Sequence[Task]) -> int:
        """Returns the index of the first task that need not wait for the reference; 0 if all must."""
        settled = self.material.reference_settled.is_set()
        ready = (i for i, task in enumerate(waiting) if settled or not isinstance(task, ReferenceTask))
        return next(ready, 0)

    def _server_failed(self, spec: MethodSpec, reason: str, log: str) -> None:
        message = provenance.without_paths(reason)
        with contextlib.suppress(KVQuantError):  # as above
            if not (self.store.runs(spec.slug) / "server.json").exists():
                self.store.save_server(spec.slug, {"label": spec.label, **spec.calibration()})
            self.store.save_error(spec.slug, "server", message, log)
        self._failed(spec.label, message)

    def _failed(self, what: str, message: str) -> None:
        self.failures.append(f"{what}: {message}")
        self.display.say(f"{what}: FAILED: {message}")


def _sees_cache(task: Task, spec: MethodSpec) -> bool:
    """Returns whether a spec's chunks suit a task. Flags can change them, so the task checks the server again."""
    return not isinstance(task, ReferenceTask) or spec.fits(task.largest_chunk)


def server_record(facts: ServerFacts) -> dict[str, Any]:
    """Returns the facts of a server that a reader of results needs: no paths, no changing counters."""
    kv_quant = {
        name: provenance.without_paths(value) if isinstance(value, str) else value
        for name, value in (facts.kv_quant or {}).items()
        if name != "tiers"
    }
    return {
        **asdict(facts),
        "model_path": Path(facts.model_path).name,
        "kv_quant": kv_quant or None,
        "method": facts.method,
        "allocated_bits": facts.allocated_bits,
        "pool_bits": round(facts.pool_bits, 3),
        "calibration": kv_quant.get("rotations"),
        "seed": kv_quant.get("seed"),
        "device_name": provenance.device_name(facts.device),
    }


def whole_identity(identity: dict[str, Any], task: Task) -> dict[str, Any]:
    """Returns the settings that determine a task's value: those of its server, ``identity``, and its own."""
    return {**identity, "task": task.identity()}


def server_identity(facts: ServerFacts, label: str) -> dict[str, Any]:
    """Returns the settings that determine values, as reported by a server that this program did not start."""
    record = server_record(facts)
    # Pool sizes depend on the free memory at start; they do not affect values.
    names = ("version", "kv_cache_dtype", "chunk", "method", "allocated_bits")
    fixed = {"model_path": facts.model_path, **{name: record[name] for name in names}}
    kept = ("rotations", "clip_k", "clip_v", "sink_tokens", "recent_tokens", "prefill_window", "seed", "sha256")
    fixed["kv_quant"] = {name: (record["kv_quant"] or {}).get(name) for name in kept}
    return {"label": label, "server": digest(fixed), "method": record["method"]}
