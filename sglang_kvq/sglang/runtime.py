"""State that the hooks of one scheduler process share: one model worker, one cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from sglang_kvq.attention.scores.scoring import KeyScores
from sglang_kvq.cache.layout import KVGeometry, MemoryLayout
from sglang_kvq.cache.memory.windows import WindowNeed
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.shared.split import Split, WindowSlots
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.sessions.messages import Fold
from sglang_kvq.sglang.types import Req, ServerArgs

logger = logging.getLogger("sglang_kvq")

#: Set on SGLang's ServerArgs by the flags; travels with it into every process.
CONFIG_ATTRIBUTE = "_kvq_config"
#: Set beside the config when it came from a command line: errors then end the process without a traceback.
CLI_ATTRIBUTE = "_kvq_from_cli"


def config_of(server_args: ServerArgs) -> KVQuantConfig | None:
    """The configuration of this server, None when ``--kv-quant`` is off."""
    config: KVQuantConfig | None = getattr(server_args, CONFIG_ATTRIBUTE, None)
    return config


def attach(config: KVQuantConfig, server_args: ServerArgs) -> None:
    """Makes ``config_of`` find the runtime."""
    setattr(server_args, CONFIG_ATTRIBUTE, config)


class Checkable(Protocol):
    """The allocator, as ``observe`` uses it."""

    def check_integrity(self) -> None:
        """Raises RuntimeError if pool and allocator disagree."""


class Watch(Protocol):
    """Reports errors of the tiers to the log."""

    def look(self) -> None:
        """Logs the times that have become known."""


class Reporter(Protocol):
    """The worker's metrics."""

    def report(self, *, running: int, queued: int) -> None:
        """Publishes the figures of now, or of the last call, while so many requests run and wait."""


class HostPages(Protocol):
    """Quantized pages in host memory, as ``observe`` and ``metrics`` use them.

    Attributes:
        size: tokens.
        page_bytes: bytes of a page.
        damaged_pages: pages of storage that were not as they had been written, since the start.
    """

    size: int
    page_bytes: int
    damaged_pages: int


class Transfers(Protocol):
    """This worker's part in transfers between servers (``disaggregation.handover``), as SGLang's pool needs it."""

    def buffers(self) -> tuple[list[int], list[int], list[int]]:
        """Returns pointers, bytes, and bytes of a page, of what is sent page by page."""

    def staged_rows(self, row: int, tokens: int) -> list[int]:
        """Returns where a request's window is staged."""

    def save(self, locations: torch.Tensor, tiers: TierManager) -> Any:
        """Copies a retracted request to host memory."""

    def restore(self, saved: Any, locations: torch.Tensor, row: int) -> None:
        """Copies it back."""


@dataclass(eq=False)
class WindowLayers:
    """The layers of a model that see a window only: SGLang keeps their keys and values itself, in BF16.

    Attributes:
        layer_ids: the model's numbers of those of this worker.
        need: what their pool is sized by.
        requests: that may run at once, if the user set it.
        given_ratio: ``--swa-full-tokens-ratio``, if the user set it.
        tokens: of SGLang's pool for them; 0 until it is sized.
        ratio: of that and the tokens of the layers in the cache.
    """

    layer_ids: frozenset[int]
    need: WindowNeed
    requests: int | None = None
    given_ratio: float | None = None
    tokens: int = 0
    ratio: float = 0.0


@dataclass(eq=False, repr=False)
class Runtime:
    """Filled in the order SGLang builds things: sizes, pool, allocator, attention backend.

    An attribute without a default does not exist before its step; reading it then is an AttributeError.

    Attributes:
        layer_ids: the model's numbers of the layers in the cache, in its order; others keep their state elsewhere.
        split, admits_another: the boundary in a shared memory, and whether another request's window fits; None
            otherwise.
        budget_slots: BF16 pages that ``--kv-quant-bf16-budget`` pays for, in a memory that is divided once.
        shared: what requests take of a memory that records and BF16 pages share, of ``budget_bytes``; None otherwise.
        tiers: None until the attention backend exists.
        status: what is served, in plain values, for the log and ``/server_info``.
        windows: None where every layer sees all tokens.
        host: pages in host memory; None without HiCache.
        metrics: None until SGLang reports its own for the first time.
        watch: None until the attention backend exists.
        chosen_tokens: what a request keeps that ends as a fold (``folding.ChosenTokens``); None where none does.
        checked: the step of ``tiers`` at which the cache was last checked while idle.
        last_step, idle_since: the step that an idle server has ended with, and when that was first seen.
        scores: of the requests whose past is scored, by id (``scoring``).
        staged_windows: windows that may be on their way to or from another server at a time; 0 on its own.
        handover: None on a server of its own, and until SGLang prepares transfers.
    """

    config: KVQuantConfig
    geometry: KVGeometry
    layer_ids: tuple[int, ...]
    budget_slots: int = 0
    shared: WindowSlots | None = None
    budget_bytes: int = 0
    layout: MemoryLayout = field(init=False)
    pages: PagePool = field(init=False)
    allocator: Checkable = field(init=False)
    split: Split | None = None
    admits_another: Callable[[], bool] | None = None
    tiers: TierManager | None = None
    windows: WindowLayers | None = None
    host: HostPages | None = None
    status: dict[str, Any] = field(default_factory=dict)
    metrics: Reporter | None = None
    watch: Watch | None = None
    chosen_tokens: Callable[[Req, Fold], torch.Tensor | None] | None = None
    checked: int = -1
    last_step: int = -1
    idle_since: float = 0.0
    scores: dict[str, KeyScores] = field(default_factory=dict)
    staged_windows: int = 0
    handover: Transfers | None = None


_current: Runtime | None = None


def start(config: KVQuantConfig, geometry: KVGeometry, layer_ids: tuple[int, ...]) -> Runtime:
    """Begins (or, when SGLang sizes twice, begins again) this process's cache."""
    global _current  # noqa: PLW0603  (SGLang's hooks share nothing but the process)
    if _current is None or (_current.config, _current.geometry, _current.layer_ids) != (config, geometry, layer_ids):
        _current = Runtime(config, geometry, layer_ids)
    return _current


def current() -> Runtime | None:
    """This process's cache, None when ``--kv-quant`` is off or nothing is built yet."""
    return _current


def started() -> Runtime:
    """This process's cache, for what SGLang builds after it was sized.

    Raises:
        RuntimeError: it was not.
    """
    if _current is None:
        raise RuntimeError("kv-quant: SGLang builds a part of the cache that was never sized; please report this.")
    return _current


def transfers() -> Transfers:
    """This worker's part in transfers between servers.

    Raises:
        RuntimeError: it has none.
    """
    found = started().handover
    if found is None:
        raise RuntimeError("kv-quant: SGLang moves a cache without --disaggregation-mode; please report this.")
    return found


def tiers() -> TierManager | None:
    """The live tier manager, None until the attention backend exists."""
    return _current.tiers if _current else None


def live_tiers() -> TierManager:
    """The live tier manager, for what happens only once requests run.

    Raises:
        RuntimeError: there is none.
    """
    found = tiers()
    if found is None:
        raise RuntimeError("kv-quant: the cache is used before the attention backend exists; please report this.")
    return found
