"""A running SGLang server as a context manager: the demo and the end-to-end tests start it the same way."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

#: What SGLang needs on a machine with no accelerator.
CPU_FLAGS = (
    *("--device", "cpu", "--dtype", "bfloat16"),
    *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--sleep-on-idle"),
    *("--max-running-requests", "8", "--context-length", "2048"),
)
#: Keeps the pools small, unless the caller sizes them by a share of the memory.
CPU_CAPACITY = ("--max-total-tokens", "4096")

# Names given here never go through a proxy: the server is on this machine.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(RuntimeError):
    """The server did not start, stopped by itself, or answered with an error; the message ends with its log."""


def free_port() -> int:
    """A loopback TCP port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def cpu_flags(flags: Sequence[str]) -> list[str]:
    """``flags`` with the CPU's defaults before them, so that a flag given twice takes the caller's value."""
    chosen = flags[flags.index("--kv-quant") + 1] if "--kv-quant" in flags else "none"
    # With a method the plugin brings its own attention backend.
    backend = ["--attention-backend", "torch_native"] if chosen == "none" else []
    capacity = () if "--mem-fraction-static" in flags else CPU_CAPACITY
    return [*CPU_FLAGS, *capacity, *backend, *flags]


def cpu_environment(flags: Sequence[str]) -> dict[str, str]:
    """Variables of SGLang's CPU engine for these flags.

    It binds each tensor-parallel rank to one NUMA node unless told to which cores; ranks beyond the nodes would stop it.
    """
    chosen = {"SGLANG_USE_CPU_ENGINE": "1"}
    if "--tp-size" in flags:
        ranks, cores = int(flags[flags.index("--tp-size") + 1]), sorted(os.sched_getaffinity(0))
        chosen["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    return chosen


def _die_with_parent() -> None:
    """In the child: if this process is killed outright, the kernel ends the server too (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Server:
    """``python -m sglang.launch_server`` on a free loopback port, for as long as the ``with`` block lasts.

    Args:
        model: folder or hub name.
        flags: SGLang's and the plugin's flags; on a CPU they follow ``CPU_FLAGS``.
        python: interpreter of the environment that has SGLang.
        cpu: run on the CPU engine.
        env: variables added to this process's own.
        log_path: where stdout and stderr go; a temporary file if None.

    Raises:
        ServerError: by ``start``, when the process ends or is not ready in time.
    """

    def __init__(
        self,
        model: str | Path,
        *flags: str,
        python: str | Path = sys.executable,
        cpu: bool = True,
        env: Mapping[str, str] | None = None,
        log_path: str | Path | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = Path(log_path) if log_path else Path(tempfile.mkdtemp(prefix="kvq-server-")) / "server.log"
        self.command = [
            *(str(python), "-m", "sglang.launch_server", "--model-path", str(model)),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *(cpu_flags(flags) if cpu else flags),
        ]
        self.env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "NO_PROXY": "127.0.0.1,localhost"}
        self.env["no_proxy"] = self.env["NO_PROXY"]
        self.env.pop("SGLANG_USE_CPU_ENGINE", None)  # a test process may have set it for itself
        if cpu:
            self.env.update(cpu_environment(flags))
        if Path(model).is_dir():
            self.env["HF_HUB_OFFLINE"] = "1"
        self.env.update(env or {})
        self.process: subprocess.Popen[bytes] | None = None

    # -- life ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self, timeout: float = 300.0, waiting: Callable[[float], None] | None = None) -> Server:
        """Starts and waits until it serves; ``waiting`` is told the seconds passed, about twice a second."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.env,
                cwd=self.log_path.parent,  # not the repository: the current folder is on the server's sys.path
                start_new_session=True,  # one group with its children; Ctrl-C reaches us, and we stop them
                preexec_fn=_die_with_parent,
            )
        begin = time.monotonic()
        try:
            while not self._healthy():
                passed = time.monotonic() - begin
                if not self.running:
                    raise ServerError(f"the server ended with code {self.process.returncode}\n{self.log_tail()}")
                if passed > timeout:
                    raise ServerError(f"the server was not ready after {timeout:.0f} s\n{self.log_tail()}")
                if waiting:
                    waiting(passed)
                time.sleep(0.5)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Ends the server and everything it started. Safe to call twice."""
        if self.process is None:
            return
        if self.running:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    # -- log ----------------------------------------------------------------------------------------------

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self, lines: int = 40) -> str:
        tail = "\n".join(self.log().splitlines()[-lines:])
        return f"--- last {lines} lines of {self.log_path} ---\n{tail}"

    # -- requests -----------------------------------------------------------------------------------------

    def request(self, path: str, body: Any = None, timeout: float = 300.0) -> bytes:
        """GET, or POST of ``body`` as JSON.

        Raises:
            ServerError: any status but 2xx, with the server's words.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with _OPENER.open(request, timeout=timeout) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            raise ServerError(f"{path}: {error.code} {error.read().decode(errors='replace')}") from error
        except OSError as error:
            raise ServerError(f"{path}: {error}\n{self.log_tail()}") from error

    def json(self, path: str, body: Any = None, timeout: float = 300.0) -> Any:
        return json.loads(self.request(path, body, timeout))

    def generate(self, prompt: str | list[int], max_new_tokens: int = 16, **options: Any) -> dict[str, Any]:
        """SGLang's own ``/generate``, greedy unless ``sampling_params`` says otherwise.

        ``options`` go in as they are (``return_logprob=True``, ``session_params=…``). A list is token ids.
        """
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, **options.pop("sampling_params", {})}
        source = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
        return self.json("/generate", {**source, "sampling_params": sampling, **options})

    def openai(self) -> Any:
        """A client of the ``openai`` package for this server."""
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=300.0, max_retries=0)

    def chat(self, question: str, max_tokens: int = 64, **options: Any) -> str:
        """The answer to one user message, greedy, through the ``openai`` client."""
        options.setdefault("temperature", 0)
        answer = self.openai().chat.completions.create(
            model="default", messages=[{"role": "user", "content": question}], max_tokens=max_tokens, **options
        )
        return answer.choices[0].message.content or ""

    def info(self) -> dict[str, Any]:
        return self.json("/server_info")

    def kv_quant(self) -> dict[str, Any]:
        """The plugin's part of ``/server_info``: what is served, and how much of it is in use now.

        Raises:
            ServerError: the server reports none, so the plugin is not in use.
        """
        # A part that is fixed at start and one of the scheduler's state; later ones are the more recent.
        found = [part for part in _find(self.info(), "kv_quant") if isinstance(part, dict)]
        if not found:
            raise ServerError(f"/server_info has no kv_quant: the plugin is not in use\n{self.log_tail()}")
        return {key: value for part in found for key, value in part.items()}

    def flush(self) -> None:
        """Empties the prefix cache (the server must be idle)."""
        self.request("/flush_cache", {})

    def _healthy(self) -> bool:
        try:
            with _OPENER.open(self.url + "/health", timeout=30) as response:
                return response.status == 200
        except OSError:  # refused, 503 while it loads, or slow
            return False


def _find(tree: Any, key: str) -> Iterator[Any]:
    """Every value under ``key`` in nested dicts and lists, outermost first. SGLang moved the schedulers' part."""
    if isinstance(tree, dict):
        if key in tree:
            yield tree[key]
        tree = list(tree.values())
    if isinstance(tree, list):
        for inner in tree:
            yield from _find(inner, key)
