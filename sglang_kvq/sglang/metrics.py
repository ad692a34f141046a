"""Prometheus metrics of the tiers under ``GET /metrics``, published together with SGLang's own metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sglang_kvq
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.cache.transfer import LateCopy
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.sglang import runtime

#: Least time between two counts on a GPU. SGLang reports after every prefill, and the next batch would wait for the
#: two dozen kernel launches of a count.
_SECONDS = 1.0


def after_log_stats(result: None, collector: Any, stats: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``SchedulerMetricsCollector.log_stats``: reports the tiers. Only ranks that publish metrics call it."""
    state = runtime.current()
    if state is None or state.tiers is None:
        return
    if state.metrics is None:
        state.metrics = TierMetrics(state, state.tiers, collector.labels)
    state.metrics.report(running=stats.num_running_reqs.total, queued=stats.num_queue_reqs.total)


class TierMetrics:
    """Gauges and counters of one worker.

    The counts are on the device, and a report must not wait for it. So counts are copied in the background, and on a
    GPU a report publishes the copy that the previous report started.

    Args:
        labels: the labels that SGLang gives this worker's metrics.
    """

    def __init__(self, state: runtime.Runtime, tiers: TierManager, labels: dict[str, str]) -> None:
        # Imported here because SGLang must set PROMETHEUS_MULTIPROC_DIR first.
        from prometheus_client import Counter, Gauge

        def gauge(name: str, what: str, *more: str) -> Gauge:
            return Gauge(f"sglang_kvq_{name}", what, [*labels, *more], multiprocess_mode="mostrecent")

        def counter(name: str, what: str, *more: str) -> Counter:
            return Counter(f"sglang_kvq_{name}", what, [*labels, *more])

        def per_tier(name: str, what: str, kind: Callable[..., Any] = gauge) -> tuple[Any, Any]:
            family = kind(name, what, "tier")
            return tuple(family.labels(**labels, tier=tier) for tier in ("quantized", "bf16"))  # type: ignore[return-value]  # two

        layout = self.layout = state.layout
        info = {
            "method": state.config.method,
            "bits": f"{layout.geometry.record_bits_per_element:.2f}",
            "rotations_sha256": state.status.get("rotations_sha256") or "",
            "version": sglang_kvq.__version__,
        }
        gauge("info", "What is served; always 1.", *info).labels(**labels, **info).set(1)
        gauge("bits_per_element", "Allocated bits per element of the KV cache, BF16 pages included.").labels(
            **labels
        ).set(layout.bits_per_element)
        gauge("bf16_equivalent_tokens", "Tokens that plain BF16 would hold in the same memory.").labels(**labels).set(
            layout.bf16_tokens
        )
        self.page_bytes = layout.geometry.page_bytes, layout.geometry.slot_bytes
        self.pool_bytes = per_tier("pool_bytes", "Bytes of a tier of the KV cache.")
        self.pool_tokens = per_tier("pool_tokens", "Tokens that a tier of the KV cache can hold.")
        self.split, self.admits_another = state.split, state.admits_another
        self._publish_sizes()
        self.held_tokens = per_tier("held_tokens", "Tokens of the pages that a tier holds; a page may be in both.")
        self.held_bytes = per_tier("held_bytes", "Bytes of the pages that a tier holds.")
        lost = gauge("lost_window_pages", "Window pages of running requests that are read in few bits, not in BF16.")
        held_back = gauge("held_back_requests", "Requests that wait because no further window fits.")
        self.lost_pages, self.held_back = lost.labels(**labels), held_back.labels(**labels)
        self.counters = [
            counter("quantized_pages", "Pages quantized since the server started.").labels(**labels),
            counter("errors", "Errors of the cache since the server started; answers may be wrong.").labels(**labels),
            *per_tier("prefix_tokens", "Tokens before its own that a prefill reads, cached or of a chunk.", counter),
        ]
        self.published = [0] * len(self.counters)
        self.host, self.damaged, self.damaged_before = state.host, None, 0
        if self.host is not None:
            damaged = counter("damaged_pages", "Pages of HiCache's storage that were damaged, and so computed again.")
            self.damaged = damaged.labels(**labels)
        self.counts = LateCopy(tiers.count, tiers.pool.device, _SECONDS)
        self.counts.ask()

    def _publish_sizes(self) -> None:
        """Publishes the tiers' sizes, which change while tiers share one memory."""
        layout = self.layout if self.split is None else self.split
        pages = (layout.pages, layout.slots)
        for size, tokens, count, page_bytes in zip(self.pool_bytes, self.pool_tokens, pages, self.page_bytes):
            size.set(count * page_bytes)
            tokens.set(count * PAGE_SIZE)

    def report(self, *, running: int, queued: int) -> None:
        """Publishes the latest counts that have arrived, and asks for the next ones.

        Args:
            running, queued: numbers of requests that run and wait.
        """
        full = running >= self.layout.max_requests or (self.admits_another is not None and not self.admits_another())
        self.held_back.set(queued if full else 0)
        if self.split is not None:
            self._publish_sizes()
        if self.host is not None and self.damaged is not None:
            now = self.host.damaged_pages
            self.damaged.inc(now - self.damaged_before)
            self.damaged_before = now
        if (found := self.counts.arrived()) is not None:
            self._publish(*found)
        if not running and not queued:  # the device learns only with the next plan that the last request has ended
            self.lost_pages.set(0)
        self.counts.ask()

    def _publish(
        self,
        slots_used: int,
        pages_quantized: int,
        records_written: int,
        errors: int,
        pages_lost: int,
        prefix_bf16: int,
        prefix_quantized: int,
    ) -> None:
        held = zip(self.held_tokens, self.held_bytes, (pages_quantized, slots_used), self.page_bytes)
        for tokens, size, pages, page_bytes in held:
            tokens.set(pages * PAGE_SIZE)
            size.set(pages * page_bytes)
        self.lost_pages.set(pages_lost)
        totals = [records_written, errors, prefix_quantized, prefix_bf16]
        for counter, total, before in zip(self.counters, totals, self.published):
            counter.inc(total - before)
        self.published = totals
