"""What the scheduler did to pages and rows since the last forward pass, in order."""

from __future__ import annotations

import torch


class PendingOps:
    """An ordered list of page and row events, recorded on the scheduler's stream.

    Events hold device tensors of page ids, so recording one never waits for the device.
    """

    def __init__(self) -> None:
        self._ops: list[tuple[str, ...]] = []

    def __bool__(self) -> bool:
        return bool(self._ops)

    def clear(self) -> None:
        self._ops.clear()

    def free_pages(self, pages: torch.Tensor) -> None:
        """Pages ``[n]`` of any integer type went back to the allocator; repeats are harmless."""
        if pages.numel():
            self._ops.append(("free", pages.long()))

    def free_rows(self, rows: list[int]) -> None:
        """Rows of ``req_to_token`` were given back: their windows are no longer pinned."""
        if rows:
            self._ops.append(("rows", torch.tensor(rows, dtype=torch.int64)))

    def reserve_move(self) -> int:
        """A place in the order for a move whose pages are known only after the frees that follow it."""
        self._ops.append(("move", None, None))
        return len(self._ops) - 1

    def fill_move(self, place: int, own: torch.Tensor, kept: torch.Tensor) -> None:
        """Row pages ``own`` int64 ``[n]`` were replaced by the equal pages ``kept`` of the tree, one to one."""
        self._ops[place] = ("move", own, kept)

    def drain(self, device: torch.device):
        """Yield and forget all events, their tensors on ``device`` and kept alive for its current stream."""
        ops, self._ops = self._ops, []
        for op, *tensors in ops:
            if tensors[0] is None:  # a reserved move that turned out to be none
                continue
            moved = [t.to(device, non_blocking=True) for t in tensors]
            if device.type == "cuda":
                for t in moved:
                    t.record_stream(torch.cuda.current_stream(device))
            yield op, *moved
