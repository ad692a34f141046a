"""The chain of blocks that makes an episode: sizes, positions, names."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.episodic.chain import ChainPlan, chain, stand_ins
from sglang_kvq.errors import KVQuantError

PROMPT = (5, 6, 7)


def steps(tokens: int, plan: ChainPlan, prompt=PROMPT, seed: int = 0, **changes):
    history = np.random.default_rng(seed).integers(0, 1000, tokens)
    named = dict(tenant="t", namespace=None, method="oscar") | changes
    return chain(history, prompt, plan, **named)


@given(
    tokens=st.integers(0, 40 * P),
    budget=st.integers(2, 8).map(lambda n: n * P),
    block=st.integers(1, 8).map(lambda n: n * P),
)
def test_blocks_follow_each_other_to_the_last_whole_one(tokens, budget, block):
    plan = ChainPlan(budget, block)
    found = steps(tokens, plan)
    end = tokens // block * block
    assert bool(found) == (end > budget)
    if not found:
        assert plan.folded(tokens) == 0
        return
    assert found[-1].end == plan.folded(tokens) == end
    first = found[0]
    # The oracle's loop: nothing is evicted before the block with which there is too much.
    assert (first.before, first.prefix, first.offset) == (None, first.start, 0)
    assert first.prefix <= budget < first.end and first.end - first.start == block
    for one, after in pairwise(found):
        assert (after.before, after.start, after.prefix) == (one.name, one.end, budget)
        assert after.offset == after.start - budget
    assert len({step.name for step in found}) == len(found)


def test_a_longer_history_continues_the_same_chain():
    plan = ChainPlan(4 * P, 2 * P)
    history = np.arange(30 * P)
    named = dict(tenant="t", namespace=None, method="oscar")
    short = chain(history[: 12 * P], PROMPT, plan, **named)
    assert chain(history, PROMPT, plan, **named)[: len(short)] == short


@pytest.mark.parametrize(
    "change",
    [
        dict(seed=1),
        dict(prompt=(5, 6, 8)),
        dict(tenant="u"),
        dict(namespace="n"),
        dict(method="int2"),
        dict(plan=ChainPlan(4 * P, 2 * P, 2 * P)),
        dict(plan=ChainPlan(5 * P, 2 * P)),
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_name_follows_from_all_that_its_content_does(change):
    plan = ChainPlan(4 * P, 2 * P)
    usual = {step.name for step in steps(12 * P, plan)}
    assert usual == {step.name for step in steps(12 * P, plan)}
    assert not usual & {step.name for step in steps(**dict(tokens=12 * P, plan=plan) | change)}


def test_an_earlier_edit_changes_all_later_names():
    plan, history = ChainPlan(4 * P, 2 * P), np.arange(12 * P)
    named = dict(tenant="t", namespace=None, method="oscar")
    before = chain(history, PROMPT, plan, **named)
    history[7 * P] = 0
    after = chain(history, PROMPT, plan, **named)
    assert [a.name == b.name for a, b in zip(before, after)] == [True] + [False] * (len(before) - 1)


def test_stand_ins_are_as_many_as_an_episode_keeps():
    plan = ChainPlan(4 * P, 2 * P)
    assert stand_ins(np.arange(12 * P), plan).tolist() == list(range(4 * P))


@pytest.mark.parametrize("sizes", [(100, 64), (128, 100), (128, 0), (0, 64), (64, 64), (128, 64, 65), (64, 64, -64)])
def test_wrong_sizes(sizes):
    with pytest.raises(KVQuantError, match="tokens"):
        ChainPlan(*sizes)
