"""Rows of length 1, nothing of a long text dropped, and bad input refused."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_kvq.episodic.embed import PIECE_WORDS, Embedder
from sglang_kvq.errors import KVQuantError


class Counts:
    """An encoder that counts words a, b and c, and refuses texts that MiniLM would cut."""

    def encode(self, sentences: list[str], **options: Any) -> Any:
        assert all(len(text.split()) <= PIECE_WORDS for text in sentences)
        return [[float(text.split().count(word)) for word in "abc"] for text in sentences]


def test_rows_have_length_one_and_keep_their_order() -> None:
    rows = Embedder(Counts()).encode(["a a b", "c", "b"])
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, [[2 / 5**0.5, 1 / 5**0.5, 0], [0, 0, 1], [0, 1, 0]], rtol=1e-6)


def test_a_long_text_is_the_mean_of_its_pieces() -> None:
    """Two pieces of one kind and one of another, between short texts; a cut text would not know of c."""
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
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)  # not installed
    with pytest.raises(KVQuantError, match=r"pip install 'sglang-kvq\[episodes\]'"):
        Embedder.load(tmp_path)
