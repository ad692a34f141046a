"""Clusters and their medoids, the prompt of an episode, and the chain that builds it: sizes, positions, names."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.config import PROMPT_TOKENS
from sglang_kvq.sessions.embedding import unit
from sglang_kvq.sessions.episodes import (
    BYTES,
    INSTRUCTION,
    ChainPlan,
    Episodes,
    EpisodesOfSession,
    chain,
    cluster,
    medoids,
    patched_prompt,
    stand_ins,
    step_ids,
)


def clouds(counts: tuple[int, ...], spread: float = 0.05, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns shuffled rows around ``len(counts)`` axes, and the axis of each row."""
    generator = np.random.default_rng(seed)
    of = generator.permutation(np.repeat(np.arange(len(counts)), counts))
    return unit(np.eye(8)[of] + spread * generator.standard_normal((len(of), 8))), of


def test_clusters_are_the_clouds() -> None:
    rows, of = clouds((12, 7, 20, 5))
    found = cluster(rows, 4)
    assert len(found) == 4
    for episode in range(4):
        assert len(np.unique(of[found.members(episode)])) == 1
    np.testing.assert_allclose(np.linalg.norm(found.centroids, axis=1), 1, rtol=1e-6)
    means = unit(np.stack([rows[found.labels == e].mean(0) for e in range(4)]))
    np.testing.assert_allclose(found.centroids, means, rtol=1e-6)


def test_numbers_follow_first_occurrence_and_the_seed_does_not_matter_here() -> None:
    rows, _ = clouds((6, 6, 6))
    found = cluster(rows, 3, seed=1)
    _, first = np.unique(found.labels, return_index=True)
    assert (np.diff(first) > 0).all()
    np.testing.assert_array_equal(cluster(rows, 3, seed=2).labels, found.labels)


def test_no_more_clusters_than_different_segments() -> None:
    rows = np.repeat(np.eye(3, dtype=np.float32), 4, axis=0)
    assert len(cluster(rows, 9)) == 3
    assert len(cluster(rows[:4], 2)) == 1
    one = cluster(rows[:1], 4)
    assert one.labels.tolist() == [0]


def test_medoids_are_the_nearest_in_order_of_the_conversation() -> None:
    angles = np.array([0.9, 0.1, 0.4, 0.0, 2.0])
    rows = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    episodes = Episodes(np.array([0, 0, 0, 0, 1]), rows[[3, 4]])
    assert medoids(rows, episodes, 0, 2).tolist() == [1, 3]
    assert medoids(rows, episodes, 0, 9).tolist() == [0, 1, 2, 3]
    assert medoids(rows, episodes, 1, 2).tolist() == [4]


def test_bad_input_is_refused() -> None:
    rows, _ = clouds((3, 3))
    with pytest.raises(KVQuantError, match=r"shape \(0, 8\)"):
        cluster(rows[:0], 2)
    with pytest.raises(KVQuantError, match="0 episodes"):
        cluster(rows, 0)
    for episode, count in ((2, 1), (-1, 1), (1, 0)):
        with pytest.raises(KVQuantError, match=f"{count} medoids of episode {episode}: there are 2"):
            medoids(rows, cluster(rows, 2), episode, count)


def test_scikit_learn_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.cluster", None)
    with pytest.raises(KVQuantError, match=r"pip install 'sglang-kvq\[episodes\]'"):
        cluster(clouds((3, 3))[0], 2)


def test_a_patched_prompt_has_its_segments_in_order() -> None:
    text = patched_prompt(["Ann: one\n", "Bob: two\n"])
    assert text.startswith(INSTRUCTION)
    assert text.removeprefix(INSTRUCTION) == "Ann: one\n\nBob: two\n"


def divided(segments: int = 4) -> EpisodesOfSession:
    """Returns two episodes of so many segments of a page each, with one prompt."""
    found, rows = EpisodesOfSession(), np.repeat(np.eye(2, dtype=np.float32), segments // 2, axis=0)
    found.prompt(found.divide(rows, 2, segments * P), 0, rows, str, lambda text: [*map(ord, text)])
    return found


def test_a_conversation_is_divided_again_when_it_has_doubled() -> None:
    found, rows = divided(), np.repeat(np.eye(3, dtype=np.float32), [2, 2, 4], axis=0)
    before = found.clusters
    assert found.divide(rows[:7], 3, 7 * P) is before and list(found.prompts) == [0]
    assert len(found.divide(rows, 3, 8 * P)) == 3
    assert (found.segments, found.tokens, found.prompts) == (8, 8 * P, {})


def test_clusters_of_tokens_that_changed_are_forgotten() -> None:
    found = divided()
    found.answered = 1
    found.keep(4 * P)
    assert found.clusters is not None and found.prompts
    found.keep(4 * P - 1)
    assert vars(found) == vars(EpisodesOfSession())


def test_a_patched_prompt_is_made_once_of_the_episodes_own_segments() -> None:
    found = divided()
    known = found.prompt(found.clusters, 0, np.zeros((9, 2)), str, lambda text: [])
    assert "".join(map(chr, known)) == patched_prompt(["0", "1"])
    # Segments that followed later belong to no episode yet.
    rows = np.repeat(np.eye(2, dtype=np.float32), [2, 5], axis=0)
    text = found.prompt(found.clusters, 1, rows, str, lambda text: [*map(ord, text)] + [0] * PROMPT_TOKENS)
    assert "".join(map(chr, text)).startswith(patched_prompt(["2", "3"]) + "\0") and len(text) == PROMPT_TOKENS


def test_copies_change_independently_and_bytes_are_counted() -> None:
    found = divided()
    made, arrays = found.copy(), (found.clusters.labels, found.clusters.centroids, found.prompts[0])
    made.prompts[1] = np.zeros(3, np.int64)
    assert list(found.prompts) == [0] and EpisodesOfSession().nbytes == 0
    assert found.nbytes == sum(one.nbytes for one in arrays) + BYTES == made.nbytes - 24 - BYTES


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
    # As in the oracle's loop, nothing is evicted before the first block that exceeds the budget.
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


def test_a_steps_request_is_its_prefix_a_block_and_the_prompt():
    plan, history = ChainPlan(5 * P, 2 * P), np.arange(12 * P)
    found = chain(history, PROMPT, plan, tenant="t", namespace=None, method="oscar")
    ids = [step_ids(step, history, np.array(PROMPT)) for step in found]
    assert ids[0].tolist() == [*range(6 * P), *PROMPT]  # the first prefix is history
    for start, one in zip((6 * P, 8 * P, 10 * P), ids[1:], strict=True):
        assert one.tolist() == [*stand_ins(history, plan), *range(start, start + 2 * P), *PROMPT]


@pytest.mark.parametrize(
    "sizes", [(100, 64), (128, 100), (128, 0), (0, 64), (64, 64), (128, 64, 65), (64, 64, -64), (64, 64, 0)]
)
def test_chains_of_wrong_sizes(sizes):
    with pytest.raises(KVQuantError, match="tokens"):
        ChainPlan(*sizes)
