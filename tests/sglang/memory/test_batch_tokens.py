"""Batches of short prompts have as many tokens as ``--chunked-prefill-size`` allows, through SGLang's own admission."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.memory.batch_tokens import around_charge
from tests.sglang.prefix.fold_model import FoldModel, sglang_request
from tests.sglang.prefix.test_hybrid_tree import served
from tests.sglang.prefix.tree_model import OLD

__all__ = ["served"]

pytestmark = pytest.mark.skipif(OLD, reason="SGLang 0.5.16 rounds a prompt to pages before the hook can see it")

CHUNK = 8 * P


@pytest.fixture
def admit(served):
    """Returns a function that admits prompts of these lengths to one batch, and returns the tokens taken of each."""
    model = FoldModel(200, 30, 90, sink_pages=1, recent_pages=2)

    def run(lengths: list[int], chunk: int | None = CHUNK, most: int = 1 << 20) -> list[int]:
        from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

        adder = PrefillAdder(P, model.unified, model.allocator, SimpleNamespace(reqs=[]), 0.5, most, chunk)
        for number, length in enumerate(lengths):
            req = sglang_request(f"r{number}", [1000 * number + i for i in range(length)], None)
            req.sampling_params.max_new_tokens = 1
            req.init_next_round_input(model.unified)
            if adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None) != AddReqResult.CONTINUE:
                break
        model.check()
        return [req.extend_len for req in adder.can_run_list]

    return run


@pytest.mark.parametrize("length", [20, 63, P, 70, 200])
def test_a_batch_of_short_prompts_is_full(admit, length):
    """If whole pages counted, prompts of 20 tokens would take 160 tokens of 512."""
    taken = admit([length] * 600)
    assert CHUNK - P < sum(taken) <= CHUNK
    assert taken[:-1] == [length] * (len(taken) - 1) and (taken[-1] == length or taken[-1] % P == 0)


@pytest.mark.parametrize("lengths", [[300, 20, 20, 500], [513], [20, 10_000]])
def test_a_chunk_ends_at_a_page_and_within_the_limit(admit, lengths):
    *whole, last = admit(lengths)
    assert whole == lengths[: len(whole)] and last % P == 0 and CHUNK - P < sum(whole) + last <= CHUNK


def test_without_chunks_the_limit_of_a_batch_counts_tokens_too(admit):
    taken = admit([20] * 100, chunk=None, most=10 * P)
    assert 9 * P - 20 <= sum(taken) <= 10 * P


@pytest.mark.parametrize(
    ("disable", "exact", "left"), [(False, False, 480), (True, False, 448), (False, True, 480)], ids=str
)
def test_what_is_given_back(monkeypatch, disable, exact, left):
    """Without a prefix cache, and where SGLang itself counts tokens, nothing is."""
    monkeypatch.setattr(runtime, "tiers", object)
    adder = SimpleNamespace(
        rem_input_tokens=CHUNK,
        rem_chunk_tokens=CHUNK,
        exact_chunk_fill=exact,
        tree_cache=SimpleNamespace(disable=disable),
        ceil_paged_tokens=lambda tokens: -(-tokens // P) * P,
    )

    def charge(self, prefix_len: int, tokens: int, answer: int) -> None:
        count = tokens if exact else self.ceil_paged_tokens(tokens)
        self.rem_input_tokens -= count
        self.rem_chunk_tokens -= count

    around_charge(charge, adder, 0, 32, 1)
    assert adder.rem_input_tokens == adder.rem_chunk_tokens == left
