"""Windows and records follow SGLang's unified tree when it cuts prefixes at recurrent states, on random schedules."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from sglang_kvq.cache.pending import MovedBF16Pages
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.sglang import runtime
from tests.cache.schedules import OVERLAP, Driver
from tests.pairs import each
from tests.sglang.prefix.tree_model import OLD, TreeModel


@pytest.fixture
def served(applied, command_line, monkeypatch):
    """Sets this process up to serve with ``--kv-quant``, as far as hooks and SGLang's settings go."""
    from sglang.srt import runtime_context

    server_args = command_line("--kv-quant", "int2")
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    monkeypatch.setattr(applied, "_config", KVQuantConfig("int2"))
    monkeypatch.setattr(runtime, "_current", None)
    runtime_context.get_context().set_server_args(server_args)
    yield
    runtime_context.reset_context()


@each(seed=range(2), overlap=OVERLAP)
def test_random_schedules(served, seed, overlap):
    rng = random.Random(300 + seed)
    rows, sinks, recent = rng.randint(2, 5), rng.randint(0, 2), rng.randint(1, 3)
    slots = rows * (sinks + recent + 2) + rng.randint(0, 6)
    model = TreeModel(rng.randint(30, 60), slots, rows, sinks, recent, overlap=overlap, look_every=8)
    driver = Driver(model, rng)
    driver.run(120)
    driver.finish()
    assert model.tiers.steps > 30 and int(model.tiers.records_written) > 5
    assert model.longest_match >= P and model.repointed


def computed_alone(model: TreeModel, tokens: int, kept: int | None):
    """Returns a request computed whole while the tree was empty; ``kept`` is the position of its last state."""
    request = model.start([7] * tokens)
    assert request is not None and request.fresh
    model.extend([(request, tokens)])
    request.memory.mamba_last_track_seqlen = kept
    return request


def moved(model: TreeModel) -> list[tuple[list[int], list[int]]]:
    """Returns the moves recorded since the last plan that change something."""
    pending = copy.copy(model.tiers.pending)  # a copy, because the next plan applies them
    events = [e for e in pending.drain(model.pool.device) if isinstance(e, MovedBF16Pages)]
    return [(own.tolist(), kept.tolist()) for own, kept in events if not torch.equal(own, kept)]


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "running"])
def test_a_window_moves_up_to_the_last_state(served, finished):
    """The tree takes 5 of 7 pages, up to the last state; sinks and window move as for a request of 5 pages."""
    model = TreeModel(40, 30, 3, sink_pages=1, recent_pages=2)
    first, again = (computed_alone(model, 7 * P + 9, kept=5 * P) for _ in range(2))
    pages = [model.row_pages(r, r.stored) for r in (first, again)]
    model.leave(first, publish=True)
    assert not moved(model), "what it moves to are its own pages"
    if finished:
        model.leave(again, publish=True)
    else:
        model.publish(again, finished=False)
        assert model.row_pages(again, again.stored) == pages[0][:5] + pages[1][5:]
    at = [0, 2, 3, 4]
    assert moved(model) == [([pages[1][i] for i in at], [pages[0][i] for i in at])]


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "running"])
def test_nothing_moves_without_a_state(served, finished):
    model = TreeModel(40, 30, 3, sink_pages=1, recent_pages=2)
    first, again = computed_alone(model, 5 * P, kept=5 * P), computed_alone(model, 5 * P, kept=None)
    own = model.row_pages(again, again.stored)
    model.leave(first, publish=True)
    assert not moved(model)
    if finished:
        model.leave(again, publish=True)
    else:
        model.publish(again, finished=False)
        assert model.row_pages(again, again.stored) == own
    assert not moved(model)


if not OLD:  # the old tree keeps only one state

    @pytest.mark.parametrize(("older", "count"), [(4 * P, 4), (None, 0)], ids=["one", "none"])
    def test_an_older_state_serves_a_request_that_ends_before_the_newer(served, older, count):
        model = TreeModel(40, 30, 3, sink_pages=1, recent_pages=2)
        first, again = (computed_alone(model, 5 * P, kept=6 * P) for _ in range(2))
        for request in (first, again):
            request.memory.mamba_prev_track_seqlen = older
        pages = [model.row_pages(r, r.stored) for r in (first, again)]
        model.leave(first, publish=True)
        assert not moved(model)
        model.leave(again, publish=True)
        assert moved(model) == [tuple(which[:count] for which in reversed(pages))] * (count > 0)
