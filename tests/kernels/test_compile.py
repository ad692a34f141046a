"""The compiler accepts every kernel for sm_90; the interpreter, which other tests use, accepts more."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import pairs
from tests.conftest import ROOT

#: Most instructions per kernel at head_dim 128: at least a tenth above the counts of Triton 3.6 to 3.9. A compiler
#: that loses track of contiguity, or spreads a row's planes over lanes, emits two to five times as many.
MOST = {
    "geometries": {
        "_decode": 3200,
        "_quantize_tokens": 2300,
        "_quantize_slots": 2300,
        "_rotate": 1300,
        "_gather": 1450,
        "_past_lse": 1060,
        "_raise_scores": 900,
        "_fold": 3150,
    },
    "planes": {"_gather": 1200, "_extend": 4650, "_fold": 2200},  # the kernels with which prefill reads planes
}
#: Kernels that load single bytes on purpose, for example gains.
BYTES = {"geometries": ("_fold",), "planes": ("_fold", "_gather")}
#: The scene to which these limits apply; no other scene is disassembled.
SCENES = {"geometries": "d128g128-8q2kv", "planes": "4321-2211, d128g128-8q2kv"}
#: Names in ``compile_sm90.PARTS``, repeated because that module imports kernels that must not be interpreted.
PARTS = ("geometries", "codes", "planes", "launches")
SCRIPT = Path(__file__).parent / "compile_sm90.py"
#: Triton's cache of compiled kernels, keyed by their sources, the Triton release and the options.
CACHE = ROOT / ".venvs" / "triton"


def test_no_part_is_left_out():
    (named,) = re.findall(r"^PARTS = \{(.*)\}$", SCRIPT.read_text(), re.MULTILINE)
    assert tuple(re.findall(r'"(\w+)":', named)) == PARTS


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", PARTS if pairs.everything else [part for part in PARTS if part != "codes"])
def test_kernels_compile_for_sm90(part):
    """Without ``--all`` only kernels for the methods' defaults are compiled; unchanged kernels come from the cache."""
    command = [sys.executable, str(SCRIPT), f"--sass={SCENES.get(part, 'none')}", part]
    command += ["--all"] if pairs.everything else []
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=1780)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    kernel = "_decode" if part == "launches" else "_quantize_tokens"
    assert len(re.findall(rf"^  {kernel} ", done.stdout, re.MULTILINE)) >= (3 if pairs.everything else 1), done.stdout
    if part in SCENES:
        shown = re.search(rf"^{SCENES[part]}\n((?:  .*\n)+)", done.stdout, re.MULTILINE)[1]
        check_sizes(shown, MOST[part], BYTES[part])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", [80, 89, 100])
@pytest.mark.parametrize("part", ["geometries", "planes"])
def test_kernels_compile_for_other_gpus(part, arch):
    """Every kernel compiles for an A100, an L40S and a B200, and fits into their shared memory."""
    command = [sys.executable, str(SCRIPT), "--sass=none", f"--arch={arch}", part]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=1780)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert re.search("^  _decode ", done.stdout, re.MULTILINE), done.stdout


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(CACHE)}


def check_sizes(shown: str, most: dict[str, int], of_bytes: tuple[str, ...]) -> None:
    """Checks instructions, narrow loads and waits of the kernels compiled at head_dim 128."""
    for kernel, limit in most.items():
        found = re.findall(rf"^  {kernel} .*instructions +(\d+) +narrow loads +(\d+)", shown, re.MULTILINE)
        assert found, f"{kernel} was not compiled:\n{shown}"
        for instructions, narrow in found:
            assert int(instructions) <= limit, f"{kernel}: {instructions} instructions, at most {limit}"
            assert kernel in of_bytes or narrow == "0", f"{kernel}: {narrow} narrow loads"
    # If ptxas runs out of registers, or finds the sums of an unfinished product touched, it waits after each product.
    for kernel in ("_extend", *(name for name in ("_past_lse", "_raise_scores") if name in most)):
        products = re.findall(rf"^  {kernel} .*products +(\d+) +waits +(\d+)", shown, re.MULTILINE)
        assert products, shown
        for made, waits in products:
            assert 0 < 3 * int(waits) <= int(made), f"{kernel}: {waits} waits for {made} products, one after the other"
