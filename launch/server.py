"""A running SGLang server as a context manager, for the demo and the end-to-end tests."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_kvq.server_process import OPENER, ServerFailed, ServerProcess, free_port

#: Flags that SGLang needs on a machine without accelerator.
CPU_FLAGS = (
    *("--device", "cpu", "--dtype", "bfloat16"),
    *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--sleep-on-idle"),
    *("--max-running-requests", "8", "--context-length", "2048"),
)
#: Keeps the pools small, unless the caller sizes them by a share of the memory.
CPU_CAPACITY = ("--max-total-tokens", "4096")


class ServerError(RuntimeError):
    """The server did not start, stopped by itself, or answered with an error; the message ends with its log."""


def cpu_flags(flags: Sequence[str]) -> list[str]:
    """Returns ``flags`` with the CPU's defaults before them, so that a flag given twice takes the caller's value."""
    chosen = flags[flags.index("--kv-quant") + 1] if "--kv-quant" in flags else "none"
    # With a method, the plugin has its own attention backend.
    backend = ["--attention-backend", "torch_native"] if chosen == "none" else []
    capacity = () if "--mem-fraction-static" in flags else CPU_CAPACITY
    return [*CPU_FLAGS, *capacity, *backend, *flags]


def cpu_environment(flags: Sequence[str]) -> dict[str, str]:
    """Returns the environment variables of SGLang's CPU engine for these flags.

    Unless told which cores to use, the engine binds each rank to one NUMA node, and stops if there are more ranks than
    nodes.
    """
    chosen = {"SGLANG_USE_CPU_ENGINE": "1"}
    sizes = [int(flags[flags.index(flag) + 1]) for flag in ("--tp-size", "--pp-size") if flag in flags]
    if sizes:
        ranks, cores = math.prod(sizes), sorted(os.sched_getaffinity(0))
        chosen["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    return chosen


class Server(ServerProcess):
    """``python -m sglang.launch_server`` on a free loopback port, for the duration of the ``with`` block.

    Args:
        model: folder or hub name.
        flags: SGLang's and the plugin's flags; on a CPU they follow ``CPU_FLAGS``.
        python: interpreter of the environment that has SGLang.
        cpu: run on the CPU engine.
        env: variables added to this process's own.
        log_path: file for stdout and stderr; a temporary file if None.

    Raises:
        ServerError: by ``start``, if the process ends or is not ready in time.
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
        port = free_port()
        command = [
            *(str(python), "-m", "sglang.launch_server", "--model-path", str(model)),
            *("--host", "127.0.0.1", "--port", str(port)),
            *(cpu_flags(flags) if cpu else flags),
        ]
        # A test process may have set the CPU engine for itself.
        own = cpu_environment(flags) if cpu else {"SGLANG_USE_CPU_ENGINE": "0"}
        if Path(model).is_dir():
            own["HF_HUB_OFFLINE"] = "1"
        log = Path(log_path) if log_path else Path(tempfile.mkdtemp(prefix="kvq-server-")) / "server.log"
        super().__init__(command, log, port, {**own, **(env or {})})

    def start(self, timeout: float | None = None) -> Server:
        try:
            super().start(timeout)
        except ServerFailed as error:
            raise ServerError(f"{error}\n{self.log_tail()}") from None
        return self

    def log_tail(self, lines: int = 40) -> str:
        return f"--- last {lines} lines of {self.log_path} ---\n{super().log_tail(lines)}"

    # -- requests -----------------------------------------------------------------------------------------

    def request(self, path: str, body: Any = None, timeout: float = 300.0) -> bytes:
        """Sends a GET, or a POST of ``body`` as JSON; returns the body of the answer.

        Raises:
            ServerError: the status is not 2xx; the message has the server's words.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with OPENER.open(request, timeout=timeout) as response:
                content: bytes = response.read()
                return content
        except urllib.error.HTTPError as error:
            raise ServerError(f"{path}: {error.code} {error.read().decode(errors='replace')}") from error
        except OSError as error:
            raise ServerError(f"{path}: {error}\n{self.log_tail()}") from error

    def json(self, path: str, body: Any = None, timeout: float = 300.0) -> Any:
        return json.loads(self.request(path, body, timeout))

    def generate(self, prompt: str | list[int], max_new_tokens: int = 16, **options: Any) -> dict[str, Any]:
        """Calls SGLang's own ``/generate``, greedy unless ``sampling_params`` says otherwise.

        ``options`` are passed on unchanged (``return_logprob=True``, ``session_params=…``). A list is token ids.
        """
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, **options.pop("sampling_params", {})}
        source = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
        answer: dict[str, Any] = self.json("/generate", {**source, "sampling_params": sampling, **options})
        return answer

    def openai(self) -> Any:
        """Returns a client of the ``openai`` package for this server."""
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=300.0, max_retries=0)

    def chat(self, question: str, max_tokens: int = 64, **options: Any) -> str:
        """Returns the answer to one user message, greedy, through the ``openai`` client."""
        options.setdefault("temperature", 0)
        answer = self.openai().chat.completions.create(
            model="default", messages=[{"role": "user", "content": question}], max_tokens=max_tokens, **options
        )
        return answer.choices[0].message.content or ""

    def info(self) -> dict[str, Any]:
        info: dict[str, Any] = self.json("/server_info")
        return info

    def kv_quant(self) -> dict[str, Any]:
        """Returns the plugin's part of ``/server_info``: method, sizes, and current use.

        Raises:
            ServerError: the server reports none, so the plugin is not in use.
        """
        # One part is fixed at start, the other is the scheduler's state; later parts are more recent.
        found = [part for part in _find(self.info(), "kv_quant") if isinstance(part, dict)]
        if not found:
            raise ServerError(f"/server_info has no kv_quant: the plugin is not in use\n{self.log_tail()}")
        return {key: value for part in found for key, value in part.items()}

    def flush(self) -> None:
        """Empties the prefix cache (the server must be idle)."""
        self.request("/flush_cache", {})

    def drain(self, seconds: float = 60) -> None:
        """Waits until nothing runs, then empties the prefix cache.

        Raises:
            ServerError: requests still run after that time.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                return self.flush()
            except ServerError as error:
                self.check_alive()
                if time.monotonic() > deadline:
                    raise ServerError(f"not idle after {seconds:.0f} s: {error}") from None
                time.sleep(0.05)


def _find(tree: Any, key: str) -> Iterator[Any]:
    """Yields every value under ``key`` in nested dicts and lists, outermost first; its place depends on the release."""
    if isinstance(tree, dict):
        if key in tree:
            yield tree[key]
        tree = list(tree.values())
    if isinstance(tree, list):
        for inner in tree:
            yield from _find(inner, key)
