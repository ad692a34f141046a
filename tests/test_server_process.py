"""Servers as child processes: what they start ends with them, and they end with this process."""

from __future__ import annotations

import inspect
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from packaging.version import Version
from sglang.srt.utils import network

from sglang_kvq import server_process
from sglang_kvq.server_process import ServerFailed, ServerProcess, free_port
from sglang_kvq.sglang.compat import sglang_version
from tests.conftest import ROOT

#: A server that answers ``/health``; before that it starts a child and prints both process ids.
SERVER = """
import http.server, os, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
print(os.getpid(), child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
HANGING = "import time; print('loading', flush=True); time.sleep(600)"


def server(folder: Path, code: str = SERVER, **options) -> ServerProcess:
    port = free_port()
    return ServerProcess([sys.executable, "-c", code, str(port)], folder / "server.log", port, **options)


def started(folder: Path) -> list[int]:
    """Returns the process ids of the server and of its child."""
    return [int(word) for word in (folder / "server.log").read_text().splitlines()[0].split()]


def running(pid: int) -> bool:
    """Returns True if the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid: int) -> bool:
    deadline = time.monotonic() + 120
    while running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not running(pid)


def test_ports_are_free_and_given_out_once(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        first = taken.getsockname()[1]
        monkeypatch.setattr(server_process, "PORTS", range(first, first + 2))
        try:
            ports = [free_port()]
        except ServerFailed:  # another process has the other port
            pytest.skip(f"port {first + 1} is taken")
        assert ports == [first + 1]
        with pytest.raises(ServerFailed, match=f"no free port from {first} to {first + 1}"):
            free_port()


def test_no_port_is_one_that_sglang_takes_for_itself():
    """Each server of newer releases has a random port for its workers, which must not be another server's port."""
    own = getattr(network, "get_free_port_below_ephemeral", None)
    assert own or sglang_version() < Version("0.5.23")
    limits = inspect.signature(own).parameters if own else {}
    assert own is None or server_process.PORTS.stop <= limits["low"].default < limits["high"].default


def test_stopping_ends_what_the_server_started(tmp_path):
    with server(tmp_path) as process:
        own, child = started(tmp_path)
        assert own == process.process.pid and running(own) and running(child)
        process.check_alive()
    assert not process.running and ends(own) and ends(child)
    process.stop()


def test_a_server_ends_when_its_parent_is_killed(tmp_path):
    code = (
        "import pathlib, sys, time\n"
        "from tests.test_server_process import server\n"
        "server(pathlib.Path(sys.argv[1])).start()\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "ready\n"
    own, child = started(tmp_path)
    assert running(own)
    parent.kill()
    parent.communicate()
    assert ends(own)
    os.kill(child, signal.SIGKILL)  # only the server itself is tied to its parent


def test_a_server_that_ends_or_hangs_is_told_with_its_log(tmp_path, monkeypatch):
    with pytest.raises(ServerFailed, match="code 3") as raised:
        server(tmp_path, "print('no such model'); raise SystemExit(3)").start()
    assert raised.value.log == "no such model"
    process = server(tmp_path, HANGING)
    health = process._healthy

    def healthy() -> bool:  # a slow machine may need more than a second until the process says anything
        while process.running and not process.log():
            time.sleep(0.05)
        return health()

    monkeypatch.setattr(process, "_healthy", healthy)
    with pytest.raises(ServerFailed, match="not ready after 1 s"):
        process.start(1)
    assert not process.running and process.log() == "loading\n"


def test_starting_can_be_given_up(tmp_path, monkeypatch):
    def give_up(passed: float) -> None:
        raise KeyboardInterrupt

    process = server(tmp_path, HANGING)
    monkeypatch.setattr(process, "while_starting", give_up)
    with pytest.raises(KeyboardInterrupt):
        process.start(30)
    assert not process.running


def test_no_proxy_for_this_machine_beside_the_users_own_hosts(tmp_path, monkeypatch):
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("no_proxy", "mirror.example")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    process = server(tmp_path, env={"MINE": "1"})
    assert process.env["no_proxy"] == process.env["NO_PROXY"] == "mirror.example,127.0.0.1,localhost"
    assert process.env["MINE"] == "1"
    with process:
        pass
