"""BM25 agrees with its formula in plain Python, and the index can grow."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.index import LENGTH, LETTERS, MOST, SATURATION, Lexical

TEXTS = [
    "Caroline: I painted a sunrise over the lake last year.",
    "Melanie: The kids love camping, and camping loves us.",
    "Caroline: My support group met again on Friday; it was powerful.",
    "Melanie: Lakes, lakes, lakes! We swim in every lake there is.",
    "",
    "Caroline: a",
]


def terms(text: str) -> Counter[str]:
    """Returns the letter runs of each word, padded with a space on both sides."""
    found: Counter[str] = Counter()
    for word in text.lower().split():
        padded = f" {word} "
        found.update(padded[at : at + LETTERS] for at in range(max(1, len(padded) - LETTERS + 1)))
    return found


def reference(texts: list[str], question: str) -> list[float]:
    of_texts = [terms(text) for text in texts]
    mean = sum(sum(of.values()) for of in of_texts) / len(texts)
    scores = []
    for of in of_texts:
        score = 0.0
        for term in terms(question):
            having = sum(term in one for one in of_texts)
            weight = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
            norm = SATURATION * (1 - LENGTH + LENGTH * sum(of.values()) / mean)
            score += weight * of[term] * (SATURATION + 1) / (of[term] + norm)
        scores.append(score)
    return scores


def index(texts: list[str]) -> Lexical:
    made = Lexical()
    made.add(texts)
    return made


@pytest.mark.parametrize("question", ["When did Caroline paint a sunrise?", "Which lakes?", "a", "camping camping"])
@pytest.mark.parametrize("texts", [TEXTS, ["", *TEXTS], TEXTS[:1], [*TEXTS, ""]])
def test_scores_are_the_formulas(texts: list[str], question: str) -> None:
    np.testing.assert_allclose(index(texts).scores(question), reference(texts, question), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("run", [2, 3, 6, 9])
def test_runs_are_texts_joined(run: int) -> None:
    joined = [" ".join(TEXTS[n : n + run]) for n in range(max(1, len(TEXTS) - run + 1))]
    np.testing.assert_allclose(index(TEXTS).scores("Caroline's lakes", run), reference(joined, "Caroline's lakes"))


def test_forms_of_a_word_match() -> None:
    scores = index(TEXTS).scores("What did she paint?")
    assert scores.argmax() == 0
    words = Lexical(letters=0)
    words.add(TEXTS)
    assert words.scores("What did she paint?")[0] == 0 < words.scores("Who painted?")[0]


def test_nothing_shared_scores_nothing() -> None:
    assert not index(TEXTS).scores("Quixotic zebra?").any()
    assert not index(TEXTS).scores("").any() and not index(["", ""]).scores("lake").any()
    assert len(Lexical().scores("lake")) == 0


def test_growth_and_cuts_are_the_index_of_what_is_left() -> None:
    grown = Lexical()
    for at, text in enumerate(TEXTS):
        assert len(grown) == at
        grown.add([text])
    grown.add([])
    np.testing.assert_array_equal(grown.scores("lake group"), index(TEXTS).scores("lake group"))
    grown = grown.first(3)
    np.testing.assert_array_equal(grown.scores("lake group"), index(TEXTS[:3]).scores("lake group"))
    grown.add(TEXTS[3:])
    np.testing.assert_array_equal(grown.scores("lake group"), index(TEXTS).scores("lake group"))
    grown = grown.first(0)
    assert len(grown) == 0 and len(grown.scores("lake")) == 0


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(KVQuantError, match="runs of 0 texts"):
        index(TEXTS).scores("lake", 0)
    with pytest.raises(KVQuantError, match="terms of -1 letters"):
        Lexical(letters=-1)


def test_growth_takes_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is counted as concatenated bytes; texts arrive a few at a time, as a server embeds them."""
    copied, concatenate = [0], np.concatenate

    def counting(parts: Any, **options: Any) -> np.ndarray:
        made = np.asarray(concatenate(parts, **options))
        copied[0] += made.nbytes
        return made

    texts = [f"{TEXTS[n % 4]} {n}" for n in range(4000)]
    monkeypatch.setattr(np, "concatenate", counting)
    grown = Lexical()
    for at in range(0, len(texts), 8):
        grown.add(texts[at : at + 8])
    assert copied[0] / len(texts) < 5000
    np.testing.assert_array_equal(grown.scores("lakes 77"), index(texts).scores("lakes 77"))


def test_an_index_of_the_first_texts_grows_by_itself() -> None:
    texts = [f"{TEXTS[n % 4]} {n}" for n in range(200)]
    whole = index(texts)
    other = whole.first(150)
    other.add(["lakes and kites"])
    np.testing.assert_array_equal(whole.scores("kites 7"), index(texts).scores("kites 7"))
    np.testing.assert_array_equal(other.scores("kites 7"), index([*texts[:150], "lakes and kites"]).scores("kites 7"))
    assert sum(a is b for a, b in zip(whole.texts.blocks, other.texts.blocks)) == 2
    (block,) = other.first(9).texts.blocks
    assert block.nbytes == block.packed.nbytes + 9 * (block.ends.itemsize + block.lengths.itemsize)


def test_a_term_without_end_counts_as_often_as_it_can() -> None:
    texts = ["lake " * 3 * MOST, "kite"]
    assert index(texts).scores("lake")[0] == pytest.approx(reference(texts, "lake")[0], rel=1e-3)
