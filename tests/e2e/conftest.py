"""Servers for end-to-end tests. A server takes half a minute to start, so tests with the same flags share it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, cached_property, partial
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from benchmarks.tiny_server import with_plugin
from launch.server import Server
from sglang_kvq.releases import OLD_TREE_RELEASES, OLDEST
from tests import shallow
from tests.conftest import ROOT
from tests.e2e.preloaded import Preloaded, other_models

#: True on a GPU machine: the same tests run there, and decode inside CUDA graphs.
ON_GPU = torch.cuda.is_available()
GPU_FLAGS = (
    *("--dtype", "bfloat16", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--mem-fraction-static", "0.6", "--max-total-tokens", "4096", "--max-running-requests", "8"),
    *("--context-length", "2048"),
)
#: Makes SGLang check its pools whenever idle and after every step, and stop at the first page unaccounted for.
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
#: Keeps a CPU server's BF16 products from instructions of newer processors. With those, batches of other sizes changed
#: log-probabilities by up to 0.04 nats, and answers that depend on less than that.
STEADY = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
#: Number of idle servers that are kept: each holds about 2.5 GB.
KEPT = 2
#: Files in an order in which most find a server with their flags running. Each file in a line leaves a server that the
#: next one uses.
ORDER = (
    *("test_bf16.py", "test_demo.py", "test_kits.py", "test_transform.py"),
    *("test_server_metrics.py", "test_folded_weights.py", "test_serving.py"),
    *("test_evaluation.py", "test_numbers.py", "test_parallel.py"),
    *("test_canary.py", "test_capture.py", "test_refusals.py"),
)
#: Tests that the oldest release runs without ``--all``: one server under load, and one that must not start.
#: ``tests/sglang`` tests, symbol by symbol, what differs from the newest release.
OLDEST_TOO = re.compile(r"test_serving\.py::|test_refusals\.py::test_a_model_is_refused")
#: Seconds until a server must be ready: next to other jobs on two slow cores, one took three minutes.
READY = 900


def variables(env: dict[str, str] | None) -> dict[str, str]:
    """Returns the environment variables of a test's server.

    These are ``STRICT``, a list of models to leave out, on a CPU a folder for the C++ that SGLang compiles, and
    ``env``. In its usual folder torch compiles that C++ again whenever another clone or release has used the folder.
    """
    more = {"SGLANG_DISABLED_MODEL_ARCHS": other_models()}
    if not ON_GPU and "TORCH_EXTENSIONS_DIR" not in os.environ:
        more["TORCH_EXTENSIONS_DIR"] = str(ROOT / ".venvs" / "extensions" / version("sglang"))
    return {**STRICT, **more, **(env or {})}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Orders files by ``ORDER``, then others, and gives each test a limit that includes the start of its servers."""
    here = Path(__file__).parent
    ours = [item for item in items if here in item.path.parents]
    for item in ours:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(2 * READY))
        if item.path.name.startswith("test_hicache") and version("sglang") in OLD_TREE_RELEASES:
            item.add_marker(pytest.mark.skip(reason="HiCache is refused with this release"))
    ours.sort(key=lambda item: (*ORDER, item.path.name).index(item.path.name))
    if version("sglang") == OLDEST and not config.getoption("--all"):
        ours = [item for item in ours if OLDEST_TOO.search(item.nodeid)]
    items[:] = [*(item for item in items if here not in item.path.parents), *ours]


