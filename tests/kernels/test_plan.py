"""Divides a decode batch: every page exactly once, and no item much longer than the others."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from sglang_kvq.constants import HEAD_DIMS, PAGE_SIZE
from sglang_kvq.kernels.decode.decode_attention import SM_BYTES, DecodeLaunch, decode_launch
from sglang_kvq.kernels.decode.split_work import (
    BF16_PAGE_TILE,
    FIELDS,
    HISTORY_COST,
    LEAST_WORK,
    Item,
    WorkCosts,
    split_work,
)
from sglang_kvq.kernels.device.codes import record_of
from tests.kernels.scene import DEVICE
from tests.kernels.test_formats import KINDS, make_format

TILE = BF16_PAGE_TILE.value


def plan(lengths, sinks, ends, count, costs):
    """Returns the plan as Python lists: items and spans, and each request's row and page ids."""
    batch = len(lengths)
    order = torch.randperm(batch) + 1  # request i uses row order[i]
    tables = [torch.zeros(batch + 1, dtype=torch.int32) for _ in range(2)]
    for table, values in zip(tables, (sinks, ends)):
        table[order] = torch.tensor(values, dtype=torch.int32)
    pages = -(-max(lengths) // PAGE_SIZE)
    ids = torch.randint(1, 1 << 20, (batch + 1, pages), dtype=torch.int32)
    items = torch.full((count, FIELDS.value), 1 << 20, dtype=torch.int32, device=DEVICE)
    spans = torch.full((batch, 2), 1 << 20, dtype=torch.int32, device=DEVICE)
    tables = [x.to(DEVICE) for x in (ids, *tables)]
    split_work(items, spans, order.to(DEVICE), torch.tensor(lengths, device=DEVICE), *tables, costs)
    items = [Item(*row[: len(Item._fields)]) for row in items.tolist()]
    return items, spans.tolist(), order.tolist(), ids[order].tolist()


def work(length: int, sink: int, end: int) -> tuple[range, int]:
    """Returns a request's history pages and the number of its BF16 tiles."""
    pages = -(-length // PAGE_SIZE)
    begin = min(-(-sink // PAGE_SIZE), pages)
    history = range(begin, min(max(-(-end // PAGE_SIZE), begin), pages))
    outside = [t for t in range(-(-length // TILE)) if t * TILE // PAGE_SIZE not in history]
    return history, len(outside)


CASES = {
    "one": ([1], [0], [0], 8),
    "one-long": ([64 * 999 + 5], [64], [64 * 995], 100),
    "equal": ([64 * 40] * 5, [64] * 5, [64 * 36] * 5, 33),
    "as-many-items-as-requests": ([700, 5, 3000], [64, 5, 64], [448, 5, 2688], 3),
    "no-bf16_pages": ([64 * 50, 64 * 3], [0, 0], [64 * 50, 64 * 3], 20),
    "no-history": ([300, 10, 64], [64, 10, 64], [64, 10, 64], 16),
}


def random_case(seed: int):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high + 1, (1,), generator=generator))  # noqa: E731
    batch = draw(1, 40)
    lengths = [draw(1, 64 * 4 ** draw(0, 5)) for _ in range(batch)]
    sinks = [min(64 * draw(0, 2), length) for length in lengths]
    ends = [max(sink, (length - 64 * draw(0, 5)) // 64 * 64) for sink, length in zip(sinks, lengths)]
    return lengths, sinks, ends, batch + draw(0, 200)


CASES |= {f"random{seed}": random_case(seed) for seed in range(12)}
CASES["more-than-1024"] = ([70 + 7 * i % 900 for i in range(2100)], [64] * 2100, [64] * 2100, 2400)


@pytest.mark.parametrize("costs", [WorkCosts(), WorkCosts(bf16_page=2, turn=1)], ids=["turns-of-two", "turns-of-one"])
@pytest.mark.parametrize(("lengths", "sinks", "ends", "count"), CASES.values(), ids=CASES)
def test_every_page_is_in_one_item(lengths, sinks, ends, count, costs):
    items, spans, rows, ids = plan(lengths, sinks, ends, count, costs)
    shapes = [work(*request) for request in zip(lengths, sinks, ends)]
    work_of_items = []
    expected = 0  # the next item
    for request, ((first, parts), (history, tiles)) in enumerate(zip(spans, shapes)):
        assert first == expected and parts >= 1
        pages, bf16_pages = [], []
        for item in items[first : first + parts]:
            assert item.request == request
            assert (item.history, item.history_end) == (history.start, history.stop)
            assert (item.row, item.length) == (rows[request], lengths[request])
            mine, tiles_of_item = range(item.first_page, item.last_page), range(item.first_tile, item.last_tile)
            if mine:
                assert item.page_a == ids[request][mine[0]]
                assert item.page_b == ids[request][min(mine[0] + 1, mine[-1])]
            assert mine or tiles_of_item, "an item without work"
            assert len(mine) % costs.turn == 0 or mine[-1] + 1 == history.stop, "part of a turn"
            pages += mine
            bf16_pages += tiles_of_item
            work_of_items.append(HISTORY_COST.value * len(mine) + costs.bf16_page * len(tiles_of_item))
        assert pages == list(history) and bf16_pages == list(range(tiles))
        expected += parts
    assert expected <= count and all(item.request == -1 for item in items[expected:])

    # The plan uses the least unit of work that fits: one less would need more items than there are.
    total = [HISTORY_COST.value * len(history) + costs.bf16_page * tiles for history, tiles in shapes]
    fits = lambda unit: sum(-(-x // unit) for x in total) <= count  # noqa: E731
    unit = next(unit for unit in range(LEAST_WORK.value, max(*total, LEAST_WORK.value, 0) + 1) if fits(unit))
    assert expected == sum(-(-x // unit) for x in total)
    assert max(work_of_items) <= unit + costs.turn * HISTORY_COST.value + costs.bf16_page


@pytest.mark.parametrize(
    ("batch", "programs", "sms", "items"),
    [(132, 8, 132, 132), (100, 8, 132, 4 * 132), (129, 1, 2, 9 * 16), (3, 32, 2, 3)],
    ids=["a-wave", "four-waves-are-busy", "no-number-of-waves-is-busy", "less-than-an-item-at-once"],
)
def test_items_fill_the_fewest_busy_waves(batch, programs, sms, items):
    assert DecodeLaunch(stages=2, registers=168, programs_per_sm=8).items(batch, programs, sms) == items


def test_only_programs_that_do_not_fit_an_sm_leave_a_plan():
    """Every launch keeps its programs if an SM holds them all; with one byte more for each, only their number falls."""
    for head_dim, group, kind in product(HEAD_DIMS, range(1, 17), KINDS):
        launch = decode_launch(head_dim, group, record_of(make_format(kind, head_dim)), kv_heads=1)
        room = SM_BYTES // launch.programs_per_sm - 1024
        assert launch.fitting(room, SM_BYTES) == launch
        assert launch.fitting(room + 1, SM_BYTES) == replace(launch, programs_per_sm=launch.programs_per_sm - 1)


def test_an_sm_with_less_shared_memory_holds_fewer_programs():
    launch = DecodeLaunch(stages=2, registers=168, programs_per_sm=12)
    assert launch.fitting(17 << 10, SM_BYTES) == launch
    assert launch.fitting(17 << 10, 100 << 10).programs_per_sm == 5  # an L40S
