"""The wheel's content: a serving node's torch and SGLang must survive ``pip install sglang-kvq``."""

from __future__ import annotations

import email
import re
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from tests.conftest import ROOT

#: Distributions of which a GPU node has builds that match its driver.
NEVER_REQUIRED = ("torch", "triton", "sglang", "sgl-kernel", "sglang-kernel", "flashinfer", "nvidia", "cuda", "vllm")


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def normal(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement).group()).lower()


def test_requirements_leave_torch_and_sglang_alone(metadata: Message) -> None:
    always = [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r]
    assert always, "no requirement at all: the metadata was not read"
    for requirement in always:
        assert not normal(requirement).startswith(NEVER_REQUIRED), requirement


def test_only_the_sglang_extra_names_sglang(metadata: Message) -> None:
    naming = [r for r in metadata.get_all("Requires-Dist") if normal(r) == "sglang"]
    assert naming and all("extra ==" in r and "sglang" in r.split("extra ==")[1] for r in naming), naming


def test_top_level_is_ours_alone(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"sglang_kvq"}


def test_every_module_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "sglang_kvq").rglob("*.py")}
    assert modules <= set(wheel.namelist())
    assert "sglang_kvq/kernels/probe/__init__.py" in wheel.namelist()


def test_rotations_are_shipped_and_nothing_else_is(wheel: zipfile.ZipFile) -> None:
    held = {Path(name).name for name in wheel.namelist() if "/rotation_zoo/probes/probe-1.5b/" in name}
    assert held == {"config.json", "rotations.safetensors"}


def test_entry_points(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    lines = wheel.read(name).decode().splitlines()
    assert "kvq = sglang_kvq.sglang.plugin:register" in lines[lines.index("[sglang.srt.plugins]") :]
    assert "kvq = sglang_kvq.cli:main" in lines[lines.index("[console_scripts]") :]
