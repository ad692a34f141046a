"""``sglang.Engine(kv_quant=...)`` checks and sets the same as the command line, from keywords."""

import pytest

from sglang_kvq.config import KVQuantConfig
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.config import EpisodicConfig
from sglang_kvq.sglang import compat
from sglang_kvq.sglang.runtime import config_of


@pytest.fixture
def engine_class(applied, monkeypatch):
    from sglang.srt.entrypoints import engine

    monkeypatch.setattr(engine.atexit, "register", lambda shutdown: None)  # a failed Engine would stay registered
    return engine.Engine


@pytest.fixture
def build(engine_class, model_folder):
    """``build(**keywords)`` returns the ServerArgs that ``Engine(**keywords)`` builds first."""

    def server_args(**keywords):
        built = engine_class.server_args_class(model_path=model_folder(), device="cpu", **keywords)
        if hasattr(built, "resolve_once"):
            built.resolve_once()
        return built

    return server_args


def test_keywords_become_the_config(build):
    server_args = build(kv_quant="hadamard", kv_quant_recent=128, kv_quant_bf16_budget=0.2)
    assert config_of(server_args) == KVQuantConfig("hadamard", recent_tokens=128, bf16_budget=0.2)
    assert compat.resolved(server_args, "page_size") == 64
    assert compat.resolved(server_args, "attention_backend") == "torch_native"


def test_keywords_of_sessions_become_the_config(build):
    server_args = build(
        kv_quant="hadamard", episodic_policy="retrieve", episodic_embedder="folder", episodic_budget=2048
    )
    expected = EpisodicConfig("retrieve", 2048, embedder="folder")
    assert config_of(server_args) == KVQuantConfig("hadamard", episodic=expected)


@pytest.mark.parametrize("keywords", [{}, {"kv_quant": "none"}], ids=["absent", "none"])
def test_engine_without_kv_quant_is_untouched(build, keywords):
    server_args = build(**keywords)
    assert config_of(server_args) is None
    assert compat.resolved(server_args, "page_size") != 64


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        (dict(kv_quant="int1"), "int1: unknown method"),
        (dict(kv_quant="int2", page_size=16), "--page-size 16"),
        (dict(kv_quant="int2", speculative_algorithm="DFLASH"), "--speculative-algorithm DFLASH"),
        (dict(kv_quant="int2", kv_quant_sink=1), "--kv-quant-sink 1"),
        (dict(kv_quant_recent=128), "no effect without --kv-quant"),
        (
            dict(
                kv_quant="int2",
                episodic_policy="retrieve",
                episodic_embedder="folder",
                episodic_tenant_header="X-Tenant",
            ),
            "episodic_tenant_header X-Tenant: requests of Engine have no headers",
        ),
        (
            dict(
                kv_quant="int2",
                episodic_policy="retrieve",
                episodic_embedder="folder",
                episodic_session_header="X-Key",
            ),
            "episodic_session_header X-Key: requests of Engine have no headers",
        ),
        (dict(episodic_policy="retrieve", episodic_embedder="x"), "retrieve chooses pages of the quantized cache"),
        (dict(kv_quant="int2", episodic_policy="retrieve"), "retrieve needs --episodic-embedder"),
    ],
    ids=["method", "page size", "speculative", "sink", "no method", "tenants", "names", "sessions", "embedder"],
)
def test_engine_raises_what_the_command_line_prints(engine_class, model_folder, keywords, text):
    with pytest.raises(KVQuantError, match=text):
        engine_class(model_path=model_folder(), device="cpu", **keywords)


def test_unsupported_model_is_raised_before_processes_start(engine_class, model_folder):
    with pytest.raises(KVQuantError, match="heads of 80"):
        engine_class(
            model_path=model_folder(head_dim=80),
            device="cpu",
            kv_quant="hadamard",
            sampling_backend="pytorch",
            grammar_backend="none",
            skip_tokenizer_init=True,
        )
