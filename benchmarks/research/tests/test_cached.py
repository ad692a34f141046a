"""Every text is embedded once, in any order, and the next run reads the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.research.episodes import cached
from benchmarks.research.episodes.cached import CachedEmbedder
from benchmarks.research.tests import helpers


class Counting:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def encode(self, texts):
        self.seen += texts
        return helpers.embedder().encode(texts)


TEXTS = ["bread and boats", "boats", "stars of the sky at night", "boats"]


def test_rows_are_the_embedders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "AT_ONCE", 2)
    counting = Counting()
    embedder = CachedEmbedder(lambda: counting, tmp_path / "new" / "rows.npz")
    np.testing.assert_array_equal(embedder.encode(TEXTS), helpers.embedder().encode(TEXTS))
    np.testing.assert_array_equal(embedder.encode(TEXTS[::-1]), helpers.embedder().encode(TEXTS[::-1]))
    assert sorted(counting.seen) == sorted(set(TEXTS))

    again = CachedEmbedder(lambda: pytest.fail("the file has them all"), tmp_path / "new" / "rows.npz")
    np.testing.assert_array_equal(again.encode(TEXTS), helpers.embedder().encode(TEXTS))


def test_without_a_file_it_remembers() -> None:
    counting = Counting()
    embedder = CachedEmbedder(lambda: counting)
    embedder.encode(TEXTS[:2])
    embedder.encode(TEXTS)
    assert sorted(counting.seen) == sorted(set(TEXTS))
