"""The Triton backend plans the same decisions as on a CPU, without waiting for the device."""

from __future__ import annotations

import pytest
import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.attention.triton_ops import TritonOps
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.cache.triton_tiers import TritonTierManager
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.formats.page import PageFormat
from tests import device_waits


def manager(device: str, kind: type[TierManager] = TierManager, quantize=None) -> TierManager:
    pool = PagePool.allocate(
        [PageFormat(64, 64, 0.96, 0.92)] * 2,
        kv_heads=2,
        pages=200,
        slots=30,
        req_to_token=torch.zeros(5, 64 * P, dtype=torch.int32, device=device),
    )
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:160].view(4, 40) + 1
    table = (order[:, :, None] * P + torch.arange(P)).flatten(1).int()
    pool.req_to_token[1:, : 40 * P] = table.to(device)
    torch.manual_seed(2)
    pool.bf16_pages.copy_(torch.randn(pool.bf16_pages.shape).bfloat16())
    if quantize is None:
        quantize = TritonOps(pool, LayerRotations(), q_heads=4, max_batch=5).quantize_slots
    return kind(pool, 1, 4, quantize)


def drive(tiers: TierManager) -> list[torch.Tensor]:
    device = tiers.pool.device
    ids = lambda *x: torch.tensor(x, device=device)  # noqa: E731
    inputs = [
        (ids(1, 2), ids(0, 0), ids(700, 130), 0),
        (ids(3), ids(0), ids(1500), 0),
        (ids(1, 2), ids(700, 130), ids(900, 190), 700),
    ]
    decodes = [(ids(1, 2, 3, 0), ids(900 + i, 190 + i, 1500 + i, 1), 1500 + i) for i in range(1, 70)]
    freed = (tiers.pool.req_to_token[3, :1500:P] // P).long()
    with device_waits.refused():
        for rows, prefix, seq, longest in inputs:
            tiers.plan_extend(rows, prefix, seq, longest, rows.new_empty(0))
        for rows, seq, longest in decodes:
            tiers.plan_decode(rows, seq, longest)
        tiers.pending.free_pages(freed)
        tiers.pending.free_rows([3])
        tiers.plan_decode(ids(1, 2) if device.type == "cpu" else decodes[0][0][:2], decodes[-1][1][:2], 1600)
    pool = tiers.pool
    valid = tiers.page_valid[1:]  # page 0 belongs to no request
    state = (pool.page_slot, tiers.slot_page, valid, pool.row_sink_end, pool.row_history_end, pool.stores[0].records)
    return [x.cpu() for x in (*state, tiers.errors)]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [TierManager, TritonTierManager])
def test_plans_do_not_wait_for_the_device_and_agree_with_the_cpu(kind):
    from sglang_kvq.attention.reference import ReferenceOps

    ours = drive(manager("cuda", kind))
    expected = manager("cpu", quantize=lambda *a: None)
    expected.quantize_slots = ReferenceOps(expected.pool, LayerRotations()).quantize_slots
    for got, want in zip(ours, drive(expected)):
        assert torch.equal(got, want)
