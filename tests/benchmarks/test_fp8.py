"""Other kernels over FP8: the report on unavailable, wrong and fastest kernels, and on an ideal one."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernel_bench import fp8
from benchmarks.kernel_bench.fp8 import FP8, PAGE, Scene, bound_us, columns, compared

LENGTHS = [70, 3, 200]


@pytest.fixture
def scene() -> Scene:
    torch.manual_seed(0)
    return Scene.make(torch.randn(3, 4, 16).bfloat16(), LENGTHS, kv_heads=2)


def dense(scene: Scene) -> torch.Tensor:
    """Computes attention with PyTorch's own function, over each request's tokens in order."""
    out = []
    for row, length in enumerate(scene.lengths):
        places = [int(scene.table[row, n // PAGE]) * PAGE + n % PAGE for n in range(length)]
        k, v = (x.float().flatten(0, 1)[places].movedim(0, 1) for x in (scene.k, scene.v))
        q = scene.q[row, :, None].float()
        out.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)[:, 0])
    return torch.stack(out)


def test_what_is_right(scene: Scene) -> None:
    want = dense(scene)
    for row in range(len(LENGTHS)):
        torch.testing.assert_close(scene.exact(row), want[row], rtol=1e-4, atol=1e-5)


def test_columns(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(scene: Scene) -> list:
        return [fp8._attribute(("no_such_module", "torch.nothing"), "decode")]

    def broken(scene: Scene) -> list:
        raise RuntimeError("needs sm_100\nmany more lines")

    kernels = {
        "fa3": missing,
        "xqa": broken,
        "triton": lambda scene: [lambda: dense(scene)] * 2,
        "wrong": lambda scene: [lambda: dense(scene).roll(1, 0)],
    }
    monkeypatch.setattr(fp8, "KERNELS", kernels)
    times = iter((7.125, 5.0))
    monkeypatch.setattr(Scene, "make", lambda *_: scene)
    row = columns(lambda run: next(times), scene.q, LENGTHS, 2, list(kernels))
    assert (row["fp8_fa3_us"], row["fp8_xqa_us"], row["fp8_triton_us"], row["fp8_wrong_us"]) == (None, None, 5.0, None)
    assert row["fp8_triton_error"] < 1e-3
    reasons = row["fp8_skipped"].split("; ")
    assert reasons[0] == "fa3: No module named 'no_such_module'" and "xqa: RuntimeError: needs sm_100" in reasons
    assert reasons[-1].startswith("wrong: its result is wrong by")
    assert columns(lambda run: 1.0, scene.q, LENGTHS, 2, []) == {}


def test_the_fastest_and_the_bound() -> None:
    bound = bound_us([16384] * 64, kv_heads=8, head_dim=128, bandwidth=4.0e6)
    assert bound == pytest.approx(64 * 16384 * 8 * 2 * 128 / 4.0e6)
    row = {"ours_us": 170.0, "flashinfer_fp8_us": 760.0, "fp8_fa3_us": 595.0, "fp8_xqa_us": None}
    found = compared(row, bound)
    assert (found["fp8_best"], found["fp8_best_us"], found["ratio_fp8_best"]) == ("fa3", 595.0, 3.5)
    assert found["ratio_fp8_bound"] == pytest.approx(bound / 170, abs=1e-3)
    assert compared({"ours_us": 1.0, "flashinfer_fp8_us": None}, 2.0)["fp8_best"] is None


def test_kernels_are_named_as_in_the_columns() -> None:
    assert list(fp8.KERNELS) == ["fa3", "xqa", "triton"] and FP8 is torch.float8_e4m3fn
