"""Moves chosen tokens to other pages, as at the end of an episode's block, in all layers of a model."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernel_bench.planes import plane_format
from benchmarks.kernel_bench.rows import row_of
from benchmarks.kernel_bench.shapes import FORMAT, KV_HEADS, D
from benchmarks.kernel_bench.timer import Timer
from sglang_kvq.cache.fold import fold_pages
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.triton_tiers import move_tokens
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.formats.code import CodeFormat
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.record import RecordFormat

LAYERS = 36
#: Tokens that are kept, and all tokens.
SIZES = [(4096, 6144), (1536, 2560)]
FORMATS: dict[str, RecordFormat] = {
    "oscar 2": FORMAT,
    "oscar 3": PageFormat(D, D, k=CodeFormat(3), v=CodeFormat(3)),
    "transform 2.5": plane_format(D, ((5, 3, 2, 2), (3, 2, 2, 1))),
}


def fold_rows(timer: Timer, bandwidth: float) -> Iterator[dict]:
    """Yields rows for tokens in ascending order, as they are chosen, and in any order.

    Bytes are those of kept tokens, read and written, and of indices.
    """
    for kept, tokens in SIZES:
        for name, format in FORMATS.items():
            pages, targets = tokens // PAGE_SIZE, kept // PAGE_SIZE
            table = torch.zeros(1, PAGE_SIZE, dtype=torch.int32, device="cuda")
            sizes = {"kv_heads": KV_HEADS, "pages": pages + targets, "slots": 1}
            pool = PagePool.allocate([format] * LAYERS, **sizes, req_to_token=table)
            pool.stores[0].records.random_(256)
            ids = torch.randperm(pool.pages, device="cuda") + 1
            source, target = ids[:pages].contiguous(), ids[pages:].contiguous()
            drawn = torch.rand(LAYERS, KV_HEADS, tokens, device="cuda").argsort(-1)[..., :kept]
            size = LAYERS * KV_HEADS * kept * (2 * format.record_bytes / PAGE_SIZE + 8)
            for order, chosen in (("ascending", drawn.sort(-1).values), ("any order", drawn.contiguous())):
                label = f"fold ({name}, {order})"
                fold_pages(pool, source, target, chosen)
                want = pool.stores[0].records[:, target].clone()
                pool.stores[0].records[:, target] = 0
                run = lambda chosen=chosen: move_tokens(pool, source, target, chosen)  # noqa: B023, E731
                run()
                if not torch.equal(pool.stores[0].records[:, target], want):
                    raise SystemExit(f"{label}: records differ from the reference; no speed for a wrong result.")
                us = timer(run)
                more = {"layers": LAYERS, "of": tokens, "gb_per_s": round(size / us / 1e3)}
                yield row_of(label, 1, kept, us, None, 0.0, size / us / bandwidth, **more)
