"""CONTRIBUTING's checklist for a method is enough: following it alone adds a method that works and is tested."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.contributing import checklists

NAME = "toy-channels"
MODULE = NAME.replace("-", "_")
#: Folders that are copied because a contributor edits them or because their files locate others; the rest is linked.
COPIED = ("sglang_kvq", "tests", "docs")
LINKED = (".github", "launch", "benchmarks")

METHOD = """\
from sglang_kvq.formats.code import CodeFormat
from sglang_kvq.methods.base import Method, RotationKind

METHOD = Method(
    name="toy-channels",
    summary="Hadamard rotation, Lloyd-Max levels, keys scaled per channel; exists in a test only",
    paper="QuaRot, arXiv 2404.00456",
    rotation=RotationKind.HADAMARD,
    k=CodeFormat(levels="lloyd-max", statistic="moments", axis="channel"),
    v=CodeFormat(levels="lloyd-max", statistic="moments"),
    widths=(2, 4),
    group_sizes=(32, 64),
)
"""


def before(anchor: str, new: str, below: str = "") -> Callable[[str], str]:
    """Returns an edit that puts ``new`` before the first line with ``anchor`` below a heading."""

    def edit(text: str) -> str:
        at = text.index(anchor, text.index(below))
        start = text.rindex("\n", 0, at) + 1
        return text[:start] + new + "\n" + text[start:]

    return edit


def name_it(text: str) -> str:
    text, edits = re.subn(r"(METHOD_NAMES\b[^=]*= \([^)]*?),?\s*\)", rf'\1, "{NAME}")', text, count=1)
    assert edits == 1
    return text


def cover_it(text: str) -> str:
    row = f'("{NAME}", None, 2.5, 2.375), ("{NAME}", "4", 4.5, 4.375),'
    refused = f'({{"method": "{NAME}", "clip_k": 0.9}}, "--kv-quant-clip-k 0.9: --kv-quant {NAME} does not clip"),'
    return before('{"method": "oscar", "seed": 3}', refused)(before('("int4", None', row)(text))


def describe_it(text: str) -> str:
    row = f"| `{NAME}` | fixed Hadamard | [QuaRot](https://arxiv.org/abs/2404.00456) |"
    return before("| `none` |", row, below="## Methods\n")(text)


def document_it(text: str) -> str:
    row = f"| `{NAME}` | Hadamard | Lloyd-Max, keys per channel | **2**, 4 | none | QuaRot |"
    bits = f"| `{NAME}` 2 | 2.5 | 2.375 | | `{NAME}` 4 | 4.5 | 4.375 |"
    return before("| `kivi` 2 |", bits)(before("| `int2` |", row)(text))


def log_it(text: str) -> str:
    return text.replace("## [Unreleased]\n", f"## [Unreleased]\n\n### Added\n\n- `--kv-quant {NAME}`.\n", 1)


#: Edits that the checklist asks for, by file.
EDITS: dict[str, Callable[[str], str]] = {
    "sglang_kvq/methods/NAME.py": lambda _: METHOD,
    "sglang_kvq/methods/__init__.py": name_it,
    "tests/methods/test_methods.py": cover_it,
    "README.md": describe_it,
    "docs/methods.md": document_it,
    "CHANGELOG.md": log_it,
}

PROBE = f"""
import argparse
from pathlib import Path
import torch
import sglang_kvq
from sglang_kvq import KVQuantConfig
from sglang_kvq.evaluation.specs import parse
from sglang_kvq.methods import METHOD_NAMES
from sglang_kvq.rotations.resolve import resolve_formats, resolve_rotations
from sglang_kvq.sglang.flags import add_flags

assert Path(sglang_kvq.__file__).parent.parent == Path.cwd(), sglang_kvq.__file__
parser = argparse.ArgumentParser()
add_flags(parser)
assert parser.parse_args(["--kv-quant", METHOD_NAMES[-1]]).kv_quant == "{NAME}"
assert parse("{NAME}:4").flags[:2] == ["--kv-quant", "{NAME}"]

model = {{"architectures": ["Qwen3ForCausalLM"], "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
         "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 1000, "rope_theta": 10000.0}}
config = KVQuantConfig("{NAME}")
assert resolve_rotations(config, "m", model).k.shape[-2:] == (128, 128)
(format, again) = resolve_formats(config, None, model)
k, v = torch.randn(2, 3, 64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
records = format.quantize_pages(k, v)
assert records.shape == (3, format.record_bytes) and format == again
for exact, back in zip((k, v), format.dequantize_pages(records)):
    error = (back - exact.float()).square().mean() / exact.float().square().mean()
    assert 0.05 < error < 0.13, error  # 2 bits with the levels of Max 1960: 0.1175
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of this repository as a contributor would have it."""
    folder = tmp_path_factory.mktemp("contribution") / "clone"
    folder.mkdir()
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, folder)
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    return folder


def state(folder: Path) -> dict[str, str]:
    """Returns a hash of every file that can be edited."""
    files = [*folder.glob("*"), *(path for name in COPIED for path in (folder / name).rglob("*"))]
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def contribution(clone: Path) -> tuple[Path, set[str]]:
    """Returns the clone with the method in it, and the files that were changed for it."""
    start = state(clone)
    for name, edit in EDITS.items():
        path = clone / name.replace("NAME", MODULE)
        path.write_text(edit(path.read_text() if path.exists() else ""))
    end = state(clone)
    return clone, {path for path in end if end[path] != start.get(path)}


def run(folder: Path, *words: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_the_checklist_names_what_had_to_be_changed(contribution: tuple[Path, set[str]]) -> None:
    _, changed = contribution
    assert changed == {name.replace("NAME", MODULE) for name in checklists.files("Add a method")}


def test_the_method_is_offered_resolved_and_quantizes(contribution: tuple[Path, set[str]]) -> None:
    run(contribution[0], "-c", PROBE)


def test_the_tests_that_the_checklist_names_cover_it(contribution: tuple[Path, set[str]]) -> None:
    options = ("-v", "--no-header", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist")
    shown = run(contribution[0], "-m", "pytest", *options, *checklists.pytest_words("Add a method"))
    passed = {line.split("::")[0] for line in shown.splitlines() if NAME in line and "PASSED" in line}
    assert {"tests/methods/test_methods.py", "tests/test_config.py", "tests/cache/test_pool.py"} <= passed
    assert "test_readme.py::test_methods PASSED" in shown
