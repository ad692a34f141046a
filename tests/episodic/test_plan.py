"""Plans of prompts of any length, known part and question."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.episodic.config import EpisodicConfig
from sglang_kvq.episodic.plan import Plan, plan
from sglang_kvq.errors import KVQuantError

SINK, RECENT = P, 4 * P


def config(**changes) -> EpisodicConfig:
    return EpisodicConfig(**{"policy": "late", "embedder": "folder", **changes})


@st.composite
def limits(draw) -> EpisodicConfig:
    """Any budget, block and segment that are valid together."""
    block, segment = draw(st.integers(1, 20)) * P, draw(st.integers(1, 5)) * P
    least = SINK + RECENT + segment + block
    found = config(budget=least + draw(st.integers(0, 40)) * P, block=block, segment=segment)
    found.check_windows(SINK, RECENT)
    return found


@given(limits(), st.data())
def test_a_plan_reads_no_more_than_the_budget(limits: EpisodicConfig, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 3 * limits.budget))
    exact = data.draw(st.integers(0, tokens))
    question = data.draw(st.integers(0, tokens))
    got = plan(tokens, exact, question, budget=limits.budget, block=limits.block)
    if tokens <= limits.budget:
        assert got == Plan(tokens) and got.hot == tokens
        return
    assert got.history % P == 0 and 0 < got.history < tokens
    assert 1 <= got.tail <= limits.block
    assert limits.budget - P < got.hot <= limits.budget
    assert (SINK + RECENT + limits.segment) // P <= got.pages < got.history // P
    if got.compute:
        assert exact < got.history
    else:
        assert got.history <= exact


@given(limits(), st.data())
def test_a_history_that_is_known_needs_nothing(limits: EpisodicConfig, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(limits.budget + 1, 3 * limits.budget))
    exact = data.draw(st.integers(tokens - limits.block + P, tokens + P))
    got = plan(tokens, exact, 0, budget=limits.budget, block=limits.block)
    assert not got.compute and got.history == min(exact, tokens - 1) // P * P


def test_what_is_computed_ends_where_the_question_begins() -> None:
    assert plan(5000, 0, 4900, budget=1024, block=512) == Plan(5000, 4864, True, 13)
    # A question longer than the block: its beginning is computed with the history.
    assert plan(5000, 0, 3000, budget=1024, block=512) == Plan(5000, 4544, True, 8)
    # One that begins in the last page is not history.
    assert plan(5000, 0, 5000, budget=1024, block=512).history == 4992
    assert plan(5056, 0, 5056, budget=1024, block=512).history == 4992


def test_a_tail_up_to_the_block_stays() -> None:
    assert plan(5000, 4544, 4900, budget=1024, block=512) == Plan(5000, 4544, False, 8)
    assert plan(5000, 4480, 4900, budget=1024, block=512).compute


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"policy": "lat"}, "--episodic-policy lat: choose off or late or epicache"),
        ({"policy": "epicache", "episodes": 0}, "--episodic-episodes 0: give 1 or more"),
        ({"budget": 1000}, "--episodic-budget 1000: must be a multiple .* nearest valid value is 1024"),
        ({"block": 0}, "--episodic-block 0: must be a multiple .* nearest valid value is 64"),
        ({"segment": 65}, "--episodic-segment 65"),
        ({"embedder": ""}, "late needs --episodic-embedder"),
        ({"sessions": 0}, "--episodic-sessions 0: give 1 or more"),
        ({"state_memory": 0}, "--episodic-state-memory 0: give 1 MiB or more"),
        ({"tenant_share": 0.0}, "--episodic-tenant-share 0.0: give a share above 0, at most 1"),
        ({"tenant_share": 1.5}, "--episodic-tenant-share 1.5: give a share"),
        ({"tenant_share": float("nan")}, "--episodic-tenant-share nan: give a share"),
        ({"tenant_header": "X Tenant"}, "--episodic-tenant-header 'X Tenant': not the name of a header"),
        ({"tenant_header": ""}, "--episodic-tenant-header '': not the name of a header"),
        ({"tenant_header": "x-Session-ID"}, "--episodic-tenant-header x-Session-ID: it says something else already"),
        ({"tenant_header": "Authorization"}, "--episodic-tenant-header Authorization: it says something else already"),
        ({"idle_seconds": -1.0}, "--episodic-idle -1.0: give seconds"),
        ({"idle_seconds": float("nan")}, "--episodic-idle nan: give seconds"),
        ({"episodes": 4}, "--episodic-episodes 4: --episodic-policy late has no episodes"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_bad_values_name_themselves_and_the_fix(fields: dict, message: str) -> None:
    with pytest.raises(KVQuantError, match=message):
        config(**fields)


def test_an_episode_keeps_more_than_sinks() -> None:
    config(policy="epicache", budget=192).check_windows(128, RECENT)
    with pytest.raises(KVQuantError, match="--episodic-budget 128: the sinks .128.* give 192 or more"):
        config(policy="epicache", budget=128).check_windows(128, RECENT)


def test_a_budget_must_leave_pages_to_choose() -> None:
    with pytest.raises(KVQuantError, match=r"--episodic-budget 1024: .* need 1472; raise the budget"):
        config(budget=1024, block=1024).check_windows(SINK, RECENT)
    with pytest.raises(KVQuantError, match="--episodic-segment 384: .* at most 320 with --kv-quant-recent 256"):
        config(segment=384).check_windows(SINK, RECENT)


@pytest.mark.parametrize(("policy", "least"), [("late", 2 * 1024 + 512 + 128), ("epicache", 2 * 1024 + 512 + 1152)])
def test_a_cache_holds_a_conversation_beyond_the_budget(policy: str, least: int) -> None:
    found = config(policy=policy, budget=1024, block=512)
    found.check_cache(least)
    with pytest.raises(KVQuantError, match=f"budget 1024: .* {least} tokens or more, .* holds {least - 1}; .* to 960"):
        found.check_cache(least - 1)
    with pytest.raises(KVQuantError, match="holds 512; raise --mem-fraction-static"):
        found.check_cache(512)
