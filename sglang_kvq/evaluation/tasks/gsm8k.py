"""GSM8K: grade-school mathematics, graded by the final number (Cobbe et al., arXiv 2110.14168)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.client import Client
from sglang_kvq.evaluation.tasks.base import Bench, Outcome, file_identity, settings_of
from sglang_kvq.evaluation.tasks.problems import read_json_lines, score

_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"


@dataclass(frozen=True)
class GSM8KTask:
    """Settings of GSM8K.

    Attributes:
        path: test.jsonl.
        train: the file whose first ``shots`` problems are the worked examples; None if ``shots`` is 0.
        problems: number of first problems to use; 0 for all.
        style: ``chat`` (examples as messages), ``completion`` (as text), or ``auto``: chat if there is a template.
    """

    path: Path
    train: Path | None = None
    shots: int = 8
    problems: int = 200
    style: str = "auto"
    max_tokens: int = 400
    name: str = "gsm8k"

    def __post_init__(self) -> None:
        if self.shots and self.train is None:
            raise KVQuantError(f"--gsm8k-shots {self.shots} needs --gsm8k-train FILE. Or give --gsm8k-shots 0.")
        self._read()  # refuses broken files before any server runs

    def identity(self) -> dict[str, Any]:
        settings = settings_of(self, leave_out=["path"])
        # Without worked examples, their file does not affect the value.
        return {**file_identity(self.path), **settings, "train": settings["train"] if self.shots else None}

    def _read(self) -> tuple[list[tuple[str, Decimal]], list[dict[str, Any]]]:
        """Returns the questions with the numbers that answer them, and the worked examples."""
        problems = []
        for problem in read_json_lines(self.path, ("question", "answer"))[: self.problems or None]:
            if (wanted := final_number(problem["answer"])) is None:
                raise KVQuantError(f"{self.path.name}: an answer without a number: {problem['answer'][-60:]!r}")
            problems.append((problem["question"], wanted))
        examples: list[dict[str, Any]] = []
        if self.shots and self.train:
            examples = read_json_lines(self.train, ("question", "answer"))[: self.shots]
        if len(examples) < self.shots:
            raise KVQuantError(f"{self.train}: {len(examples)} problems, but --gsm8k-shots is {self.shots}.")
        return problems, examples

    def run(self, client: Client, bench: Bench) -> Outcome:
        problems, examples = self._read()
        style = client.style(self.style)

        def solve(problem: tuple[str, Decimal]) -> dict[str, Any]:
            question, wanted = problem
            if style == "chat":
                answer = client.chat(conversation(examples, question), self.max_tokens)
            else:
                answer = client.complete(document(examples, question), self.max_tokens, ["\nQuestion:"])
            found = final_number(answer.text)
            return {
                "passed": found == wanted,
                "found": None if found is None else f"{found:f}",
                "wanted": f"{wanted:f}",
                "complete": answer.complete,
                "tokens": answer.tokens,
            }

        return score("gsm8k", style, bench.map(solve, problems))


def worked(answer: str) -> str:
    """Removes the calculator's annotations, ``<<16-3=13>>``, from a worked answer."""
    return re.sub(r"<<.*?>>", "", answer)


def document(examples: list[dict[str, Any]], question: str) -> str:
    shown = "".join(f"Question: {one['question']}\nAnswer: {worked(one['answer'])}\n\n" for one in examples)
    return f"{shown}Question: {question}\nAnswer:"


def conversation(examples: list[dict[str, Any]], question: str) -> list[dict[str, str]]:
    ask = "Solve the problem step by step. End with the answer alone on a line, as in: #### 42\n\n"
    turns = []
    for one in examples:
        turns += [
            {"role": "user", "content": ask + one["question"]},
            {"role": "assistant", "content": worked(one["answer"])},
        ]
    return [*turns, {"role": "user", "content": ask + question}]


def final_number(text: str) -> Decimal | None:
    """Returns the number after the first ``####`` (the data set's convention), else the last number.

    The first ``####`` counts because a few-shot model may go on to further problems after its answer. One with nothing
    but the number on its line goes first, because chat models also write headings like ``#### 1. Eggs sold``.
    """
    number = rf"####\s*({_NUMBER})"
    marked = re.search(rf"{number}[.*]*\s*$", text, re.MULTILINE) or re.search(number, text)
    found = [marked.group(1)] if marked else re.findall(_NUMBER, text)
    if not found:
        return None
    try:
        return Decimal(re.sub(r"[$,]", "", found[-1])).normalize()
    except InvalidOperation:
        return None
