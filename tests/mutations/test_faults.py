"""Every fault of ``faults.yaml`` still applies to the package, and its tests exist."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.mutations.__main__ import Fault, load

FAULTS = load()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_fault_can_be_put_in(fault: Fault, tmp_path: Path) -> None:
    for path in (ROOT / "sglang_kvq").glob(fault.file):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    changed, before = fault.put_into(tmp_path)
    assert changed.read_text() != before
    compile(changed.read_text(), str(changed), "exec")
    assert (ROOT / fault.tests.split()[0]).exists()


def test_faults_are_of_all_packages() -> None:
    packages = {fault.file.split("/")[0] for fault in FAULTS}
    assert len(FAULTS) >= 30 and packages >= {
        "formats",
        "rotations",
        "cache",
        "kernels",
        "attention",
        "sessions",
        "sglang",
    }
