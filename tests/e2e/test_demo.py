"""The demo's program on servers that other tests have started; ``test_newcomer.py`` runs ``./demo`` itself."""

from __future__ import annotations

import argparse
import io

import pytest
from rich.console import Console

from launch import demo
from tests.e2e.test_bf16 import WIDE

#: Flags after ``--``; plain SGLang refuses the first two.
FLAGS = ["--kv-quant-recent", "64", "--kv-quant-sink=0", "--context-length", "2048"]


class Running:
    """Stand-in for ``launch.server.Server``: a server that already runs and keeps running."""

    def __init__(self, server) -> None:
        self._server = server

    def __getattr__(self, name: str):
        return getattr(self._server, name)

    def start(self, timeout: float | None = None):
        return self

    def stop(self) -> None:
        pass


def test_both_servers_are_asked_and_compared(servers, model, monkeypatch):
    asked = []

    def server(path: str, *flags: str, cpu: bool) -> Running:
        asked.append(flags)
        return Running(servers(*(() if "none" in flags else WIDE)))

    monkeypatch.setattr(demo, "Server", server)
    monkeypatch.setattr(demo, "LONG", f"{demo.PASSAGE}Question: who built the lighthouse?")
    shown = io.StringIO()
    options = argparse.Namespace(model=str(model), method="int2", flags=FLAGS, serve=False, episodes=False)
    demo.run(options, Console(file=shown, width=160))
    first, second = asked
    status = servers(*WIDE).kv_quant()
    same = status["bf16_tokens_same_memory"]
    assert first[-5:] == tuple(FLAGS) and second[-2:] == tuple(FLAGS[-2:]) and second[1] == "none"
    assert not any(flag.startswith("--kv-quant-") for flag in second)
    assert first[:2] == ("--kv-quant", "int2") and second[second.index("--max-total-tokens") + 1] == str(same)
    table = shown.getvalue()
    assert "The same memory, two KV caches" in table and "--kv-quant int2" in table
    assert f"{status['tokens']:,} (" in table and f"{status['bits_per_element']:.2f}" in table


def test_an_unknown_method_is_refused_before_a_server_starts(monkeypatch, capsys):
    """With ``none``, the first server would start, answer, and have nothing to show."""
    monkeypatch.setattr(demo, "run", lambda *_: pytest.fail("a server starts"))
    monkeypatch.setattr("sys.argv", ["demo", "--method", "none"])
    with pytest.raises(SystemExit, match="2"):
        demo.main()
    assert "choose from" in capsys.readouterr().err
