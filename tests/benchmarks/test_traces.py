"""A decode step's time is divided by kernel, from a profiler's trace."""

import gzip
import json

import pytest

from benchmarks import traces


def event(name: str, ts: float, dur: float, cat: str = "kernel") -> dict:
    return {"name": name, "cat": cat, "ts": ts, "dur": dur}


def write(folder, events) -> None:
    folder.joinpath("1-TP-0.trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))


def test_time_by_kernel_and_between_kernels(tmp_path):
    events, layers, steps = [], 3, 4
    for step in range(steps):
        for layer in range(layers):
            at = 1000.0 * step + 100.0 * layer
            events += [
                event("void ns::gemm<float, int>(a, b)", at, 10),
                event("void ns::gemm<half, int>(a)", at + 10, 20),
            ]
            events += [event("_decode", at + 30, 40), event("_merge", at + 60, 20)]  # overlaps the event before it
        events += [event("sample(int)", 1000.0 * step + 300, 5), event("cpu_op", 1000.0 * step, 900, "cpu_op")]
    write(tmp_path, events[::-1])
    found = traces.per_step(traces.read_trace(tmp_path), steps - 1, layers)  # one step more than was requested
    assert found["kernels"] == {"_decode": [120, 3], "gemm": [90, 6], "_merge": [60, 3], "sample": [5, 1]}
    assert found["busy"] == 3 * 80 + 5
    # 20 us twice between layers and once after them, and 695 us between steps.
    assert found["idle"] == pytest.approx((steps * 3 * 20 + (steps - 1) * 695) / steps, abs=0.1)


def test_short_names():
    assert traces.short("void flashinfer::BatchDecode<a<b>, (c::D)1>(flashinfer::P<int>)") == "BatchDecode"
    assert traces.short("nvjet_tst_64x8_v_bz") == "nvjet_tst_64x8_v_bz"
    assert (
        traces.short("void at::native::elementwise_kernel<128, at::native::f()::{lambda(int)#1}>(int)")
        == "elementwise_kernel"
    )


def test_a_folder_without_a_trace(tmp_path):
    with pytest.raises(FileNotFoundError, match="no trace with events of a GPU"):
        traces.read_trace(tmp_path)
    write(tmp_path, [event("aten::add", 0, 1, "cpu_op")])
    with pytest.raises(FileNotFoundError, match="no trace with events of a GPU"):
        traces.read_trace(tmp_path)
    path = tmp_path / "1-TP-0.trace.json.gz"  # half written
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(FileNotFoundError, match="no trace with events of a GPU"):
        traces.read_trace(tmp_path)
