"""Multi-session needles: facts that a user mentions in passing over many sessions, some of which change later.

Sessions are topics of LongChat's five-topic records; needles are drawn from a seed. A fact that changed has two
evidence turns in two sessions, and its answer is the new value.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from benchmarks.research.episodes import longchat
from benchmarks.research.episodes.conversations import Conversation, Question
from benchmarks.research.episodes.segments import Turn

FILE = "longchat/5_topics.jsonl"
#: (statement, statement of a change, question); {} is the answer.
KINDS = (
    (
        "the door code of my {} is {}",
        "the door code of my {} has changed, now it is {}",
        "What is the door code of my {}?",
    ),
    (
        "I keep the spare key of my {} in the {}",
        "I have moved the spare key of my {} to the {}",
        "Where is the spare key of my {}?",
    ),
    (
        "the meeting about my {} is with {}",
        "the meeting about my {} is now with {} instead",
        "Who is the meeting about my {} with?",
    ),
)
THINGS = (
    "office",
    "garage",
    "boat",
    "cabin",
    "workshop",
    "studio",
    "cellar",
    "greenhouse",
    "caravan",
    "attic",
    "warehouse",
    "gallery",
    "bakery",
    "stable",
    "library",
    "kiosk",
    "clinic",
    "laboratory",
    "chapel",
    "theatre",
)
PLACES = (
    "blue teapot",
    "piano stool",
    "flour jar",
    "left boot",
    "bird house",
    "sewing box",
    "toolbox",
    "old lantern",
    "umbrella stand",
    "bread bin",
    "picnic basket",
    "camera bag",
)
PEOPLE = (
    "Amara Osei",
    "Bjorn Halvorsen",
    "Chiara Russo",
    "Dmitri Volkov",
    "Elif Yilmaz",
    "Farid Haddad",
    "Greta Lindqvist",
    "Hana Suzuki",
    "Ivan Petrov",
    "Jorge Medina",
    "Kavya Rao",
    "Liam Byrne",
)
REPLY = "I will remember that."
#: Records joined into one conversation, and new facts in each of its sessions.
JOINED = 5
FACTS = 2
#: Share of facts that change in a later session.
CHANGED = 0.3


def value(kind: int, random_: random.Random) -> str:
    return [str(random_.randrange(1000, 10000)), random_.choice(PLACES), random_.choice(PEOPLE)][kind]


def load(data: Path, seed: int = 0) -> list[Conversation]:
    """Loads one conversation for each ``JOINED`` records of LongChat's other file, with needles in every session."""
    filler = longchat.load(data, FILE, JOINED)
    return [plant(one, f"needles/{n}", seed * 1000 + n) for n, one in enumerate(filler)]


def plant(filler: Conversation, name: str, seed: int) -> Conversation:
    """Returns a conversation with the filler's turns, needles among them, and a question about each needle."""
    random_ = random.Random(seed)
    sessions = sorted({turn.session for turn in filler.turns})
    facts = [(kind, thing) for kind in range(len(KINDS)) for thing in THINGS]
    random_.shuffle(facts)
    said: dict[int, list[tuple[int, str, str]]] = {session: [] for session in sessions}
    for number, (session, (kind, thing)) in enumerate(zip(np.repeat(sessions, FACTS).tolist(), facts)):
        first = value(kind, random_)
        said[session].append((number, KINDS[kind][0].format(thing, first), first))
        if random_.random() < CHANGED and session != sessions[-1]:
            later = random_.choice([s for s in sessions if session < s <= session + 8])
            second = first
            while second == first:
                second = value(kind, random_)
            said[later].append((number, KINDS[kind][1].format(thing, second), second))
    turns: list[Turn] = []
    evidence: dict[int, list[int]] = {}
    answers: dict[int, str] = {}
    for session in sessions:
        of_session = [turn for turn in filler.turns if turn.session == session]
        places = sorted(random_.randrange(1, len(of_session) + 1) for _ in said[session])
        for at, turn in enumerate(of_session, 1):
            turns.append(turn)
            for place, (number, text, answer) in zip(places, said[session]):
                if place == at:
                    evidence.setdefault(number, []).append(len(turns))
                    answers[number] = answer
                    turns.append(Turn("USER", f"By the way, please remember that {text}.", session))
                    turns.append(Turn("ASSISTANT", REPLY, session))
    questions = [
        Question(KINDS[facts[number][0]][2].format(facts[number][1]), answers[number], tuple(evidence[number]))
        for number in sorted(evidence)
    ]
    return Conversation(name, tuple(turns), tuple(questions))
