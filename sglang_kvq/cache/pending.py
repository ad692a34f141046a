"""Events on pages and rows that the scheduler has recorded since the last forward pass, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from sglang_kvq.cache.transfer import to_device
from sglang_kvq.constants import EVENT_ALLOCATE, EVENT_FREE, EVENT_MOVE, EVENT_ROWS


class AllocatedPages(NamedTuple):
    """Page ids int64 ``[n]`` that left the allocator; recorded only if ids are not pages (``PagePool.places``)."""

    pages: torch.Tensor


class FreedPages(NamedTuple):
    """Page ids int64 ``[n]`` that went back to the allocator."""

    pages: torch.Tensor


class MovedBF16Pages(NamedTuple):
    """BF16 copies of pages ``own`` int64 ``[n]`` that go to the pages ``kept``, one to one, if those have none."""

    own: torch.Tensor
    kept: torch.Tensor


class FreedRows(NamedTuple):
    """Rows of ``req_to_token`` that were given back."""

    rows: list[int]


class CopiedPages(NamedTuple):
    """Pages ``target`` int64 ``[n]``, just allocated, that receive the content of the pages ``source``, one to one.

    ``windows`` int64 ``[m]`` are indices of the pages that will be in a window. These pages also get BF16 copies if
    their sources have BF16 copies and there is room.
    """

    source: torch.Tensor
    target: torch.Tensor
    windows: torch.Tensor


class FoldedPages(NamedTuple):
    """Pages ``target`` int64 ``[m]``, just allocated, that receive chosen tokens of the pages ``source`` int64 ``[n]``.

    ``tokens`` int64 ``[layers, kv_heads, 64 m]`` are indices into the sources' tokens (``cache.fold.fold_pages``).
    ``sinks`` int64 ``[k]`` are indices of pages that are copied whole, each to the target of the same index. These
    pages also get BF16 copies if their sources have BF16 copies and there is room.
    """

    source: torch.Tensor
    target: torch.Tensor
    tokens: torch.Tensor
    sinks: torch.Tensor


class ArrivedRequest(NamedTuple):
    """A request whose cache was computed elsewhere: its records are already in its pages, its window is in ``source``.

    ``rows`` and ``lens`` int64 ``[1]`` are the request's row and number of tokens. ``pages`` int64 ``[n]`` are the
    whole pages whose records have arrived. ``window`` int64 ``[w]`` are the pages of its window. ``places`` int64
    ``[w]`` are their indices in the request, and ``at`` int64 ``[w]`` their indices in ``source``, which has the layout
    of ``PagePool.read_bf16``. ``done`` is called once a plan has read ``source``.
    """

    rows: torch.Tensor
    lens: torch.Tensor
    pages: torch.Tensor
    window: torch.Tensor
    places: torch.Tensor
    at: torch.Tensor
    source: torch.Tensor
    done: Callable[[], None]


class MovedBoundary(NamedTuple):
    """A move of the boundary in a shared memory: BF16 pages begin at ``first_slot`` (``cache.shared.arena``)."""

    first_slot: int


#: Events that ``pack`` does not pack, because they are rare and need separate operations.
Fill: TypeAlias = CopiedPages | FoldedPages | ArrivedRequest | MovedBoundary
Event: TypeAlias = AllocatedPages | FreedPages | MovedBF16Pages | FreedRows | Fill


class PendingOps:
    """An ordered list of page and row events, recorded on the scheduler's stream.

    Events hold device tensors of page ids, so recording an event never waits for the device.
    """

    def __init__(self) -> None:
        self._events: list[Event | None] = []  # None: a reserved move whose pages are not known yet

    def __bool__(self) -> bool:
        return bool(self._events)

    @property
    def has_open_move(self) -> bool:
        """True while the pages of a reserved move are unknown: no event may be drained before ``fill_move``."""
        return any(event is None for event in self._events)

    @property
    def has_arrivals(self) -> bool:
        """True while an arrived request has not been applied, so that the buffer with its window is still needed."""
        return any(isinstance(event, ArrivedRequest) for event in self._events)

    def clear(self) -> None:
        for event in self._events:
            if isinstance(event, ArrivedRequest):
                event.done()
        # The last move of the boundary stays, because the scheduler already counts with it.
        boundaries = [event for event in self._events if isinstance(event, MovedBoundary)]
        self._events = [*boundaries[-1:]]

    def allocate_pages(self, pages: torch.Tensor) -> None:
        """Records that page ids int64 ``[n]``, all different, left the allocator."""
        if pages.numel():
            self._events.append(AllocatedPages(pages))

    def move_boundary(self, first_slot: int) -> None:
        """Records that BF16 pages begin at ``first_slot`` from now on; see ``MovedBoundary``.

        The pages that are in use after all earlier events must fit before this slot.
        """
        self._events.append(MovedBoundary(first_slot))

    def free_pages(self, pages: torch.Tensor) -> None:
        """Records that page ids ``[n]``, of any integer type, went back to the allocator.

        A page may be named several times, but that costs time: name it once, not once for each of its tokens.
        """
        if pages.numel():
            self._events.append(FreedPages(pages.long()))

    def free_rows(self, rows: list[int]) -> None:
        """Records that rows of ``req_to_token`` were given back, so their windows are no longer pinned."""
        if rows:
            self._events.append(FreedRows(rows))

    def copy_pages(self, source: torch.Tensor, target: torch.Tensor, windows: torch.Tensor) -> None:
        """Records that the next plan copies pages ``source`` to ``target`` int64 ``[n]``; see ``CopiedPages``.

        Sources may be freed right afterwards, because the free is a later event. One call must not copy a page to
        several targets.
        """
        if target.numel():
            self._events.append(CopiedPages(source, target, windows))

    def fold_pages(self, source: torch.Tensor, target: torch.Tensor, tokens: torch.Tensor, sinks: torch.Tensor) -> None:
        """Records that the next plan folds tokens of pages ``source`` into ``target``; see ``FoldedPages``.

        Sources may be freed right afterwards, because the free is a later event. No page may be named twice.
        """
        if target.numel():
            self._events.append(FoldedPages(source, target, tokens, sinks))

    def arrive(self, event: ArrivedRequest) -> None:
        """Records the arrival of a request whose cache was computed elsewhere."""
        self._events.append(event)

    def reserve_move(self) -> int:
        """Reserves a place in the order for a move whose pages become known after later frees; returns its ticket."""
        self._events.append(None)
        return len(self._events) - 1

    def fill_move(self, ticket: int, own: torch.Tensor, kept: torch.Tensor) -> None:
        """Records that the tree's pages ``kept`` replaced a row's equal pages ``own`` int64 ``[n]``, one to one."""
        self._events[ticket] = MovedBF16Pages(own, kept)

    def moves(self) -> list[MovedBF16Pages]:
        """Returns the moves that are not applied yet. Their rows already name the pages ``kept``."""
        return [event for event in self._events if isinstance(event, MovedBF16Pages)]

    def drain(self, device: torch.device) -> Iterator[Event]:
        """Removes and yields the events before the next ``Fill``, on ``device`` and kept alive for its stream."""
        for event in self._take():
            yield _on(event, device)

    def pack(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        """Removes all events before the next ``Fill`` and packs them into two tensors; None if there are none.

        Only ``spans`` is copied from the host, in one copy.

        Returns:
            spans: int64 on ``device``: a triple (kind, first, count) per event, then all rows. ``EVENT_FREE`` frees the
                pages ``ids[first : first + count]``, ``EVENT_ALLOCATE`` gives these ids pages. ``EVENT_MOVE`` gives
                their BF16 copies to the ``count`` ids that follow. ``EVENT_ROWS`` gives back rows
                ``spans[first : first + count]``. Events keep their order, with two exceptions. Consecutive frees, or
                allocations, become one event. Rows, which are independent of pages, come together at the end.
            ids: int64 on ``device``, page ids.
            events: number of triples.
        """
        spans: list[list[int]] = []
        pages: list[torch.Tensor] = []
        rows: list[int] = []
        first = 0
        for event in self._take():
            if isinstance(event, FreedRows):
                rows += event.rows
                continue
            ids = [ids for ids in event if isinstance(ids, torch.Tensor)]
            kind, count = _KINDS[type(event)], ids[0].shape[0]
            if kind != EVENT_MOVE and spans and spans[-1][0] == kind:
                spans[-1][2] += count
            else:
                spans.append([kind, first, count])
            pages += ids
            first += count * len(ids)
        if rows:
            spans.append([EVENT_ROWS, 3 * (len(spans) + 1), len(rows)])
        if not spans:
            return None
        (packed,) = to_device([np.array([*chain(*spans), *rows], np.int64)], device)
        pages = [ids.to(device, non_blocking=True) for ids in pages]
        keep_alive(pages)
        together = packed[:0] if not pages else pages[0] if len(pages) == 1 else torch.cat(pages)
        return packed, together, len(spans)

    def take_fill(self, device: torch.device) -> Fill | None:
        """Removes and returns the first event, with tensors on ``device``, if it is a ``Fill``; otherwise None.

        ``drain`` and ``pack`` stop before such an event.
        """
        first = self._events[0] if self._events else None
        if not isinstance(first, Fill):
            return None
        del self._events[0]
        return _on(first, device)

    def _take(self) -> list[Event]:
        """Removes and returns the events before the first ``Fill``."""
        end = next((i for i, event in enumerate(self._events) if isinstance(event, Fill)), len(self._events))
        events, self._events = self._events[:end], self._events[end:]
        return [event for event in events if event is not None]


_KINDS = {AllocatedPages: EVENT_ALLOCATE, FreedPages: EVENT_FREE, MovedBF16Pages: EVENT_MOVE}
_Kind = TypeVar("_Kind", bound=Event)


def _on(event: _Kind, device: torch.device) -> _Kind:
    """Returns the event with its tensors on ``device``, kept alive for the current stream."""
    moved: list[Any] = [x.to(device, non_blocking=True) if isinstance(x, torch.Tensor) else x for x in event]
    keep_alive([x for x in moved if isinstance(x, torch.Tensor)])
    return type(event)(*moved)


def keep_alive(tensors: list[torch.Tensor]) -> None:
    """Keeps tensors of the scheduler's stream alive for the current stream.

    The current stream is looked up once, because an eviction has hundreds of tensors.
    """
    stream = None
    for t in tensors:
        if t.is_cuda:
            stream = stream or torch.cuda.current_stream(t.device)
            t.record_stream(stream)
