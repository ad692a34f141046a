"""PyTorch's threads on the CPU follow from the CPUs that a container may use, not from its host's cores."""

import contextlib
import os

import pytest
import torch

from sglang_kvq.cpus import usable_cpus
from sglang_kvq.rotations.calibration.hf_model import limit_threads, one_thread


@pytest.fixture(autouse=True)
def threads_stay(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(208)))
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def cgroup(folder, version, quota):
    if version == 2:
        (folder / "cpu.max").write_text(f"{quota} 100000\n")
    else:
        (folder / "cpu").mkdir()
        (folder / "cpu" / "cpu.cfs_quota_us").write_text(f"{-1 if quota == 'max' else quota}\n")
        (folder / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    return folder


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("quota, cpus", [("max", 208), (1600000, 16), (150000, 1), (50000, 1)])
def test_the_share_of_a_container(tmp_path, version, quota, cpus):
    assert usable_cpus(cgroup(tmp_path, version, quota)) == cpus


def test_threads_are_no_more_than_the_share(tmp_path):
    torch.set_num_threads(104)
    limit_threads(cgroup(tmp_path, 2, 1600000))
    assert torch.get_num_threads() == 16
    torch.set_num_threads(2)
    limit_threads(tmp_path)
    assert torch.get_num_threads() == 2


def test_no_limit_and_a_number_that_the_user_gave(tmp_path, monkeypatch):
    assert usable_cpus(tmp_path) == 208
    torch.set_num_threads(104)
    monkeypatch.setenv("OMP_NUM_THREADS", "104")
    limit_threads(cgroup(tmp_path, 2, 1600000))
    assert torch.get_num_threads() == 104


def test_one_thread_gives_the_others_back():
    torch.set_num_threads(3)
    with contextlib.suppress(ZeroDivisionError), one_thread():
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == 3
