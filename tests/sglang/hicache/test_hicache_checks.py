"""Settings that HiCache cannot be combined with are refused by name and reason; the others pass."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from packaging.version import Version

from sglang_kvq.config import KVQuantConfig
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sglang import compat
from sglang_kvq.sglang.hicache import checks

CONFIG = KVQuantConfig("hadamard")
ON = {"enable_hierarchical_cache": True}


@pytest.fixture(autouse=True)
def release(monkeypatch):
    """``release("0.5.18")`` makes this the installed release."""

    def set_to(version: str) -> None:
        monkeypatch.setattr(compat, "sglang_version", lambda: Version(version))

    set_to("0.5.23")
    return set_to


def refused(**values) -> str:
    return "\n".join(checks.refused_flags({**ON, **values}))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"hicache_io_backend": "direct"}, "--hicache-io-backend direct: pages are copied by kernels"),
        ({"hicache_io_backend": "kernel_ascend"}, "--hicache-io-backend kernel_ascend: pages are copied by kernels"),
        ({"hicache_mem_layout": "layer_first"}, "--hicache-mem-layout layer_first: quantized pages have one layout"),
        ({"hicache_mem_layout": "page_head"}, "--hicache-mem-layout page_head: quantized pages have one layout"),
        ({"hicache_storage_backend": "hf3fs"}, "--hicache-storage-backend hf3fs: it stores keys and values of a page"),
        ({"hicache_storage_backend": "aibrix"}, "--hicache-storage-backend aibrix: it needs the shapes of plain keys"),
        ({"hicache_storage_backend": "shm"}, "--hicache-storage-backend shm: it has not been tried"),
    ],
)
def test_setting(values, text):
    assert text in refused(**values)
    assert not list(checks.refused_flags(values)), "without HiCache nobody reads it"


def test_what_passes():
    kernel = dict(hicache_io_backend="kernel", hicache_mem_layout="page_first")
    policies = dict(hicache_write_policy="write_back", hicache_ratio=3.0, hicache_storage_prefetch_policy="timeout")
    for storage in (None, "file", "mooncake", "nixl", "dynamic"):
        assert not refused(**kernel, **policies, hicache_storage_backend=storage)
    for mode in ("cache", "buffer_only"):
        assert not refused(hicache_host_memory_mode=mode)
    assert not refused()


@pytest.mark.parametrize("version", ["0.5.16", "0.5.18"])
def test_older_releases_say_which_to_use(release, version):
    release(version)
    assert f"SGLang {version} has a prefix cache that keeps plain BF16 rows" in refused()
    assert "Use SGLang 0.5.22 or 0.5.23" in refused()


@pytest.fixture
def resolved(monkeypatch):
    """``resolved(config, is_hybrid_swa=True, kv_canary="raise")`` runs the last check on this model and settings."""
    from sglang.srt.configs import hybrid_arch

    def check(config: KVQuantConfig = CONFIG, states: bool = False, is_hybrid_swa: bool = False, **settings) -> None:
        settings = {**ON, **settings}
        monkeypatch.setattr(compat, "resolved", lambda server_args, field, default=None: settings.get(field, default))
        monkeypatch.setattr(hybrid_arch, "mambaish_config", lambda model: object() if states else None)
        checks.check_resolved(None, config, SimpleNamespace(is_hybrid_swa=is_hybrid_swa))

    return check


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"states": True}, "when recurrent states come back from the host .* Leave out --enable-hierarchical-cache"),
        ({"is_hybrid_swa": True, "hicache_storage_backend": "file"}, "windows without a checksum"),
        ({"is_hybrid_swa": True, "speculative_algorithm": "NGRAM"}, "Leave out --speculative-algorithm"),
        ({"kv_canary": "raise"}, "Leave out --kv-canary"),
        ({"config": SimpleNamespace(episodic=SimpleNamespace(policy="epicache"))}, "Use --episodic-policy retrieve"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_model_or_feature(resolved, settings, text):
    with pytest.raises(KVQuantError, match=f"--enable-hierarchical-cache: .*{text}"):
        resolved(**settings)
    resolved(**settings, enable_hierarchical_cache=False)


SESSIONS = SimpleNamespace(episodic=SimpleNamespace(policy="retrieve"))


def test_chosen_pages_need_names_with_namespaces(resolved, monkeypatch):
    """Copies of a history's pages have their own namespace; named by tokens alone they would be another prompt."""
    from sglang.srt.mem_cache import utils

    monkeypatch.setattr(utils, "storage_namespace_seed", lambda *names: "", raising=False)
    resolved(SESSIONS)
    monkeypatch.delattr(utils, "storage_namespace_seed")
    for config, env in ((SESSIONS, None), (CONFIG, "1")):
        if env:
            monkeypatch.setenv(checks.ENABLED, env)
        with pytest.raises(KVQuantError, match="names stored pages by their tokens alone.*Use 0.5.23"):
            resolved(config)


def test_a_plain_model_passes(resolved):
    resolved()
    resolved(kv_canary="none", speculative_algorithm="NEXTN", hicache_storage_backend="nixl")


def test_windows_pass_with_the_host_alone(resolved):
    resolved(is_hybrid_swa=True)
