"""What a prefill over stored prefixes takes, read from the pages or dequantised into a workspace first: a model of both.

Both are products of two matrices, cut into tiles of query rows. Reading pages (``kernels.extend``) packs the query heads
of a KV head into a tile's 64 rows and splits keys, so it is busy everywhere whatever the batch, but dequantises again for
every tile. A workspace is dequantised once, at the speed of memory; FlashInfer then attends twice as fast, in tiles of
128 tokens of one head that do not split keys: a few of them leave most of the GPU idle.

The constants are of one H200 (``python benchmarks/extends.py --sweep``): all but the bandwidth are an SM's, so that they
hold for any Hopper GPU. Microseconds, FLOP per microsecond, bytes per microsecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_kvq.config import PAGE_SIZE


@dataclass(frozen=True)
class Costs:
    """Constants of the model.

    Attributes:
        fixed: a way's launches and their ends.
        pages_rate: FLOP an SM does in a microsecond over 2-bit records; pages_rows: of a tile.
        window_keys: what a request's BF16 pages (sinks, window) cost more than as many keys of records, in keys.
        workspace_rate: FLOP an SM does in a microsecond in FlashInfer over BF16; own_rate: in our own kernel.
        workspace_rows: of a tile, tokens of one head.
        alone: what of a tile's time is left where half of the SMs or more are idle: then clocks are higher.
        gather: bytes of the workspace written in a microsecond by the whole GPU; call: of one that fills the workspace.
    """

    fixed: float = 12.0
    pages_rate: float = 2.64e6
    pages_rows: int = 64
    window_keys: int = 1200
    workspace_rate: float = 4.47e6
    own_rate: float = 3.3e6
    workspace_rows: int = 128
    alone: float = 0.75
    gather: float = 3.3e6
    call: float = 5.0


@dataclass(frozen=True)
class Attention:
    """A worker's attention: heads, and the GPU that runs it."""

    q_heads: int
    kv_heads: int
    head_dim: int
    sms: int

    @property
    def shared(self) -> int:
        """Query heads of a KV head."""
        return self.q_heads // self.kv_heads


def pages_us(prefix_lens: Sequence[int], new_lens: Sequence[int], attention: Attention, costs: Costs = Costs()) -> float:  # noqa: B008
    """Microseconds of a layer whose prefixes are read where they lie."""
    prefix, new = np.array(prefix_lens), np.array(new_lens)
    rows = -(-new * attention.shared // costs.pages_rows) * costs.pages_rows
    keys = prefix + new / 2 + costs.window_keys
    flop = 4 * attention.head_dim * attention.kv_heads * float((rows * keys).sum())
    return costs.fixed + flop / (costs.pages_rate * attention.sms)


def workspace_us(
    prefix_lens: Sequence[int],
    new_lens: Sequence[int],
    attention: Attention,
    capacity: int,
    flashinfer: bool = True,
    costs: Costs = Costs(),  # noqa: B008
) -> float:
    """Microseconds of a layer whose prefixes go through a workspace of ``capacity`` tokens, with FlashInfer or our own kernel."""
    prefix, new = np.array(prefix_lens), np.array(new_lens)
    stored = float((-(-prefix // PAGE_SIZE) * PAGE_SIZE).sum())
    written = 4 * attention.kv_heads * attention.head_dim * stored
    tiles = -(-new // costs.workspace_rows) * attention.q_heads
    keys = prefix + new / 2
    rate = costs.workspace_rate if flashinfer else costs.own_rate
    tile = 4 * attention.head_dim * costs.workspace_rows * keys / rate  # of each request
    # Tiles of one call end together in whole waves; the longest of them is the least that there is.
    waves = float((tiles * tile).sum()) / attention.sms
    count = int(tiles.sum())
    if count:
        waves *= -(-count // attention.sms) * attention.sms / count
    least = float(tile.max(initial=0.0)) * min(max(costs.alone, count / attention.sms), 1.0)
    attended = max(waves, least) if count > attention.sms else least
    return costs.fixed + written / costs.gather + attended + costs.call * -(-stored // capacity)
