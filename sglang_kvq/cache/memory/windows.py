"""Divides memory between sliding-window layers and the cache, for models that also have full-attention layers.

The keys and values of sliding-window layers stay in BF16, in a separate pool, while a window reaches them. The cache
holds the keys and values of the other layers, as long as the request runs or its prefix is in the radix tree.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_kvq.cache.layout import KVGeometry, bf16_slots
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE

#: Default number of kept prefixes for each request that may run; SGLang uses this number if it counts prefixes.
PREFIXES_PER_REQUEST = 4
#: SGLang's ratio of window tokens to cache tokens, and the largest ratio chosen here.
STOCK_RATIO = 0.8
#: SGLang's limit on running requests, whatever the memory.
MOST_REQUESTS = 4096


@dataclass(frozen=True)
class WindowNeed:
    """Tokens that sliding windows take in their pool.

    Attributes:
        per_request: tokens of a running request: its window, older tokens that are not yet freed, and its next page.
        per_prefix: tokens of a prefix in the radix tree, kept so that a request can continue from the prefix's end.
        batches: tokens of the prefill batches under way.
        prefixes: how many prefixes keep their tokens; None for ``PREFIXES_PER_REQUEST``.
    """

    per_request: int
    per_prefix: int
    batches: int
    prefixes: int | None = None

    def tokens(self, requests: int) -> int:
        """Returns the tokens that ``requests`` running requests take, in whole pages."""
        prefixes = PREFIXES_PER_REQUEST * requests if self.prefixes is None else self.prefixes
        tokens = self.per_request * requests + self.per_prefix * prefixes + self.batches
        return -(-tokens // PAGE_SIZE) * PAGE_SIZE


def need_of(
    window: int, *, kept_behind: int, drafts: int, chunk: int, batches: int, prefixes: int | None
) -> WindowNeed:
    """Computes the tokens that windows need.

    Args:
        window: length of the sliding window in tokens.
        kept_behind: decode steps after which SGLang frees the tokens that have left a window.
        drafts: most tokens that a decode step adds.
        chunk: tokens of a prefill batch.
        batches: prefill batches that may be under way at once.
        prefixes: see ``WindowNeed``.
    """
    per_request = window + kept_behind * drafts + 2 * PAGE_SIZE + 2 * (drafts - 1)
    return WindowNeed(
        per_request, -(-window // PAGE_SIZE) * PAGE_SIZE + PAGE_SIZE, batches * chunk + PAGE_SIZE, prefixes
    )


@dataclass(frozen=True)
class WindowSplit:
    """One divided memory budget.

    Attributes:
        bf16_budget: bytes of the cache, of which BF16 pages take their share and records the rest.
        tokens: tokens of the cache.
        window_tokens: tokens of the windows' pool.
    """

    bf16_budget: int
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
    """Divides a budget between the cache and the windows' pool.

    Args:
        bf16_budget: share of the cache's memory for BF16 pages (``--kv-quant-bf16-budget``).
        window_bytes: bytes of a token in the windows' pool, all its layers.
        other_bytes: bytes of a cache token in neither pool: in the draft model's cache.
        wanted: tokens that the windows need (``WindowNeed.tokens``).
        ratio: window tokens per cache token; None chooses as many window tokens as are wanted, up to ``STOCK_RATIO``.
    """
    token_bytes = geometry.page_bytes / PAGE_SIZE + other_bytes

    def at(ratio: float) -> float:
        """Returns the tokens of the cache if the windows' pool has ``ratio`` times as many."""
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
    """Runs ``split_windows`` for the most requests whose BF16 pages are affordable; returns the split and their number.

    Args:
        window_bytes, ratio: see ``split_windows``.
        requests: ``--max-running-requests`` of this worker; None for as many as fit.
    """
    affordable = bf16_slots(config, geometry, budget_bytes) // config.pinned_slots()
    running = max(1, min(requests or MOST_REQUESTS, affordable))
    split = split_windows(
        budget_bytes,
        geometry,
        bf16_budget=config.bf16_share,
        window_bytes=window_bytes,
        other_bytes=geometry.draft_page_bytes // PAGE_SIZE,
        wanted=need.tokens(running),
        ratio=ratio,
    )
    return split, running


def token_bytes(geometry: KVGeometry, window_bytes: int, ratio: float) -> float:
    """Returns the bytes that SGLang counts per cache token: records, the draft model's cache, the windows' share."""
    return geometry.page_bytes / PAGE_SIZE + geometry.draft_page_bytes // PAGE_SIZE + ratio * window_bytes
