"""Starting and stopping the servers that ``kvq eval --model`` compares."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from sglang_kvq.errors import KVQuantError

#: Small chunks: most of a prompt then attends to stored keys and values, which is what is measured.
CHUNK = ("--chunked-prefill-size", "128")
#: Ends the server when this process is killed outright (PR_SET_PDEATHSIG), then becomes it.
_TIED = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_ports: set[int] = set()


class ServerFailed(KVQuantError):
    """The server did not start, or stopped by itself; ``log`` has its last lines."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


def free_port() -> int:
    """A loopback TCP port that nobody listens on and that this process has not given out before."""
    while True:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        if port not in _ports:
            _ports.add(port)
            return port


def _whole(word: str) -> str:
    return str(Path(word).absolute()) if "/" in word and Path(word).exists() else word


class ServerProcess:
    """A server on a loopback port, for as long as the ``with`` block lasts.

    Args:
        command: what starts a server, without model and address: ``python -m sglang.launch_server``.
        model: folder or hub name.
        flags: everything else; ``--chunked-prefill-size 128`` unless they say otherwise.
        log: file for what it prints; its folder is the server's working folder.
        timeout: seconds until it must be ready.
        stopped: asked twice a second while it starts; if true, starting is given up.
    """

    def __init__(
        self,
        command: str,
        model: str,
        flags: Sequence[str],
        log: Path,
        *,
        timeout: float = 600.0,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path, self.timeout, self.stopped = log.resolve(), timeout, stopped
        words = shlex.split(command) or [""]
        if words[0] in ("python", "python3"):
            words[0] = sys.executable
        where = ("--host", "127.0.0.1", "--port", str(self.port))
        chunk = () if any(flag.startswith(CHUNK[0]) for flag in flags) else CHUNK
        # The server runs in another folder, so what is a path from here must be a whole one.
        self.command = [*map(_whole, words), "--model-path", model, *where, *chunk, *map(_whole, flags)]
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        begin = time.monotonic()
        try:
            with self.log_path.open("wb") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _TIED, *self.command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    cwd=self.log_path.parent,  # the current folder is on the server's sys.path
                    start_new_session=True,  # one group with its children; Ctrl-C reaches us, and we stop them
                )
            while not self._healthy():
                if self.process.poll() is not None:
                    raise ServerFailed(self._reason(), self.log_tail())
                if self.stopped():
                    raise ServerFailed("interrupted while it started", "")
                if time.monotonic() - begin > self.timeout:
                    raise ServerFailed(f"not ready after {self.timeout:.0f} s (--start-timeout)", self.log_tail())
                time.sleep(0.5)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the server and everything it started."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def check_alive(self) -> None:
        """Raises:
        ServerFailed: it stopped by itself since it was ready.
        """
        if self.process is not None and self.process.poll() is not None:
            raise ServerFailed(self._reason(), self.log_tail())

    def log_tail(self, lines: int = 25) -> str:
        return "\n".join(self._log().splitlines()[-lines:])

    def _log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def _reason(self) -> str:
        """One line out of the log that says why, as well as can be told."""
        lines = [line.strip() for line in self._log().splitlines()]
        code = self.process.returncode if self.process else None
        for pattern in (r"sglang-kvq: |KVQuantError", r"^[\w.]*(Error|Exception)\b.*:", r"\berror: "):
            if found := [line for line in lines if re.search(pattern, line)]:
                return f"the server ended with code {code}: {found[-1][:500]}"
        return f"the server ended with code {code}: {lines[-1][:500] if lines else 'nothing in its log'}"

    def _healthy(self) -> bool:
        try:
            with _OPENER.open(self.url + "/health", timeout=30) as response:
                return response.status == 200
        except OSError:  # refused, 503 while it loads, or slow
            return False
