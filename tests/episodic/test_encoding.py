"""Questions go before segments, errors reach who asked, and texts without words are near nothing."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from sglang_kvq.episodic.embed import Embedder
from sglang_kvq.episodic.encoding import BATCH, CPU_BATCH, EncodingThread, embed


class Slow:
    """Waits for ``go`` before its first answer; remembers the order of what it was asked."""

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
    waiting = [thread.segments([name]) for name in ("one", "two", "three")]
    question = thread.question("question")
    encoder.go.set()
    assert question.result(10).shape == (1, 2)
    for future in waiting:
        future.result(10)
    # The thread may or may not have begun with the first.
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
        thread.segments(["bad"]).result(10)
    assert thread.segments(["good"]).result(10).shape == (1, 2)
    thread.close()


def test_texts_without_words_are_zeros() -> None:
    encoder = Slow()
    encoder.go.set()
    rows = embed(Embedder(encoder), ["", "a", " \n", "bb"])
    np.testing.assert_allclose(rows, [[0, 0], [2**-0.5, 2**-0.5], [0, 0], [2 / 5**0.5, 1 / 5**0.5]], rtol=1e-6)
    assert embed(Embedder(encoder), [" "]).tolist() == [[0, 0]]
