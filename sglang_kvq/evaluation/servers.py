"""The servers that ``kvq eval --model`` compares."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sglang_kvq.evaluation import provenance
from sglang_kvq.evaluation.files import model_identity
from sglang_kvq.evaluation.specs import MethodSpec, names
from sglang_kvq.server_process import ServerFailed, ServerProcess, free_port

#: Names in --server-command that stand for this interpreter.
PYTHON = ("python", "python3")


def _whole(word: str) -> str:
    return str(Path(word).absolute()) if "/" in word and Path(word).exists() else word


@dataclass(frozen=True)
class Launch:
    """Settings for starting servers.

    Attributes:
        flags: for all servers.
        plain_flags: only for servers without ``--kv-quant``, for instance an attention backend.
        parallel: simultaneous servers on the same devices; with ``gpus``, per GPU.
        gpus: each server sees one of them, as CUDA_VISIBLE_DEVICES names it; empty: every server sees all.
    """

    model: str
    command: str
    flags: tuple[str, ...] = ()
    plain_flags: tuple[str, ...] = ()
    parallel: int = 1
    start_timeout: float = 600.0
    gpus: tuple[str, ...] = ()

    def of(self, spec: MethodSpec) -> list[str]:
        """Returns all flags of a method's server except its address."""
        flags = [*self._shared(spec), *spec.flags]
        return [*spec.chunk_flags(flags), *flags]

    @cached_property
    def known_as(self) -> str:
        """The model's identity (``files.model_identity``), which reads the ends of its files: once for all methods."""
        return model_identity(self.model)

    def identity(self, spec: MethodSpec) -> dict[str, Any]:
        """Returns the settings that determine values, without paths."""
        return {
            "model": self.known_as,
            **spec.identity(),
            "flags": [provenance.without_paths(word) for word in self._shared(spec)],
        }

    def _shared(self, spec: MethodSpec) -> tuple[str, ...]:
        """Returns the flags that the spec does not set itself."""
        return (*self.flags, *(self.plain_flags if spec.method in ("none", "fp8") else ()))


class EvaluatedServer(ServerProcess):
    """A method's server on a loopback port, for the duration of the ``with`` block.

    Args:
        log: file for its output; its folder is the server's working folder.
        stopped: called twice a second while it starts; True aborts the start.
        gpu: the GPU that the server sees, as CUDA_VISIBLE_DEVICES names it; empty: all.
    """

    more_time = " (--start-timeout)"

    def __init__(self, launch: Launch, spec: MethodSpec, log: Path, stopped: Callable[[], bool], gpu: str) -> None:
        self.start_timeout, self.stopped = launch.start_timeout, stopped
        words, flags = shlex.split(launch.command), launch.of(spec)
        if words[0] in PYTHON:
            words[0] = sys.executable
        port = free_port()
        where = ("--host", "127.0.0.1", "--port", str(port))
        # Servers that look for a free port at the same time would find the same one.
        meeting = ("--nccl-port", str(free_port())) if gpu and not names(flags, "--nccl-port") else ()
        env: Mapping[str, str] = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        # The server runs in another folder, so relative paths must become absolute.
        whole = [*map(_whole, words), "--model-path", launch.model, *where, *meeting, *map(_whole, flags)]
        super().__init__(whole, log, port, env)

    @property
    def is_ours(self) -> bool:
        """True if the server runs in this interpreter, and so with the same versions of packages."""
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
