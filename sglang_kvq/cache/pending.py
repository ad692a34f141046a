"""What the scheduler did to pages and rows since the last forward pass, in order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from sglang_kvq.cache.transfer import to_device

#: Kinds of events in the packed form.
FREE, MOVE, ROWS = range(3)


class FreedPages(NamedTuple):
    """Pages int64 ``[n]`` went back to the allocator."""

    pages: torch.Tensor


class MovedOverlays(NamedTuple):
    """The overlays of pages ``own`` int64 ``[n]`` go to the pages ``kept``, one to one, where those have none."""

    own: torch.Tensor
    kept: torch.Tensor


class FreedRows(NamedTuple):
    """Rows int64 ``[n]`` of ``req_to_token`` were given back; on the host until they are drained."""

    rows: torch.Tensor


class CopiedPages(NamedTuple):
    """Pages ``target`` int64 ``[n]``, just allocated, are to hold what the pages ``source`` hold, one to one.

    ``windows`` int64 ``[m]`` are indices of those that will be read in a window: they get overlays too if their sources
    have them and there is room.
    """

    source: torch.Tensor
    target: torch.Tensor
    windows: torch.Tensor


class FoldedPages(NamedTuple):
    """Pages ``target`` int64 ``[m]``, just allocated, are to hold chosen tokens of the pages ``source`` int64 ``[n]``.

    ``tokens`` int64 ``[layers, kv_heads, 64 m]`` are indices into the sources' tokens (``cache.fold.fold_pages``).
    ``sinks`` int64 ``[k]`` are indices of pages that are taken whole, to the same place of the target: they get
    overlays too if their sources have them and there is room.
    """

    source: torch.Tensor
    target: torch.Tensor
    tokens: torch.Tensor
    sinks: torch.Tensor


#: What ``pack`` leaves alone: rare, and done in operations of their own.
Fill: TypeAlias = CopiedPages | FoldedPages
Event: TypeAlias = FreedPages | MovedOverlays | FreedRows | Fill


class PendingOps:
    """An ordered list of page and row events, recorded on the scheduler's stream.

    Events hold device tensors of page ids, so recording one never waits for the device.
    """

    def __init__(self) -> None:
        self._events: list[Event | None] = []  # None: a reserved move that is not known yet, or turned out to be none

    def __bool__(self) -> bool:
        return bool(self._events)

    def clear(self) -> None:
        self._events.clear()

    def free_pages(self, pages: torch.Tensor) -> None:
        """Pages ``[n]`` of any integer type went back to the allocator.

        Repeats are harmless, but each is work: name a page once, not once for each of its tokens.
        """
        if pages.numel():
            self._events.append(FreedPages(pages.long()))

    def free_rows(self, rows: list[int]) -> None:
        """Rows of ``req_to_token`` were given back: their windows are no longer pinned."""
        if rows:
            self._events.append(FreedRows(torch.tensor(rows, dtype=torch.int64)))

    def copy_pages(self, source: torch.Tensor, target: torch.Tensor, windows: torch.Tensor) -> None:
        """Pages ``target`` int64 ``[n]`` get what ``source`` hold when the next batch is planned; see ``CopiedPages``.

        Sources may be freed right after: that is a later event. A page is copied to one target at most per call.
        """
        if target.numel():
            self._events.append(CopiedPages(source, target, windows))

    def fold_pages(self, source: torch.Tensor, target: torch.Tensor, tokens: torch.Tensor, sinks: torch.Tensor) -> None:
        """Pages ``target`` get chosen tokens of ``source`` when the next batch is planned; see ``FoldedPages``.

        Sources may be freed right after: that is a later event. No page is named twice.
        """
        if target.numel():
            self._events.append(FoldedPages(source, target, tokens, sinks))

    def reserve_move(self) -> int:
        """A ticket for a move that comes now in the order, but whose pages are known only after frees that follow."""
        self._events.append(None)
        return len(self._events) - 1

    def fill_move(self, ticket: int, own: torch.Tensor, kept: torch.Tensor) -> None:
        """Row pages ``own`` int64 ``[n]`` were replaced by the equal pages ``kept`` of the tree, one to one."""
        self._events[ticket] = MovedOverlays(own, kept)

    def drain(self, device: torch.device) -> Iterator[Event]:
        """Yield and forget all events, their tensors on ``device`` and kept alive for its current stream."""
        for event in self._take():
            yield _on(event, device)

    def pack(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        """Forget all events before the next ``Fill`` and give them as two tensors, by one copy; None if there are none.

        Returns:
            spans: int64 on ``device``: a triple (kind, first, count) per event, then all rows. Pages ``ids[first :
                first + count]`` are freed (kind FREE), or give their overlays to the ``count`` ids that follow (MOVE);
                rows ``spans[first : first + count]`` are given back (ROWS). The order is that of the events, but frees
                in a row are one, and rows, of which pages know nothing, are together at the end.
            ids: int64 on ``device``, page ids.
            events: how many triples there are.
        """
        spans: list[list[int]] = []
        pages: list[torch.Tensor] = []
        rows: list[int] = []
        first = 0
        for event in self._take(until_fill=True):
            if isinstance(event, FreedRows):
                rows += event.rows.tolist()
                continue
            kind, count = MOVE if isinstance(event, MovedOverlays) else FREE, len(event[0])
            if kind == FREE and spans and spans[-1][0] == FREE:
                spans[-1][2] += count
            else:
                spans.append([kind, first, count])
            pages += event
            first += count * len(event)
        if rows:
            spans.append([ROWS, 3 * (len(spans) + 1), len(rows)])
        if not spans:
            return None
        (packed,) = to_device([np.array([*chain(*spans), *rows], np.int64)], device)
        pages = [ids.to(device, non_blocking=True) for ids in pages]
        _keep_alive(pages)
        ids = packed[:0] if not pages else pages[0] if len(pages) == 1 else torch.cat(pages)
        return packed, ids, len(spans)

    def take_fill(self, device: torch.device) -> Fill | None:
        """Forget the first event and give it, on ``device``, if it is a copy or a fold; ``pack`` stops there."""
        first = self._events[0] if self._events else None
        if not isinstance(first, Fill):
            return None
        del self._events[0]
        return _on(first, device)

    def _take(self, *, until_fill: bool = False) -> list[Event]:
        """Forget events and give them; those before the first copy or fold, or all."""
        events, self._events = self._events, []
        if until_fill:
            end = next((i for i, event in enumerate(events) if isinstance(event, Fill)), len(events))
            events, self._events = events[:end], events[end:]
        return [event for event in events if event is not None]


_Kind = TypeVar("_Kind", bound=Event)


def _on(event: _Kind, device: torch.device) -> _Kind:
    """The event with its tensors there, kept alive for the current stream."""
    moved = [ids.to(device, non_blocking=True) for ids in event]
    _keep_alive(moved)
    return type(event)(*moved)


def _keep_alive(tensors: list[torch.Tensor]) -> None:
    """Tensors of the scheduler's stream are used on the current one. An eviction brings hundreds: ask once."""
    stream = None
    for t in tensors:
        if t.is_cuda:
            stream = stream or torch.cuda.current_stream(t.device)
            t.record_stream(stream)
