"""Problems like those of MATH (Hendrycks et al., arXiv 2103.03874), graded by the answer in the last ``\\boxed{}``.

The problems come from a file, such as MATH-500's test.jsonl, or are generated (``math_problems``). Derivations are
long, so this task also shows whether a coarser cache makes a model think longer: see ``problems.answer_lengths``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.client import Client
from sglang_kvq.evaluation.tasks.base import Bench, Outcome, file_identity, settings_of
from sglang_kvq.evaluation.tasks.math_problems import make
from sglang_kvq.evaluation.tasks.problems import read_json_lines, score

ASK = "Solve the problem step by step. Put the final answer within \\boxed{}.\n\n"
#: Number of generated problems if ``problems`` is 0, which means all problems of a file.
GENERATED = 240
MOST = 10_000
_NUMBER = r"[-+]?\$?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?"
#: Longer answers, such as a digit repeated without end, are no numbers.
_LONGEST = 1000


@dataclass(frozen=True)
class MathTask:
    """Settings of the task.

    Attributes:
        path: .jsonl file with ``problem`` and ``answer``; None for generated problems.
        problems: number of first problems to use; 0 for all.
        seed: seed of generated problems.
        style: ``chat``, ``completion``, or ``auto``: chat if the model has a template.
    """

    path: Path | None = None
    problems: int = 120
    seed: int = 0
    style: str = "auto"
    max_tokens: int = 1024
    name: str = "math"

    def __post_init__(self) -> None:
        if self.path:
            self._read()  # refuses a broken file before any server runs
        elif self.problems > MOST:
            raise KVQuantError(f"--math-problems {self.problems}: at most {MOST} are generated. Or give --math FILE.")

    def identity(self) -> dict[str, Any]:
        source = file_identity(self.path) if self.path else {"file": None}
        return {**source, **settings_of(self, leave_out=["path", *(["seed"] if self.path else [])])}

    def _read(self) -> list[dict[str, Any]]:
        if self.path:
            return read_json_lines(self.path, ("problem", "answer"))[: self.problems or None]
        return make(self.seed, self.problems or GENERATED)

    def run(self, client: Client, bench: Bench) -> Outcome:
        problems, style = self._read(), client.style(self.style)

        def solve(problem: dict[str, Any]) -> dict[str, Any]:
            if style == "chat":
                answer = client.chat(ASK + problem["problem"], self.max_tokens)
            else:
                text = f"{ASK}Problem: {problem['problem']}\nSolution:"
                answer = client.complete(text, self.max_tokens, ["\nProblem:"])
            found = final_answer(answer.text)
            return {
                "passed": found is not None and same(found, problem["answer"]),
                "found": found,
                "wanted": problem["answer"],
                "complete": answer.complete,
                "tokens": answer.tokens,
            }

        return score("math", style, bench.map(solve, problems))


def final_answer(text: str) -> str | None:
    """Returns the content of the last ``\\boxed{}``, braces within it included; else the last number; else None."""
    at = text.rfind("\\boxed{")
    if at >= 0:
        begin = at + len("\\boxed{")
        depth = 1
        for place in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[begin:place]
    found = re.findall(_NUMBER, text)
    return found[-1] if found else None


def same(found: str, wanted: str) -> bool:
    """Returns whether two answers are equal as numbers, or, if one is no number, as LaTeX after ``plain``."""
    a, b = number(found), number(wanted)
    return a == b if a is not None and b is not None else plain(found) == plain(wanted)


def plain(answer: str) -> str:
    """Removes parts of LaTeX that do not change its meaning: spaces, brackets' sizes, units, ``x =``, dollar signs."""
    text = re.sub(r"\\(?:left|right|displaystyle|,|;|!|:| )", "", answer)
    text = re.sub(r"\\(?:text|mathrm|mbox)\{[^{}]*\}|\^\{?\\circ\}?|\\?\$|\\?%|\s", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)  # \frac12
    return re.sub(r"^[a-zA-Z]\w*(?:\(\w\))?=", "", text).rstrip(".")


def number(answer: str) -> Fraction | None:
    """Returns an answer's value if it is an integer, a decimal, ``a/b`` or ``\\frac{a}{b}``."""
    if len(answer) > _LONGEST:
        return None
    text = plain(answer)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    fraction = re.fullmatch(r"([-+]?)\\frac\{([-+]?\d+)\}\{([-+]?\d+)\}", text)
    if fraction:
        sign, top, bottom = fraction.groups()
        return None if int(bottom) == 0 else Fraction(int(top), int(bottom)) * (-1 if sign == "-" else 1)
    if re.fullmatch(r"[-+]?(?:\d+(?:\.\d+)?|\.\d+|\d+/0*[1-9]\d*)", text):
        return Fraction(text)
    return None
