"""Transfer of requests that a prefill server computes and a decode server continues: the data sent, and its places.

Whole pages are sent as records, directly from a page of one server to a page of the other. The page being filled has no
record, and the rest of the window would lose precision as records. So windows are sent in BF16, through an entry of
``Staging`` on both servers.

*Prefill*: after the layers of a chunk, on their stream, the chunk's whole pages get records. After the last chunk the
window is packed into the entry. SGLang sends a chunk after the result of its batch has arrived, so this work is done.

*Decode*: SGLang allocates pages and a row, and asks for the entry's addresses. The row holds the entry until the
request begins to run. Its arrival is then recorded as an event: the next plan gives its window BF16 pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from sglang_kvq.cache.pending import ArrivedRequest
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.cache.transfer import to_device
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.disaggregation.staging import Staging, window_of

#: Bytes per page of the filler buffer, which makes the number of SGLang's transfer buffers even.
_FILLER = 16


@dataclass(frozen=True)
class SavedRow:
    """A retracted request in host memory: records by store, its packed window, and its number of tokens.

    ``drafts`` is SGLang's copy of the draft model's keys and values; None without a draft model.
    """

    records: list[torch.Tensor]
    window: torch.Tensor
    tokens: int
    drafts: object = None


class DraftPool(Protocol):
    """SGLang's pool of a draft model; a token has the same location there as in our pool."""

    def get_cpu_copy(self, indices: torch.Tensor) -> Any:
        """Copies tokens to host memory."""

    def load_cpu_copy(self, kv_cache_cpu: Any, indices: torch.Tensor) -> None:
        """Copies tokens back, to these locations."""


@dataclass(frozen=True)
class ComputedRow:
    """A request of a prefill batch: its pages int64 ``[n]`` and the number of its tokens.

    ``entry`` is the staging entry for its window if this chunk is its last; None otherwise.
    """

    row: int
    pages: torch.Tensor
    tokens: int
    entry: int | None


