"""Models of which some layers see a window only: how memory is divided between these and the cache.

The keys and values of layers with windows stay in BF16, in a pool of their own, and only as long as a window reaches
them; those of the others, which the cache holds, stay as long as their request or its prefix in the radix tree.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_kvq.cache.layout import KVGeometry, overlay_slots
from sglang_kvq.config import PAGE_SIZE, KVQuantConfig

#: Prefixes kept for each request that may run, where the user does not say: what SGLang keeps where it counts so.
PREFIXES_PER_REQUEST = 4
#: SGLang's own ratio of the pools' tokens; what is chosen here is never more.
STOCK_RATIO = 0.8
#: Requests that SGLang runs at most, whatever the memory.
MOST_REQUESTS = 4096


@dataclass(frozen=True)
class WindowNeed:
    """Tokens that windows take in their pool.

    Attributes:
        per_request: of one that runs: its window, what is behind it and not given back yet, and its next page.
        per_prefix: of one in the radix tree, so that a request may go on from its end.
        batches: of the prefill batches under way.
        prefixes: that shall have theirs; None for ``PREFIXES_PER_REQUEST``.
    """

    per_request: int
    per_prefix: int
    batches: int
    prefixes: int | None = None

    def tokens(self, requests: int) -> int:
        """With that many requests running; whole pages."""
        prefixes = PREFIXES_PER_REQUEST * requests if self.prefixes is None else self.prefixes
        tokens = self.per_request * requests + self.per_prefix * prefixes + self.batches
        return -(-tokens // PAGE_SIZE) * PAGE_SIZE


def need_of(
    window: int, *, kept_behind: int, drafts: int, chunk: int, batches: int, prefixes: int | None
) -> WindowNeed:
    """
    Args:
        window: tokens.
        kept_behind: tokens after which SGLang gives back what has left a window.
        drafts: tokens that a decode step adds, at most.
        chunk: tokens of a prefill batch; batches: that may be under way at once.
        prefixes: as of ``WindowNeed``.
    """
    per_request = window + kept_behind * drafts + 2 * PAGE_SIZE + 2 * (drafts - 1)
    return WindowNeed(
        per_request, -(-window // PAGE_SIZE) * PAGE_SIZE + PAGE_SIZE, batches * chunk + PAGE_SIZE, prefixes
    )


@dataclass(frozen=True)
class WindowSplit:
    """One memory budget, divided.

    Attributes:
        overlay_budget: bytes of which BF16 overlays take their share, the rest being records.
        tokens: of the cache; window_tokens: of the windows' pool.
    """

    overlay_budget: int
    tokens: int
    window_tokens: int

    @property
    def ratio(self) -> float:
        return self.window_tokens / self.tokens


def split_windows(
    budget_bytes: int,
    geometry: KVGeometry,
    *,
    bf16_budget: float,
    window_bytes: int,
    other_bytes: float = 0.0,
    wanted: int,
    ratio: float | None = None,
) -> WindowSplit:
    """
    Args:
        bf16_budget: ``--kv-quant-bf16-budget``.
        window_bytes: of a token in the windows' pool, all its layers.
        other_bytes: of a token of the cache, for what is neither: a draft model's own cache.
        wanted: tokens that the windows need (``WindowNeed.tokens``).
        ratio: of the pools' tokens, if it is given; None for as many tokens as are wanted, at ``STOCK_RATIO`` at most.
    """
    token_bytes = geometry.page_bytes / PAGE_SIZE + other_bytes

    def at(ratio: float) -> float:
        """Tokens of the cache, if the windows' pool has ``ratio`` as many."""
        return (1 - bf16_budget) * budget_bytes / (token_bytes + (1 - bf16_budget) * ratio * window_bytes)

    most = int(at(STOCK_RATIO if ratio is None else ratio) * (STOCK_RATIO if ratio is None else ratio))
    windows = most if ratio is not None else min(wanted, most)
    windows = windows // PAGE_SIZE * PAGE_SIZE
    rest = budget_bytes - windows * window_bytes
    tokens = int((1 - bf16_budget) * rest / token_bytes) // PAGE_SIZE * PAGE_SIZE
    return WindowSplit(rest, tokens, windows)


def share_windows(
    config: KVQuantConfig,
    geometry: KVGeometry,
    budget_bytes: int,
    *,
    window_bytes: int,
    need: WindowNeed,
    requests: int | None = None,
    ratio: float | None = None,
) -> tuple[WindowSplit, int]:
    """``split_windows`` for as many running requests as overlays are affordable for, and that number.

    Args:
        window_bytes, ratio: as of ``split_windows``.
        requests: ``--max-running-requests`` of this worker; None for as many as fit.
    """
    affordable = overlay_slots(config, geometry, budget_bytes) // config.slots_per_request
    running = max(1, min(requests or MOST_REQUESTS, affordable))
    split = split_windows(
        budget_bytes,
        geometry,
        bf16_budget=config.bf16_budget,
        window_bytes=window_bytes,
        other_bytes=geometry.draft_page_bytes // PAGE_SIZE,
        wanted=need.tokens(running),
        ratio=ratio,
    )
    return split, running


def token_bytes(geometry: KVGeometry, window_bytes: int, ratio: float) -> float:
    """What SGLang counts for a token of the cache: its records, a draft model's, and its share of the windows' pool."""
    return geometry.page_bytes / PAGE_SIZE + geometry.draft_page_bytes // PAGE_SIZE + ratio * window_bytes
