"""Runs a server as a child process: starts it in its own process group, waits for it, and ends it with its children."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from sglang_kvq.errors import KVQuantError

#: Hosts that are never reached through a proxy, because the server is on this machine.
LOCAL = "127.0.0.1,localhost"
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
#: Python program that becomes the server, after telling the kernel to kill it if this process dies (PR_SET_PDEATHSIG).
#: ``preexec_fn`` could do the same, but it is unsafe in a process with several threads.
_TIED = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
#: Ports for servers, below those that a system uses for connections: from 32768 on Linux, 49152 elsewhere. Each SGLang
#: server also takes a random port from 22000 to 29999 for itself.
PORTS = range(16000, 22000)
_ports: set[int] = set()
_Self = TypeVar("_Self", bound="ServerProcess")


class ServerFailed(KVQuantError):
    """The server did not start, or stopped by itself; ``log`` has the last lines of its log."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


def free_port() -> int:
    """Returns a loopback TCP port that nobody listens on and that this process has not given out before.

    A server binds its port up to a minute after this choice. So the port is one of ``PORTS``, which no connection takes
    in the meantime. It is random, so that other processes that start servers are unlikely to choose the same port.

    Raises:
        ServerFailed: no port is left.
    """
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        if port not in _ports and _is_free(port):
            _ports.add(port)
            return port
    raise ServerFailed(f"no free port from {PORTS.start} to {PORTS.stop - 1}. Stop what listens there.", "")


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class ServerProcess:
    """An HTTP server on a loopback port that answers ``/health`` when it is ready; it ends with the ``with`` block.

    Args:
        command: words of the command, which must listen on ``port``; the first word is looked up on the path.
        log_path: file for the server's output; its folder is the server's working directory.
        port: a port from ``free_port``.
        env: variables added to this process's own.
    """

    #: Seconds until a server must be ready, and the advice in the error on how to extend them.
    start_timeout = 300.0
    more_time = ""

    def __init__(self, command: Sequence[str], log_path: Path, port: int, env: Mapping[str, str] | None = None) -> None:
        self.command, self.log_path, self.port = list(command), log_path.resolve(), port
        self.url = f"http://127.0.0.1:{port}"
        direct = ",".join(filter(None, (os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), LOCAL)))
        self.env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "no_proxy": direct, "NO_PROXY": direct}
        self.env.update(env or {})
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self: _Self) -> _Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def while_starting(self, passed: float) -> None:
        """Does nothing; subclasses may override it. Called about twice a second while the server starts.

        passed: seconds since the start. An exception ends the server.
        """

    def spawn(self) -> subprocess.Popen[bytes]:
        """Starts the process, with its output in the log."""
        with self.log_path.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-I", "-c", _TIED, *self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.env,
                cwd=self.log_path.parent,  # not the repository, because the current folder is on the server's sys.path
                start_new_session=True,  # one group with its children: Ctrl-C reaches only us, and we stop the group
            )

    def start(self: _Self, timeout: float | None = None) -> _Self:
        """Starts the server and waits until it is ready.

        Args:
            timeout: seconds until it must be ready; None for ``start_timeout``.

        Raises:
            ServerFailed: the server ended, or was not ready in time.
        """
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        begin, timeout = time.monotonic(), self.start_timeout if timeout is None else timeout
        try:
            self.process = self.spawn()
            while not self._healthy():
                self.check_alive()
                passed = time.monotonic() - begin
                if passed > timeout:
                    raise ServerFailed(f"not ready after {timeout:.0f} s{self.more_time}", self.log_tail())
                self.while_starting(passed)
                time.sleep(0.5)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self, grace: float = 10.0) -> None:
        """Ends the server and everything it started. Safe to call twice.

        Args:
            grace: seconds that the server has to end by itself before it is killed.
        """
        if self.process is None:
            return
        if self.running and grace:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=grace)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def check_alive(self) -> None:
        """Checks that the server is still running.

        Raises:
            ServerFailed: the server has stopped by itself.
        """
        if self.process is not None and self.process.poll() is not None:
            raise ServerFailed(self._reason(), self.log_tail())

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log().splitlines()[-lines:])

    def _reason(self) -> str:
        """Returns in one line why the server ended."""
        return f"the server ended with code {self.process.returncode if self.process else None}"

    def _healthy(self) -> bool:
        try:
            with OPENER.open(self.url + "/health", timeout=30) as response:
                return bool(response.status == 200)
        except OSError:  # refused, 503 while it loads, or slow
            return False
