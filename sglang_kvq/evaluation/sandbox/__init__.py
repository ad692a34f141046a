"""Runs generated programs in a sandbox and returns whether they passed.

Each program is a process tree in new PID, network, mount and IPC namespaces. Its root holds only the interpreter, the
standard library and shared libraries, all read-only, /dev/null and /dev/urandom, and an empty /tmp of bounded size. It
has no other files, processes, network, sockets, environment variables, input or capabilities. It runs as ``python -I``
under a seccomp filter. CPU time, address space, file sizes, processes and open files are limited. When the time is up,
the namespace's first process is killed, and the kernel ends all others with it.

layout.py lists the root's content, filter.py the refused system calls, and child.py sets the sandbox up.
docs/sandbox.md says which mechanisms are used with which rights.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.sandbox.filter import instructions

_CHILD = Path(__file__).with_name("child.py")
_LAYOUT = Path(__file__).with_name("layout.py")
#: The child's exit code if the sandbox could not be set up; the program has not run.
_NOT_CLOSED = 97
#: User ids that belong to no account (systemd lends out the same range). Each program gets its own user id, so a limit
#: on a user's processes counts only that program's.
_UIDS = range(61184, 65519)


@dataclass(frozen=True)
class Limits:
    """Limits of one program.

    Attributes:
        cpu_seconds, memory_bytes: per process (RLIMIT_CPU, RLIMIT_AS).
        wall_seconds: for all processes together; larger than the CPU limit, because programs share the CPU.
        processes: processes and threads (RLIMIT_NPROC); applies only if the program has a user of its own.
        file_bytes: per file, printed output included (RLIMIT_FSIZE).
        disk_bytes: total size of /tmp.
    """

    cpu_seconds: int = 10
    wall_seconds: float = 30.0
    memory_bytes: int = 1 << 30
    processes: int = 16
    file_bytes: int = 1 << 20
    disk_bytes: int = 16 << 20


@dataclass(frozen=True)
class Verdict:
    """Result of one program. If it failed, ``reason`` is its last printed line, or the limit that ended it."""

    passed: bool
    reason: str = ""


#: A sandbox in which this program passes is closed.
_PROBE = f"""
import os, socket, time
seen = sorted(os.listdir("/dev") + os.listdir("/proc") + os.listdir("/proc/self"))
assert seen == ["exe", "null", "self", "urandom"], seen
try:
    socket.socket()
    raise SystemExit("the seccomp filter does not hold: sockets can be made")
except PermissionError:
    pass
try:
    for _ in range({Limits.processes}):
        os.fork() or time.sleep(60)
    raise SystemExit("the limit on processes does not hold")
except BlockingIOError:
    pass
