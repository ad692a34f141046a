"""HumanEval pass@1, greedy (Chen et al., arXiv 2107.03374): the model completes functions, tests run in a sandbox."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_kvq.cpus import usable_cpus
from sglang_kvq.evaluation import sandbox
from sglang_kvq.evaluation.client import Client
from sglang_kvq.evaluation.tasks.base import Bench, Outcome, file_identity, settings_of
from sglang_kvq.evaluation.tasks.problems import read_json_lines, score

#: Strings that end a completed function: those of the paper's section 2.1, a code fence and an assertion.
STOP = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint", "\n```", "\nassert ")
#: One slot per core, shared by all servers: more programs would share cores, and could exceed their wall-clock limit.
_CORES = threading.Semaphore(usable_cpus())


@dataclass(frozen=True)
class HumanEvalTask:
    """Settings of HumanEval.

    Attributes:
        path: HumanEval.jsonl or .jsonl.gz.
        problems: number of first problems to use; 0 for all.
        style: ``chat`` asks an instruct model for the whole function. ``completion`` lets a base or coder model
            continue the prompt. ``auto`` is chat if the model has a template.
    """

    path: Path
    problems: int = 0
    style: str = "auto"
    max_tokens: int = 768
    limits: sandbox.Limits = field(default_factory=sandbox.Limits)
    allow_unsandboxed: bool = False
    name: str = "humaneval"

    def __post_init__(self) -> None:
        """Refuses a broken file, and a host without a sandbox, before any server runs."""
        sandbox.require(self.allow_unsandboxed)
        self._read()

    def identity(self) -> dict[str, Any]:
        return {**file_identity(self.path), **settings_of(self, leave_out=("path", "allow_unsandboxed"))}

    def _read(self) -> list[dict[str, Any]]:
        return read_json_lines(self.path, ("task_id", "prompt", "entry_point", "test"))[: self.problems or None]

    def run(self, client: Client, bench: Bench) -> Outcome:
        warning = sandbox.require(self.allow_unsandboxed)
        problems, style = self._read(), client.style(self.style)

        def solve(problem: dict[str, Any]) -> dict[str, Any]:
            if style == "chat":
                answer = client.chat(question(problem), self.max_tokens)
                code = extract(answer.text, problem)
            else:
                answer = client.complete(problem["prompt"], self.max_tokens, STOP)
                code = problem["prompt"] + answer.text
            with _CORES:
                verdict = sandbox.run(f"{code}\n\n{problem['test']}\n\ncheck({problem['entry_point']})", self.limits)
            return {
                "task_id": problem["task_id"],
                "passed": verdict.passed,
                "reason": verdict.reason,
                "complete": answer.complete,
                "tokens": answer.tokens,
            }

        return score("humaneval", style, bench.map(solve, problems), [warning] if warning else [])


def question(problem: dict[str, Any]) -> str:
    return (
        "Complete the following Python function. Answer with the whole function, its imports included, in one "
        f"```python block.\n\n```python\n{problem['prompt'].rstrip()}\n```"
    )


def extract(answer: str, problem: dict[str, Any]) -> str:
    """Extracts the program from a chat model's answer.

    It takes the first fenced block that defines the function, else the first block, else the whole answer. It prepends
    the problem's text before the function (imports, helpers). A block without the function is taken for its body.
    """
    # A block that the token limit cut off has no closing fence.
    blocks = re.findall(r"```[^\n`]*\n(.*?)(?:\n[ \t]*```|$)", answer, re.DOTALL)
    heading = re.compile(rf"^[ \t]*(async )?def {re.escape(problem['entry_point'])}\b", re.MULTILINE)
    code = next((block for block in blocks if heading.search(block)), blocks[0] if blocks else answer)
    if heading.search(code):
        return f"{heading.split(problem['prompt'])[0]}\n{code}"
    return str(problem["prompt"]) + code
