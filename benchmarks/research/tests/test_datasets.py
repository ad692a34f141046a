"""Conversations are read from files in the forms of LoCoMo and LongChat; needles' evidence holds their answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.research.episodes import locomo, longchat, needles
from benchmarks.research.tests import helpers
from sglang_kvq.errors import KVQuantError

RAW = {
    "sample_id": "conv-1",
    "conversation": {
        "speaker_a": "Ann",
        "session_2_date_time": "2 May",
        "session_2": [{"speaker": "Bob", "dia_id": "D2:1", "text": "Look", "blip_caption": "a dog"}],
        "session_10_date_time": "9 May",
        "session_10": [{"speaker": "Ann", "dia_id": "D10:1", "text": "Late"}],
        "session_1_date_time": "1 May",
        "session_1": [
            {"speaker": "Ann", "dia_id": "D1:1", "text": "Hi"},
            {"speaker": "Bob", "dia_id": "D1:2", "text": "Yo"},
        ],
    },
    "qa": [
        {"question": "When?", "answer": 2022, "evidence": ["D2:1; D1:2"], "category": 2},
        {"question": "Trick?", "adversarial_answer": "x", "evidence": ["D1:1"], "category": 5},
        {"question": "Lost?", "answer": "x", "evidence": ["D9:1"], "category": 1},
        {"question": "None?", "answer": "x", "evidence": [], "category": 1},
        {"question": "Last?", "answer": "Late", "evidence": ["D10:1"], "category": 4},
    ],
}  # fmt: skip


def test_locomo() -> None:
    found = locomo.parse(RAW)
    assert [turn.text for turn in found.turns] == ["Hi", "Yo", "Look (shares a photo: a dog)", "Late"]
    assert [(turn.session, turn.when) for turn in found.turns[1:]] == [(1, "1 May"), (2, "2 May"), (10, "9 May")]
    assert [(q.text, q.answer, q.evidence) for q in found.questions] == [
        ("When?", "2022", (1, 2)),
        ("Last?", "Late", (3,)),
    ]


@pytest.mark.parametrize("mark", ["\u2028", "\u0085"], ids=ascii)
def test_longchat_of_records_with_line_breaks_of_their_own(tmp_path, mark) -> None:
    records = [helpers.record(f"art{mark}", "tea"), helpers.record("fog", "ice")]
    (tmp_path / "longchat").mkdir()
    lines = [json.dumps({"prompt": one}, ensure_ascii=False) for one in records]
    (tmp_path / longchat.FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert len(longchat.load(tmp_path, joined=1)) == 2


def test_longchat_names_topics_and_leaves_closings_out() -> None:
    found = longchat.join("x", [helpers.record("art", "tea"), helpers.record("tea", "fog")])
    assert [turn.session for turn in found.turns] == sorted(turn.session for turn in found.turns)
    assert len({turn.session for turn in found.turns}) == 3
    assert not any("first topic" in turn.text for turn in found.turns)
    assert [(q.text, q.answer) for q in found.questions[:2]] == [
        ("When we began to discuss the topic of art, what did the user ask first?", "Why art?"),
        ("When we discussed the topic of art, what was the last thing that the user asked about it?",
         "Since when is art known?"),
    ]  # fmt: skip
    assert [q.text.split("topic of ")[1].split(",")[0] for q in found.questions[::2]] == ["art", "tea", "fog"]
    assert all(found.turns[q.evidence[0]].text == q.answer for q in found.questions)


def test_a_records_own_question_is_not_part_of_it() -> None:
    """The record's own question names no topic and follows the last one."""
    (topic, said), *_ = longchat.topics(helpers.record("art"))
    assert topic == "art" and [speaker for speaker, _ in said] == [*["USER", "ASSISTANT"] * 3, "USER"]


def test_needles() -> None:
    filler = longchat.join("x", [helpers.record(*(f"topic {n}{letter}" for n in range(9))) for letter in "abc"])
    found = needles.plant(filler, "needles", seed=3)
    assert found == needles.plant(filler, "needles", seed=3) != needles.plant(filler, "needles", seed=4)
    assert len(found.questions) == needles.FACTS * 27
    changed = 0
    for question in found.questions:
        said = [found.turns[turn].text for turn in question.evidence]
        assert question.answer in said[-1] and all("please remember" in text for text in said)
        sessions = [found.turns[turn].session for turn in question.evidence]
        if len(said) == 2:
            changed += 1
            assert sessions[0] < sessions[1] and question.answer not in said[0]
            thing = question.text.split(" my ")[1].split()[0].rstrip("?")
            assert all(thing in text for text in said)
    assert 8 < changed < 27
    plain = [turn for turn in found.turns if "please remember" not in turn.text and turn.text != needles.REPLY]
    assert plain == list(filler.turns)


@pytest.mark.parametrize("module", [locomo, longchat, needles])
def test_missing_data_is_said(module, tmp_path: Path) -> None:
    with pytest.raises(KVQuantError, match="is missing; give the folder"):
        module.load(tmp_path)
