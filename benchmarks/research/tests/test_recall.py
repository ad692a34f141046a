"""Recall of evidence agrees with a count of tokens, and the whole command runs on small data."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.research.episodes import recall as command
from benchmarks.research.episodes.case import Settings
from benchmarks.research.episodes.recall import (
    Search,
    Searched,
    best,
    by_ranks,
    evidence_shares,
    searches,
    with_neighbours,
)
from benchmarks.research.tests import helpers
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.index import Lexical
from sglang_kvq.sessions.search import choose_pages, rank_windows

SETTINGS = Settings(recent_pages=1)


@pytest.fixture(scope="module")
def searched() -> Searched:
    return Searched(helpers.conversation(8, 8), helpers.writer(), helpers.embedder())


def arguments(data: Path, *words: str) -> argparse.Namespace:
    fixed = ["--model", "tiny", "--embedder", "none", "--data", str(data), "--out", str(data / "out.json")]
    return command.arguments([*fixed, "--history-tokens", "1400", "--datasets", "locomo", "--limit", "2", *words])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    helpers.write_data(folder, [helpers.record(*(f"{a}{n}" for n in range(3))) for a in "abcdefgh"])
    return folder


def test_shares_are_a_count_of_tokens() -> None:
    evidence = [[(60, 70)], [(0, 64), (130, 200)], [(10, 20), (15, 400)]]
    shares = evidence_shares(evidence, 450)
    assert shares.shape == (3, 8)
    for row, turns in zip(shares, evidence):
        for page in range(8):
            tokens = [[t // PAGE_SIZE == page for t in range(*turn)] for turn in turns]
            assert row[page] == pytest.approx(np.mean([np.mean(of) for of in tokens]))


@pytest.mark.parametrize("pieces, ranking", [("2 pages", "fused"), ("4 turns", "cosine"), ("1 page", "bm25")])
def test_recall_is_that_of_the_chosen_pages_tokens(searched: Searched, pieces: str, ranking: str) -> None:
    search = Search(pieces, ranking, dates="page" in pieces)
    found = searched.recall(search, 3, SETTINGS)
    spans = searched.spans(pieces)
    size = len(searched.history)
    sinks = -(-len(searched.history.prefix) // PAGE_SIZE)
    for n, question in enumerate(searched.conversation.questions):
        order = np.argsort(-searched.scores(pieces, search.dates, ranking)[n], kind="stable")
        budget = size // 3 // PAGE_SIZE
        pages = choose_pages(
            [spans[at] for at in order], size, budget, page=PAGE_SIZE, sink_pages=sinks, recent_pages=1
        ).tolist()
        assert len(pages) == budget and {*range(sinks), (size - 1) // PAGE_SIZE} <= set(pages)
        start, end = searched.history.spans[question.evidence[0]]
        assert found[n] == pytest.approx(np.mean([token // PAGE_SIZE in pages for token in range(start, end)]))


def test_words_of_a_question_find_its_evidence(searched: Searched) -> None:
    for search in (Search("2 pages", "bm25"), Search("4 turns", "cosine", dates=False)):
        assert searched.recall(search, 2, SETTINGS).mean() > 0.9
    recent = searched.recall(Search("1 page", "recent"), 4, SETTINGS)
    assert recent[1] == 0 and recent[-1] > 0.99 and recent.mean() < 0.5


def test_windows_see_tokens_and_headers(searched: Searched) -> None:
    whole = len(searched.history) // PAGE_SIZE
    assert len(searched.texts("2 pages", True)) == whole == len(searched.texts("2 pages whole", True)) + 1
    assert len(searched.spans("2 pages")) == len(searched.spans("2 pages whole")) == whole - 1
    assert any("[Session 1, May]" in text for text in searched.texts("2 pages", True))
    assert not any("[Session" in text for text in searched.texts("2 pages whole", False)[3:-3])
    assert searched.texts("4 turns", True)[2].startswith("\n[Session 1, May]\nA: ")
    assert not any("[Session" in text for text in searched.texts("4 turns", False))


def test_windows_apart_are_every_second_one(searched: Searched) -> None:
    assert searched.spans("2 pages apart") == searched.spans("2 pages")[::2]
    for ranking in ("cosine", "bm25"):
        every = searched.scores("2 pages", True, ranking)
        np.testing.assert_array_equal(searched.scores("2 pages apart", True, ranking), every[:, ::2])


def test_the_served_search_is_rank_windows(searched: Searched) -> None:
    texts = searched.texts("1 page", True)
    index = Lexical()
    index.add(texts)
    for n, question in enumerate(searched.questions):
        served = rank_windows(question, searched.rows[n], helpers.embedder().encode(texts), index)
        assert served.tolist() == np.argsort(-searched.scores("2 pages", True, "fused")[n], kind="stable").tolist()


def test_centroids_go_episode_by_episode(searched: Searched) -> None:
    from sglang_kvq.sessions.episodes import cluster

    labels = cluster(searched.embeddings("4 turns", False), 4).labels
    for of_question in searched.scores("4 turns", False, "centroid_4"):
        ranked = labels[np.argsort(-of_question, kind="stable")]
        assert np.count_nonzero(np.diff(ranked)) == 3


def test_neighbours_follow_their_hit() -> None:
    page = PAGE_SIZE
    ranked = [(3 * page, 5 * page), (10, 20), (6 * page, 6 * page + 9)]
    size = 6 * page + 9
    assert list(with_neighbours(ranked, size, 0, 0)) == ranked
    assert list(with_neighbours(ranked, size, 1, 1)) == [
        ranked[0], (2 * page, 3 * page), (5 * page, 6 * page),
        ranked[1], (page, 2 * page),
        ranked[2], (5 * page, 6 * page),
    ]  # fmt: skip
    assert list(with_neighbours(ranked[:1], 5 * page + 3, 0, 1))[1] == (5 * page, 5 * page + 3)


def test_fusion_by_reciprocal_ranks() -> None:
    cosines, words = np.array([0.9, 0.5, 0.7, 0.1]), np.array([0.0, 30.0, 20.0, 0.0])
    # Ranks are 0 2 1 3 and, with equal scores in their order, 2 0 1 3.
    wanted = [1 / 61 + 1 / 63, 1 / 63 + 1 / 61, 1 / 62 + 1 / 62, 1 / 64 + 1 / 64]
    np.testing.assert_allclose(by_ranks(cosines, words), wanted, rtol=1e-12)


def test_rows_and_choice(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "CHOSEN_BY", (2.0, 2.5))
    args = arguments(data, "--compressions", "2,2.5,3")
    table, more = command.run(args, helpers.writer(), helpers.embedder())
    assert len(table) == len(searches()) * 3 and len(set(searches())) == len(searches())
    assert {row["compression"] for row in table} == {2, 2.5, 3}
    assert all(0 <= row["recall"] <= 1 + 1e-9 and row["complete"] <= row["recall"] + 1e-9 for row in table)
    assert {(row["conversations"], row["questions"], row["questions_choose"]) for row in table} == {(1, 8, 8)}
    assert {row["recall_se"] for row in table} == {None}  # a single conversation has no error
    served = [row for row in table if row["served"] and row["compression"] in (2, 2.5)]
    assert all(row["ranking"] == "recent" or ("page" in row["pieces"] and row["dates"]) for row in served)
    names = [(row["pieces"], row["ranking"], row["neighbours"]) for row in served]
    assert tuple(more["chosen"].values()) in names
    assert len(command.text_table(table).splitlines()) == len(searches())
    json.dumps([table, more])


def choice(*searches: tuple[str, str, bool, float, float], error: float = 0.0) -> str:
    """Returns the choice among (pieces, neighbors, served, recall, recall_choose) at one compression."""
    names = ("pieces", "neighbours", "served", "recall", "recall_choose")
    more = dict(dataset="a", ranking="cosine", compression=4.0, recall_choose_se=error)
    return " ".join(best([{**dict(zip(names, one)), **more} for one in searches]).values())


def test_the_choice_sees_the_choosing_half_only() -> None:
    found = choice(
        ("1 page", "none", True, 0.9, 0.1), ("2 pages", "both", True, 0.1, 0.5), ("1 turn", "none", False, 1.0, 1.0)
    )
    assert found == "2 pages cosine both"


def test_of_what_is_within_an_error_the_plainest_is_chosen() -> None:
    searches = [
        ("1 page", "none", True, 0.5, 0.6),
        ("2 pages whole", "none", True, 0.5, 0.79),
        ("3 pages", "none", True, 0.5, 0.78),
        ("2 pages", "none", True, 0.5, 0.77),
        ("2 pages", "both", True, 0.5, 0.8),
    ]
    assert choice(*searches, error=0.04) == "2 pages cosine none"
    assert choice(*searches, error=0.025) == "3 pages cosine none"
    assert choice(*searches, error=0.015) == "2 pages whole cosine none"
    assert choice(*searches, error=0.005) == "2 pages cosine both"


@pytest.mark.parametrize(
    "words, message",
    [
        (["--compressions", "4,x"], "--compressions 4,x: give numbers above 1"),
        (["--compressions", "8"], "--compressions 8: a way .* by its recall at 4 or 6. Add"),
        (["--limit", "0"], "--limit 0: give 1 or more"),
        (["--limit", "1", "--compressions", "2,4"], "locomo: 1 conversation, but one is needed to choose"),
        (["--pieces", "5 pages"], "--pieces 5 pages: choose"),
        (["--datasets", "locomo,x"], "--datasets x: choose"),
    ],
)
def test_bad_arguments_are_refused(data: Path, words: list[str], message: str) -> None:
    with pytest.raises(KVQuantError, match=message):
        command.run(arguments(data, *words), helpers.writer(), helpers.embedder())
