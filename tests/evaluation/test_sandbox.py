"""Generated programs for real: each kind of misbehaviour is contained and counts as failed."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation import sandbox

LIMITS = sandbox.Limits(cpu_seconds=1, wall_seconds=10, memory_bytes=256 << 20)


def test_namespaces_can_be_made_here():
    """Without them the tests below would show nothing."""
    assert sandbox.namespace_command() is not None


@pytest.mark.parametrize(
    "program", ["assert 1 + 1 == 2", "print('out')", "open('mine', 'w').write('x'); assert open('mine').read()"]
)
def test_passes(program):
    assert sandbox.run(program, LIMITS) == sandbox.Verdict(True)


@pytest.mark.parametrize(
    "program, reason",
    [
        ("assert 1 + 1 == 3", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit(0)", "exit status 0"),
        ("import os; os._exit(0)", "exit status 0"),
        ("while True: pass", "timeout"),
        ("x = bytearray(1 << 32)", "MemoryError"),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", "MemoryError"),
        ("input()", "EOFError"),
        ("import os; assert 'HOME' in os.environ", "AssertionError"),
        ("import numpy", "ModuleNotFoundError"),
        ("while True: print('x' * 1000)", ""),
        ("f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))", "File too large"),
    ],
    ids=lambda value: value[:24],
)
def test_fails_and_says_why(program, reason):
    verdict = sandbox.run(program, LIMITS)
    assert not verdict.passed and reason in verdict.reason


def test_waiting_ends_with_the_wall_clock():
    begin = time.monotonic()
    verdict = sandbox.run("import time; time.sleep(60)", sandbox.Limits(wall_seconds=2))
    assert not verdict.passed and "timeout: 2 s" in verdict.reason and time.monotonic() - begin < 8


@pytest.mark.parametrize("place", ["/root", "/tmp", "/var/tmp", "/dev/shm", str(Path(__file__).parent)])
def test_writes_stay_inside(place):
    """In /tmp a program may have one of its own; the machine's sees nothing of it."""
    target = Path(place) / "kvq_escaped"
    verdict = sandbox.run(f"open({str(target)!r}, 'w').write('x')", LIMITS)
    assert not verdict.passed or place == "/tmp"
    assert not target.exists()


def test_this_machines_files_cannot_be_deleted(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("x")
    victim.chmod(0o666)
    tmp_path.chmod(0o777)
    assert not sandbox.run(f"import os; os.remove({str(victim)!r})", LIMITS).passed
    assert victim.read_text() == "x"


def test_no_network_not_even_this_machine():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.1)
        address = listener.getsockname()
        assert not sandbox.run(f"import socket; socket.create_connection({address!r}, timeout=2)", LIMITS).passed
        with pytest.raises(TimeoutError):
            listener.accept()


def test_fork_bomb_ends():
    """It runs out of processes, or else of time; nothing of it is left."""
    begin = time.monotonic()
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert not sandbox.run(bomb, sandbox.Limits(cpu_seconds=1, wall_seconds=4)).passed
    assert time.monotonic() - begin < 20
    assert left_over() == []


def test_a_daemon_does_not_outlive_its_program():
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\n"
    sandbox.run(daemon, LIMITS)
    assert left_over() == []


def left_over() -> list[str]:
    """Processes that still run a sandboxed program."""
    time.sleep(0.3)
    shown = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in shown.splitlines() if "-I program.py" in line]


def test_other_processes_are_out_of_sight():
    assert not sandbox.run(f"import os; os.kill({os.getpid()}, 0)", LIMITS).passed


def test_without_namespaces_nothing_runs_unless_allowed(monkeypatch):
    monkeypatch.setattr(sandbox, "namespace_command", lambda: None)
    with pytest.raises(KVQuantError, match="--allow-unsandboxed"):
        sandbox.require(allow_unsandboxed=False)
    assert "network" in sandbox.require(allow_unsandboxed=True)
    assert sandbox.run("assert True", LIMITS).passed
    assert "timeout" in sandbox.run("while True: pass", LIMITS).reason
