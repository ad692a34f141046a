"""Embeddings: unit rows for whole texts, zeros without words, questions before pages, errors to callers."""

from __future__ import annotations

import re
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.embedding import BATCH, CPU_BATCH, PIECE_WORDS, Embedder, EncodingThread, embed


class Counts:
    """An encoder that counts the words a, b and c, and refuses texts that MiniLM would truncate."""

    def encode(self, sentences: list[str], **options: Any) -> Any:
        assert all(len(text.split()) <= PIECE_WORDS for text in sentences)
        return [[float(text.split().count(word)) for word in "abc"] for text in sentences]


def test_rows_have_length_one_and_keep_their_order() -> None:
    rows = Embedder(Counts()).encode(["a a b", "c", "b"])
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, [[2 / 5**0.5, 1 / 5**0.5, 0], [0, 0, 1], [0, 1, 0]], rtol=1e-6)


def test_a_long_text_is_the_mean_of_its_pieces() -> None:
    """A long text has two pieces of one kind and one of another; if it were truncated, c would be missing."""
    long = " ".join(["a"] * PIECE_WORDS + ["a"] * PIECE_WORDS + ["c"] * PIECE_WORDS)
    rows = Embedder(Counts()).encode(["b", long, "c"])
    np.testing.assert_allclose(rows, [[0, 1, 0], [2 / 5**0.5, 0, 1 / 5**0.5], [0, 0, 1]], rtol=1e-6)


@pytest.mark.parametrize("words", [PIECE_WORDS, PIECE_WORDS + 1, 5 * PIECE_WORDS - 3])
def test_pieces_lose_no_word(words: int) -> None:
    seen: list[str] = []

    class Notes:
        def encode(self, sentences: list[str], **options: Any) -> Any:
            seen.extend(sentences)
            return np.ones((len(sentences), 2))

    text = " ".join(f"w{n}" for n in range(words))
    Embedder(Notes()).encode([text])
    assert " ".join(seen) == text and max(len(piece.split()) for piece in seen) <= PIECE_WORDS


@pytest.mark.parametrize(
    "text",
    ["我昨天收养了一只鹦鹉。" * 40, "попугая зовут Пикси, " * 60, "self.read(turn[0].ids,done)" * 40, "deadbeef" * 200],
)
def test_texts_without_many_spaces_are_cut_too(text: str) -> None:
    """MiniLM makes a token of each mark, and of each letter that is not ASCII; it reads 254 of them."""
    seen: list[str] = []

    class Notes:
        def encode(self, sentences: list[str], **options: Any) -> Any:
            seen.extend(sentences)
            return np.ones((len(sentences), 2))

    Embedder(Notes()).encode([text])
    assert "".join("".join(seen).split()) == "".join(text.split())
    assert max(len(re.findall(r"[A-Za-z0-9]{1,8}|[^\sA-Za-z0-9]", piece)) for piece in seen) <= PIECE_WORDS


def test_bad_input_is_refused(tmp_path: Path) -> None:
    embedder = Embedder(Counts())
    with pytest.raises(KVQuantError, match="no texts"):
        embedder.encode([])
    with pytest.raises(KVQuantError, match="an empty text"):
        embedder.encode(["a", "  "])

    class Broken:
        def encode(self, sentences: list[str], **options: Any) -> Any:
            return [[float("nan")]] * len(sentences)

    with pytest.raises(KVQuantError, match="infinite values"):
        Embedder(Broken()).encode(["a"])
    with pytest.raises(KVQuantError, match="not a sentence-transformers model"):
        Embedder.load(tmp_path)


def test_a_folder_is_loaded_by_sentence_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modules.json").write_text("[]")
    made = []
    module = types.ModuleType("sentence_transformers")
    module.SentenceTransformer = lambda *args, **options: made.append((args, options)) or Counts()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    assert Embedder.load(tmp_path).encode(["a"]).shape == (1, 3)
    assert made == [((str(tmp_path),), {"device": "cpu"})]
    assert Embedder.load(tmp_path, "cuda:1").device == made[-1][1]["device"] == "cuda:1"
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)  # as if not installed
    with pytest.raises(KVQuantError, match=r"pip install 'sglang-kvq\[episodes\]'"):
        Embedder.load(tmp_path)


class Slow:
    """An encoder that waits for ``go`` before its first answer and remembers the order of its inputs."""

    def __init__(self) -> None:
        self.go, self.asked = threading.Event(), list[str]()

    def encode(self, sentences: list[str], **options: Any) -> Any:
        assert self.go.wait(10)
        self.asked += sentences
        if "bad" in sentences:
            raise RuntimeError("no memory")
        return [[float(len(text)), 1.0] for text in sentences]


def test_a_question_passes_segments_that_wait() -> None:
    encoder = Slow()
    thread = EncodingThread(Embedder(encoder))
    waiting = [thread.pages([name]) for name in ("one", "two", "three")]
    question = thread.question("question")
    encoder.go.set()
    assert question.result(10).shape == (1, 2)
    for future in waiting:
        future.result(10)
    # The thread may or may not have begun with the first text.
    assert encoder.asked.index("question") <= 1 and encoder.asked[-2:] == ["two", "three"]
    thread.close()


def test_more_are_embedded_at_once_where_that_is_fast() -> None:
    for device, batch in (("cpu", CPU_BATCH), ("cuda", BATCH), ("cuda:1", BATCH)):
        thread = EncodingThread(Embedder(Slow(), device))
        assert thread.batch == batch
        thread.close()


def test_an_error_is_that_of_who_asked() -> None:
    encoder = Slow()
    encoder.go.set()
    thread = EncodingThread(Embedder(encoder))
    with pytest.raises(RuntimeError, match="no memory"):
        thread.pages(["bad"]).result(10)
    assert thread.pages(["good"]).result(10).rows.values.shape == (1, 2)
    thread.close()


def test_texts_without_words_are_zeros() -> None:
    encoder = Slow()
    encoder.go.set()
    rows = embed(Embedder(encoder), ["", "a", " \n", "bb"])
    np.testing.assert_allclose(rows, [[0, 0], [2**-0.5, 2**-0.5], [0, 0], [2 / 5**0.5, 1 / 5**0.5]], rtol=1e-6)
    assert embed(Embedder(encoder), [" "]).tolist() == [[0, 0]]
