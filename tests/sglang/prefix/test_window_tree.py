"""Windows, records and BF16 pages follow SGLang's unified tree of a model with sliding windows, on random schedules."""

from __future__ import annotations

import random

import pytest

from sglang_kvq.constants import PAGE_SIZE as P
from tests.cache.schedules import Driver
from tests.sglang.prefix.test_hybrid_tree import moved, served
from tests.sglang.prefix.window_tree_model import WindowTreeModel

__all__ = ["served"]


@pytest.mark.parametrize("overlap", [False, True], ids=["alone", "in-flight"])
@pytest.mark.parametrize("seed", range(2))
def test_random_schedules(served, seed, overlap):
    rng = random.Random(700 + seed)
    rows, sinks, recent = rng.randint(2, 5), rng.randint(0, 2), rng.randint(1, 3)
    slots = rows * (sinks + recent + 2) + rng.randint(0, 6)
    pages = rng.randint(40, 60)
    model = WindowTreeModel(
        pages, slots, rows, sinks, recent, overlap=overlap, look_every=16, window_pages=rng.randint(24, pages)
    )
    driver = Driver(model, rng)
    driver.run(70)
    driver.finish()
    assert model.tiers.steps > 30 and int(model.tiers.records_written) > 5
    assert model.longest_match >= P and model.windows_read > 10


def computed(model: WindowTreeModel, tokens: int):
    request = model.start([7] * tokens)
    assert request is not None and model.extend([(request, tokens - request.stored)])
    return request


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "running"])
def test_a_window_moves_to_the_trees_pages(served, finished):
    model = WindowTreeModel(40, 30, 3, sink_pages=1, recent_pages=2)
    first, again = (computed(model, 6 * P + 9) for _ in range(2))
    pages = [model.row_pages(r, r.stored) for r in (first, again)]
    model.leave(first, publish=True)
    assert not moved(model), "what it moves to are its own pages"
    if finished:
        model.leave(again, publish=True)
    else:
        model.publish(again, finished=False)
        assert model.row_pages(again, again.stored) == pages[0][:6] + pages[1][6:]
    assert moved(model) == [([pages[1][i] for i in (0, 3, 4, 5)], [pages[0][i] for i in (0, 3, 4, 5)])]


def test_pages_whose_windows_are_gone_are_computed_again_and_replaced(served):
    """The tree takes the new pages and frees its own; nothing moves, and no page is lost."""
    model = WindowTreeModel(40, 30, 3, sink_pages=1, recent_pages=2)
    first = computed(model, 8 * P)
    old = model.row_pages(first, first.stored)
    model.leave(first, publish=True)
    model._evict(0, 40)  # evicts all windows, but no pages
    moved(model)
    again = computed(model, 8 * P)
    assert again.fresh, "without its window no prefix may be continued"
    new = model.row_pages(again, again.stored)
    model.leave(again, publish=True)
    assert not moved(model)
    in_tree = set((model.unified.all_values_flatten()[::P] // P).tolist())
    assert set(new[:6]) <= in_tree and not set(old[:6]) & in_tree
    assert sorted([*model.free, *in_tree]) == list(range(1, 41))
