"""Prometheus metrics of the tiers under ``GET /metrics``, written when and where SGLang writes its own."""

from __future__ import annotations

from typing import Any

from sglang_kvq.cache.layout import MemoryLayout
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.cache.transfer import LateCopy
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
    """Gauges and counters of one worker.

    Counts live on the device and reporting must not wait for it: they are copied in the background, and on a GPU
    a report publishes the copy that the previous one began.

    Args:
        labels: SGLang's, of this worker.
    """

    def __init__(self, tiers: TierManager, layout: MemoryLayout, labels: dict[str, str]) -> None:
        # Not before SGLang has set PROMETHEUS_MULTIPROC_DIR.
        from prometheus_client import Counter, Gauge

        def gauge(name: str, what: str, *more: str) -> Gauge:
            return Gauge(f"sglang_kvq_{name}", what, [*labels, *more], multiprocess_mode="mostrecent")

        gauge("bits_per_element", "Allocated bits per element of the KV cache, BF16 pages included.").labels(
            **labels
        ).set(layout.bits_per_element)
        pool = gauge("pool_tokens", "Tokens that a tier of the KV cache can hold.", "tier")
        pool.labels(**labels, tier="quantized").set(layout.tokens)
        pool.labels(**labels, tier="bf16").set(layout.slots * PAGE_SIZE)
        held = gauge("held_tokens", "Tokens of the pages that a tier holds; a page may be in both.", "tier")
        self.held_quantized, self.held_bf16 = (held.labels(**labels, tier=tier) for tier in ("quantized", "bf16"))

        def counter(name: str, what: str) -> Counter:
            return Counter(f"sglang_kvq_{name}", what, list(labels)).labels(**labels)

        self.quantized_pages = counter("quantized_pages", "Pages quantized since the server started.")
        self.errors = counter("errors", "Errors of the cache since the server started; answers may be wrong.")
        self.published = {self.quantized_pages: 0, self.errors: 0}
        self.counts = LateCopy(tiers.count, tiers.pool.device)
        self.counts.ask()

    def report(self) -> None:
        """Publish the latest counts that have arrived, and ask for the next."""
        if (found := self.counts.arrived()) is not None:
            self._publish(*found)
            self.counts.ask()

    def _publish(self, slots_used: int, pages_quantized: int, records_written: int, errors: int) -> None:
        self.held_bf16.set(slots_used * PAGE_SIZE)
        self.held_quantized.set(pages_quantized * PAGE_SIZE)
        for counter, count in ((self.quantized_pages, records_written), (self.errors, errors)):
            counter.inc(count - self.published[counter])
            self.published[counter] = count
