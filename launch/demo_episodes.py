"""``./demo --episodes``: a conversation longer than its requests may read, compared with the full cache.

One server gets each question twice. Without a session id it reads the whole conversation. With one it reads only the
pages nearest to the question (``--episodic-policy retrieve``).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from launch import embedder
from launch.progress import step
from launch.server import Server, ServerError

BUDGET, BLOCK = 1024, 256
FLAGS = (
    *("--episodic-policy", "retrieve", "--episodic-budget", str(BUDGET), "--episodic-block", str(BLOCK)),
    *("--context-length", "8192", "--max-total-tokens", "16384", "--max-running-requests", "4"),
)
SESSION = "the-demo"

#: Topics, one per sitting: a remark by the user, and further text about the topic.
SITTINGS = (
    (
        "I adopted a parrot yesterday. Her name is Pixie and she is four years old.",
        "Parrots live long and learn by listening. Put the cage where the family sits in the evening, talk "
        "to her while you feed her, and cover the cage at night. A bowl of water to bathe in, fresh fruit "
        "every day, and a branch to climb on will keep her busy. Loud noises frighten young birds, so keep "
        "the radio low for the first weeks. ",
    ),
    (
        "We paint the kitchen on Saturday. Martha wants it in olive green.",
        "Wash the walls first and let them dry for a day. Tape the edges of the windows, lay paper on the "
        "floor, and begin with the ceiling. Two thin coats look better than a thick one, and the second "
        "should wait until the first no longer smells. A small brush reaches the corners. Keep a jar of the "
        "paint for repairs, and write the date on it. ",
    ),
    (
        "My train to Lisbon leaves on the ninth of May from platform seven.",
        "Pack light for a journey by train: one bag that fits above the seat, a book, and something to eat. "
        "Long trains are quiet in the middle and noisy at the ends. Sit on the side away from the sun. In "
        "the mountains the telephone often has no signal, so write down the address of the hotel before you "
        "leave, and carry some coins. ",
    ),
    (
        "The doctor said that I should take the blue tablets after breakfast.",
        "A small box with a compartment for each day helps one to remember tablets. Drink a glass of water "
        "with them, and do not take twice as many when one was forgotten. Most people feel better after a "
        "week. Walking for half an hour each day does the heart good, and so does sleeping at the same time "
        "every night. Ask again if you feel dizzy. ",
    ),
    (
        "I lent my red bicycle to Oscar from the bakery.",
        "A bicycle that is ridden in the rain wants oil on its chain every month. Pump the tyres until they "
        "give a little under the thumb. The brakes should hold before the lever touches the bar. In winter "
        "take the lamp indoors, since the cold empties its battery. A good lock costs a tenth of a bicycle "
        "and is worth it in any town. ",
    ),
)
#: Questions, each with the beginning of its answer: this small model finds a remark only if it can continue it.
QUESTIONS = (
    ("What is the name of my parrot?", "You said: I adopted a parrot yesterday. Her name is"),
    ("In which color do we paint the kitchen?", "You said: We paint the kitchen on Saturday. Martha wants it in"),
    ("From where does my train leave?", "You said: My train to Lisbon leaves on the ninth of May from platform"),
    ("To whom did I lend my bicycle?", "You said: I lent my red bicycle to"),
)


@dataclass
class Reply:
    """One answer, the tokens of the conversation that it read, and seconds to its first token."""

    text: str
    read: int
    seconds: float


def conversation() -> list[dict[str, str]]:
    """Returns the messages of all sittings; each sitting appears twice."""
    messages = []
    for number, (said, advice) in enumerate(SITTINGS):
        for _ in range(2):
            messages += [
                {"role": "user", "content": f"Good morning. This is our talk number {number + 1}. {said}"},
                {"role": "assistant", "content": advice * 2},
            ]
    return messages


def ask(
    server: Server, messages: list[dict[str, str]], question: str, session: str | None, beginning: str = ""
) -> Reply:
    """Streams the answer to a question after a conversation; the model continues ``beginning``, if any."""
    begin, first, text, prompt = time.monotonic(), None, "", 0
    more: dict[str, Any] = {"session_id": session} if session else {}
    end = [{"role": "user", "content": question}]
    if beginning:
        end.append({"role": "assistant", "content": beginning})
        more["continue_final_message"] = True
    stream = server.openai().chat.completions.create(
        model="default",
        messages=[*messages, *end],  # type: ignore[arg-type]
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=more,
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.monotonic()
            text += chunk.choices[0].delta.content
        if chunk.usage:
            prompt = chunk.usage.prompt_tokens
    if first is None:
        raise ServerError(f"the server answered nothing to {question!r}; please report this with {server.log_path}")
    read = state(server, session)["hot_tokens"] if session else prompt
    return Reply(f"{beginning} {text.strip()}".split("\n")[0], read, first - begin)


def state(server: Server, session: str) -> dict[str, Any]:
    """Returns the server's report on a session, which only the API key that owns it may read."""
    found: dict[str, Any] = server.openai().get(f"/sessions/{session}", cast_to=object)
    return found


def table(rows: list[tuple[str, Reply, Reply]]) -> Table:
    out = Table(title="One conversation, read whole and by the question", show_lines=True)
    for heading in ("question", "full cache", "--episodic-policy retrieve"):
        out.add_column(heading, overflow="fold")
    for question, *replies in rows:
        shown = (
            f"{escape(reply.text)}\n[dim]{reply.read:,} tokens read, first token after {reply.seconds:.1f} s[/dim]"
            for reply in replies
        )
        out.add_row(escape(question), *shown)
    return out


def run(model: str, method: str, flags: list[str], cpu: bool, console: Console) -> None:
    """Starts one server, holds the conversation, and shows both kinds of answers."""
    folder = embedder.ensure()
    memory = ["--mem-fraction-static", "0.1"] if cpu else []
    own = ["--kv-quant", method, *memory, *FLAGS, "--episodic-embedder", str(folder), *flags]
    messages = conversation()
    with Server(model, *own, cpu=cpu) as server:
        with step("a conversation of a few weeks"):
            ask(server, messages, "Good night.", SESSION)
        with step("asking about it"):
            rows = []
            for question, beginning in QUESTIONS:
                late = ask(server, messages, question, SESSION, beginning)
                rows.append((question, ask(server, messages, question, None, beginning), late))
        console.print(table(rows))
        known = state(server, SESSION)
        console.print(
            f"the session: {known['history_tokens']:,} tokens said, {known['hot_bytes'] / 2**20:.1f} MiB read of "
            f"{known['total_bytes'] / 2**20:.1f} MiB kept"
        )
