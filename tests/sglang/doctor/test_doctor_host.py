"""``kvq doctor`` names a fault of the machine before the faults that it causes, and says how to fix it."""

import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from sglang_kvq.cli import app
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sglang import hooks
from sglang_kvq.sglang.doctor import host as doctor_host
from sglang_kvq.sglang.doctor import kernels as kernel_check
from sglang_kvq.sglang.doctor import report as doctor
from tests import pairs
from tests.conftest import ROOT

Usage = namedtuple("Usage", "total used free")
CAPTURE = {"capture_output": True, "text": True, "check": True}


def test_causes_come_before_what_they_cause():
    names = list(doctor.CHECKS)
    assert names[1:6] == ["folders", "disk", "/dev/shm", "driver", "torch"]
    assert names.index("folders") < names.index("SGLang's symbols") and names.index("driver") < names.index("kernels")


@pytest.mark.parametrize(
    ("variable", "what"),
    [
        ("HOME", "HOME"),
        ("TRITON_CACHE_DIR", "Triton's cache"),
        ("FLASHINFER_WORKSPACE_BASE", "FlashInfer's cache"),
        ("HF_HUB_CACHE", "the Hugging Face cache"),
        ("TMPDIR", "temporary files"),
    ],
)
def test_folder_that_cannot_be_written(tmp_path, monkeypatch, variable, what):
    """The folder is below a file, because root may write everywhere else."""
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "cache"
    monkeypatch.setenv(variable, str(place))
    if variable == "HF_HUB_CACHE":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(place))
    with pytest.raises(KVQuantError, match="cannot write:") as error:
        doctor_host.folders()
    assert f"{what} {place}" in str(error.value) and "not a directory. Set " in str(error.value)


def test_caches_are_those_of_a_server(tmp_path, monkeypatch):
    """SGLang sets the variables of the caches when it is imported; another process asks, because this one did that."""
    variables = ("TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")
    for name in variables:
        monkeypatch.delenv(name, raising=False)
    for folder in (None, str(tmp_path / "elsewhere")):
        monkeypatch.setenv("HOME", str(tmp_path))
        if folder:
            monkeypatch.setenv("SGLANG_CACHE_DIR", folder)
        script = f"import os, sglang; print(*[os.environ.get(name, '') for name in {variables}], sep='\\n')"
        done = subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}, **CAPTURE
        )
        triton, flashinfer = done.stdout.splitlines()[-2:]
        assert doctor_host.triton_cache() == Path(triton or tmp_path / ".triton" / "cache")
        assert doctor_host.flashinfer_cache() == Path(flashinfer or tmp_path) / ".cache" / "flashinfer"


def test_doctor_compiles_where_a_server_looks(tmp_path, monkeypatch):
    used = []
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(kernel_check, "run_all", lambda device: (used.append(os.environ["TRITON_CACHE_DIR"]) or [], []))
    doctor.our_kernels()
    assert used == [str(doctor_host.triton_cache())] and str(tmp_path) in used[0]


@pytest.mark.parametrize("variable", ["TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"])
def test_folder_from_which_nothing_can_be_loaded(tmp_path, monkeypatch, variable):
    """Docker mounts its tmpfs noexec. Only root can do the same here, so `flags` pretends it."""
    closed, statvfs = tmp_path / "closed", os.statvfs
    closed.mkdir()

    def flags(path):
        return SimpleNamespace(f_flag=statvfs(path).f_flag & ~os.ST_NOEXEC | (os.ST_NOEXEC if path == closed else 0))

    monkeypatch.setattr(os, "statvfs", flags)
    monkeypatch.setenv("HOME", str(tmp_path))
    doctor_host.folders()
    monkeypatch.setenv(variable, str(closed / "cache"))
    with pytest.raises(KVQuantError, match=rf"^{closed}.* is mounted noexec, .*--tmpfs {closed}.*:exec"):
        doctor_host.folders()


