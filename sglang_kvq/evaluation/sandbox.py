"""Runs generated programs where they can do no harm, and says whether they passed.

One program is one process tree in new PID, network, mount and IPC namespaces (as root, or through a user namespace):
no network, not even loopback; the whole file system read-only but for an empty /tmp; no other process in sight; no
environment variables; stdin at its end; ``python -I``. CPU time, address space, file sizes, processes and open files
are limited, and when the time is up the namespace's first process is killed and the kernel ends all others with it.
"""

from __future__ import annotations

import functools
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sglang_kvq.errors import KVQuantError

_CHILD = Path(__file__).with_name("sandbox_child.py")
#: The child's exit code when a wall could not be closed: nothing of the program has run.
_NOT_CLOSED = 97
_NAMESPACES = ("--pid", "--fork", "--kill-child=KILL", "--net", "--mount", "--ipc")
#: Users that no account has (systemd hands out the same range to services): one per program, so that limits on a
#: user's processes count that program's alone.
_UIDS = range(61184, 65519)


@dataclass(frozen=True)
class Limits:
    """Of one program.

    Attributes:
        cpu_seconds, memory_bytes: of each process (RLIMIT_CPU, RLIMIT_AS).
        wall_seconds: of all of them together; more than the CPU's, because programs share it.
        processes: also threads; RLIMIT_NPROC, where the program has a user of its own.
        file_bytes: per file, printed output included (RLIMIT_FSIZE).
        disk_bytes: of /tmp altogether.
    """

    cpu_seconds: int = 10
    wall_seconds: float = 30.0
    memory_bytes: int = 1 << 30
    processes: int = 16
    file_bytes: int = 1 << 20
    disk_bytes: int = 16 << 20


@dataclass(frozen=True)
class Verdict:
    """``passed``, and else why not: the last lines that the program printed, or the limit that ended it."""

    passed: bool
    reason: str = ""


@functools.cache
def namespace_command() -> tuple[str, ...] | None:
    """The ``unshare`` command that works on this machine: root's own, or a user namespace; None if neither does."""
    if not shutil.which("unshare"):
        return None
    for command in (("unshare", *_NAMESPACES), ("unshare", "--user", "--map-root-user", *_NAMESPACES)):
        if "--user" not in command and os.geteuid() != 0:
            continue
        if _start("pass", Limits(), command)[0] == 0:
            return command
    return None


def require(allow_unsandboxed: bool) -> str | None:
    """Check once, before anything is generated, that programs can be contained.

    Returns:
        None, or with ``allow_unsandboxed`` the warning that goes into the report.

    Raises:
        KVQuantError: they cannot, and nobody allowed that.
    """
    if namespace_command() is not None:
        return None
    if not allow_unsandboxed:
        raise KVQuantError(
            "generated programs cannot be sandboxed here: unshare(1) may not make PID, network and mount namespaces "
            "(in a container: --cap-add SYS_ADMIN, or allow user namespaces). On a machine with nothing to lose and no "
            "network, --allow-unsandboxed runs them with limits on time, memory, files and processes only."
        )
    return "network and file system were not cut off (--allow-unsandboxed): limits on time and memory only"


def run(program: str, limits: Limits = Limits()) -> Verdict:
    """Run a Python program; it passed if it reached its end.

    A line printed by the very end tells that from a program that merely exits with status 0.
    """
    token = secrets.token_hex(16)
    program = f"{program}\n\nimport os as _os\n_os.write(1, b'\\n{token}')\n"
    code, output = _start(program, limits, namespace_command())
    if code == _NOT_CLOSED:
        raise KVQuantError(f"the sandbox could not be closed: {output.strip()}")
    if code == 0 and token in output:  # what Python had buffered may come after it
        return Verdict(True)
    if code is None:
        return Verdict(False, f"timeout: {limits.wall_seconds:g} s")
    if code - 128 in (signal.SIGXCPU, signal.SIGKILL):
        return Verdict(False, f"timeout: {limits.cpu_seconds} s of CPU time")
    lines = [line for line in output.splitlines() if line.strip()]
    return Verdict(False, lines[-1][-300:] if lines else f"exit status {code}, nothing printed")


def _start(program: str, limits: Limits, namespaces: tuple[str, ...] | None) -> tuple[int | None, str]:
    """Exit status (None: out of time) and the end of what was printed."""
    root = os.geteuid() == 0 and "--user" not in (namespaces or ())
    # RLIMIT_NPROC counts all processes of a user: only where the program has its own (or its own user namespace)
    # can a small number be meant for it.
    own_user = root or "--user" in (namespaces or ())
    order = {
        "program": program,
        "isolate": namespaces is not None,
        # Without namespaces the interpreter may lie where another user cannot read.
        "uid": random.choice(_UIDS) if root and namespaces else None,
        "disk_bytes": limits.disk_bytes,
        "limits": {
            "CPU": limits.cpu_seconds,
            "AS": limits.memory_bytes,
            "FSIZE": limits.file_bytes,
            "NPROC": limits.processes if namespaces and own_user else None,
            "NOFILE": 64,
            "CORE": 0,
        },
    }
    with tempfile.TemporaryDirectory(prefix="kvq-") as folder, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [*(namespaces or ()), sys.executable, "-I", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={"PATH": os.defpath},
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps(order).encode(), timeout=limits.wall_seconds)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            code = None
        except BrokenPipeError:
            code = process.wait()
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        size = output.seek(0, os.SEEK_END)
        output.seek(max(0, size - 65536))
        return code, output.read().decode(errors="replace")
