"""What a worker publishes: each figure under its own name and tier, the counter by what is new."""

from __future__ import annotations

from types import SimpleNamespace

import prometheus_client
import pytest
import torch

from sglang_kvq.cache.layout import KVGeometry, MemoryLayout
from sglang_kvq.config import PAGE_SIZE, KVQuantConfig
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.sglang import metrics, runtime

LABELS = {"model_name": "m", "tp_rank": "0"}
CPU = torch.device("cpu")


def value(name: str, **more: str) -> float | None:
    return prometheus_client.REGISTRY.get_sample_value(f"sglang_kvq_{name}", {**LABELS, **more})


def test_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = KVGeometry(2, (PageFormat(64, 64),) * 2)
    state = runtime.Runtime(KVQuantConfig("int2"), geometry, (0, 1))
    state.layout = MemoryLayout(geometry, pages=16, slots=5, max_requests=2)
    monkeypatch.setattr(runtime, "_current", state)
    collector = SimpleNamespace(labels=LABELS)
    metrics.after_log_stats(None, collector)
    assert state.metrics is None, "nothing to publish before the backend exists"

    counts = [3, 7, 9, 0]  # slots used, pages quantized, records written, errors
    state.tiers = SimpleNamespace(pool=SimpleNamespace(device=CPU), count=lambda: torch.tensor(counts))
    metrics.after_log_stats(None, collector)
    assert value("pool_tokens", tier="quantized") == state.layout.tokens
    assert value("pool_tokens", tier="bf16") == 5 * PAGE_SIZE
    assert value("bits_per_element") == state.layout.bits_per_element
    assert value("held_tokens", tier="bf16") == 3 * PAGE_SIZE
    assert value("held_tokens", tier="quantized") == 7 * PAGE_SIZE
    assert value("quantized_pages_total") == 9
    assert value("errors_total") == 0

    counts[:] = [1, 2, 11, 3]
    metrics.after_log_stats(None, collector)
    assert value("held_tokens", tier="quantized") == 2 * PAGE_SIZE
    assert value("quantized_pages_total") == 11, "pages since the start, not of this report"
    assert value("errors_total") == 3
    counts[3] = 5
    metrics.after_log_stats(None, collector)
    assert value("errors_total") == 5
