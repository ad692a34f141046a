"""Prometheus metrics of the tiers under ``GET /metrics``, written when and where SGLang writes its own."""

from __future__ import annotations

import torch

from sglang_kvq.config import PAGE_SIZE
from sglang_kvq.sglang import runtime

_metrics: TierMetrics | None = None


def after_log_stats(result: None, collector, *args, **kwargs) -> None:
    """AFTER ``SchedulerMetricsCollector.log_stats``, which only the ranks that report call."""
    global _metrics
    state = runtime.current()
    if state is None or state.tiers is None:
        return
    if _metrics is None:
        _metrics = TierMetrics(state, collector.labels)
    _metrics.report()


class TierMetrics:
    """Gauges and a counter of one worker.

    Counts live on the device and reporting must not wait for it: they are copied in the background, and on a GPU
    a report publishes the copy that the previous one began.

    Args:
        labels: SGLang's, of this worker.
    """

    def __init__(self, state: runtime.Runtime, labels: dict[str, str]) -> None:
        # Not before SGLang has set PROMETHEUS_MULTIPROC_DIR.
        from prometheus_client import Counter, Gauge

        def gauge(name: str, what: str, *more: str) -> Gauge:
            return Gauge(f"sglang_kvq:{name}", what, [*labels, *more], multiprocess_mode="mostrecent")

        self.tiers, layout = state.tiers, state.layout
        gauge("bits_per_element", "Allocated bits per element of the KV cache, BF16 pages included.").labels(
            **labels
        ).set(layout.bits_per_element)
        pool = gauge("pool_tokens", "Tokens that a tier of the KV cache can hold.", "tier")
        pool.labels(**labels, tier="quantized").set(layout.tokens)
        pool.labels(**labels, tier="bf16").set(layout.slots * PAGE_SIZE)
        held = gauge("held_tokens", "Tokens of the pages that a tier holds; a page may be in both.", "tier")
        self.quantized, self.bf16 = held.labels(**labels, tier="quantized"), held.labels(**labels, tier="bf16")
        self.quantized = Counter(
            "sglang_kvq:quantized_pages", "Pages quantized since the server started.", list(labels)
        ).labels(**labels)
        self.on_gpu = self.tiers.pool.device.type == "cuda"
        self.host = self.tiers.count().to("cpu", copy=True)
        if self.on_gpu:
            self.host, self.copied = self.host.pin_memory(), torch.cuda.Event()
            self.copied.record()
        self.published = 0

    def report(self) -> None:
        """Publish the latest counts that have arrived, and ask for the next."""
        if not self.on_gpu:
            self.host.copy_(self.tiers.count())
        elif not self.copied.query():
            return
        self._publish(*self.host.tolist())
        if self.on_gpu:
            self.host.copy_(self.tiers.count(), non_blocking=True)
            self.copied.record()

    def _publish(self, slots_used: int, pages_quantized: int, records_written: int, errors: int) -> None:
        self.bf16.set(slots_used * PAGE_SIZE)
        self.quantized.set(pages_quantized * PAGE_SIZE)
        self.quantized.inc(records_written - self.published)
        self.published = records_written
