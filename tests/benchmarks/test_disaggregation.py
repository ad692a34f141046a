"""The benchmark of two servers sends every request to both and counts its bytes."""

from __future__ import annotations

import argparse
import socket

from benchmarks import disaggregation
from benchmarks.pair_server import PairServer
from sglang_kvq.evaluation.specs import parse


def test_the_loopback_counts_what_it_carries():
    before = disaggregation.loopback_bytes()
    one, other = socket.create_server(("127.0.0.1", 0)), socket.socket()
    with one, other:
        other.connect(one.getsockname())
        there, _ = one.accept()
        with there:
            sent = 0
            while sent < 1 << 16:
                sent += other.send(b"x" * 1024)
                there.recv(1024)
    assert disaggregation.loopback_bytes() - before >= 1 << 16


def test_both_servers_get_the_same_request():
    asked: dict[str, dict] = {}

    def server(name: str) -> argparse.Namespace:
        answer = {"output_ids": [1, 2], "meta_info": {}}
        return argparse.Namespace(
            command=[], json=lambda path, body, timeout: (asked.setdefault(name, body), answer)[1]
        )

    ids, spent, carried = disaggregation.ask(PairServer(server("prefill"), server("decode"), 5), [7, 8], 2)
    assert ids == [1, 2] and spent > 0 and carried >= 0
    assert asked["prefill"] == asked["decode"] and asked["decode"]["bootstrap_port"] == 5


def test_roles_are_flags_of_the_servers(tmp_path):
    args = argparse.Namespace(
        cpu=True, model=disaggregation.MODEL, layers=2, lengths=[300], mem_fraction_static="0.8", gpus=1
    )
    spec = parse("none")
    prefill = disaggregation.make(spec, args, tmp_path, "prefill", 0, *disaggregation.mode(), "prefill").command
    alone = disaggregation.make(spec, args, tmp_path, "alone", 0).command
    assert prefill[prefill.index("--disaggregation-mode") + 1] == "prefill"
    assert "--disaggregation-mode" not in alone and "--disable-radix-cache" in alone
    assert int(alone[alone.index("--max-total-tokens", alone.index("--context-length")) + 1]) >= 2 * 300
