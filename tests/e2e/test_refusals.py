"""Servers that must not start: the command ends by itself, and its log says why.

``tests/sglang`` covers the reasons that are known before a scheduler starts.
"""

from __future__ import annotations

import json

import pytest

from tests.pairs import few


def test_memory_for_less_than_one_request(refused):
    log = refused("--kv-quant", "hadamard", "--max-total-tokens", "256", "--kv-quant-bf16-budget", "0.1")
    last = log.index("sglang-kvq: The KV cache has room for 4 BF16 pages, but one request needs 7 ")
    assert "--kv-quant-bf16-budget (now 0.1), --mem-fraction-static or --max-total-tokens" in log[last:]
    assert "Traceback" not in log[:last], "the reason comes after another one"


@pytest.mark.parametrize(
    ("more", "text"),
    few([((), "heads of 80 elements"), (("--page-size", "16", "--enable-lmcache"), "--page-size 16")], 1),
    ids=few(["model", "flag"], 1),
)
def test_a_model_is_refused_before_any_process_starts(refused, servers, tmp_path, more, text):
    """The installed plugin refuses a model in ``python -m sglang.launch_server``."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((servers.model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "head_dim": 80}))
    log = refused("--skip-tokenizer-init", "--kv-quant", "hadamard", *more, model=folder, status=1)
    assert text in log
    assert "Traceback" not in log and "Load weight" not in log
