"""A conversation becomes tokens: every turn lies at its span and does not depend on its neighbors."""

from __future__ import annotations

import pytest

from benchmarks.research.episodes.conversations import OPENING, SYSTEM, Question, Writer, fit
from benchmarks.research.episodes.datasets import thin
from benchmarks.research.tests import helpers
from sglang_kvq.errors import KVQuantError

WRITER, TALK = helpers.writer(), helpers.conversation()


def text(ids: list[int]) -> str:
    return str(WRITER.tokenizer.decode(ids))


def test_a_history_is_the_templates_text_up_to_the_question() -> None:
    history = WRITER.history(TALK.turns)
    whole = text(history.ids + WRITER.question("Why?"))
    assert whole.startswith(f"<system>{SYSTEM}</><user>{OPENING}\n[Session 0]\nA: more boats please\n")
    assert whole.endswith("\n\nQuestion: Why?</><assistant>")
    assert "\n[Session 1, May]\nA: more bread please\n" in whole


def test_spans_hold_their_turns() -> None:
    history = WRITER.history(TALK.turns)
    assert history.spans[0][0] == len(history.prefix) and history.spans[-1][1] == len(history)
    assert all(a[1] == b[0] for a, b in zip(history.spans, history.spans[1:]))
    for (start, end), turn in zip(history.spans, TALK.turns):
        assert text(history.ids[start:end]).endswith(turn.line())
    assert history.span(2, 4) == (history.spans[2][0], history.spans[4][1])


def test_a_template_that_changes_what_is_said_is_refused() -> None:
    tokenizer = helpers.writer().tokenizer
    tokenizer.chat_template = helpers.TEMPLATE.replace("m['content']", "m['content'] | lower")
    with pytest.raises(KVQuantError, match="the chat template changes what the user says"):
        Writer(tokenizer)


def test_some_turns_stand_under_their_sessions_headers() -> None:
    history = WRITER.history(TALK.turns)
    found = text(history.of_turns([14, 13, 2]))
    sessions = ("\n[Session 0]\nA: the code of boats is 007\n", "\n[Session 2, May]\nB: more stars please\n")
    assert found.endswith("".join(sessions) + "A: the code of stars is 227\n")
    sizes = history.size([13, 14], header=True) + history.size([2], header=True)
    assert len(history.of_turns([14, 13, 2])) == len(history.prefix) + sizes
    assert history.of_turns(range(len(TALK.turns))) == history.ids


def test_an_answer_is_the_end_of_its_question() -> None:
    ask = WRITER.ask(Question("Why?", "Because", (0,)))
    assert text(ask.ids[-ask.answer :]) == "Because" and ask.ids[: -ask.answer] == WRITER.question("Why?")


def test_what_fits_keeps_its_questions_only() -> None:
    history = WRITER.history(TALK.turns)
    tokens = history.spans[15][1]
    cut = fit(TALK, WRITER, tokens, whole_sessions=False)
    assert cut.turns == TALK.turns[:16] and len(WRITER.history(cut.turns)) == tokens
    assert [q.evidence for q in cut.questions] == [(2,), (8,), (14,)]
    whole = fit(TALK, WRITER, tokens, whole_sessions=True)
    assert whole.turns == TALK.turns[:12] and len(whole.questions) == 2
    assert fit(TALK, WRITER, len(history), whole_sessions=True) == TALK
    with pytest.raises(KVQuantError, match="tiny: no question about what fits 150 tokens"):
        fit(TALK, WRITER, 150, whole_sessions=True)


def test_questions_are_thinned_evenly() -> None:
    assert [q.evidence[0] for q in thin(TALK, 3).questions] == [2, 14, 32]
    assert thin(TALK, 99) == TALK
