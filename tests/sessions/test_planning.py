"""Plans of prompts with any length, known part and question, and where a question begins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.sessions.config import EpisodicConfig
from sglang_kvq.sessions.planning import (
    QUESTION_TOKENS,
    Plan,
    common_length,
    occurrences,
    plan,
    question_start,
    user_turn,
)

SINK, RECENT = P, 4 * P


def config(**changes) -> EpisodicConfig:
    return EpisodicConfig(**{"policy": "retrieve", "embedder": "folder", **changes})


@st.composite
def limits(draw) -> EpisodicConfig:
    """Draws any budget, block and segment that are valid together."""
    block, segment = draw(st.integers(1, 20)) * P, draw(st.integers(1, 5)) * P
    least = SINK + RECENT + segment + block
    found = config(budget=least + draw(st.integers(0, 40)) * P, block=block, segment=segment)
    found.check_windows(SINK, RECENT)
    return found


@given(limits(), st.data())
def test_a_plan_reads_no_more_than_the_budget(limits: EpisodicConfig, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 3 * limits.budget))
    exact = data.draw(st.integers(0, tokens))
    question = data.draw(st.integers(0, tokens))
    got = plan(tokens, exact, question, budget=limits.budget, block=limits.block)
    if tokens <= limits.budget:
        assert got == Plan(tokens) and got.hot == tokens
        return
    assert got.history % P == 0 and 0 < got.history < tokens
    assert 1 <= got.tail <= limits.block
    assert limits.budget - P < got.hot <= limits.budget
    assert (SINK + RECENT + limits.segment) // P <= got.pages < got.history // P
    if got.compute:
        assert exact < got.history
    else:
        assert got.history <= exact


@given(limits(), st.data())
def test_a_history_that_is_known_needs_nothing(limits: EpisodicConfig, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(limits.budget + 1, 3 * limits.budget))
    exact = data.draw(st.integers(tokens - limits.block + P, tokens + P))
    got = plan(tokens, exact, 0, budget=limits.budget, block=limits.block)
    assert not got.compute and got.history == min(exact, tokens - 1) // P * P


def test_what_is_computed_ends_where_the_question_begins() -> None:
    assert plan(5000, 0, 4900, budget=1024, block=512) == Plan(5000, 4864, True, 13)
    # The question is longer than the block, so its beginning is computed with the history.
    assert plan(5000, 0, 3000, budget=1024, block=512) == Plan(5000, 4544, True, 8)
    # Tokens in the same page as the question are not history.
    assert plan(5000, 0, 5000, budget=1024, block=512).history == 4992
    assert plan(5056, 0, 5056, budget=1024, block=512).history == 4992


def test_a_tail_up_to_the_block_stays() -> None:
    assert plan(5000, 4544, 4900, budget=1024, block=512) == Plan(5000, 4544, False, 8)
    assert plan(5000, 4480, 4900, budget=1024, block=512).compute


class Tokenizer:
    """A chat template whose tokens are characters."""

    def __init__(self, before: dict[str, str], after: str = "$\n") -> None:
        self.before, self.after = before, after

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> list[int]:
        assert options == {"tokenize": True, "return_dict": False}  # otherwise a tokenizer returns text, or a dict
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
        (1000, 920, [10, 900], 920),  # results of a tool come after it
        (1000, 1000, [10, 900], 900),  # the same prompt once more
        (1000, 900, [], 900),  # no template: only the new tokens
        (1000, 0, [], 1000 - QUESTION_TOKENS),
        (1000, 100, [200], 1000 - QUESTION_TOKENS),
        (100, 0, [], 0),
    ],
)
def test_where_a_question_begins(tokens: int, known: int, turns: list[int], expected: int) -> None:
    assert question_start(np.zeros(tokens, np.int32), known, np.array(turns, np.int64)) == expected