class Servers:
    """Running servers by their flags and environment; if there are too many, the one used longest ago stops."""

    def __init__(self, model: Path, logs: Path) -> None:
        self.model, self.logs = model, logs
        self._running: dict[tuple, Server] = {}
        self._preloaded: Preloaded | None = None

    def __call__(
        self,
        *flags: str,
        env: dict[str, str] | None = None,
        fresh: bool = False,
        alone: bool = False,
        model: Path | None = None,
    ) -> Server:
        """Returns a ready server with these flags; SGLang checks its pools as ``STRICT`` says.

        The server may stop at the second later call that asks for other flags.

        Args:
            env: variables of the server; they may undo those of ``STRICT``.
            fresh: start a server that has served nobody before.
            alone: stop all others first, for a server of several workers.
            model: a model other than most tests', with a class in ``MODEL_MODULES``.
        """
        model = model or self.model
        env = variables(env)
        key = (model, flags, tuple(sorted(env.items())))
        for other in [k for k in self._running if alone and k != key]:
            self._running.pop(other).stop(grace=0)
        server = self._running.pop(key, None)
        if server and (fresh or not server.running):
            server.stop(grace=0)
            server = None
        if server is None:
            while len(self._running) >= KEPT:
                self._running.pop(next(iter(self._running))).stop(grace=0)
            log = self.logs / f"server-{len(list(self.logs.iterdir()))}" / "server.log"
            if ON_GPU:
                # Plain BF16 attends with Triton kernels too, so that differences come from the cache.
                backend = () if "--kv-quant" in flags else ("--attention-backend", "triton")
                flags = (*GPU_FLAGS, *backend, *flags)
            server = self.forked(Server(model, *flags, cpu=not ON_GPU, env=env, log_path=log))
            server.start(READY)
        self._running[key] = server
        return server

    def forked(self, server: Server) -> Server:
        """Returns the server; it will fork from a process that has imported SGLang, if its variables allow that."""
        if not ON_GPU:
            self._preloaded = self._preloaded or Preloaded(server)
            if self._preloaded.can_fork(server):
                server.spawn = partial(self._preloaded.fork, server)
        return server

    @cached_property
    def shallow(self) -> Path:
        """The model's first layers, for tests of a server's behavior: on a CPU, decoding takes a fifth of the time."""
        return self.model if ON_GPU else shallow.cut(self.model, self.logs.with_name("shallow"))

    def stop(self) -> None:
        for server in self._running.values():
            server.stop(grace=0)
        self._running.clear()
        if self._preloaded:
            self._preloaded.stop()
            self._preloaded = None


@cache
def lacks(module: str, packages: str) -> str | None:
    """Returns what is missing if a module cannot be imported; None if it can."""
    run = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True)
    return None if run.returncode == 0 else f"needs pip install {packages}: {run.stderr.strip().splitlines()[-1]}"


@pytest.fixture(scope="session")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """``servers("--kv-quant", "oscar")`` returns a running server with those flags."""
    running = Servers(model, tmp_path_factory.mktemp("servers"))
    yield running
    running.stop()


@pytest.fixture(scope="session")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, str]]:
    """``faulty(*names)`` returns variables that make a server load ``server_faults.py`` with these faults."""
    folder, here = tmp_path_factory.mktemp("plugin"), Path(__file__).parent
    path = with_plugin(folder, here / "server_faults.py", os.environ.get("PYTHONPATH", ""))
    return lambda *names: {"PYTHONPATH": path, "KVQ_TEST_FAULTS": ",".join(names)}


@pytest.fixture(scope="session")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, str]]:
    """``plugins(*names)`` returns variables that make a server load these files of this folder as plugins."""

    def install(*names: str) -> dict[str, str]:
        folder, path = tmp_path_factory.mktemp("plugins"), os.environ.get("PYTHONPATH", "")
        for name in names:
            path = with_plugin(folder, Path(__file__).parent / f"{name}.py", path)
        return {"PYTHONPATH": path}

    return install


@pytest.fixture(scope="session")
def plugin(plugins: Callable[..., dict[str, str]]) -> dict[str, str]:
    """Returns variables with which a server loads ``linear_attention_on_cpu.py``."""
    return {} if ON_GPU else plugins("linear_attention_on_cpu")


@pytest.fixture
def refused(servers: Servers, tmp_path: Path) -> Callable[..., str]:
    """``refused(*flags)`` starts a server that must refuse to start, and returns its log.

    ``status`` is the exit status that it must have; None means any but 0.
    """

    def start(
        *flags: str, env: dict[str, str] | None = None, model: Path | None = None, status: int | None = None
    ) -> str:
        log = tmp_path / "server.log"
        server = servers.forked(Server(model or servers.shallow, *flags, env=variables(env), log_path=log))
        try:
            server.start(READY)
        except Exception:
            assert server.process is not None and server.process.returncode not in (None, 0), server.log_tail()
            assert status in (None, server.process.returncode), server.log_tail()
            return server.log()
        server.stop()
        pytest.fail(f"the server started with {' '.join(flags)}, but must refuse\n{server.log_tail()}", pytrace=False)

    return start
