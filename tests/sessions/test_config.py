"""Valid values of ``--episodic-*`` flags, alone and together."""

from __future__ import annotations

import pytest

from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.config import EpisodicConfig

SINK, RECENT = P, 4 * P


def config(**changes) -> EpisodicConfig:
    return EpisodicConfig(**{"policy": "retrieve", "embedder": "folder", **changes})


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"policy": "lat"}, "--episodic-policy lat: must be off or retrieve or epicache"),
        ({"policy": "epicache", "episodes": 0}, "--episodic-episodes 0: must be at least 1"),
        ({"budget": 1000}, "--episodic-budget 1000: must be a multiple .* nearest valid value is 1024"),
        ({"block": 0}, "--episodic-block 0: must be a multiple .* nearest valid value is 64"),
        ({"segment": 65}, "--episodic-segment 65"),
        ({"embedder": ""}, "retrieve needs --episodic-embedder"),
        ({"sessions": 0}, "--episodic-sessions 0: must be at least 1"),
        ({"state_memory": 0}, "--episodic-state-memory 0: must be at least 1 MiB"),
        ({"tenant_share": 0.0}, "--episodic-tenant-share 0.0: must be above 0, and at most 1"),
        ({"tenant_share": 1.5}, "--episodic-tenant-share 1.5: must be above 0"),
        ({"tenant_share": float("nan")}, "--episodic-tenant-share nan: must be above 0"),
        ({"tenant_header": "X Tenant"}, "--episodic-tenant-header 'X Tenant': not the name of a header"),
        ({"tenant_header": ""}, "--episodic-tenant-header '': not the name of a header"),
        (
            {"tenant_header": "x-Session-ID"},
            "--episodic-tenant-header x-Session-ID: this header already has another use",
        ),
        (
            {"session_header": "a b"},
            "--episodic-session-header 'a b': not the name of a header. Give one like X-Session-Id",
        ),
        (
            {"session_header": "authorization"},
            "--episodic-session-header authorization: this header already has another use",
        ),
        (
            {"session_header": "X-Key", "tenant_header": "x-key"},
            "--episodic-tenant-header x-key: this header already has another use",
        ),
        (
            {"tenant_header": "Authorization"},
            "--episodic-tenant-header Authorization: this header already has another use",
        ),
        ({"idle_seconds": -1.0}, "--episodic-idle -1.0: must be seconds"),
        ({"idle_seconds": float("nan")}, "--episodic-idle nan: must be seconds"),
        ({"episodes": 4}, "--episodic-episodes 4: --episodic-policy retrieve has no episodes"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_bad_values_name_themselves_and_the_fix(fields: dict, message: str) -> None:
    with pytest.raises(KVQuantError, match=message):
        config(**fields)


def test_the_former_name_of_a_policy_is_the_same_policy() -> None:
    assert config(policy="late") == config(policy="retrieve") and config(policy="late").policy == "retrieve"


def test_an_episode_keeps_more_than_sinks() -> None:
    config(policy="epicache", budget=192).check_windows(128, RECENT)
    with pytest.raises(KVQuantError, match="--episodic-budget 128: the sinks .128.* Give 192 or more"):
        config(policy="epicache", budget=128).check_windows(128, RECENT)


def test_an_episode_has_a_segment() -> None:
    config(policy="epicache", budget=1024, block=512, segment=1536).check_windows(SINK, RECENT)
    with pytest.raises(KVQuantError, match="--episodic-segment 1600: .* Give at most 1536"):
        config(policy="epicache", budget=1024, block=512, segment=1600).check_windows(SINK, RECENT)


def test_a_budget_must_leave_pages_to_choose() -> None:
    with pytest.raises(KVQuantError, match=r"--episodic-budget 1024: .* need 1472. Raise the budget"):
        config(budget=1024, block=1024).check_windows(SINK, RECENT)
    with pytest.raises(KVQuantError, match="--episodic-segment 384: .* at most 320 with --kv-quant-recent 256"):
        config(segment=384).check_windows(SINK, RECENT)


@pytest.mark.parametrize(("policy", "least"), [("retrieve", 2 * 1024 + 512 + 128), ("epicache", 2 * 1024 + 512 + 1152)])
def test_a_cache_holds_a_conversation_beyond_the_budget(policy: str, least: int) -> None:
    found = config(policy=policy, budget=1024, block=512)
    found.check_cache(least)
    with pytest.raises(KVQuantError, match=f"budget 1024: .* {least} tokens or more, .* holds {least - 1}. .* to 960"):
        found.check_cache(least - 1)
    with pytest.raises(KVQuantError, match="holds 512. Raise --mem-fraction-static"):
        found.check_cache(512)
