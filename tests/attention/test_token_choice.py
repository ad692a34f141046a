"""The tokens that are kept equal the oracle's choice, with ties broken by position."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks.research.episodes.select import pin, top_of_heads
from sglang_kvq.attention.scores.token_choice import choose_tokens
from sglang_kvq.errors import KVQuantError
from tests import device_waits


@pytest.mark.parametrize(
    "pinned,keep", [(0, 1), (1, 1), (64, 64), *((p, k) for p in (0, 1, 64) for k in (65, 999, 1000))]
)
def test_the_choice_is_the_oracles(keep, pinned):
    torch.manual_seed(keep)
    scores = torch.rand(3, 2, 1000)
    got = choose_tokens(scores, keep, pinned)
    assert got.dtype == torch.int64 and got.shape == (3, 2, keep)
    for layer, of_layer in enumerate(scores):
        want = top_of_heads(pin(of_layer.clone(), torch.arange(1000) < pinned)[None], keep)[0]
        assert torch.equal(got[layer], want)


def test_of_equal_scores_the_earlier_tokens_stay():
    scores = torch.tensor([[[0.0, 0.5, 0.5, 0.9, 0.5, 0.5]]])
    assert choose_tokens(scores, 3, 0).tolist() == [[[1, 2, 3]]]
    assert choose_tokens(scores, 3, 1).tolist() == [[[0, 1, 3]]]
    assert choose_tokens(torch.zeros(1, 2, 5000), 1200, 64)[0, 1].tolist() == [*range(1200)]


def test_pinned_tokens_take_no_more_than_their_places():
    scores = torch.tensor([[[0.1, 0.9, 0.2, 0.8]]])
    assert choose_tokens(scores, 2, 2).tolist() == [[[0, 1]]]
    assert choose_tokens(scores, 3, 2).tolist() == [[[0, 1, 3]]]
    assert scores.tolist()[0][0][0] == pytest.approx(0.1), "scores are left alone"


@pytest.mark.parametrize("keep,pinned", [(0, 0), (11, 0), (3, 4), (5, -1)])
def test_numbers_that_do_not_fit_are_refused(keep, pinned):
    with pytest.raises(KVQuantError, match=f"keep {keep} of 10 tokens with {pinned} pinned"):
        choose_tokens(torch.rand(2, 2, 10), keep, pinned)


@pytest.mark.parametrize(("shape", "dtype"), [((2, 10), torch.float32), ((1, 2, 10), torch.int64)], ids=str)
def test_what_are_no_scores_is_refused(shape, dtype):
    with pytest.raises(KVQuantError, match=re.escape(f"{dtype} {[*shape]}: they must be floats")):
        choose_tokens(torch.zeros(shape, dtype=dtype), 1, 0)


@pytest.mark.gpu
def test_the_host_never_waits():
    scores = torch.rand(36, 8, 6144, device="cuda")
    choose_tokens(scores, 4096, 64)
    with device_waits.refused():
        choose_tokens(scores, 4096, 64)
