"""Kernels that a server loads while it serves are found in its log."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import late_kernels
from benchmarks.late_kernels import own_late_kernels

#: Lines of SGLang 0.5.23, of a server on a GPU.
LOG = (
    "[2026-11-28 14:27:51] Triton kernel '_quantize_slots' took 1.48 s to compile after serving started. Serving-time "
    "compilation can stall the engine; pre-compile it during engine init.\n"
    "[2026-11-28 14:27:52] Triton kernel '_quantize_slots' device-loaded after serving started (free device mem: 17.26 "
    "GiB). Pre-load it during engine init to avoid CUDA OOM.\n"
    "[2026-11-28 14:27:52] Triton kernel 'write_req_to_token_pool_triton' device-loaded after serving started (free "
    "device mem: unknown). Pre-load it during engine init to avoid CUDA OOM.\n"
)


def test_names_are_listed_once_and_ours_are_told_apart():
    assert late_kernels.late_kernels(LOG) == ["_quantize_slots", "write_req_to_token_pool_triton"]
    assert own_late_kernels(LOG) == ["_quantize_slots"]
    assert own_late_kernels(LOG.replace("write_req_to_token_pool_triton", "alloc_decode_kernel")) == [
        "_quantize_slots",
        "alloc_decode_kernel",
    ]
    assert own_late_kernels("Triton kernel '_merge' is fine") == []


def test_every_kernel_of_the_package_is_known():
    launch = pytest.importorskip("sglang_kvq.sglang.doctor.kernels")
    launched = {name.rpartition(".")[2] for name in launch.kernels()}
    assert len(launched) > 15 and launched <= late_kernels._own()


def test_the_allocators_kernels_are_those_that_it_loads():
    paged = pytest.importorskip("sglang.srt.mem_cache.allocator.paged")
    assert {name for name in vars(paged) if re.fullmatch("alloc_.*_kernel", name)} == late_kernels._LOADED


def test_sglang_logs_these_lines():
    """Reads SGLang's source, because only a GPU loads kernels."""
    watch = pytest.importorskip("sglang.srt.utils.triton_load_watch", reason="older than 0.5.23")
    from sglang.srt.environ import envs

    source = Path(watch.__file__).read_text()
    assert "took %.2f s to compile after serving started" in source
    assert "device-loaded after serving started" in source
    (name,) = late_kernels.ENV
    assert hasattr(envs, name)
