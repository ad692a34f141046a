"""Divides one memory budget between quantized pages and BF16 pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_kvq.cache.shared.arena import Arena, padded
from sglang_kvq.cache.shared.split import WindowSlots
from sglang_kvq.cache.sink_token_cache import PAGES_PER_ENTRY
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.record import RecordFormat

#: Context lengths in tokens for which logs and ``kvq plan`` show how many requests fit.
CONTEXTS = (4 << 10, 32 << 10, 128 << 10)
#: Limits of SGLang's table of rows if ``--max-running-requests`` does not size it: the largest share of the cache's
#: memory that the table may take, and the fewest rows.
_ROWS_SHARE, _LEAST_ROWS = 1 / 32, 64


def contexts_within(most: int) -> tuple[int, ...]:
    """Returns the values of ``CONTEXTS`` up to ``most``, a model's longest context; just ``most`` if there are none."""
    return tuple(context for context in CONTEXTS if context <= most) or (most,)


def rows_within(budget_bytes: int, context: int) -> int:
    """Returns how many requests may run in a shared memory without ``--max-running-requests``.

    SGLang's table has four bytes for every token of every request that may run. In a memory that is divided once, BF16
    pages keep these requests few. In a shared memory the table might have thousands of rows for a million tokens each.
    """
    return max(int(budget_bytes * _ROWS_SHARE) // (4 * context), _LEAST_ROWS)


@dataclass(frozen=True)
class KVGeometry:
    """Storage per token on one worker: its KV heads, and the page format of each of its layers.

    Attributes:
        draft_page_bytes: bytes per page in a draft model's plain cache.
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
        """Bytes of one page's records in all layers."""
        return self.kv_heads * sum(f.record_bytes for f in self.formats)

    @property
    def first_bytes(self) -> int:
        """Bytes of kept first tokens (``cache.sink_token_cache``) per page, in all layers; 0 if none are kept."""
        if not any(f.keeps_first for f in self.formats):
            return 0
        # Rounded up to whole bytes per token, because SGLang counts bytes per token.
        return -(-self.slot_bytes // (PAGE_SIZE * PAGES_PER_ENTRY * PAGE_SIZE)) * PAGE_SIZE

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers, without its BF16 copy."""
        return self.record_bytes + self.first_bytes

    @property
    def shared_page_bytes(self) -> int:
        """Bytes of a page like ``page_bytes``, if records and BF16 pages share a memory."""
        return padded(self.record_bytes) + self.first_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one BF16 page in all layers; a plain BF16 cache takes as many for a page."""
        return self.layers * self.kv_heads * 2 * PAGE_SIZE * self.head_dim * 2

    @property
    def record_bits_per_element(self) -> float:
        """Allocated bits per element of records, all layers together."""
        return 16 * self.record_bytes / self.slot_bytes


class NoRoom(KVQuantError):
    """The memory does not hold one request's window; ``problem`` is the message without the fix, a server's flag."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"{problem} {fix}")
        self.problem = problem


@dataclass(frozen=True)
class MemoryLayout:
    """Sizes of the two pools.

    Attributes:
        pages: quantized pages, without the reserved one.
        slots: BF16 pages, without the reserved one.
        max_requests: limit of running requests: the BF16 pages that a request never loses always fit for so many.
        whole_windows: running requests whose whole windows fit at once; with more requests, all windows shrink.
        arena: sizes of the memory that records and BF16 pages share; ``pages`` and ``slots`` are then upper limits
            that do not hold at the same time. None if the memory is divided once.
        windows: BF16 pages that running requests take of a shared memory; None without one.
    """

    geometry: KVGeometry
    pages: int
    slots: int
    max_requests: int
    whole_windows: int
    arena: Arena | None = None
    windows: WindowSlots | None = None

    @property
    def tokens(self) -> int:
        return self.pages * PAGE_SIZE

    @property
    def total_bytes(self) -> int:
        if self.arena is not None:
            return self.arena.total_bytes + self.pages * self.geometry.first_bytes
        return self.pages * self.geometry.page_bytes + self.slots * self.geometry.slot_bytes

    @property
    def bf16_tokens(self) -> int:
        """Tokens that a plain BF16 cache would hold in the same bytes, the draft model's cache included."""
        draft = self.geometry.draft_page_bytes
        return (self.total_bytes + self.pages * draft) * PAGE_SIZE // (self.geometry.slot_bytes + draft)

    def requests_at(self, context: int) -> tuple[int, int]:
        """Returns how many requests of ``context`` tokens fit in a plain BF16 cache of equal size, and in this one."""
        ours = self.tokens // context
        if self.arena is not None and self.windows is not None:
            pages = -(-context // PAGE_SIZE)
            ours = 0 if pages > self.pages else _requests(self.arena, self.windows.least, self.windows.spare, pages)
        return self.bf16_tokens // context, min(ours, self.max_requests)

    @property
    def bits_per_element(self) -> float:
        """Allocated bits per element of the cache's capacity, BF16 pages included."""
        return 16 * self.total_bytes / (self.pages * self.geometry.slot_bytes)


def bf16_slots(config: KVQuantConfig, geometry: KVGeometry, budget_bytes: int) -> int:
    """Returns how many BF16 pages fit in the share of the budget that ``--kv-quant-bf16-budget`` sets."""
    return int(budget_bytes * config.bf16_share) // geometry.slot_bytes


def reserved_bytes(geometry: KVGeometry, slots: int) -> int:
    """Returns the bytes of the cache that add no capacity: ``slots`` BF16 pages, slot 0 and page 0."""
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
    batch: int | None = None,
    written: int = 1,
) -> MemoryLayout:
    """Computes the layout for ``pages`` pages, after SGLang has applied its own limits.

    Args:
        slots: BF16 pages that the budget affords (``bf16_slots``). If ``--max-total-tokens`` leaves fewer pages than
            the budget does, there are proportionally fewer BF16 pages. They never fall below the needs of ``wanted``
            requests and the prefill window.
        wanted: ``--max-running-requests``; None counts as 8.
        resumes: requests of one prefill batch that may continue in the middle of a page. Each may hold one BF16 page
            beyond its window while that batch runs.
        chunk: tokens of a prompt computed at once; None: all. If a chunk is so short that all its tokens get BF16
            copies, running requests' windows leave ``config.prefill_pages`` BF16 pages free, unless ``wanted`` requests
            need them.
        batch: most tokens of a prefill batch. If requests may lose recent pages (``config.recent_min``), the tokens
            that such a batch writes need room in addition to the pages that requests never lose.
        written: tokens that a step writes, 1 or the number of drafts.

    Raises:
        NoRoom: the BF16 pages cannot hold one request's window.
    """
    need, whole = config.pinned_slots(written), config.slots_per_request
    shrinks = need < whole
    if resumes > 1:  # streaming sessions: every row may resume at once
        need, whole, resumes = need + 1, whole + 1, 0
    resumed = resumes
    if shrinks:
        resumes += max(config.slots_per_request, -(-(batch or 0) // PAGE_SIZE))
    page_bytes = geometry.page_bytes + geometry.draft_page_bytes
    share = int(pages * page_bytes * config.bf16_share / (1 - config.bf16_share)) // geometry.slot_bytes
    least = (8 if wanted is None else wanted) * need + resumes
    prefill = config.prefill_pages if chunk is not None and chunk <= config.recent_tokens else 0
    slots = min(slots, pages, max(share, least + prefill))  # a page never needs two BF16 pages
    spare = min(prefill, max(slots - least, 0))
    requests = (slots - resumes - spare) // need
    if requests < 1:
        one = (need + resumes) * geometry.slot_bytes
        raise NoRoom(
            f"The KV cache has room for {slots} BF16 pages, but one request needs {need + resumes} "
            f"({one / 2**20:.0f} MiB: {config.sink_tokens} sink and {config.kept_pages * PAGE_SIZE} recent tokens).",
            f"Raise --kv-quant-bf16-budget (now {config.bf16_share}), --mem-fraction-static or --max-total-tokens, or "
            "lower --kv-quant-recent.",
        )
    return MemoryLayout(geometry, pages, slots, requests, min((slots - resumed - spare) // whole, requests))


def window_slots(config: KVQuantConfig, batch: int, written: int = 1) -> WindowSlots:
    """Returns the BF16 pages that requests take of a shared memory.

    Args:
        batch: most tokens of a prefill batch. These tokens need room in addition to the pages that requests never lose,
            and so does the page that one request of the batch resumes.
        written: tokens that a step writes.
    """
    spare = 1 + max(config.slots_per_request, -(-batch // PAGE_SIZE))
    return WindowSlots(config.slots_per_request, config.pinned_slots(written), spare)


def shared_reserve(geometry: KVGeometry, windows: WindowSlots) -> int:
    """Returns the bytes of a shared memory that records cannot use while one request runs.

    These are the request's BF16 pages, slot 0, page 0, and one more BF16 page for rounding.
    """
    return (windows.needed(1) + 2) * geometry.slot_bytes + geometry.shared_page_bytes + geometry.draft_page_bytes


def share(
    geometry: KVGeometry, windows: WindowSlots, *, pages: int, budget_bytes: int, wanted: int | None = None
) -> MemoryLayout:
    """Computes the layout of a shared memory for ``pages`` pages, after SGLang has applied its own limits.

    Args:
        budget_bytes: bytes of the whole memory, a draft model's cache included. If ``--max-total-tokens`` leaves fewer
            pages than the budget holds, the memory is smaller too, but still has BF16 pages for ``wanted`` requests
            beside all pages.
        wanted: ``--max-running-requests``; None counts as 8.

    Raises:
        NoRoom: no page fits beside one request's window.
    """
    page, slot = padded(geometry.record_bytes), geometry.slot_bytes
    if pages < 1:
        raise NoRoom(
            f"The KV cache has room for {budget_bytes // slot} BF16 pages, but one request and its prompt need "
            f"{windows.needed(1) + 2} ({(windows.needed(1) + 2) * slot / 2**20:.0f} MiB).",
            "Raise --mem-fraction-static or --max-total-tokens, or lower --kv-quant-recent or --chunked-prefill-size.",
        )
    for_pages = -(-(pages + 1) * page // slot)
    beside = geometry.first_bytes + geometry.draft_page_bytes  # of every page, in separate memories
    affordable = (budget_bytes - pages * beside - geometry.draft_page_bytes) // slot - 1
    least, more = windows.needed(1), windows.wanted(8 if wanted is None else wanted)
    slots = for_pages + max(least, min(affordable - for_pages, more))
    arena = Arena(page, slot, slots, pages)
    most, whole = (max(_requests(arena, each, windows.spare, 1), 1) for each in (windows.least, windows.whole))
    return MemoryLayout(geometry, pages, slots, most, whole, arena, windows)


def _requests(arena: Arena, slots: int, spare: int, pages: int) -> int:
    """Returns how many requests fit in a shared memory, if each has ``slots`` BF16 pages and ``pages`` pages."""
    of_slot = arena.page_bytes / arena.slot_bytes
    return max(int((arena.slots - spare - of_slot) / (slots + pages * of_slot)), 0)


def fit_shared(config: KVQuantConfig, geometry: KVGeometry, budget_bytes: int, batch: int) -> MemoryLayout:
    """Returns the shared layout of a whole budget, equal to a server's if no flag limits tokens or requests.

    Raises:
        NoRoom: no page fits beside one request's window.
    """
    if config.recent_min is None:
        config = replace(config, recent_min=0)
    windows = window_slots(config, batch)
    left = budget_bytes - shared_reserve(geometry, windows)
    pages = max(left, 0) // geometry.shared_page_bytes
    return share(geometry, windows, pages=pages, budget_bytes=budget_bytes)


def fit(config: KVQuantConfig, geometry: KVGeometry, budget_bytes: int) -> MemoryLayout:
    """Returns the layout of a whole budget, equal to a server's if no flag limits tokens or requests.

    Raises:
        NoRoom: the BF16 pages cannot hold one request's window.
    """
    slots = bf16_slots(config, geometry, budget_bytes)
    left = budget_bytes - reserved_bytes(geometry, slots)
    return divide(config, geometry, pages=max(left, 0) // geometry.page_bytes, slots=slots)
