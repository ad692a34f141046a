"""``kvq doctor`` passes where the tests run, and names each thing that a test breaks."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from typer.testing import CliRunner

import sglang_kvq.kernels
from sglang_kvq.cli import app
from sglang_kvq.constants import HEAD_DIMS
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.planes import PlaneFormat
from sglang_kvq.rotations.storage import zoo
from sglang_kvq.sglang import compat, hooks
from sglang_kvq.sglang.doctor import kernels as kernel_check
from sglang_kvq.sglang.doctor import report as doctor
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def usual_environment(monkeypatch):
    for name in ("SGLANG_PLUGINS", "SGLANG_PLATFORM"):
        monkeypatch.delenv(name, raising=False)


def lines(only: str | None = None, monkeypatch=None) -> tuple[int, list[str]]:
    """Returns the command's exit status and output lines; ``only`` limits it to one check."""
    if only:
        monkeypatch.setattr(doctor, "CHECKS", {only: doctor.CHECKS[only]})
    result = CliRunner().invoke(app, ["doctor"])
    return result.exit_code, result.stdout.splitlines()


def test_everything_is_in_order_here():
    status, shown = lines()
    assert status == 0, shown
    assert len(shown) == len(doctor.CHECKS) + 1
    assert all(line.startswith("ok ") for line in shown[:-1]) and "all 13 checks passed" in shown[-1]


def an_enum_is_made():
    """Python 3.11 turns the exception into a RuntimeError."""
    named = type("Named", (), {"__set_name__": lambda *_: signal.raise_signal(signal.SIGINT)})
    type("Some", (), {"member": named()})


def a_library_catches_everything():
    with contextlib.suppress(BaseException):
        signal.raise_signal(signal.SIGINT)
    return "all is well"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Undoes that a shell's background jobs ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("check", [an_enum_is_made, a_library_catches_everything])
