"""Decides which pages have BF16 copies, and which of a request's tokens are read from records or from BF16 pages.

If records and BF16 pages share one memory (``cache.shared``), SGLang's page ids are not places in memory: a table gives
each id a page. Everything else in this package works with pages, not ids.

All state is on the device and every decision is a tensor operation, so a step never waits for the host. The scheduler
only *records* events on pages (``PendingOps``). The next forward pass applies the events, in order, on the stream that
runs the model. So taking BF16 copies is safe under overlap scheduling: no page loses its BF16 copy while an earlier
batch still reads it.

Rules (docs/design.md has the reasons):

* A request's *window* is its sink pages, its last ``recent_tokens`` (rounded up to whole pages) and the page being
  filled. For rows in use, the sinks, the last ``kept_pages`` recent pages and the pages being written are pinned. Every
  other BF16 copy may be taken. Copies outside all windows are taken first: the least recently used first, and sinks
  last. Then recent pages of rows in use lose theirs: those farthest from the end first, so that all windows shrink
  evenly.
* If a page has no valid record yet, it is quantized before its BF16 copy is taken. So no token is ever lost when BF16
  pages run short.
* If the format requires it, a page that begins a sequence keeps its first token when its BF16 copy is taken
  (``cache.sink_token_cache``). A prefill that reads such a page rebuilds the BF16 copy from the record and that token.
* A request reads records in one range ``[sink_end, history_end)``. Pages in the range without a valid record are
  quantized before the batch runs. If a window page has lost its BF16 copy, as after a late prefix hit, the range's end
  moves past that page.
* A prefill of more than one token also reads BF16 pages up to ``prefill_pages`` further back. Most pages that recently
  left the window still have a BF16 copy, with the values as written. No BF16 page is pinned for this purpose.

``state`` has the tables and their basic operations, and ``manager`` plans batches. ``fills`` handles pages that are
filled without a batch, and ``boundary`` moves the boundary of a shared memory. This package is the CPU path and the
reference for ``triton_tiers``, which makes the same decisions on a GPU in a few launches.
"""

from sglang_kvq.cache.tiers.manager import TierManager, read_lens
from sglang_kvq.cache.tiers.state import SINK_BONUS, QuantizeSlots, RestorePages, TierCounts

__all__ = ["SINK_BONUS", "QuantizeSlots", "RestorePages", "TierCounts", "TierManager", "read_lens"]
