"""Files that tasks read, and a bench with the fake server's tokenizer."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from sglang_kvq.cli import app
from sglang_kvq.evaluation.material import Material
from sglang_kvq.evaluation.tasks.base import Bench

PROBLEMS = [
    {
        "task_id": "T/0",
        "prompt": 'import math\n\n\ndef add(a, b):\n    """The sum."""\n',
        "entry_point": "add",
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3 and math.pi > 3\n",
    },
    {
        "task_id": "T/1",
        "prompt": 'def broken(a):\n    """Anything."""\n',
        "entry_point": "broken",
        "test": "def check(candidate):\n    candidate(1)\n",
    },
]


def main(words: list[str]) -> int:
    """Runs ``kvq eval`` and returns its exit status; our own errors are raised."""
    return app(args=["eval", *words], standalone_mode=False) or 0


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "held_out.txt"
    path.write_text("".join(f"Line {n} of a story about nothing much.\n" for n in range(400)))
    return path


@pytest.fixture
def humaneval(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, PROBLEMS)).encode()))
    return path


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    answers = ("6 * 7 = <<6*7=42>>42\n#### 42", "so\n#### 1,042", "x\n#### 42")
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"Q{n}?", "answer": a}) for n, a in enumerate(answers)))
    return path


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(Material(tmp_path / "material", "fake"), concurrency=4)
