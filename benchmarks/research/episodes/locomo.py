"""LoCoMo (arXiv 2402.17753): two people talk over months of sessions; each question names its evidence turns."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.research.episodes.conversations import Conversation, Question
from benchmarks.research.episodes.segments import Turn
from sglang_kvq.errors import KVQuantError

FILE = "locomo/locomo_first5.json"
#: Category 5 asks about things that were never said, so it has no answer to score.
ADVERSARIAL = 5


def load(data: Path) -> list[Conversation]:
    """Loads the conversations of the file, with every question that has an answer and evidence.

    Raises:
        KVQuantError: the file does not exist.
    """
    path = data / FILE
    if not path.exists():
        raise KVQuantError(f"{path}: LoCoMo is missing; give the folder that holds {FILE} by --data.")
    return [parse(one) for one in json.loads(path.read_text())]


def parse(raw: dict[str, Any]) -> Conversation:
    talk = raw["conversation"]
    turns: list[Turn] = []
    number_of: dict[str, int] = {}
    sessions = sorted(int(match[1]) for key in talk if (match := re.fullmatch(r"session_(\d+)", key)))
    for session in sessions:
        for said in talk[f"session_{session}"]:
            photo = f" (shares a photo: {said['blip_caption']})" if said.get("blip_caption") else ""
            number_of[said["dia_id"]] = len(turns)
            turns.append(Turn(said["speaker"], said["text"] + photo, session, talk[f"session_{session}_date_time"]))
    questions = [question for one in raw["qa"] if (question := _question(one, number_of))]
    return Conversation(f"locomo/{raw['sample_id']}", tuple(turns), tuple(questions))


def _question(raw: dict[str, Any], number_of: dict[str, int]) -> Question | None:
    # Some entries name several turns in one string, and a few name turns that do not exist.
    names = [f"D{a}:{b}" for text in raw["evidence"] for a, b in re.findall(r"D(\d+):(\d+)", text)]
    answer = str(raw.get("answer", "")).strip()
    if raw["category"] == ADVERSARIAL or not answer or not names or not all(name in number_of for name in names):
        return None
    return Question(raw["question"], answer, tuple(sorted({number_of[name] for name in names})))
