"""Requests that begin with chosen pages, through SGLang's own tree, allocator and admission."""

from __future__ import annotations

import gc
import random
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_kvq.cache.pending import CopiedPages
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.sessions.messages import FOLD, PREFIX, SELECTION, Fold, FoldedPrefix, Selection
from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.prefix import episodes, tree_keys
from sglang_kvq.sglang.prefix import selection as selections
from tests.sglang.prefix.fold_model import FoldModel, sglang_request
from tests.sglang.prefix.test_hybrid_tree import served
from tests.sglang.prefix.tree_model import EVERYTHING, OLD

__all__ = ["served"]

TAIL = 40


@pytest.fixture
def model(served, monkeypatch):
    monkeypatch.setenv(selections.ENABLED, "1")
    return lambda pages: FoldModel(pages, 30, 6, sink_pages=1, recent_pages=2)


def said(pages: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(10, 3000, pages * P, dtype=np.int32)


def remember(model: FoldModel, history: np.ndarray) -> None:
    """Runs a request that computes the history and ends; from then on the history is cached, and may be evicted."""
    request = model.start(history.tolist())
    assert model.extend([(request, len(history) - request.stored)])
    model.leave(request, publish=True)


def run(model: FoldModel, pages: int):
    """Starts a request that holds so many pages until ``model.leave``."""
    request = model.start([5 + i % 7 for i in range(pages * P)])
    assert model.extend([(request, pages * P)])
    return request


def new_request(name: str, ids: list[int], namespace: str | None, params: dict[str, str]):
    """Returns a request with these custom parameters that SGLang has not admitted yet."""
    req = sglang_request(name, ids, namespace)
    req.sampling_params.max_new_tokens, req.sampling_params.custom_params = 8, params
    req.problem = None

    def end(message: str) -> None:  # SGLang's own method asks for this process's rank
        req.problem, req.origin_input_ids = message, req.origin_input_ids[:1]
        req.return_logprob, req.logprob_start_len = False, -1

    req.set_finish_with_abort = end
    return req


def ask(history: np.ndarray, pages: int, name: str = "r", **options):
    """Returns a waiting request for the first so many pages of a history."""
    selection = Selection(history, None, range(pages))
    ids = [*selection.tokens.tolist(), *range(TAIL)]
    req = new_request(name, ids, selection.name, {SELECTION: selection.encode()})
    req.stand_ins = pages * P
    for field, value in options.items():
        setattr(req, field, value)
    return req


def schedule(model: FoldModel, *waiting):
    """Runs one round of the scheduler; returns the admitted requests, and the result for the last one it looked at."""
    from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

    running = SimpleNamespace(reqs=[request.req for request in model.running])
    for req in running.reqs:
        req.sampling_params.max_new_tokens = 1
    adder = PrefillAdder(P, model.unified, model.allocator, running, 0.5, 1 << 20, None)
    result = AddReqResult.CONTINUE
    for req in waiting:
        req.init_next_round_input(model.unified)
        result = adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
        if result != AddReqResult.CONTINUE:
            break
    return adder.can_run_list, result.name


def found(req) -> int:
    """Returns how many tokens SGLang took as cached."""
    return len(req.prefix_indices) if OLD else req.prefix_len


def end(model: FoldModel, req) -> None:
    """Ends an admitted request before anything is computed for it."""
    if OLD:
        model.unified.dec_lock_ref(req.last_node)
    else:
        model.unified.unlock(req.lock)


def cached(model: FoldModel, history: np.ndarray) -> int:
    key = tree_keys.key(sglang_request("x", [1], None), selections._ids(history), None)
    return len(tree_keys.match(model.unified, key)[0])


def test_with_room_the_pages_are_copied_and_only_the_rest_is_computed(model):
    model, history = model(40), said(20)
    remember(model, history)
    req = ask(history, 12)
    admitted, _ = schedule(model, req)
    assert admitted == [req] and found(req) == 12 * P and req.problem is None
    assert len(req.get_fill_ids()) == 12 * P + TAIL
    (copies,) = (event for event in model.tiers.pending._events if isinstance(event, CopiedPages))
    assert copies.windows.tolist() == [0, 10, 11], "a sink and two recent pages"
    end(model, req)
    model.check_empty()


def test_without_room_it_waits_and_the_history_stays(model):
    """The history has 20 of 40 pages, a running request 15; 12 more do not fit until that request ends."""
    model, history = model(40), said(20)
    remember(model, history)
    busy, req = run(model, 15), ask(history, 12)
    for _ in range(3):
        assert schedule(model, req) == ([], "NO_TOKEN") and req.problem is None
        assert cached(model, history) == len(history)
        model.check()
    model.leave(busy, publish=False)
    admitted, _ = schedule(model, req)
    assert admitted == [req] and found(req) == 12 * P
    end(model, req)
    model.check_empty()


def test_waiting_evicts_nothing_in_vain(model):
    model, history, other = model(40), said(20), said(4, seed=1)
    remember(model, history)
    remember(model, other)
    busy, req = run(model, 14), ask(history, 12)
    assert schedule(model, req) == ([], "NO_TOKEN") and cached(model, other) == len(other)
    model.leave(busy, publish=False)
    end(model, schedule(model, req)[0][0])
    model.check_empty()


def test_room_is_made_of_what_others_left(model):
    model, history, other = model(40), said(20), said(15, seed=1)
    remember(model, other)
    remember(model, history)
    req = ask(history, 12)
    assert schedule(model, req)[0] == [req] and found(req) == 12 * P
    assert cached(model, other) < len(other)
    end(model, req)
    model.check_empty()


def test_what_never_fits_ends_with_an_error(model):
    """A request that can never fit ends with an error on an idle server, where waiting would be in vain."""
    model, history = model(30), said(20)
    remember(model, history)
    req = ask(history, 12)
    admitted, _ = schedule(model, req)
    assert req.problem == (
        "sglang-kvq: the KV cache of 1920 tokens is too small for a history of 1280 tokens and copies of 768 of them. "
        "Lower --episodic-budget, or give the cache more memory."
    )
    assert admitted == [req] and len(req.get_fill_ids()) == 1 and selections.offset_of(req) == 0
    end(model, req)
    model.check_empty()


def test_what_just_fits_is_served(model):
    model, history = model(32), said(20)
    remember(model, history)
    req = ask(history, 12)
    assert schedule(model, req)[0] == [req] and found(req) == 12 * P
    end(model, req)
    model.check_empty()


def test_of_two_one_evicts_the_others_history_and_that_is_said(model):
    """A waiting request pins nothing, so two never wait for each other; one evicts the history of the other."""
    model, first, second = model(26), said(10), said(10, seed=1)
    remember(model, second)
    remember(model, first)
    one, two = ask(first, 8, "one"), ask(second, 8, "two")
    admitted, _ = schedule(model, one, two)
    assert admitted == [one, two] and found(one) == 8 * P
    assert "of 640 tokens of the history are no longer cached" in two.problem and len(two.get_fill_ids()) == 1
    for req in admitted:
        end(model, req)
    model.check_empty()


def test_an_idle_server_looks_again(model, monkeypatch):
    """The older release never looks again after "no token" if nothing runs, so the result is OTHER."""
    model, history = model(40), said(20)
    remember(model, history)
    req = ask(history, 12)
    with monkeypatch.context() as patch:
        patch.setattr(selections, "_room", lambda *args: None)
        assert schedule(model, req) == ([], "OTHER")
    assert schedule(model, req)[0] == [req]
    end(model, req)
    model.check_empty()


def test_copies_wait_for_pages_that_are_being_loaded(model, monkeypatch):
    """With HiCache a history may be on its way from the host; the request then waits for a later round."""
    model, history = model(40), said(20)
    remember(model, history)
    req, asked = ask(history, 12), []
    with monkeypatch.context() as patch:
        patch.setattr(selections, "loads_allow", lambda tree: bool(asked.append(tree)))
        assert schedule(model, req) == ([], "OTHER") and req.problem is None
        assert cached(model, history) == len(history)
    assert asked == [model.unified]
    assert selections.loads_allow(model.unified), "a server without HiCache has no loads"
    assert schedule(model, req)[0] == [req] and found(req) == 12 * P
    end(model, req)
    model.check_empty()


def test_after_no_token_nobody_is_admitted_so_a_load_that_is_queued_is_not_that(model, monkeypatch):
    """The load begins with the round's batch, so the next round can copy. "No token" lasts until a request ends."""
    model, history = model(40), said(20)
    remember(model, history)
    busy, req = run(model, 4), ask(history, 12)
    with monkeypatch.context() as patch:
        patch.setattr(selections, "loads_allow", lambda tree: False)
        assert schedule(model, req) == ([], "OTHER") and req.problem is None
    assert schedule(model, req)[0] == [req]
    end(model, req)
    model.leave(busy, publish=False)
    model.check_empty()


def test_after_a_retraction_copies_are_made_again(model):
    model, history = model(40), said(20)
    remember(model, history)
    req = ask(history, 12)
    assert schedule(model, req)[0] == [req]
    end(model, req)
    req.output_ids.extend([3, 4, 5])
    model.evict(EVERYTHING // P)
    remember(model, history)
    assert schedule(model, req)[0] == [req]
    assert found(req) == 12 * P and len(req.get_fill_ids()) == 12 * P + TAIL + 3
    end(model, req)
    model.check_empty()


@pytest.mark.parametrize("message", [SELECTION, PREFIX, FOLD])
def test_a_request_that_sglang_refuses_ends_with_its_reason(model, message):
    """Such as for its grammar: SGLang gives it a prompt of one token and lets it run once."""
    model, history = model(40), said(20)
    remember(model, history)
    req = ask(history, 12)
    if message != SELECTION:
        folded = Fold("kvq-x", 12 * P, 4 * P).encode() if message == FOLD else FoldedPrefix(12 * P, P).encode()
        req.sampling_params.custom_params = {message: folded}
        runtime.current().chosen_tokens = lambda req, fold: None
    req.to_finish, req.origin_input_ids = "invalid grammar", array("q", [0])
    admitted, _ = schedule(model, req)
    assert admitted == [req] and req.problem is None and selections.offset_of(req) == 0
    end(model, req)
    model.check_empty()


@pytest.mark.parametrize("problem", ["other tokens", "no prompt", "a client"])
def test_what_only_the_router_may_send_ends_with_an_error(model, problem, monkeypatch):
    model, history = model(40), said(20)
    remember(model, history)
    req = ask(history, 12)
    said_to = "the prompt must begin with the chosen pages' tokens and have more; only the router sends such requests."
    if problem == "other tokens":
        req.origin_input_ids[12 * P - 1] += 1
    elif problem == "no prompt":
        del req.origin_input_ids[12 * P :]
    else:
        monkeypatch.delenv(selections.ENABLED)
        said_to = "custom_params kvq_selection: this server does not let clients choose pages."
    assert schedule(model, req)[0] == [req] and req.problem == f"sglang-kvq: {said_to}"
    end(model, req)
    model.check_empty()


@pytest.mark.parametrize("decoding", [False, True], ids=["prompts", "answers"])
def test_new_tokens_have_positions_after_the_whole_history(model, decoding):
    model(40)
    reqs = [sglang_request("plain", [1, 2, 3], None), ask(said(20), 12)]
    mode = SimpleNamespace(is_idle=lambda: False, is_decode=lambda: decoding)
    batch = SimpleNamespace(reqs=reqs, forward_mode=mode, extend_lens=[3, 2])
    theirs = torch.arange(6)  # the last is padding
    result = SimpleNamespace(rids=["plain", "r"], positions=theirs[:])
    assert selections.after_new_batch(result, type, batch) is result
    moved = [1] if decoding else [3, 4]
    assert (result.positions - theirs).tolist() == [8 * P if i in moved else 0 for i in range(6)]
    assert theirs.tolist() == list(range(6)) and runtime.live_tiers().requests == ("plain", "r")


def go_on(model: FoldModel, tail: int = TAIL):
    """Returns a waiting request that continues an episode of three pages, which a fold has left in the cache."""
    folded = run(model, 6)
    names = model.fold(folded, list(range(3 * P)), publish=False)
    namespace, ids = model.prefixes[names[0]]
    return new_request("next", [*ids, *range(tail)], namespace, {PREFIX: FoldedPrefix(3 * P, 5 * P).encode()})


def test_an_episode_that_is_cached_whole_is_a_prefix(model):
    model = model(40)
    req = go_on(model)
    assert schedule(model, req)[0] == [req] and req.problem is None
    assert found(req) == selections.stand_ins(req) == 3 * P and selections.offset_of(req) == 5 * P
    end(model, req)
    model.check_empty()


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        ("evicted", "192 of 192 tokens of the episode are no longer cached."),
        ("no prompt", "an episode of 192 tokens in a prompt of 192: the prompt must be longer."),
        ("a client", "custom_params kvq_prefix: this server does not let clients continue an episode."),
    ],
)
def test_an_episode_that_cannot_be_continued_ends_with_an_error(model, problem, said):
    model = model(40)
    req = go_on(model, tail=0 if problem == "no prompt" else TAIL)
    if problem == "evicted":
        model.evict(EVERYTHING // P)
    elif problem == "a client":
        runtime.started().chosen_tokens = None
    assert schedule(model, req)[0] == [req] and req.problem == f"sglang-kvq: {said}"
    assert len(req.get_fill_ids()) == 1 and selections.stand_ins(req) == selections.offset_of(req) == 0
    end(model, req)
    model.check_empty()


def test_a_request_that_folds_computes_its_cached_prompt_whose_queries_score(model):
    model, history = model(40), said(8)
    remember(model, history)
    episodes.serve()
    fold = Fold("kvq-x", 4 * P, 2 * P, pinned=P)
    req = new_request("r", history.tolist(), None, {FOLD: fold.encode()})
    for _ in range(2):  # a retracted request is prepared again
        assert schedule(model, req)[0] == [req] and found(req) == 4 * P
        end(model, req)
    scores = runtime.started().scores["r"]
    scores.values[..., 3 * P :] = 1
    scores.add(4 * P, 8 * P)
    chosen = runtime.started().chosen_tokens(req, fold)
    assert chosen.tolist() == [[[*range(P), *range(3 * P, 4 * P)]]]
    assert not runtime.started().scores and runtime.started().chosen_tokens(req, fold) is None
    model.check_empty()


def test_a_request_that_is_gone_is_not_scored_any_more(model):
    model = model(40)
    episodes.serve()
    req = new_request("r", said(8).tolist(), None, {FOLD: Fold("kvq-x", 4 * P, 2 * P).encode()})
    episodes.prepare(model.unified, req)
    assert runtime.started().scores.keys() == {"r"}
    del req
    gc.collect()
    assert not runtime.started().scores


def test_scores_of_tokens_that_stand_for_others_are_refused(model):
    """SGLang computes tokens from the start of log-probabilities on, even if they are cached."""
    model, history = model(40), said(20)
    remember(model, history)
    req = ask(history, 12, return_logprob=True, logprob_start_len=3 * P)
    schedule(model, req)
    said_to = "sglang-kvq: the prompt's first 768 tokens represent cached history, but SGLang found only 192 of them"
    assert req.problem.startswith(said_to)
    end(model, req)
    model.check_empty()


def room(model: FoldModel) -> int:
    """Returns how many pages a request can get."""
    return (model.allocator.available_size() + model.unified.evictable_size()) // P


@pytest.mark.parametrize("seed", range(4))
def test_random_rounds_never_compute_what_stands_for_a_history(model, seed):
    """Tokens that represent a history's pages are never computed, in a pool too small for all requests."""
    rng = random.Random(seed)
    model = model(40)
    histories = [said(rng.randint(6, 16), seed=n) for n in range(4)]
    waiting, running, counts = [], [], {"admitted": 0, "waited": 0, "gone": 0}
    for step in range(60):
        if len(waiting) < 3:
            history = rng.choice(histories)
            waiting.append(ask(history, rng.randint(2, len(history) // P), f"r{step}"))
            if rng.random() < 0.7 and room(model) > len(history) // P:
                remember(model, history)
        if len(model.running) < 3 and (most := min(room(model) - 1, 16)) > 1:
            run(model, rng.randint(2, most))
        admitted, result = schedule(model, *waiting)
        counts["waited"] += result in ("NO_TOKEN", "OTHER")
        for req in admitted:
            assert req.problem or found(req) >= req.stand_ins
            counts["gone" if req.problem else "admitted"] += 1
            running.append(req)
            waiting.remove(req)
        for req in [req for req in running if rng.random() < 0.4]:
            end(model, req)
            running.remove(req)
        if model.running and rng.random() < 0.4:
            model.leave(model.running[0], publish=False)
        model.check()
    assert counts["admitted"] > 5 and counts["waited"] > 1, counts
    for req in running:
        end(model, req)
    for request in list(model.running):
        model.leave(request, publish=False)
    model.check_empty()
