"""Runs the same kernel tests natively on a GPU and in Triton's interpreter on a CPU.

Triton reads its switch when kernels are defined and again when they run. The switch is set only at these times, because
tests in other folders and the servers that they start must not inherit it.
"""

import importlib.util

import pytest
import torch

ON_GPU = torch.cuda.is_available()

if not ON_GPU:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import sglang_kvq.attention.triton_ops
        import sglang_kvq.cache.triton_tiers
        import sglang_kvq.kernels.tiers.host_rows  # noqa: F401

        if importlib.util.find_spec("triton.experimental.gluon"):
            import triton.experimental.gluon  # noqa: F401  (imported by the first launch otherwise)

        from tests.kernels.interpreter import speed_up

        speed_up()


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
