"""The hook around SGLang's method that divides a hybrid model's memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_kvq.cache.memory.recurrent_states import SGLANG_RATIO
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.releases import OLD_TREE
from sglang_kvq.sglang import compat
from sglang_kvq.sglang.memory import recurrent_states
from sglang_kvq.sglang.runtime import attach

HYBRID = dict(
    num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2, head_dim=256, full_attention_interval=4
)
STATE_BYTES = 6 << 20
GIB = 4.0


@pytest.fixture
def log(monkeypatch):
    """Returns the list of lines that the hook logs; SGLang's set-up of logging may hide them from pytest."""
    lines: list[str] = []
    monkeypatch.setattr(
        recurrent_states, "logger", SimpleNamespace(info=lambda text, *words: lines.append(text % words))
    )
    return lines


@pytest.fixture
def configured(applied, command_line, monkeypatch):
    """``configured(*flags)`` returns a worker's ServerArgs, and the GiB that SGLang's method leaves for tokens."""
    from sglang.srt import runtime_context
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    method = KVCacheConfigurator._handle_max_mamba_cache
    method = getattr(method, "__wrapped__", method)

    def make(*flags: str, kv_quant: bool = True):
        server_args = command_line("--chunked-prefill-size", "1024", *flags)
        if hasattr(server_args, "resolve_once"):
            server_args.resolve_once()
        runtime_context.get_context().set_server_args(server_args)
        if kv_quant:
            attach(KVQuantConfig("int2"), server_args)
        kvc = object.__new__(KVCacheConfigurator)
        known = dict(
            server_args=server_args,
            mambaish_config=SimpleNamespace(
                mamba2_cache_params=SimpleNamespace(mamba_cache_per_req=STATE_BYTES, layers=[0, 1, 2, 4, 5, 6])
            ),
            model_config=SimpleNamespace(
                hf_config=HYBRID, model_path="m", context_len=32768, get_num_kv_heads=lambda size: 2
            ),
            spec_algorithm=SimpleNamespace(
                is_none=lambda: "--speculative-algorithm" not in flags,
                is_eagle=lambda: False,
                is_standalone=lambda: False,
            ),
            is_draft_worker=False,
            pp_size=1,
            hybrid_gdn_config=None,
            hybrid_kda_config=None,
            extra_mamba_cache_bytes_per_req=0,
        )
        known |= {"ps": SimpleNamespace(attn_dp_size=1)} if OLD else {"attn_dp_size": 1}
        for name, value in known.items():
            if hasattr(type(kvc), name) or not hasattr(type(kvc), "__slots__") or name in type(kvc).__slots__:
                setattr(kvc, name, value)
        monkeypatch.setattr(type(kvc), "_calculate_mamba_ratio", lambda self: 5)
        if not OLD:
            monkeypatch.setattr(type(kvc), "fused_entry_bytes", lambda self, kind: None)
        from sglang.srt.runtime_context import get_parallel

        with get_parallel().override(attn_tp_size=1):
            left = recurrent_states.handle_max_mamba_cache(method, kvc, GIB)
        return server_args, left

    yield make
    runtime_context.reset_context()


OLD = compat.applies(OLD_TREE, compat.sglang_version())


def of_states(left: float) -> float:
    """Returns the ratio of the states' memory to the rest."""
    return (GIB - left) / left


def test_states_get_what_the_smaller_cache_leaves(configured, log):
    server_args, left = configured()
    ratio = compat.setting(server_args, "mamba_full_memory_ratio")
    assert ratio > 2 * SGLANG_RATIO and of_states(left) == pytest.approx(ratio, rel=0.02)
    assert f"a ratio of {ratio:.2f}" in log[-1] and "5 for each running request" in log[-1]
    count = compat.setting(server_args, "max_mamba_cache_size")
    assert f"({count} of 6.0 MiB" in log[-1] and count * STATE_BYTES <= (GIB - left) * 2**30


def test_fewer_running_requests_leave_more_to_the_cache(configured):
    assert of_states(configured("--max-running-requests", "4")[1]) < of_states(configured()[1]) / 1.5


@pytest.mark.parametrize("requests", [4, 40])
def test_drafts_have_states_of_their_own(configured, log, requests):
    """Every wanted request has its states and those of each draft; the rest of SGLang's memory is for tokens."""
    drafts = 4
    flags = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(drafts))
    server_args, left = configured("--max-running-requests", str(requests), *flags)
    count = compat.setting(server_args, "max_mamba_cache_size")
    assert count >= 5 * requests - 1
    taken = (GIB - left) * 2**30 / STATE_BYTES
    assert taken == pytest.approx(count + requests * drafts, abs=2 + drafts), "0.5.23 counts padding"
    assert left > 0 and "5 for each running request and 4 for its drafts" in log[-1]


def test_a_number_of_drafts_without_an_algorithm_is_ignored(configured, log):
    assert configured("--speculative-num-draft-tokens", "4")[1] == configured()[1]
    assert "drafts" not in log[-1]


@pytest.mark.parametrize(
    ("flags", "ratio"),
    [
        (("--mamba-full-memory-ratio", "0.5"), 0.5),
        (("--max-mamba-cache-size", "10"), 60 / (GIB * 1024 - 60)),
        (("--disable-radix-cache", "--max-running-requests", "20"), 120 / (GIB * 1024 - 120)),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_the_user_gave_stands(configured, log, flags, ratio):
    assert of_states(configured(*flags)[1]) == pytest.approx(ratio, rel=0.15)
    assert "as --mamba-full-memory-ratio" in log[-1]


def test_without_kv_quant_nothing_changes(configured):
    assert of_states(configured(kv_quant=False)[1]) == pytest.approx(SGLANG_RATIO, rel=0.02)


def test_geometry_is_that_of_the_layers_in_the_cache(configured):
    kvc = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=HYBRID, model_path="m", get_num_kv_heads=lambda size: 2),
        spec_algorithm=SimpleNamespace(is_eagle=lambda: False, is_standalone=lambda: False),
    )
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(attn_tp_size=1):
        geometry = recurrent_states._geometry(kvc, KVQuantConfig("int2"))
    assert geometry.layers == 2 and geometry.kv_heads == 2 and geometry.slot_bytes == 2 * 2 * 2 * 64 * 256 * 2


def test_a_draft_model_takes_its_share_of_every_token(configured, monkeypatch):
    monkeypatch.setattr(recurrent_states, "draft_page_bytes", lambda configurator: 0)
    without = configured("--max-running-requests", "4")[1]
    monkeypatch.setattr(recurrent_states, "draft_page_bytes", lambda configurator: 64 * 16384)
    assert configured("--max-running-requests", "4")[1] > 1.1 * without
