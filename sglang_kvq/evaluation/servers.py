"""The servers that ``kvq eval --model`` compares."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sglang_kvq.evaluation.specs import names
from sglang_kvq.server_process import ServerFailed, ServerProcess, free_port


def _whole(word: str) -> str:
    return str(Path(word).absolute()) if "/" in word and Path(word).exists() else word


class EvaluatedServer(ServerProcess):
    """A server on a loopback port, for the duration of the ``with`` block.

    Args:
        command: starts a server, without model and address: ``python -m sglang.launch_server``.
        model: folder or hub name.
        flags: all other flags.
        log: file for its output; its folder is the server's working folder.
        timeout: seconds until it must be ready.
        stopped: called twice a second while it starts; True aborts the start.
        gpu: the GPU that it sees, as CUDA_VISIBLE_DEVICES names it; empty: all.
    """

    more_time = " (--start-timeout)"

    def __init__(
        self,
        command: str,
        model: str,
        flags: Sequence[str],
        log: Path,
        *,
        timeout: float = 600.0,
        stopped: Callable[[], bool] = lambda: False,
        gpu: str = "",
    ) -> None:
        self.start_timeout, self.stopped = timeout, stopped
        words = shlex.split(command) or [""]
        if words[0] in ("python", "python3"):
            words[0] = sys.executable
        port = free_port()
        where = ("--host", "127.0.0.1", "--port", str(port))
        # Servers that start at the same time would look for a free port together, and find the same one.
        meeting = ("--nccl-port", str(free_port())) if gpu and not names(flags, "--nccl-port") else ()
        env: Mapping[str, str] = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        # The server runs in another folder, so relative paths must become absolute.
        whole = [*map(_whole, words), "--model-path", model, *where, *meeting, *map(_whole, flags)]
        super().__init__(whole, log, port, env)

    @property
    def is_ours(self) -> bool:
        """True if it runs in this interpreter, and so with these versions of packages."""
        return self.command[0] == sys.executable

    def while_starting(self, passed: float) -> None:
        if self.stopped():
            raise ServerFailed(f"interrupted after {passed:.0f} s of starting", "")

    def _reason(self) -> str:
        """Returns the line of the log that most likely gives the reason."""
        lines = [line.strip() for line in self.log().splitlines()]
        for pattern in (r"sglang-kvq: |KVQuantError", r"^[\w.]*(Error|Exception)\b.*:", r"\berror: "):
            if found := [line for line in lines if re.search(pattern, line)]:
                return f"{super()._reason()}: {found[-1][:500]}"
        return f"{super()._reason()}: {lines[-1][:500] if lines else 'nothing in its log'}"
