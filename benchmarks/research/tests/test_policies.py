"""Each policy keeps the right part of a small conversation, and equals the full cache if nothing is left out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.research.episodes.case import Case, Settings
from benchmarks.research.episodes.matching import rank_segments
from benchmarks.research.episodes.policies import NAMES, POLICIES, Outcome, epicache_layers, known_names
from benchmarks.research.episodes.runner import Runner
from benchmarks.research.tests import helpers
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.index import Lexical
from sglang_kvq.sessions.search import choose_pages, rank_windows, windows

SETTINGS = Settings(medoids=1, block=128, chunk=256, repeat=128, recent_pages=1, episodes=3)


@pytest.fixture(scope="module")
def case() -> Case:
    return Case(helpers.runner(), helpers.writer(), helpers.embedder(), helpers.conversation(), SETTINGS)


def outcomes(case: Case, policy: str, tokens: int) -> list[Outcome]:
    if policy == "epicache_layers":
        return list(epicache_layers(case, tokens, (tokens,) * case.runner.layers))
    return list(POLICIES[policy](case, tokens))


def test_the_case(case: Case) -> None:
    assert len(case.history) > 12 * PAGE_SIZE and len(case.asks) == 6 and len(case.episodes) == 3
    assert case.pinned % PAGE_SIZE == 0 and case.pinned >= len(case.history.prefix)
    assert case.budget(2) % PAGE_SIZE == 0 and case.budget(2) <= len(case.history) / 2
    ends = [outcomes(case, end, 0)[0].likelihoods for end in ("full", "none")]
    assert np.abs(ends[0] - ends[1]).min() > 0.05  # the history matters


@pytest.mark.parametrize("policy", [name for name in NAMES if name not in ("full", "none")])
def test_with_room_for_everything_it_is_the_full_cache(case: Case, policy: str) -> None:
    (full,) = outcomes(case, "full", 0)
    size = len(case.history)
    for found in outcomes(case, policy, -(-size // PAGE_SIZE) * PAGE_SIZE):
        np.testing.assert_allclose(found.likelihoods, full.likelihoods, atol=1e-4)
        np.testing.assert_allclose(found.recall, 1, atol=1e-6)
        if policy != "snapkv":
            assert found.hot == size


@pytest.mark.parametrize("policy", [name for name in NAMES if name not in ("full", "none")])
def test_it_keeps_within_its_budget_and_loses_something(case: Case, policy: str) -> None:
    tokens = case.budget(2)
    (full,) = outcomes(case, "full", 0)
    found = outcomes(case, policy, tokens)
    assert found
    for one in found:
        assert one.hot <= tokens + 1e-6 and one.recall.min() >= 0 and one.recall.max() <= 1
        assert np.isfinite(one.likelihoods).all() and len(one.likelihoods) == len(case.asks)
        assert np.abs(one.likelihoods - full.likelihoods).max() > 1e-3
        if not policy.startswith("text"):
            assert one.hot > tokens - PAGE_SIZE
    stored = {one.total for one in found}
    if policy in ("retrieve", "snapkv"):
        assert stored == {len(case.history)}
    elif policy.startswith("epicache"):
        assert stored == {one.hot * 3 for one in found}


def test_window_keeps_both_ends(case: Case) -> None:
    (found,) = outcomes(case, "window", case.budget(2))
    spans = case.history.spans
    start = len(case.history) - (case.budget(2) - case.pinned)
    wanted = [
        np.mean([t < case.pinned or t >= start for t in range(*spans[q.evidence[0]])])
        for q in case.conversation.questions
    ]
    np.testing.assert_allclose(found.recall, wanted, atol=1e-6)
    assert found.recall[-1] == 1 and found.recall.min() == 0


def test_text_and_late_find_what_is_asked_for(case: Case) -> None:
    """Words of the questions occur only in their sessions, so retrieval by segments finds all evidence."""
    texts = {one.matching: one for one in outcomes(case, "text", case.budget(3))}
    late = {one.matching: one for one in outcomes(case, "retrieve", case.budget(2))}
    assert set(texts) == {"segments", "fused"} and set(late) == {"centroid", "segments", "windows"}
    for text in texts.values():
        assert text.recall.tolist() == [1] * 6
        assert text.matched is not None and text.matched.tolist() == [1] * 6
    for matching in ("segments", "windows"):
        np.testing.assert_allclose(late[matching].recall, 1, atol=1e-6)
    (recent,) = outcomes(case, "text_recent", case.budget(3))
    assert recent.recall.tolist()[0] == 0 and recent.recall.tolist()[-1] == 1


@pytest.mark.parametrize("matching", ["segments", "windows"])
def test_late_reads_pages_in_place(case: Case, matching: str) -> None:
    """One question's answer equals that with a mask over the full cache."""
    (found,) = (one for one in outcomes(case, "retrieve", case.budget(3)) if one.matching == matching)
    number = 1
    if matching == "segments":
        ranked = [case.spans[n] for n in rank_segments(case.question_rows[number], case.embeddings)]
    else:
        texts = [case.writer.text(case.history.ids[start:end]) for start, end in windows(len(case.history), 1)]
        index = Lexical()
        index.add(texts)
        question = case.conversation.questions[number].text
        order = rank_windows(question, case.question_rows[number], case.embedder.encode(texts), index)
        ranked = [windows(len(case.history))[n] for n in order]
    pages = choose_pages(
        ranked,
        len(case.history),
        case.budget(3) // PAGE_SIZE,
        page=PAGE_SIZE,
        sink_pages=case.pinned // PAGE_SIZE,
        recent_pages=1,
    )
    seen = torch.isin(torch.arange(len(case.history)) // PAGE_SIZE, torch.tensor(pages))

    def attend(layer, q, k, v, scale):
        group, n = q.shape[1] // k.shape[1], q.shape[2]
        keys, values = (
            torch.cat(of, 2).repeat_interleave(group, 1) for of in ((case.full.k[layer], k), (case.full.v[layer], v))
        )
        mask = torch.cat([seen.expand(n, -1), torch.ones(n, n, dtype=torch.bool).tril()], 1)
        return (q @ keys.mT * scale).masked_fill(~mask, -torch.inf).softmax(-1) @ values

    ask = case.asks[number]
    hidden = case.runner.hidden(torch.tensor([ask.ids]), len(case.history), attend)[0]
    targets = torch.tensor(ask.ids[-ask.answer :])
    wanted = case.runner.logprobs(hidden[len(ask.ids) - ask.answer - 1 : -1], targets).double().mean()
    assert found.likelihoods[number] == pytest.approx(float(wanted), abs=1e-4)


def test_a_question_gets_the_episode_that_its_matching_chose(case: Case) -> None:
    """Each matching's answers equal those of a single cache that serves every question."""
    found = {one.matching: one for one in outcomes(case, "epicache", case.budget(2))}
    assert set(found) == {"centroid", "segments", "evidence"}
    matched = found["evidence"].matched
    assert matched is not None and matched.tolist() == [1] * 6
    assert (found["evidence"].recall > 0).all()
    for one in found.values():
        assert one.matched is not None
        same = one.matched == 1
        np.testing.assert_allclose(one.likelihoods[same], found["evidence"].likelihoods[same], atol=1e-4)


def test_another_storage_shares_what_text_alone_says(case: Case) -> None:
    rows, full = case.ranked_windows, case.full
    other = case.stored_as(lambda layer, first, k, v: (k, torch.zeros_like(v)), with_mass=False)
    assert other.ranked_windows is rows and other.history is case.history
    assert other.full is not full and not other.full.v[0][0, 0, 0].any() and full.v[0][0, 0, 0].any()
    with pytest.raises(ValueError, match="made without mass"):
        _ = other.mass


@pytest.mark.parametrize("policy", NAMES)
def test_all_run_in_bf16(policy: str) -> None:
    """Policies run in BF16, as on a GPU; BF16 moves these logits by some tenths, other chosen tokens by more."""
    exact = Case(helpers.runner(), helpers.writer(), helpers.embedder(), helpers.conversation(), SETTINGS)
    model = helpers.tiny_llama().bfloat16()
    case = Case(Runner(model), exact.writer, exact.embedder, exact.conversation, SETTINGS)
    for found, wanted in zip(outcomes(case, policy, case.budget(2)), outcomes(exact, policy, case.budget(2))):
        assert found.policy == wanted.policy and found.hot == wanted.hot
        assert np.isfinite(found.likelihoods).all()
        if policy in ("full", "none", "window", "text", "text_recent", "retrieve"):
            assert np.abs(found.likelihoods - wanted.likelihoods).max() < 0.5
    past = case.full
    assert {x.dtype for x in (*past.k, *past.v)} == {torch.bfloat16}


def test_unknown_names_are_refused() -> None:
    assert known_names(["late", "retrieve", "epicache_layers"]) == ["retrieve", "retrieve", "epicache_layers"]
    with pytest.raises(KVQuantError, match="policy lat: choose some of full, none"):
        known_names(["lat"])
