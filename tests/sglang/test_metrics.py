"""A worker publishes each figure under its own name and tier, and adds only new events to counters."""

from __future__ import annotations

from types import SimpleNamespace

import prometheus_client
import pytest
import torch

import sglang_kvq
from sglang_kvq.cache.layout import KVGeometry, MemoryLayout
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.sglang import metrics, runtime

LABELS = {"model_name": "m", "tp_rank": "0"}
CPU = torch.device("cpu")


def value(name: str, **more: str) -> float | None:
    return prometheus_client.REGISTRY.get_sample_value(f"sglang_kvq_{name}", {**LABELS, **more})


def test_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = KVGeometry(2, (PageFormat(64, 64),) * 2)
    state = runtime.Runtime(KVQuantConfig("int2"), geometry, (0, 1))
    state.layout = MemoryLayout(geometry, pages=16, slots=5, max_requests=2, whole_windows=2)
    monkeypatch.setattr(runtime, "_current", state)
    collector = SimpleNamespace(labels=LABELS)
    stats = SimpleNamespace(num_running_reqs=SimpleNamespace(total=1), num_queue_reqs=SimpleNamespace(total=4))
    metrics.after_log_stats(None, collector, stats)
    assert state.metrics is None, "nothing to publish before the backend exists"

    state.status, state.host = {"rotations_sha256": "ab12"}, SimpleNamespace(damaged_pages=2)
    counts = [3, 7, 9, 0, 2, 128, 640]  # in the order of ``TierCounts``
    state.tiers = SimpleNamespace(pool=SimpleNamespace(device=CPU), count=lambda: torch.tensor(counts))
    metrics.after_log_stats(None, collector, stats)
    assert value("pool_tokens", tier="quantized") == state.layout.tokens
    assert value("pool_tokens", tier="bf16") == 5 * PAGE_SIZE
    assert value("bits_per_element") == state.layout.bits_per_element
    assert value("held_tokens", tier="bf16") == 3 * PAGE_SIZE
    assert value("held_tokens", tier="quantized") == 7 * PAGE_SIZE
    assert value("quantized_pages_total") == 9
    assert value("errors_total") == 0 and value("damaged_pages_total") == 2
    assert value("lost_window_pages") == 2
    assert value("prefix_tokens_total", tier="bf16") == 128 and value("prefix_tokens_total", tier="quantized") == 640
    assert value("pool_bytes", tier="quantized") + value("pool_bytes", tier="bf16") == state.layout.total_bytes
    assert value("held_bytes", tier="bf16") == 3 * geometry.slot_bytes
    assert value("held_bytes", tier="quantized") == 7 * geometry.page_bytes
    assert value("bf16_equivalent_tokens") == state.layout.bf16_tokens
    bits = f"{geometry.record_bits_per_element:.2f}"
    info = dict(method="int2", bits=bits, rotations_sha256="ab12", version=sglang_kvq.__version__)
    assert value("info", **info) == 1
    assert value("held_back_requests") == 0, "one more may run"
    stats.num_running_reqs.total = 2

    counts[:] = [1, 2, 11, 3, 0, 128, 704]
    state.host.damaged_pages = 5
    metrics.after_log_stats(None, collector, stats)
    assert value("damaged_pages_total") == 5
    assert value("held_tokens", tier="quantized") == 2 * PAGE_SIZE
    assert value("quantized_pages_total") == 11, "pages since the start, not of this report"
    assert value("errors_total") == 3
    assert value("prefix_tokens_total", tier="quantized") == 704
    assert value("held_back_requests") == 4 and value("lost_window_pages") == 0
    counts[3:5] = [5, 7]
    metrics.after_log_stats(None, collector, stats)
    assert value("errors_total") == 5 and value("lost_window_pages") == 7

    stats.num_running_reqs.total = stats.num_queue_reqs.total = 0
    metrics.after_log_stats(None, collector, stats)
    assert value("lost_window_pages") == 0, "the device learns only with the next plan that nothing runs"
