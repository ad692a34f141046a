"""Flags of sessions, and the settings that are refused at start."""

from __future__ import annotations

import pytest

from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.config import EpisodicConfig
from sglang_kvq.sglang import flags
from sglang_kvq.sglang.router import checks as episodic_checks
from sglang_kvq.sglang.router import router as session_router
from tests.sglang.test_checks import GPT_OSS, HYBRID

ON = ("--kv-quant", "int4", "--episodic-policy", "retrieve", "--episodic-embedder", "folder")


def parsed(*argv):
    import argparse

    parser = argparse.ArgumentParser()
    flags.add_flags(parser)
    return flags.parse_config(vars(parser.parse_args(argv)))


def test_flags_reach_the_config():
    more = "--episodic-budget 4096 --episodic-block 512 --episodic-segment 256 --episodic-sessions 7 --episodic-idle 60"
    more += " --episodic-embedder-device cuda:1 --episodic-state-memory 99 --episodic-tenant-share 0.5"
    more += " --episodic-tenant-header X-Tenant --episodic-session-header X-SMG-Routing-Key"
    expected = EpisodicConfig(
        *("retrieve", 4096, 512, "folder", 256, 7, 60.0),
        embedder_device="cuda:1",
        state_memory=99,
        tenant_share=0.5,
        tenant_header="X-Tenant",
        session_header="X-SMG-Routing-Key",
    )
    assert parsed(*ON, *more.split()).episodic == expected
    assert parsed(*ON).episodic == EpisodicConfig("retrieve", embedder="folder")
    assert parsed("--kv-quant", "int4", "--episodic-policy", "off").episodic is None
    former = ["late" if word == "retrieve" else word for word in ON]
    assert parsed(*former, *more.split()).episodic == expected


@pytest.mark.parametrize(
    "argv,message",
    [
        (ON[2:], "--episodic-policy retrieve chooses pages of the quantized cache. Add --kv-quant"),
        (("--kv-quant", "int4", "--episodic-budget", "4096"), "--episodic-budget has no effect without"),
        ((*ON, "--episodic-budget", "1024"), "--episodic-budget 1024: sinks and recent tokens"),
    ],
    ids=["no method", "no policy", "budget"],
)
def test_flags_that_cannot_be_served(argv, message):
    with pytest.raises(KVQuantError, match=message):
        parsed(*argv)


def test_a_device_that_is_not_here(monkeypatch):
    def refuses(*_, device):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr("torch.empty", refuses)
    with pytest.raises(KVQuantError, match=r"--episodic-embedder-device cuda:3: Torch not .* Give cpu"):
        session_router.load_embedder("folder", "cuda:3")


def test_a_device_without_such_a_name():
    with pytest.raises(KVQuantError, match=r"--episodic-embedder-device gpu: .* Give cpu"):
        session_router.load_embedder("folder", "gpu")


@pytest.fixture
def loaded(monkeypatch):
    """Returns the list of embedder folders that were loaded."""
    found = []
    monkeypatch.setattr(session_router, "load_embedder", lambda folder, device: found.append(folder))
    return found


NGRAM = ("--speculative-algorithm", "NGRAM")


SMALL = ("--episodic-budget", "1024", "--episodic-block", "256")


def check(server_args):
    from sglang_kvq.sglang import checks
    from sglang_kvq.sglang.runtime import config_of

    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    checks.check_resolved(server_args, config_of(server_args))


def test_the_embedder_is_loaded_at_start(command_line, loaded):
    check(command_line(*ON, *SMALL))
    assert loaded == ["folder"]


@pytest.mark.parametrize(
    "argv,message",
    [
        (("--tokenizer-worker-num", "2"), "--tokenizer-worker-num 2: sessions are kept in one process"),
        (("--dp-size", "2"), "--dp-size 2: a session's history would be in another worker's cache"),
        (("--disable-radix-cache",), "--disable-radix-cache: histories are kept in the prefix cache"),
        (("--enable-session-radix-cache",), "--enable-session-radix-cache: it gives session ids another meaning"),
        (("--skip-tokenizer-init",), "--skip-tokenizer-init: questions and histories are compared as text"),
        (
            (*NGRAM, "--speculative-ngram-max-bfs-breadth", "1"),
            "--speculative-algorithm NGRAM: the positions of drafts are not moved yet",
        ),
        (
            ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj"),
            "--enable-lora: pages of an adapter",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_settings_that_sessions_cannot_have(command_line, loaded, argv, message):
    with pytest.raises((KVQuantError, SystemExit), match=message):
        check(command_line(*ON, *SMALL, *argv))


def test_a_budget_beyond_the_models_context(command_line, loaded):
    with pytest.raises(
        (KVQuantError, SystemExit), match="--episodic-budget 2048: the model takes 2048 tokens.*at most 1984"
    ):
        check(command_line(*ON, "--episodic-budget", "2048", "--episodic-block", "256"))


def test_another_server_is_refused(command_line, loaded, monkeypatch):
    server_args = command_line(*ON, *SMALL)
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    with pytest.raises(
        (KVQuantError, SystemExit), match="SGLANG_RUST_SERVER=1: sessions are kept in the Python server process"
    ):
        check(server_args)


@pytest.mark.parametrize(
    "changes,expected",
    [
        ({}, None),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [16, 8, 8]}}, "positions of several axes"),
        (GPT_OSS, "sliding windows: chosen pages lack"),
        (HYBRID, "recurrent states: chosen pages lack"),
    ],
    ids=["plain", "mrope", "windows", "states"],
)
def test_models_whose_pages_are_not_their_state(applied, model_folder, changes, expected):
    from sglang.srt.configs.model_config import ModelConfig

    found = next(episodic_checks.unsupported(ModelConfig(model_folder(**changes))), None)
    assert found is None if expected is None else found.startswith(expected)


def test_such_a_model_is_refused(command_line, loaded, model_folder):
    model = model_folder(rope_scaling={"rope_type": "default", "mrope_section": [16, 8, 8]})
    with pytest.raises((KVQuantError, SystemExit), match="has positions of several axes"):
        check(command_line(*ON, *SMALL, model=model))