"""


@dataclass(frozen=True)
class Walls:
    """The kind of sandbox that works on this machine.

    Attributes:
        kind: "root" (namespaces made with root's rights), "user" (through a user namespace), or None: neither works.
        why_not: the kinds that failed, each with its error.
    """

    kind: str | None
    why_not: tuple[str, ...] = ()


@functools.cache
def walls() -> Walls:
    """Returns the first kind of sandbox in which a probe program passes on this machine."""
    why_not: list[str] = []
    for kind in ("root", "user")[os.geteuid() != 0 :]:
        code, output = _start(_PROBE, Limits(), kind)
        if code == 0:
            return Walls(kind, tuple(why_not))
        means = "as root" if kind == "root" else "in a user namespace"
        lines = [line.strip() for line in output.splitlines() if line.strip()] or [f"exit status {code}"]
        why_not.append(f"{means}: {' / '.join(lines[-3:]).removeprefix('sandbox: ')}")
    return Walls(None, tuple(why_not))


def require(allow_unsandboxed: bool) -> str | None:
    """Checks once, before anything is generated, that programs can be contained.

    Returns:
        None, or with ``allow_unsandboxed`` the warning for the report.

    Raises:
        KVQuantError: programs cannot be contained, and ``allow_unsandboxed`` is False.
    """
    here = walls()
    if here.kind is not None:
        return None
    if not allow_unsandboxed:
        raise KVQuantError(
            f"generated programs cannot be sandboxed here ({'; '.join(here.why_not)}). {_fix()} On a disposable "
            "machine without a network, pass --allow-unsandboxed: only time, memory and files are then limited."
        )
    return "network and file system were not cut off (--allow-unsandboxed): limits on time and memory only"


#: Kernel settings that keep users from making user namespaces: the value that forbids it, and one that allows it.
_SETTINGS = {
    "user.max_user_namespaces": ("0", "15000"),
    "kernel.unprivileged_userns_clone": ("0", "1"),
    "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
}


def _fix() -> str:
    """Returns advice on how to allow namespaces on this machine."""
    for name, (closed, opened) in _SETTINGS.items():
        path = Path("/proc/sys", *name.split("."))
        if path.exists() and path.read_text(encoding="utf-8").strip() == closed:
            return (
                f"{name} is {closed} here: let users make namespaces (sysctl -w {name}={opened}), or run the "
                "evaluation as root with CAP_SYS_ADMIN."
            )
    return (
        "The sandbox needs Linux 5.12 or newer, and a container's default profile refuses its namespaces: start the "
        "container with --security-opt seccomp=unconfined --security-opt apparmor=unconfined, or --privileged "
        "(Kubernetes: seccompProfile and appArmorProfile of type Unconfined), or run the evaluation outside of it."
    )


def run(program: str, limits: Limits = Limits()) -> Verdict:
    """Runs a Python program and returns whether it reached its end.

    A random line printed at its very end proves this. Exit status 0 does not, because a program may exit early.
    """
    token = secrets.token_hex(16)
    program = f"{program}\n\nimport os as _os\n_os.write(1, b'\\n{token}')\n"
    code, output = _start(program, limits, walls().kind)
    if code == _NOT_CLOSED:
        raise KVQuantError(f"the sandbox could not be closed: {output.strip()}")
    if code == 0 and token in output:  # Python's buffered output may follow the token
        return Verdict(True)
    if code is None:
        return Verdict(False, f"timeout: {limits.wall_seconds:g} s")
    if code - 128 in (signal.SIGXCPU, signal.SIGKILL):
        return Verdict(False, f"timeout: {limits.cpu_seconds} s of CPU time")
    lines = [line for line in output.splitlines() if line.strip()]
    return Verdict(False, lines[-1][-300:] if lines else f"exit status {code}, nothing printed")


@functools.cache
def _layout() -> dict[str, Any]:
    """Runs layout.py in the interpreter behind the virtual environment; returns the content of a program's root."""
    interpreter = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    command = [interpreter, "-I", "-S", str(_LAYOUT)]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": os.defpath}, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise KVQuantError(
            f"{interpreter} does not start without environment variables ({done.stderr.strip()[-300:]}): generated "
            "programs cannot be run. Use an interpreter that needs none, LD_LIBRARY_PATH and PYTHONHOME included."
        )
    layout: dict[str, Any] = json.loads(done.stdout)
    return layout


def _start(program: str, limits: Limits, kind: str | None) -> tuple[int | None, str]:
    """Runs a program; returns its exit status (None if its time ran out) and the end of its output."""
    layout = _layout()
    order = {
        **layout,
        "program": program,
        # Without a sandbox: the interpreter with this environment's packages.
        "interpreter": layout["interpreter"] if kind else sys.executable,
        "walls": kind,
        "uid": random.choice(_UIDS),
        "filter": instructions() if kind else [],
        "disk_bytes": limits.disk_bytes,
        "limits": {
            "CPU": limits.cpu_seconds,
            "AS": limits.memory_bytes,
            "FSIZE": limits.file_bytes,
            # Counts all processes of a user. A small number is right only if the program has its own user or user
            # namespace.
            "NPROC": limits.processes if kind else None,
            "NOFILE": 64,
            # With a limit of 0, the machine's core handler would still run; 1 prevents this.
            "CORE": 1,
        },
    }
    with tempfile.TemporaryDirectory(prefix="kvq-") as folder, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [layout["interpreter"], "-I", "-S", str(_CHILD)],
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
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        size = output.seek(0, os.SEEK_END)
        output.seek(max(0, size - 65536))
        return code, output.read().decode(errors="replace")
