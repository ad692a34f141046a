"""State that the hooks of one scheduler process share; each process has one model worker and one cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from sglang_kvq.sglang.types import Req, ServerArgs

if TYPE_CHECKING:  # plain servers, which never use them, would import them too
    from sglang_kvq.attention.scores.scoring import KeyScores
    from sglang_kvq.cache.layout import KVGeometry, MemoryLayout
    from sglang_kvq.cache.memory.windows import WindowNeed
    from sglang_kvq.cache.pool import PagePool
    from sglang_kvq.cache.shared.split import Split, WindowSlots
    from sglang_kvq.cache.tiers import TierManager
    from sglang_kvq.config import KVQuantConfig
    from sglang_kvq.sessions.messages import Fold

logger = logging.getLogger("sglang_kvq")

#: Attribute of SGLang's ServerArgs that holds the config; it reaches every process with ServerArgs.
CONFIG_ATTRIBUTE = "_kvq_config"
#: Attribute of ServerArgs that is set if the config came from a command line: errors then have no traceback.
CLI_ATTRIBUTE = "_kvq_from_cli"


def config_of(server_args: ServerArgs) -> KVQuantConfig | None:
    """Returns the configuration of this server; None if ``--kv-quant`` is off."""
    config: KVQuantConfig | None = getattr(server_args, CONFIG_ATTRIBUTE, None)
    return config


def attach(config: KVQuantConfig, server_args: ServerArgs) -> None:
    """Stores the config on ServerArgs, where ``config_of`` finds it."""
    setattr(server_args, CONFIG_ATTRIBUTE, config)


class Allocator(Protocol):
    """The part of this worker's allocator that SGLang does not know."""

    def check_integrity(self) -> None:
        """Raises RuntimeError if pool and allocator disagree."""

    def load_kernels(self, most: int, drafts: bool) -> None:
        """Loads the kernels for batches of up to ``most`` requests, so that no request waits for the compiler."""


class Watch(Protocol):
    """The part of ``error_watch.ErrorWatch`` that ``observe`` uses."""

    def ask(self) -> None:
        """Requests the count of errors from the device, at most once a second."""

    def look(self) -> None:
        """Logs an error of the tiers, once its count has arrived from the device."""


class Reporter(Protocol):
    """The part of ``metrics.TierMetrics`` that its hook uses."""

    def report(self, *, running: int, queued: int) -> None:
        """Publishes current figures on a CPU, and those of the last call on a GPU.

        Args:
            running, queued: numbers of requests that run and wait.
        """


class HostPages(Protocol):
    """The part of the host pool that ``observe`` and ``metrics`` use.

    Attributes:
        size: tokens that fit.
        page_bytes: bytes of a page.
        damaged_pages: pages read from storage since the start that differed from the pages written.
    """

    size: int
    page_bytes: int
    damaged_pages: int


class Transfers(Protocol):
    """The part of ``disaggregation.handover.Handover`` that SGLang's pool uses."""

    def buffers(self) -> tuple[list[int], list[int], list[int]]:
        """Returns pointer, bytes, and bytes per page of each buffer that is sent page by page."""

    def staged_rows(self, row: int, tokens: int) -> list[int]:
        """Returns the rows of the staging table that hold a request's window."""

    def save(self, locations: torch.Tensor, tiers: TierManager) -> Any:
        """Copies a retracted request to host memory."""

    def restore(self, saved: Any, locations: torch.Tensor, row: int) -> None:
        """Copies a saved request back to the device."""


@dataclass(eq=False)
class WindowLayers:
    """The layers of a model with sliding windows; SGLang keeps their keys and values itself, in BF16.

    Attributes:
        layer_ids: ids of such layers on this worker.
        need: tokens that the windows need, from which their pool is sized.
        requests: maximum number of running requests, if the user set it.
        given_ratio: ``--swa-full-tokens-ratio``, if the user set it.
        tokens: size of SGLang's pool for these layers; 0 until it is sized.
        ratio: ``tokens`` divided by the tokens of the other layers.
    """

    layer_ids: frozenset[int]
    need: WindowNeed
    requests: int | None = None
    given_ratio: float | None = None
    tokens: int = 0
    ratio: float = 0.0


@dataclass(eq=False, repr=False)
class Runtime:
    """State of this process's cache, filled in the order in which SGLang builds sizes, pool, allocator and backend.

    An attribute without a default does not exist before its step: reading it earlier raises AttributeError.

    Attributes:
        layer_ids: the model's ids of the layers in the cache, in the cache's order; others keep their state elsewhere.
        split, admits_another: the boundary in a shared memory, and whether another request's window fits; None in a
            memory that is divided once.
        budget_slots: number of BF16 pages that ``--kv-quant-bf16-budget`` allows, in a memory that is divided once.
        shared: BF16 pages that requests take from a shared memory of ``budget_bytes``; None in a memory that is divided
            once.
        tiers: None until the attention backend exists.
        status: method, rotations and formats in plain values, for the log and ``/server_info``.
        windows: None if every layer sees all tokens.
        host: pages in host memory; None without HiCache.
        metrics: None until SGLang first reports its own metrics.
        watch: None until the attention backend exists.
        chosen_tokens: chooses the tokens that a fold keeps (``folding.ChosenTokens``); None if no request may fold.
        checked: the step of ``tiers`` at which the cache was last checked while idle.
        last_step, idle_since: the last step that the idle check saw, and when it first saw that step.
        scores: scores of past tokens, by id of the request whose prompt scores them (``scoring``).
        staged_windows: maximum number of windows in transfer to or from another server; 0 without disaggregation.
        handover: None without disaggregation, and until SGLang prepares transfers.
    """

    config: KVQuantConfig
    geometry: KVGeometry
    layer_ids: tuple[int, ...]
    budget_slots: int = 0
    shared: WindowSlots | None = None
    budget_bytes: int = 0
    layout: MemoryLayout = field(init=False)
    pages: PagePool = field(init=False)
    allocator: Allocator = field(init=False)
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
    """Creates this process's runtime; returns the existing one if SGLang sizes the same cache twice."""
    global _current  # noqa: PLW0603  (SGLang's hooks share nothing but the process)
    if _current is None or (_current.config, _current.geometry, _current.layer_ids) != (config, geometry, layer_ids):
        _current = Runtime(config, geometry, layer_ids)
    return _current


def current() -> Runtime | None:
    """Returns this process's runtime; None if ``--kv-quant`` is off or nothing is built yet."""
    return _current


def started() -> Runtime:
    """Returns this process's runtime, for callers that run after the cache was sized.

    Raises:
        RuntimeError: the cache was never sized.
    """
    if _current is None:
        raise RuntimeError("kv-quant: SGLang builds a part of the cache that was never sized. Please report this.")
    return _current


def transfers() -> Transfers:
    """Returns this worker's part in transfers between servers.

    Raises:
        RuntimeError: this server takes no part in transfers.
    """
    found = started().handover
    if found is None:
        raise RuntimeError("kv-quant: SGLang moves a cache without --disaggregation-mode. Please report this.")
    return found


def tiers() -> TierManager | None:
    """Returns the live tier manager; None until the attention backend exists."""
    return _current.tiers if _current else None


def live_tiers() -> TierManager:
    """Returns the live tier manager, for callers that run only once requests run.

    Raises:
        RuntimeError: there is none.
    """
    found = tiers()
    if found is None:
        raise RuntimeError("kv-quant: the cache is used before the attention backend exists. Please report this.")
    return found
