"""Assignment of BF16 pages to pages, and of each request's ranges to the pool they are read from.

Where records and BF16 pages share one memory (``cache.shared``), SGLang's page ids name no memory: a table gives each a
page. Everything else here counts pages.

All state lives on the device and every decision is a tensor operation, so a step never waits for the host. The
scheduler only *records* events on pages (``PendingOps``). The next forward pass applies them, in order, on the stream
that runs the model. So demotion is safe under overlap scheduling: no page loses its BF16 copy while an earlier batch
still reads it.

Rules (docs/design.md has the reasons):

* A request's *window* is its sink pages, its last ``recent_tokens`` (rounded up to whole pages) and the page being
  filled. Of rows in use, sinks, the last ``kept_pages`` recent pages and the pages being written are pinned. Every
  other BF16 copy may be taken: first those in no window, least recently used first, sinks last; then recent pages of
  rows in use, those farthest from the end first, so that all windows shrink evenly.
* Taking a BF16 copy quantizes its page first if the page has no valid record yet. So pressure never loses a token.
* A page that begins a sequence keeps its first token when its BF16 copy is taken, if the format requires it
  (``cache.sink_token_cache``). A prefill that reads such a page restores its BF16 copy from its record and that token.
* A request reads records in one range ``[sink_end, history_end)``. Pages in it without a valid record are quantized
  before the batch runs. If a window page has lost its BF16 copy (a prefix hit long after), the range's end moves past
  it.
* A prefill of more than one token also reads BF16 pages up to ``prefill_pages`` further back. Pages that recently left
  the window mostly still have one, with the values as written. Nothing is pinned for that.

``state`` has the tables and what is done to them, ``manager`` what happens in a plan, ``fills`` what fills pages
without a batch, ``boundary`` what moves in a shared memory. All this is the CPU path and the oracle of
``triton_tiers``, which decides the same on a GPU in a few launches.
"""

from sglang_kvq.cache.tiers.manager import TierManager, read_lens
from sglang_kvq.cache.tiers.state import SINK_BONUS, QuantizeSlots, RestorePages, TierCounts

__all__ = ["SINK_BONUS", "QuantizeSlots", "RestorePages", "TierCounts", "TierManager", "read_lens"]
