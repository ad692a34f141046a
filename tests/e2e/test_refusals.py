"""Servers that must not start for reasons that only a scheduler can know; ``tests/sglang`` covers the others."""

from __future__ import annotations


def test_memory_for_less_than_one_request(refused):
    log = refused("--kv-quant", "hadamard", "--max-total-tokens", "256", "--kv-quant-bf16-budget", "0.1")
    last = log.index("sglang-kvq: The KV cache has room for 4 BF16 pages, but one request needs 7 ")
    assert "--kv-quant-bf16-budget (now 0.1), --mem-fraction-static or --max-total-tokens" in log[last:]
    assert "Traceback" not in log[:last], "the reason comes after another one"
