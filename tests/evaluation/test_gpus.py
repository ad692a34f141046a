"""Servers on several GPUs and in several chunk sizes, and the state that a killed run leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation import runner
from tests.evaluation.conftest import main
from tests.evaluation.fake_server import OWN_CHUNK, FakeServer
from tests.evaluation.test_runner import no_hub, rows, words  # noqa: F401  (a fixture)


class Host:
    """Replaces ``EvaluatedServer`` with servers in this process; records which GPUs were used at once."""

    def __init__(self, at_once: int = 1, seconds: float = 0.05) -> None:
        """``at_once``: so many servers must start at the same time; the first ones wait for each other."""
        self.at_once, self.seconds, self.lock, self.met = at_once, seconds, threading.Lock(), threading.Event()
        self.busy: list[str] = []
        self.used: list[str] = []
        self.starting = self.most_starting = self.most_busy = 0

    @contextmanager
    def server(self, launch, spec, log, stopped, gpu):
        with self.lock:
            assert gpu not in self.busy, f"two servers on GPU {gpu}"
            self.busy.append(gpu)
            self.used.append(gpu)
            self.starting += 1
            self.most_starting = max(self.most_starting, self.starting)
            if self.starting >= self.at_once:
                self.met.set()
        assert self.met.wait(120), f"never {self.at_once} servers started at once"
        time.sleep(self.seconds)  # in which one more would start, if it could
        with self.lock:
            self.starting -= 1
            self.most_busy = max(self.most_busy, len(self.busy))
        with FakeServer(spec.method) as fake:
            fake.is_ours, fake.check_alive = True, lambda: None
            yield fake
        with self.lock:
            self.busy.remove(gpu)


METHODS = "none,oscar,hadamard,int2,none#64,oscar#64,hadamard#64,int2#64"


def test_a_method_per_gpu_and_at_most_five_that_start(text, tmp_path, monkeypatch):
    host = Host(at_once=5)
    monkeypatch.setattr(runner, "EvaluatedServer", host.server)
    assert main(words(text, tmp_path / "out", "--methods", METHODS, "--gpus", "0,1,2,3,4,5,6,7")) == 0
    assert sorted(host.used) == list("01234567")
    assert host.most_starting == 5 and host.most_busy >= 5
    found = rows(tmp_path / "out")
    assert len(found) == 8 and all(row["kl"] is not None for row in found.values())


def test_a_gpu_that_is_free_takes_the_next_method(text, tmp_path, monkeypatch):
    host = Host()
    monkeypatch.setattr(runner, "EvaluatedServer", host.server)
    assert main(words(text, tmp_path / "out", "--methods", METHODS, "--gpus", "0,3")) == 0
    assert len(host.used) == 8 and set(host.used) == {"0", "3"} and host.busy == []


def test_servers_see_their_gpu_and_meet_at_ports_of_their_own(text, tmp_path):
    out = tmp_path / "out"
    assert main(words(text, out, "--methods", "none,oscar,hadamard", "--gpus", "1,5,GPU-a")) == 0
    logs = [path.read_text() for path in out.glob("runs/*/server.log")]
    seen = [re.search(r"GPU (\S+) meets at (\d+)", log).groups() for log in logs]
    assert {gpu for gpu, _ in seen} == {"1", "5", "GPU-a"} and len({port for _, port in seen}) == 3


def test_what_does_not_wait_for_the_reference_comes_first(text, tmp_path, monkeypatch, gsm8k):
    """Tasks that need no reference run first, so that a slow start of BF16 leaves no other GPU idle."""
    order: list[tuple[str, str]] = []
    measured = threading.Event()

    def note(self, slug, task, *args, save=runner.Store.save):
        order.append((slug, task))
        if slug == "oscar" and task == "gsm8k":
            measured.set()
        save(self, slug, task, *args)

    monkeypatch.setattr(runner.Store, "save", note)
    host = Host()

    @contextmanager
    def late(*given):
        with host.server(*given) as fake:
            if fake.method == "none":
                assert measured.wait(120), "oscar waits for the reference though it has something else to do"
            yield fake

    monkeypatch.setattr(runner, "EvaluatedServer", late)
    tasks = ["--tasks", "kl,gsm8k", "--gsm8k", str(gsm8k), "--gsm8k-shots", "0", "--gpus", "0,1"]
    assert main(words(text, tmp_path / "out", "--methods", "none,oscar", *tasks)) == 0
    assert [task for slug, task in order if slug == "oscar"] == ["gsm8k", "kl"]


def test_a_killed_run_keeps_what_was_measured(text, tmp_path):
    out = tmp_path / "out"
    asked = words(text, out, "--methods", "none,oscar,hadamard", "--gpus", "0,1,2")
    run = subprocess.Popen(
        [sys.executable, "-m", "sglang_kvq.cli", "eval", *asked],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "FAKE_HANG": "hadamard"},
    )
    waiting = {"none", "oscar"}
    for line in run.stderr:
        waiting -= {name for name in waiting if f"{name}: kl = " in line}
        if not waiting:
            break
    kept = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/kl.json")}
    run.send_signal(signal.SIGKILL)
    run.wait(timeout=200)
    run.stderr.close()
    assert {path.parent.name for path in kept} == {"none", "oscar"} and not list(out.glob("accuracy_*"))
    precise = tmp_path / "precise_fake.json"
    assert main(["--map", str(out), "--out", str(precise)]) == 0
    assert {row["method"] for row in json.loads(precise.read_text())["rows"]} == {"none", "oscar"}
    assert main(asked) == 0
    assert rows(out)["hadamard"]["kl"] > 0
    assert kept == {path: path.stat().st_mtime_ns for path in kept}


def test_chunk_sizes_are_run_and_recorded(text, tmp_path, gsm8k, capsys):
    out = tmp_path / "out"
    tasks = ["--tasks", "kl,gsm8k", "--gsm8k", str(gsm8k), "--gsm8k-shots", "0"]
    asked = words(text, out, "--methods", "none,oscar", "--chunked-prefill-size", "128,own", *tasks)
    assert main(asked) == 0
    found = rows(out)
    chunks = {"none": 128, "oscar": 128, "none#own": OWN_CHUNK, "oscar#own": OWN_CHUNK}
    assert {name: row["server"]["chunk"] for name, row in found.items()} == chunks
    # Divergence reveals the cache only in small chunks, so it is not measured in others.
    assert [found[name]["kl"] is None for name in ("none", "oscar", "none#own", "oscar#own")] == [0, 0, 1, 1]
    assert not [row for row in found.values() if row["error"]] and found["oscar#own"]["gsm8k_vs_none"] is not None
    precise = tmp_path / "precise_fake-1b.json"
    assert main(["--map", str(out), "--out", str(precise)]) == 0
    measured = {(r["method"], r["task"], r["chunk"], r["bf16_chunk"]) for r in json.loads(precise.read_text())["rows"]}
    both = {(m, "gsm8k", chunk, chunk) for m in ("none", "oscar") for chunk in (128, OWN_CHUNK)}
    assert measured == both | {(m, task, 128, 128) for m in ("none", "oscar") for task in ("kl", "top1", "perplexity")}
    capsys.readouterr()
    assert main(asked) == 0 and capsys.readouterr().err.count("already measured") == 4
    only = words(text, out, "--methods", "none#own", "--tasks", "kl")
    with pytest.raises(KVQuantError, match="chunks of at most 256: add 128"):
        main(only)
