"""Prometheus metrics of the tiers under ``GET /metrics``, written when and where SGLang writes its own."""

from __future__ import annotations

from typing import Any

import torch

from sglang_kvq.cache.layout import MemoryLayout
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.config import PAGE_SIZE
from sglang_kvq.sglang import runtime


def after_log_stats(result: None, collector: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``SchedulerMetricsCollector.log_stats``, which only the ranks that report call."""
    state = runtime.current()
    if state is None or state.tiers is None:
        return
    if state.metrics is None:
        state.metrics = TierMetrics(state.tiers, state.layout, collector.labels)
    state.metrics.report()


class TierMetrics:
    """Gauges and a counter of one worker.

    Counts live on the device and reporting must not wait for it: they are copied in the background, and on a GPU
    a report publishes the copy that the previous one began.

    Args:
        labels: SGLang's, of this worker.
    """

    def __init__(self, tiers: TierManager, layout: MemoryLayout, labels: dict[str, str]) -> None:
        # Not before SGLang has set PROMETHEUS_MULTIPROC_DIR.
        from prometheus_client import Counter, Gauge

        def gauge(name: str, what: str, *more: str) -> Gauge:
            return Gauge(f"sglang_kvq:{name}", what, [*labels, *more], multiprocess_mode="mostrecent")

        self.tiers = tiers
        gauge("bits_per_element", "Allocated bits per element of the KV cache, BF16 pages included.").labels(
            **labels
        ).set(layout.bits_per_element)
        pool = gauge("pool_tokens", "Tokens that a tier of the KV cache can hold.", "tier")
        pool.labels(**labels, tier="quantized").set(layout.tokens)
        pool.labels(**labels, tier="bf16").set(layout.slots * PAGE_SIZE)
        held = gauge("held_tokens", "Tokens of the pages that a tier holds; a page may be in both.", "tier")
        self.held_quantized, self.held_bf16 = (held.labels(**labels, tier=tier) for tier in ("quantized", "bf16"))
        self.quantized_pages = Counter(
            "sglang_kvq:quantized_pages", "Pages quantized since the server started.", list(labels)
        ).labels(**labels)
        self.host = tiers.count().to("cpu", copy=True)
        #: Recorded behind the copy under way; None where a copy is done at once.
        self.copied: torch.cuda.Event | None = None
        if tiers.pool.device.type == "cuda":
            self.host, self.copied = self.host.pin_memory(), torch.cuda.Event()
            self.copied.record()
        self.published = 0

    def report(self) -> None:
        """Publish the latest counts that have arrived, and ask for the next."""
        if self.copied is None:
            self.host.copy_(self.tiers.count())
        elif not self.copied.query():
            return
        self._publish(*self.host.tolist())
        if self.copied is not None:
            self.host.copy_(self.tiers.count(), non_blocking=True)
            self.copied.record()

    def _publish(self, slots_used: int, pages_quantized: int, records_written: int, errors: int) -> None:
        self.held_bf16.set(slots_used * PAGE_SIZE)
        self.held_quantized.set(pages_quantized * PAGE_SIZE)
        self.quantized_pages.inc(records_written - self.published)
        self.published = records_written
