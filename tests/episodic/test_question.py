"""Where a prompt's question begins, by its chat template and by what was said before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvq.episodic.question import QUESTION_TOKENS, common_length, occurrences, question_start, user_turn


class Tokenizer:
    """A template of tokens that are characters."""

    def __init__(self, before: dict[str, str], after: str = "$\n") -> None:
        self.before, self.after = before, after

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> list[int]:
        return [ord(c) for one in conversation for c in self.before[one["role"]] + one["content"] + self.after]


def ids(text: str) -> np.ndarray:
    return np.array([ord(c) for c in text])


def test_the_marker_of_a_user_message() -> None:
    marker = user_turn(Tokenizer({"user": "<user>\n", "assistant": "<assistant>\n"}))
    assert "".join(map(chr, marker)) == "<user>\n"
    prompt = ids("<system>\nBe brief.$\n<user>\nOne?$\n<assistant>\n1$\n<user>\nTwo?$\n")
    assert occurrences(prompt, marker).tolist() == [20, 48]


@pytest.mark.parametrize("before", [{"user": "", "assistant": ""}, {"user": "\n", "assistant": "\n"}], ids=repr)
def test_a_template_without_a_marker_has_none(before: dict[str, str]) -> None:
    assert len(user_turn(Tokenizer(before))) == 0


def test_no_template_is_no_error() -> None:
    class Base:
        def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
            raise ValueError("this tokenizer has no chat template")

    assert len(user_turn(Base())) == 0


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=3))
def test_occurrences_are_those_of_a_plain_search(text: list[int], marker: list[int]) -> None:
    n = len(marker)
    plain = [i for i in range(len(text) - n + 1) if n and text[i : i + n] == marker]
    assert occurrences(np.array(text, np.int64), np.array(marker, np.int64)).tolist() == plain


@given(st.lists(st.integers(0, 1), max_size=9), st.lists(st.integers(0, 1), max_size=9))
def test_common_length_is_that_of_a_plain_search(a: list[int], b: list[int]) -> None:
    plain = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    assert common_length(a, np.array(b, np.int32)) == plain


@pytest.mark.parametrize(
    "tokens,known,turns,expected",
    [
        (1000, 0, [10, 900], 900),  # a first call: its last user message
        (1000, 700, [10, 900], 900),  # a new user message
        (1000, 920, [10, 900], 920),  # results of a tool after it
        (1000, 1000, [10, 900], 900),  # the same prompt once more
        (1000, 900, [], 900),  # no template: what is new
        (1000, 0, [], 1000 - QUESTION_TOKENS),
        (1000, 100, [200], 1000 - QUESTION_TOKENS),
        (100, 0, [], 0),
    ],
)
def test_where_a_question_begins(tokens: int, known: int, turns: list[int], expected: int) -> None:
    assert question_start(np.zeros(tokens, np.int32), known, np.array(turns, np.int64)) == expected
