"""Requests that end as folds, over SGLang's own allocator, requests and tree."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from sglang_kvq.cache.layout import KVGeometry
from sglang_kvq.cache.pending import FoldedPages
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.code import CodeFormat
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.sessions.messages import FOLD, Fold
from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.prefix import folding
from tests.cache.schedules import OVERLAP, Driver
from tests.pairs import each, few
from tests.sglang.prefix.fold_model import FoldModel, sglang_request
from tests.sglang.prefix.test_hybrid_tree import served
from tests.sglang.prefix.tree_model import OLD

__all__ = ["served"]


@each(seed=few(range(3), 2), overlap=OVERLAP)
def test_random_schedules(served, seed, overlap):
    rng = random.Random(400 + seed)
    rows, sinks, recent = rng.randint(2, 5), rng.randint(0, 2), rng.randint(1, 3)
    slots = rows * (sinks + recent + 2) + rng.randint(0, 6)
    model = FoldModel(
        rng.randint(30, 60),
        slots,
        rows,
        sinks,
        recent,
        overlap=overlap,
        look_every=1 + 7 * (seed > 0),
        groups=seed != 1,
    )
    driver = Driver(model, rng)
    driver.run(120)
    driver.finish()
    assert model.tiers.steps > 30 and int(model.tiers.records_written) > 1
    assert model.folded > 1 and model.longest_match >= P


def computed(model: FoldModel, tokens: int):
    """Returns a running request of so many tokens, all of them computed."""
    request = model.start([7 + i % 11 for i in range(tokens)])
    assert request is not None and model.extend([(request, tokens - request.stored)])
    return request


def events(model: FoldModel) -> list[FoldedPages]:
    return [event for event in model.tiers.pending._events if isinstance(event, FoldedPages)]


def spread(count: int, length: int) -> list[int]:
    """Returns one sink page, and random tokens of all other pages."""
    rest = range(P, length)
    return [*range(P), *sorted(random.Random(1).sample(rest, count - P))]


def test_what_it_made_is_a_prefix_and_its_own_pages_are_free(served):
    """A request that continues a fold reads the chosen tokens: sinks from BF16 pages, the rest from records."""
    model = FoldModel(40, 30, 3, sink_pages=1, recent_pages=2)
    request = computed(model, 8 * P + 5)
    chosen = spread(3 * P, 8 * P)
    names = model.fold(request, chosen, publish=False)
    (event,) = events(model)
    assert len(event.source) == 8 and len(event.target) == 3 and event.sinks.tolist() == [0]
    assert model.allocator.available_size() == (40 - 3) * P, "only the fold's pages are taken"
    model.check()
    follower = model.start([*names, *[9] * 100])
    assert follower.stored == 3 * P and model.extend([(follower, 100)])
    assert int(model.pool.row_sink_end[follower.row]) == P
    model.leave(follower, publish=True)
    model.check_empty()


def test_the_same_again_makes_nothing_new(served):
    model = FoldModel(40, 30, 3, sink_pages=1, recent_pages=2)
    request, again = computed(model, 6 * P), computed(model, 6 * P)
    model.fold(request, spread(2 * P, 5 * P), publish=False)
    first = request.req.sampling_params.custom_params
    again.req.sampling_params.custom_params = first
    del again.req._kvq_fold
    folding.fold_of(again.req)
    model.leave(again, publish=True)
    assert len(events(model)) == 1 and again.req.finished_reason.to_json()["type"] == "length"
    assert model.allocator.available_size() == 38 * P
    model.check_empty()


def fail(model: FoldModel, request) -> dict:
    """Ends a request whose fold must fail; returns its finish reason."""
    before = len(events(model))
    model.leave(request, publish=True)
    assert len(events(model)) == before, "nothing is left of it"
    model.check()
    return request.req.finished_reason.to_json()


def test_without_room_it_is_to_be_sent_again(served):
    """A fold without room fails: the request itself holds seven of eight pages, so nothing can be evicted."""
    model = FoldModel(8, 8, 1, sink_pages=1, recent_pages=2)
    request = computed(model, 7 * P - 3)
    model.ask(request, spread(3 * P, 6 * P), 6 * P)
    reason = fail(model, request)
    assert (reason["type"], reason["status_code"]) == ("abort", 503)
    assert "no room for the 192 tokens of a fold. Send the request again" in reason["message"]
    assert model.allocator.available_size() == 8 * P
    model.check_empty()


def test_room_is_made_by_eviction(served):
    model = FoldModel(12, 10, 2, sink_pages=1, recent_pages=2)
    other = model.start([3] * (5 * P))
    model.extend([(other, 5 * P)])
    model.leave(other, publish=True)
    request = computed(model, 6 * P)
    assert model.allocator.available_size() == P
    model.fold(request, spread(2 * P, 6 * P), publish=False)
    assert model.folded == 1 and len(events(model)) == 1
    model.check_empty()


def test_a_part_of_it_that_is_cached_is_not_mixed_with_it(served):
    model = FoldModel(40, 30, 3, sink_pages=1, recent_pages=2)
    request, again = computed(model, 6 * P), computed(model, 6 * P)
    model.fold(request, spread(2 * P, 5 * P), publish=False)
    name = Fold.decode(request.req.sampling_params.custom_params[FOLD]).name
    model.ask(again, spread(3 * P, 5 * P), 5 * P)
    again.req._kvq_fold = Fold(name, 5 * P, 3 * P)
    reason = fail(model, again)
    assert reason["status_code"] == 503 and "128 of 192 tokens of the fold are cached already" in reason["message"]
    model.check_empty()


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (None, "it was never scored, so no tokens were chosen"),
        (torch.zeros(1, 1, 64, dtype=torch.int64), r"chosen tokens torch.int64 [1, 1, 64]: must be int64 [1, 1, 128]"),
        (torch.zeros(1, 1, 128), "chosen tokens torch.float32 [1, 1, 128]: must be int64"),
    ],
)
def test_tokens_that_are_not_the_requests_end_it(served, tokens, said):
    model = FoldModel(20, 20, 2, sink_pages=1, recent_pages=2)
    request = computed(model, 6 * P)
    model.ask(request, spread(2 * P, 5 * P), 5 * P)
    model.chosen.pop(request.req.rid) if tokens is None else model.chosen.update({request.req.rid: tokens})
    reason = fail(model, request)
    assert reason["status_code"] == 500 and said in reason["message"]
    model.check_empty()


@pytest.mark.parametrize("how", ["retracted", "aborted"])
def test_who_does_not_finish_folds_nothing(served, how):
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    model = FoldModel(20, 20, 2, sink_pages=1, recent_pages=2)
    request = computed(model, 6 * P)
    model.ask(request, spread(2 * P, 5 * P), 5 * P)
    if how == "aborted":
        request.req.finished_reason = FINISH_ABORT("by its client")
        model.release(request, publish=True)
        assert request.req.finished_reason.message == "by its client"
    else:
        model.release(request, publish=False)
    assert not events(model) and model.allocator.available_size() == 20 * P
    model.check_empty()


def test_the_tiers_count_tokens_that_are_none_or_sinks_that_are_not_whole(served):
    """The tiers count these errors, because tokens are chosen on the device, where nothing else can check them."""
    model = FoldModel(20, 20, 2, sink_pages=1, recent_pages=2)
    request = computed(model, 6 * P)
    chosen = [P, *range(1, P), *range(2 * P, 3 * P - 1), 5 * P]
    model.ask(request, list(range(2 * P)), 5 * P)
    model.chosen[request.req.rid] = torch.tensor(chosen)[None, None]
    model.leave(request, publish=True)
    model.tiers.apply_pending()
    assert int(model.tiers.errors) == 2


def refused(model: FoldModel, fold: str, tokens: int = 6 * P, **more):
    req = sglang_request("r", list(range(tokens)), None)
    req.sampling_params.custom_params = {FOLD: fold}
    for name, value in more.items():
        setattr(req, name, value)
    said = []
    req.set_finish_with_abort = said.append  # SGLang's own method asks for this process's rank
    req.init_next_round_input(model.unified)
    (message,) = said
    assert folding.fold_of(req) is None
    return message


@pytest.mark.parametrize(
    ("fold", "more", "said"),
    [
        ("{", {}, "kvq_fold: not a fold"),
        ('{"name": "n", "length": 64, "kept": 128}', {}, "a fold of 64 tokens into 128"),
        (Fold("n", 7 * P, P).encode(), {}, "a fold of 448 tokens of a prompt of 384"),
        (
            Fold("n", 5 * P, P).encode(),
            {"session": SimpleNamespace(streaming=False)},
            "a request of an SGLang session keeps its pages",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_it_runs(served, fold, more, said):
    assert said in refused(FoldModel(20, 20, 2, sink_pages=1, recent_pages=2), fold, **more)


def test_clients_fold_nothing(served):
    model = FoldModel(20, 20, 2, sink_pages=1, recent_pages=2)
    runtime.started().chosen_tokens = None
    assert "this server does not let clients fold a request" in refused(model, Fold("n", 5 * P, P).encode())


def test_methods_whose_tokens_cannot_move_do_not_start(served, monkeypatch):
    FoldModel(20, 20, 2, sink_pages=1, recent_pages=2)
    state = runtime.started()
    monkeypatch.setattr(state, "config", KVQuantConfig("kivi"))
    monkeypatch.setattr(state, "geometry", KVGeometry(1, (PageFormat(64, 64, k=CodeFormat(axis="channel")),)))
    with pytest.raises(KVQuantError, match="--kv-quant kivi: keys in .* per channel.*Choose one of oscar"):
        folding.serve(lambda req, fold: None)


def test_the_name_of_what_keeps_prefixes_out_of_the_tree_is_the_releases(served):
    """The name follows the release: a wrong one would be a TypeError when the first fold ends."""
    from inspect import signature

    from sglang.srt.mem_cache.common import release_kv_cache

    assert folding._ENTERS in signature(release_kv_cache).parameters
    assert ("is_insert" if OLD else "checkpoint") == folding._ENTERS
