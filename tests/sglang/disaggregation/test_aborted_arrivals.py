"""A request that is aborted after its cache has arrived, and before it runs, leaves a sound decode server."""

from __future__ import annotations

import pytest
import torch

from sglang_kvq.cache.integrity import check_integrity
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.disaggregation.handover import Handover, SavedRow
from tests.sglang.disaggregation.test_disaggregation import served as transfers
from tests.sglang.prefix.fold_model import FoldModel
from tests.sglang.prefix.test_hybrid_tree import served

__all__ = ["served"]

LENGTH = 5 * P + 3


@transfers
@pytest.mark.parametrize("retracted", [False, True], ids=["arrived", "resumed after a retraction"])
def test_such_a_request_stays_out_of_the_tree(served, retracted):
    """SGLang's own function ends the request. It asks the tree to keep the pages, of which no plan knows anything."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT
    from sglang.srt.mem_cache.common import release_kv_cache

    model = FoldModel(40, 30, 3, sink_pages=1, recent_pages=2)
    handover = Handover(model.pool, decode=True, sink_pages=1, recent_pages=2, entries=2)
    runtime.current().handover = handover
    tokens = [7 + i % 11 for i in range(LENGTH)]
    req = model.start(tokens).req
    row, locations = req.kv.req_pool_idx, model.allocator.alloc(6 * P)
    model.request_rows.write((row, slice(0, LENGTH)), locations[:LENGTH].int())
    req.kv.kv_committed_len = req.kv.kv_allocated_len = LENGTH
    req.output_ids.append(5)
    if retracted:
        saved = SavedRow([x.records[:, :5].clone() for x in model.pool.stores], torch.empty(0), LENGTH)
        handover.restore(saved, locations[:LENGTH], row)
    else:
        handover.staged_rows(row, LENGTH)
    assert handover.waits(row)

    req.finished_reason = FINISH_ABORT()
    release_kv_cache(req, model.unified, checkpoint=True)
    handover.free_row(row)
    assert model.unified.evictable_size() == 0 and not handover.waits(row)
    assert handover.staging.available() == 2
    check_integrity(model.tiers, model.allocator.get_all_free_pages(), idle=True)
