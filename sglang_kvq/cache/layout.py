"""How one memory budget is divided between quantized pages and BF16 overlays."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_kvq.cache.firsts import PAGES_PER_ENTRY
from sglang_kvq.config import PAGE_SIZE, KVQuantConfig
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.record import RecordFormat


@dataclass(frozen=True)
class KVGeometry:
    """What a worker stores per token: its KV heads, and the format of a page in each of its layers.

    Attributes:
        draft_page_bytes: what a draft model's plain cache takes for a page beside it.
    """

    kv_heads: int
    formats: tuple[RecordFormat, ...]
    draft_page_bytes: int = 0

    @property
    def layers(self) -> int:
        return len(self.formats)

    @property
    def head_dim(self) -> int:
        return self.formats[0].head_dim

    @property
    def record_bytes(self) -> int:
        """Bytes of one page's records, all layers."""
        return self.kv_heads * sum(f.record_bytes for f in self.formats)

    @property
    def first_bytes(self) -> int:
        """A page's share of the first tokens that are kept (``cache.firsts``), all layers; 0 where none are."""
        if not any(f.keeps_first for f in self.formats):
            return 0
        # Whole bytes of a token, as SGLang counts.
        return -(-self.slot_bytes // (PAGE_SIZE * PAGES_PER_ENTRY * PAGE_SIZE)) * PAGE_SIZE

    @property
    def page_bytes(self) -> int:
        """What a page takes, all layers, unless it has an overlay too."""
        return self.record_bytes + self.first_bytes

    @property
    def slot_bytes(self) -> int:
        """BF16 bytes of one overlay, all layers: also what plain BF16 takes for a page."""
        return self.layers * self.kv_heads * 2 * PAGE_SIZE * self.head_dim * 2

    @property
    def record_bits_per_element(self) -> float:
        """Allocated bits per element of records, all layers together."""
        return 16 * self.record_bytes / self.slot_bytes


@dataclass(frozen=True)
class MemoryLayout:
    """The two pools' sizes.

    Attributes:
        pages: quantized pages, the reserved one not counted.
        slots: BF16 overlays, the reserved one not counted.
        max_requests: rows whose windows always fit: the bound on running requests.
    """

    geometry: KVGeometry
    pages: int
    slots: int
    max_requests: int

    @property
    def tokens(self) -> int:
        return self.pages * PAGE_SIZE

    @property
    def total_bytes(self) -> int:
        return self.pages * self.geometry.page_bytes + self.slots * self.geometry.slot_bytes

    @property
    def bf16_tokens(self) -> int:
        """Tokens plain BF16 would hold in the same bytes, with the same draft model's cache beside it."""
        draft = self.geometry.draft_page_bytes
        return (self.total_bytes + self.pages * draft) * PAGE_SIZE // (self.geometry.slot_bytes + draft)

    @property
    def bits_per_element(self) -> float:
        """Allocated bits per element of capacity, overlays included."""
        return 16 * self.total_bytes / (self.pages * self.geometry.slot_bytes)


def overlay_slots(config: KVQuantConfig, geometry: KVGeometry, budget_bytes: int) -> int:
    """Overlays that ``--kv-quant-bf16-budget``'s share of the budget holds."""
    return int(budget_bytes * config.bf16_budget) // geometry.slot_bytes


def reserved_bytes(geometry: KVGeometry, slots: int) -> int:
    """Bytes of the cache that hold no tokens: ``slots`` overlays, slot 0 and page 0."""
    return (slots + 1) * geometry.slot_bytes + geometry.page_bytes + geometry.draft_page_bytes


def divide(
    config: KVQuantConfig,
    geometry: KVGeometry,
    *,
    pages: int,
    slots: int,
    wanted: int | None = None,
    resumes: int = 1,
    chunk: int | None = None,
) -> MemoryLayout:
    """Fix the layout for ``pages`` pages once SGLang has applied its own limits.

    Args:
        slots: overlays that the budget affords (``overlay_slots``). When ``--max-total-tokens`` leaves
            fewer pages than the budget does, overlays shrink with them, but not below what ``wanted``
            requests need, and the prefill's window.
        wanted: ``--max-running-requests``; None counts as 8.
        resumes: requests of one prefill batch that may continue in the middle of a page; each may
            hold one overlay beyond its window while that batch runs.
        chunk: tokens of a prompt that are computed at once; None: all. If all of a chunk gets overlays, as many as the
            window of one prefill has are kept free of running requests' windows, unless ``wanted`` requests need them.

    Raises:
        KVQuantError: the overlays cannot hold one request's window.
    """
    need = config.slots_per_request
    if resumes > 1:  # streaming sessions: every row may resume at once
        need, resumes = need + 1, 0
    page_bytes = geometry.page_bytes + geometry.draft_page_bytes
    share = int(pages * page_bytes * config.bf16_budget / (1 - config.bf16_budget)) // geometry.slot_bytes
    least = (8 if wanted is None else wanted) * need + resumes
    prefill = config.prefill_pages if chunk is not None and chunk <= config.recent_tokens else 0
    slots = min(slots, pages, max(share, least + prefill))  # a page never needs two overlays
    spare = min(prefill, max(slots - least, 0))
    requests = (slots - resumes - spare) // need
    if requests < 1:
        one = (need + resumes) * geometry.slot_bytes
        raise KVQuantError(
            f"The KV cache has room for {slots} BF16 pages, but one request needs {need + resumes} "
            f"({one / 2**20:.0f} MiB: {config.sink_tokens} sink and {config.recent_tokens} recent tokens). Raise "
            f"--kv-quant-bf16-budget (now {config.bf16_budget}), --mem-fraction-static or --max-total-tokens, or lower "
            "--kv-quant-recent."
        )
    return MemoryLayout(geometry, pages, slots, requests)


def fit(config: KVQuantConfig, geometry: KVGeometry, budget_bytes: int) -> MemoryLayout:
    """The layout of a whole budget, as SGLang arrives at it when no flag limits tokens or requests.

    Raises:
        KVQuantError: the overlays cannot hold one request's window.
    """
    slots = overlay_slots(config, geometry, budget_bytes)
    left = budget_bytes - reserved_bytes(geometry, slots)
    return divide(config, geometry, pages=max(left, 0) // geometry.page_bytes, slots=slots)