def test_an_interruption_that_a_check_hides_ends_the_command(interruptible, monkeypatch, check):
    monkeypatch.setattr(doctor, "CHECKS", {"interrupted": check, "next": lambda: "reached"})
    with pytest.raises(KeyboardInterrupt):
        list(doctor.diagnose())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_json_says_the_same(monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    result = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and found["passed"] is False
    assert [check["check"] for check in found["checks"]] == list(doctor.CHECKS)
    assert [check["check"] for check in found["checks"] if not check["passed"]] == ["plugin"]
    assert all(check["found"] for check in found["checks"])


def test_every_module_of_the_kernels_is_looked_at(monkeypatch):
    files = {path.stem for path in Path(sglang_kvq.kernels.__path__[0]).rglob("[!_]*.py")}
    assert {module.__name__.rpartition(".")[2] for module in kernel_check.modules()} == files
    (line, _) = lines("kernels", monkeypatch)[1]
    launched = len(kernel_check.kernels())
    assert f"all {len(files)} modules can be imported" in line and f"none of the {launched} kernels" in line


def decoded() -> set[str]:
    """Returns the routines that ``kernel_check``'s geometries use, as ``decode_launch`` launches them."""
    from sglang_kvq.kernels.decode.decode_attention import decode_launch, decode_routine
    from sglang_kvq.kernels.device.codes import record_of
    from sglang_kvq.kernels.device.shape import shape_of

    found = set()
    for heads, formats in kernel_check.DECODED:
        for drafts in (1, kernel_check.DRAFTS):
            for format in formats:
                record, columns = record_of(format), heads * drafts
                launch = decode_launch(format.head_dim, columns, record, kv_heads=1)
                shape = shape_of(1, format.head_dim, columns)
                found.add(kernel_check._routine(decode_routine(record, shape, launch.half_pages), drafts))
    return found


def test_every_routine_to_decode_is_among_what_is_run():
    assert decoded() == set(kernel_check.routines()) and len(decoded()) == 10


def test_every_served_geometry_decodes_by_such_a_routine():
    """Every served geometry decodes by one of ``ROUTINES``, and each of these serves some geometry."""
    from sglang_kvq.kernels.decode.decode_attention import ROUTINES, decode_launch, decode_routine
    from sglang_kvq.kernels.device.codes import record_of
    from sglang_kvq.kernels.device.shape import shape_of

    found = set()
    for head_dim, heads in itertools.product(HEAD_DIMS, range(1, 17)):
        planes = PlaneFormat(head_dim, kernel_check.PLANES.k, kernel_check.PLANES.v)
        for format in (planes, PageFormat(head_dim, min(head_dim, 128)), PageFormat(head_dim, 32)):
            record = record_of(format)
            launch = decode_launch(head_dim, heads, record, kv_heads=1)
            found.add(decode_routine(record, shape_of(1, head_dim, heads), launch.half_pages))
    assert found == set(ROUTINES)


@pytest.mark.slow
def test_every_kernel_is_launched_and_right():
    """The check that a GPU runs passes in the interpreter; records of one method reach every kernel."""
    code = (
        "import torch\n"
        "from sglang_kvq.sglang.doctor import kernels as kernel_check\n"
        "from tests import leaving\n"
        "from tests.kernels import interpreter\n"
        "interpreter.speed_up()\n"
        "first = kernel_check.formats()[:1]\n"
        "kernel_check.formats = lambda: first\n"
        "print(*kernel_check.run_all(torch.device('cpu')))\n"
        "leaving.leave()"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{[*kernel_check.kernels(), *kernel_check.routines()]} []"


def test_kernel_that_is_wrong_is_named():
    format, want = kernel_check.formats()[0], torch.ones(4, 2, 8)
    kernel_check._compare("decode", format, want * 1.01, want)
    for wrong in (want * 1.2, want * float("nan")):
        with pytest.raises(KVQuantError, match="decode over keys in 2 bits uniform"):
            kernel_check._compare("decode", format, wrong, want)


def test_one_failure_does_not_hide_the_others(monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    monkeypatch.setattr(compat, "sglang_version", lambda: Version("0.5.20"))
    status, shown = lines()
    assert status == 1 and "checks failed" in shown[-1]
    assert any(line.startswith("FAIL plugin: SGLANG_PLUGINS=other leaves it out. Add kvq") for line in shown)
    assert any(line.startswith("FAIL SGLang: 0.5.20 is not supported. Install one of >=0.5.16") for line in shown)
    assert any(line.startswith("ok   rotations") for line in shown)


def test_platform_that_skips_the_plugin(monkeypatch):
    monkeypatch.setenv("SGLANG_PLATFORM", "other")
    assert "SGLANG_PLATFORM=other" in lines("plugin", monkeypatch)[1][0]


def test_missing_entry_point(monkeypatch):
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    status, shown = lines("plugin", monkeypatch)
    assert status == 1 and "no entry point kvq in group sglang.srt.plugins. Run pip install" in shown[0]


def test_sglang_is_not_installed(monkeypatch):
    def absent():
        raise metadata.PackageNotFoundError("sglang")

    monkeypatch.setattr(compat, "sglang_version", absent)
    status, shown = lines("SGLang", monkeypatch)
    assert status == 1 and "not installed" in shown[0]


def test_changed_symbol_is_named(monkeypatch):
    table = [replace(h, params=("other",)) if h.target.endswith("._build_mha_kv_pool") else h for h in hooks.TABLE]
    select = hooks.for_release
    monkeypatch.setattr(hooks, "for_release", lambda version: select(version, table=table))
    status, shown = lines("SGLang's symbols", monkeypatch)
    assert status == 1 and "1 of" in shown[0]
    assert "KVCacheConfigurator._build_mha_kv_pool" in shown[1] and "expected (other)" in shown[1]


def test_damaged_rotations(monkeypatch, tmp_path):
    shutil.copytree(zoo.zoo_folder() / "smollm2-135m-instruct", tmp_path / "smollm2")
    with (tmp_path / "smollm2" / "rotations.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    monkeypatch.setattr(zoo, "zoo_folder", lambda: tmp_path)
    status, shown = lines("rotations", monkeypatch)
    assert status == 1 and "sha256" in shown[0]


def test_folder_that_hides_sglangs_kernels(monkeypatch, tmp_path):
    (tmp_path / "triton_kernels").mkdir()
    (tmp_path / "triton_kernels" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "triton_kernels", raising=False)
    monkeypatch.setattr(sglang_kvq.kernels, "__path__", [str(tmp_path / "triton_kernels")])
    status, shown = lines("triton_kernels", monkeypatch)
    assert status == 1 and "hides the module of SGLang's kernels" in shown[0]


def test_clone_as_current_folder_hides_nothing(monkeypatch, tmp_path):
    """A clone as current folder hides no other ``triton_kernels``, whether or not SGLang's kernels have one."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.delitem(sys.modules, "triton_kernels", raising=False)
    status, shown = lines("triton_kernels", monkeypatch)
    assert status == 0, shown
    sys.modules.pop("triton_kernels", None)
    theirs = tmp_path / "triton_kernels" / "__init__.py"
    theirs.parent.mkdir()
    theirs.touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    status, shown = lines("triton_kernels", monkeypatch)
    assert status == 0 and str(theirs.parent) in shown[0]