class Handover:
    """One worker's part in a transfer.

    Args:
        pool: the pool whose pages are sent or received.
        decode: True on a server that decodes.
        sink_pages, recent_pages: the window, in pages.
        entries: maximum number of windows in transfer at a time.

    Attributes:
        layers: the stream that runs the layers, if it is not the scheduler's own.
        drafts: the draft model's pool, if there is one; SGLang sends its pages.
        refused: why prefill servers are refused, by their address.
    """

    def __init__(self, pool: PagePool, *, decode: bool, sink_pages: int, recent_pages: int, entries: int) -> None:
        self.pool, self.decode = pool, decode
        self.sink_pages, self.recent_pages = sink_pages, recent_pages
        self.staging = Staging(pool, sink_pages + recent_pages + 1, entries)
        self.layers: torch.cuda.Stream | None = None
        self.drafts: DraftPool | None = None
        self.refused: dict[str, str] = {}
        self._filler = torch.zeros(pool.pages + 1, _FILLER, dtype=torch.uint8, device=pool.device)
        self._entries: dict[int, tuple[int, int]] = {}  # by row: the entry, and the tokens it was taken for
        self._restored: dict[int, SavedRow] = {}  # by row: requests restored after a retraction, not running yet

    # -- buffers that SGLang registers -------------------------------------------------------------

    def buffers(self) -> tuple[list[int], list[int], list[int]]:
        """Returns pointers, bytes, and bytes per page of each layer's records.

        Their number is even, because SGLang takes the first half for keys and the second half for values, and pairs
        each half with the other server's.
        """
        entries = [*self.pool.records, *([self._filler] if self.pool.layers % 2 else [])]
        return [x.data_ptr() for x in entries], [x.nbytes for x in entries], [x[0].nbytes for x in entries]

    def staged_rows(self, row: int, tokens: int) -> list[int]:
        """Returns the staging rows for the window of a row's request. A decode server takes an entry for it now."""
        if self.decode and row not in self._entries:
            self._entries[row] = self.staging.take(), tokens
        entry, staged = self._entries.get(row, (0, -1))
        if staged != tokens:
            raise RuntimeError(f"kv-quant: a request of {tokens} tokens is sent with the window of {staged}.")
        return list(self.staging.rows(entry, len(self._window(tokens))))

    def _window(self, tokens: int) -> list[int]:
        return window_of(tokens, self.sink_pages, self.recent_pages)

    # -- prefill -----------------------------------------------------------------------------------

    def computing(self, row: int, tokens: int, entry: int | None) -> ComputedRow:
        """Reads the pages of a row whose next chunk ends at ``tokens``. Call it before the chunk's layers run.

        Later the scheduler may replace some of these pages by pages of the tree with the same tokens.
        """
        return ComputedRow(row, self._pages(row, tokens), tokens, entry)

    def computed(self, done: ComputedRow, tiers: TierManager) -> None:
        """Prepares the data of the row's next transfer. Call it after the layers, on their stream."""
        tiers.record_pages(done.pages[: done.tokens // P])
        if done.entry is None:
            return
        self._entries[done.row] = done.entry, done.tokens
        window = self._window(done.tokens)
        rows = self.staging.rows(done.entry, len(window))
        slots = self.pool.page_slot[self._at(done.pages, window)].clamp(min=0).long()
        if done.tokens % P:
            tiers.errors += slots[-1] == 0  # the page being filled exists only in BF16
        self.staging.table[:, rows.start : rows.stop] = self.pool.read_bf16(slots)

    # -- decode ------------------------------------------------------------------------------------

    def arrive(self, row: int, tokens: int, prefix: int, tiers: TierManager) -> None:
        """Records that a row's request begins to run: ``tokens`` tokens, of which this server had cached ``prefix``."""
        pages, window = self._pages(row, tokens), self._window(tokens)
        saved = self._restored.pop(row, None)
        if saved is not None:
            source, first, done, prefix = saved.window, 0, _nothing, 0
            expected = saved.tokens
        else:
            entry, expected = self._entries.pop(row)
            source, first = self.staging.table, self.staging.rows(entry, len(window)).start

            def done() -> None:
                self.staging.give_back(entry)

        if expected != tokens:
            raise RuntimeError(f"kv-quant: a request of {tokens} tokens arrived with the window of {expected}.")
        tiers.pending.arrive(
            ArrivedRequest(
                rows=torch.tensor([row]),
                lens=torch.tensor([tokens]),
                pages=pages[prefix // P : tokens // P],
                window=self._at(pages, window),
                places=torch.tensor(window),
                at=first + torch.arange(len(window)),
                source=source,
                done=done,
            )
        )

    def settle(self, tiers: TierManager) -> None:
        """Applies pending arrivals now if no staging entry is free, because a next plan may never come.

        A request for one token ends without a decode step. If such requests held all entries, the server would request
        no further transfer, and no batch would run.
        """
        if self.staging.available() or not tiers.pending.has_arrivals:
            return
        if self.layers is None:
            tiers.apply_now()
            return
        self.layers.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.layers):
            tiers.apply_now()

    def waits(self, row: int) -> bool:
        """Returns whether a row's request has not run on this decode server, so that its window has no BF16 pages."""
        return self.decode and (row in self._entries or row in self._restored)

    def free_row(self, row: int) -> None:
        """Forgets a row that was returned before its request ran; the prefill server no longer writes to its entry."""
        self._restored.pop(row, None)
        entry = self._entries.pop(row, None)
        if entry is not None and self.decode:
            self.staging.give_back(entry[0])

    def save(self, locations: torch.Tensor, tiers: TierManager) -> SavedRow:
        """Copies a request's tokens, int64 ``[n]`` locations, to host memory. The device must be idle."""
        tokens, pages = len(locations), locations[::P].long() // P
        tiers.apply_pending()
        whole = pages[: tokens // P]
        tiers.record_pages(whole)
        slots = self.pool.page_slot[self._at(pages, self._window(tokens))].clamp(min=0).long()
        if tokens % P:
            tiers.errors += slots[-1] == 0
        records = [store.records[:, whole].cpu() for store in self.pool.stores]
        drafts = None if self.drafts is None else self.drafts.get_cpu_copy(locations)
        return SavedRow(records, self.pool.read_bf16(slots).cpu(), tokens, drafts)

    def restore(self, saved: SavedRow, locations: torch.Tensor, row: int) -> None:
        """Copies a saved request's records to its new pages; ``arrive`` brings its window back when it runs."""
        if len(locations) != saved.tokens:
            raise RuntimeError(f"kv-quant: {saved.tokens} tokens are restored to a row of {len(locations)}.")
        whole = locations[::P].long()[: saved.tokens // P] // P
        for store, records in zip(self.pool.stores, saved.records):
            store.records[:, whole] = records.to(whole.device)
        if self.drafts is not None:
            self.drafts.load_cpu_copy(saved.drafts, locations)
        self._restored[row] = saved

    # -- helpers -----------------------------------------------------------------------------------

    def _pages(self, row: int, tokens: int) -> torch.Tensor:
        return self.pool.req_to_token[row, :tokens:P].long() // P

    @staticmethod
    def _at(pages: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
        (index,) = to_device([np.array(places, np.int64)], pages.device)
        return pages[index]


def _nothing() -> None:
    """Does nothing: a window in host memory is freed together with its event."""


def current() -> Handover | None:
    """Returns this process's part in transfers; None on a server that prefills and decodes."""
    state = runtime.current()
    found = state.handover if state is not None else None
    return found if isinstance(found, Handover) else None


def started() -> Handover:
    """Returns this process's part in transfers.

    Raises:
        RuntimeError: this server takes no part in transfers.
    """
    found = current()
    if found is None:
        raise RuntimeError("kv-quant: SGLang transfers a cache without --disaggregation-mode. Please report this.")
    return found