def test_folder_of_another_user(tmp_path):
    """The system's permission error is named; a child process becomes nobody, because root may write everywhere."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    (tmp_path / "closed").mkdir(mode=0o755)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.setuid(65534)
        os.write(write, str(doctor_host._refusal(tmp_path / "closed" / "cache")).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 999) == b"permission denied"


def test_cache_that_is_only_read_need_not_be_writable(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "hub" not in doctor_host.folders()


def test_full_disk(monkeypatch):
    assert "GiB free" in doctor_host.disk()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 1 << 40, 5 << 20))
    with pytest.raises(KVQuantError, match="has 5 MiB left, .* free at least 1 GiB, or move the caches"):
        doctor_host.disk()


@pytest.mark.parametrize(
    ("gpus", "free", "why"),
    [(1, 64, None), (2, 64, "64 MiB are free, and 2 GPUs need 1,024"), (0, 1, "a server needs 16")],
)
def test_small_shared_memory(monkeypatch, gpus, free, why):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, free << 20))
    monkeypatch.setattr(doctor_host, "_gpu_count", lambda: gpus)
    if why is None:
        assert doctor_host.shared_memory() == "64 MiB free"
        return
    with pytest.raises(KVQuantError, match=f"{why}.*--shm-size"):
        doctor_host.shared_memory()


@pytest.mark.parametrize(
    ("version", "cuda", "built", "said"),
    [
        (None, None, "12.8", None),
        ("550.54.15", (12, 4), "12.8", None),
        ("550.54.15", (12, 4), "13.0", "driver 550.54.15 for CUDA 12.4: torch .* is built for CUDA 13.0. Update"),
        ("550.54.15", (12, 4), None, "is a CPU build. Install a CUDA build"),
        ("550.54.15", None, "12.8", "libcuda.so.1 cannot be loaded. In Docker, add --gpus all"),
    ],
)  # fmt: skip
def test_driver(monkeypatch, version, cuda, built, said):
    monkeypatch.setattr(doctor_host, "driver_version", lambda: version)
    monkeypatch.setattr(doctor_host, "driver_cuda", lambda: cuda)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    if said is None:
        assert doctor_host.driver().startswith("no NVIDIA driver" if cuda is None else "NVIDIA driver 550.54.15")
        return
    with pytest.raises(KVQuantError, match=said):
        doctor_host.driver()


def test_version_of_a_driver(monkeypatch, tmp_path):
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n")
    monkeypatch.setattr(doctor_host, "DRIVER_FILE", file)
    assert doctor_host.driver_version() == "550.54.15"
    monkeypatch.setattr(doctor_host, "DRIVER_FILE", tmp_path / "none")
    assert doctor_host.driver_version() is None


def test_one_cause_is_not_told_once_for_each_symbol(monkeypatch):
    def closed(hook):
        raise PermissionError(13, "Permission denied", "/home/kvq/.triton")

    monkeypatch.setattr(hooks, "find", closed)
    monkeypatch.setattr(doctor, "CHECKS", {"SGLang's symbols": doctor.CHECKS["SGLang's symbols"]})
    shown = CliRunner().invoke(app, ["doctor"]).stdout.splitlines()
    assert len(shown) == 2 and "SGLang cannot be imported" in shown[0], shown
    assert "PermissionError: [Errno 13] Permission denied: '/home/kvq/.triton'" in shown[0]


@pytest.mark.slow
def test_module_and_console_script_agree(tmp_path):
    """Both agree in a clone's root, which comes first on the path of only one of them, and elsewhere."""
    script = Path(sys.executable).with_name("kvq")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = []
    ways: list = [((sys.executable, "-m", "sglang_kvq.cli"), ROOT), ((script,), tmp_path)]
    for command, where in (*ways, *([((script,), ROOT)] if pairs.everything else [])):
        done = subprocess.run(
            [*map(str, command), "doctor"], cwd=where, env=environment, capture_output=True, text=True
        )
        said.append((done.returncode, [line for line in done.stdout.splitlines() if "free" not in line]))
    assert all(each == said[0] for each in said) and said[0][0] == 0, said
