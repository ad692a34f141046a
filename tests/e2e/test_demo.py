"""The demo's program on servers that other tests have started; ``test_newcomer.py`` runs ``./demo`` itself."""

from __future__ import annotations

import argparse
import io

from rich.console import Console

from launch import demo
from tests.e2e.test_bf16 import WIDE


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
    options = argparse.Namespace(model=str(model), method="int2", flags=[], serve=False, episodes=False)
    demo.run(options, Console(file=shown, width=160))
    first, second = asked
    status = servers(*WIDE).kv_quant()
    same = status["bf16_tokens_same_memory"]
    assert first[:2] == ("--kv-quant", "int2") and second[second.index("--max-total-tokens") + 1] == str(same)
    table = shown.getvalue()
    assert "The same memory, two KV caches" in table and "--kv-quant int2" in table
    assert f"{status['tokens']:,} (" in table and f"{status['bits_per_element']:.2f}" in table
