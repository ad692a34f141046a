"""What the scheduler did to pages and rows since the last forward pass, in order."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch

from sglang_kvq.cache.transfer import to_device

#: Kinds of events in the packed form.
FREE, MOVE, ROWS = range(3)


class PendingOps:
    """An ordered list of page and row events, recorded on the scheduler's stream.

    Events hold device tensors of page ids, so recording one never waits for the device.
    """

    def __init__(self) -> None:
        self._ops: list[tuple] = []

    def __bool__(self) -> bool:
        return bool(self._ops)

    def clear(self) -> None:
        self._ops.clear()

    def free_pages(self, pages: torch.Tensor) -> None:
        """Pages ``[n]`` of any integer type went back to the allocator.

        Repeats are harmless, but each is work: name a page once, not once for each of its tokens.
        """
        if pages.numel():
            self._ops.append(("free", pages.long()))

    def free_rows(self, rows: list[int]) -> None:
        """Rows of ``req_to_token`` were given back: their windows are no longer pinned."""
        if rows:
            self._ops.append(("rows", list(rows)))

    def reserve_move(self) -> int:
        """A place in the order for a move whose pages are known only after the frees that follow it."""
        self._ops.append(("move", None, None))
        return len(self._ops) - 1

    def fill_move(self, place: int, own: torch.Tensor, kept: torch.Tensor) -> None:
        """Row pages ``own`` int64 ``[n]`` were replaced by the equal pages ``kept`` of the tree, one to one."""
        self._ops[place] = ("move", own, kept)

    def drain(self, device: torch.device):
        """Yield and forget all events, their tensors on ``device`` and kept alive for its current stream."""
        for op, *values in self._take():
            tensors = [torch.tensor(x) if isinstance(x, list) else x for x in values]
            moved = [t.to(device, non_blocking=True) for t in tensors]
            _keep_alive(moved)
            yield op, *moved

    def pack(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        """Forget all events and give them as two tensors, by one copy; None if there are none.

        Returns:
            spans: int64 on ``device``: a triple (kind, first, count) per event, then all rows. Pages ``ids[first : first +
                count]`` are freed (kind FREE), or give their overlays to the ``count`` ids that follow (MOVE); rows
                ``spans[first : first + count]`` are given back (ROWS). The order is that of the events, but frees in a
                row are one, and rows, of which pages know nothing, are together at the end.
            ids: int64 on ``device``, page ids.
            events: how many triples there are.
        """
        spans: list[list[int]] = []
        pages, rows, at = [], [], 0
        for op, *values in self._take():
            if op == "rows":
                rows += values[0]
                continue
            kind, count = MOVE if op == "move" else FREE, len(values[0])
            if kind == FREE and spans and spans[-1][0] == FREE:
                spans[-1][2] += count
            else:
                spans.append([kind, at, count])
            pages += values
            at += count * len(values)
        if rows:
            spans.append([ROWS, 3 * (len(spans) + 1), len(rows)])
        if not spans:
            return None
        (packed,) = to_device([np.array([*chain(*spans), *rows], np.int64)], device)
        pages = [t.to(device, non_blocking=True) for t in pages]
        _keep_alive(pages)
        ids = packed[:0] if not pages else pages[0] if len(pages) == 1 else torch.cat(pages)
        return packed, ids, len(spans)

    def _take(self) -> list[tuple]:
        ops, self._ops = self._ops, []
        return [op for op in ops if op[1] is not None]  # a reserved move may turn out to be none


def _keep_alive(tensors: list[torch.Tensor]) -> None:
    """Tensors allocated on the scheduler's stream are used on the current one. An eviction brings hundreds: ask once."""
    stream = None
    for t in tensors:
        if t.is_cuda:
            stream = stream or torch.cuda.current_stream(t.device)
            t.record_stream(stream)
