"""LongChat's conversations (lmsys.org/blog/2023-06-29-longchat): a user and an assistant go through topics.

Their own question ("What is the first topic?") names no topic, so retrieval cannot find its subject. Our questions name
the topic and ask what the user asked about it first and last. Records are joined, because one is too short to compress.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.research.episodes.conversations import Conversation, Question
from benchmarks.research.episodes.segments import Turn
from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.tasks.problems import json_lines

FILE = "longchat/10_topics.jsonl"
OPENING = re.compile(r"I would like to discuss the topic of (.+?)\.?\s*$")
#: The phrase with which the user leaves every topic, which is not a question to recall.
CLOSING = re.compile(r"\bthe end of our discussion\b")
#: Beginning of the record's own question.
END = "Now the record ends"
#: Records joined into one conversation; what does not fit is cut later.
JOINED = 3
#: Questions about each topic: (number among the user's questions, wording).
ASKED = (
    (0, "When we began to discuss the topic of {}, what did the user ask first?"),
    (-1, "When we discussed the topic of {}, what was the last thing that the user asked about it?"),
)


def load(data: Path, file: str = FILE, joined: int = JOINED) -> list[Conversation]:
    """Loads conversations of ``joined`` records each; topics are sessions, and none occurs twice in a conversation.

    Raises:
        KVQuantError: the file does not exist.
    """
    path = data / file
    if not path.exists():
        raise KVQuantError(f"{path}: LongChat is missing; give the folder that holds {file} by --data.")
    records = [one["prompt"] for one in json_lines(path.read_text(encoding="utf-8"))]
    groups = [records[at : at + joined] for at in range(0, len(records), joined)]
    return [join(f"longchat/{number}", group) for number, group in enumerate(groups)]


def topics(record: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Returns (topic, [(speaker, text), …]) of a record, without its instructions and its question."""
    parts = re.split(r"\b(USER|ASSISTANT): ", record.partition(END)[0])
    said = [(speaker, text.strip()) for speaker, text in zip(parts[1::2], parts[2::2])]
    found: list[tuple[str, list[tuple[str, str]]]] = []
    for speaker, text in said:
        opening = OPENING.search(text) if speaker == "USER" else None
        if opening:
            found.append((opening[1].strip(), []))
        if found:
            found[-1][1].append((speaker, text))
    return found


def join(name: str, records: list[str]) -> Conversation:
    turns: list[Turn] = []
    questions: list[Question] = []
    seen: set[str] = set()
    for record in records:
        for topic, said in topics(record):
            if topic.lower() in seen:
                continue
            seen.add(topic.lower())
            start = len(turns)
            turns += [Turn(speaker, text, len(seen)) for speaker, text in said]
            asked = [
                start + at
                for at, (speaker, text) in enumerate(said)
                if at and speaker == "USER" and not CLOSING.search(text)
            ]
            if len(asked) >= len(ASKED):
                for number, form in ASKED:
                    turn = asked[number]
                    questions.append(Question(form.format(topic), turns[turn].text, (turn,)))
    return Conversation(name, tuple(turns), tuple(questions))
