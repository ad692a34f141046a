"""Memory is divided between recurrent states and the KV cache so that both run out together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_kvq.cache.memory.recurrent_states import LEAST_TOKENS, SGLANG_RATIO, RequestNeeds, share_states

GIB = 1 << 30
#: Qwen3-Next-80B-A3B at 2 bits: 36 layers with states in FP32, 12 with 2 KV heads of 256.
QWEN3_NEXT = RequestNeeds(
    state_bytes=36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2),
    states=5,
    token_bytes=12 * 2 * 2 * 256 * 18 // 64,
    bf16_token_bytes=12 * 2 * 2 * 256 * 2,
    window_bytes=6 * 64 * 12 * 2 * 2 * 256 * 2,
    bf16_budget=0.1,
    context=262144,
)


def parts(budget: float, needs: RequestNeeds, wanted: int | None = None) -> tuple[float, float, int, int]:
    """Returns bytes of states, bytes of the cache, the number of requests, and tokens per request."""
    share = share_states(budget, needs, wanted)
    states = budget * share.ratio / (1 + share.ratio)
    return states, budget - states, share.requests, share.tokens


def test_a_request_keeps_the_tokens_it_would_have_in_bf16():
    """SGLang's ratio allows 84 BF16 requests with 17 thousand tokens each; here more run, with no fewer."""
    budget, request = 64 * GIB, QWEN3_NEXT.states * QWEN3_NEXT.state_bytes
    bf16_states = budget * SGLANG_RATIO / (1 + SGLANG_RATIO)
    bf16_requests = int(bf16_states / request)
    bf16_tokens = (budget - bf16_states) / QWEN3_NEXT.bf16_token_bytes / bf16_requests
    assert QWEN3_NEXT.tokens == pytest.approx(bf16_tokens, rel=0.02)
    states, cache, requests, tokens = parts(budget, QWEN3_NEXT)
    assert requests > 1.6 * bf16_requests and tokens >= QWEN3_NEXT.tokens
    assert requests == pytest.approx(states / request, abs=1), "states run out with the last request"
    assert requests * QWEN3_NEXT.window_bytes <= cache * QWEN3_NEXT.bf16_budget * 1.001, "and so do windows"


def test_bf16_itself_gets_sglangs_ratio():
    """If quantization saves nothing, the ratio stays SGLang's, except for the share of BF16 pages."""
    plain = replace(QWEN3_NEXT, token_bytes=QWEN3_NEXT.bf16_token_bytes, window_bytes=1, bf16_budget=1e-6)
    assert share_states(64 * GIB, plain).ratio == pytest.approx(SGLANG_RATIO, rel=1e-3)


def test_fewer_requests_leave_the_rest_to_conversations():
    """A limit on requests leaves the remaining memory to idle conversations, each with one state and its tokens."""
    budget = 64 * GIB
    most = share_states(budget, QWEN3_NEXT).requests
    states, cache, requests, tokens = parts(budget, QWEN3_NEXT, wanted=8)
    assert requests == 8 < most and tokens == QWEN3_NEXT.context
    running = 8 * (QWEN3_NEXT.states * QWEN3_NEXT.state_bytes + QWEN3_NEXT.cache_bytes(QWEN3_NEXT.tokens))
    kept = (states - 8 * QWEN3_NEXT.states * QWEN3_NEXT.state_bytes) / QWEN3_NEXT.state_bytes
    their_tokens = (cache - 8 * QWEN3_NEXT.cache_bytes(QWEN3_NEXT.tokens)) * 0.9 / QWEN3_NEXT.token_bytes / kept
    assert kept > 3 * most and their_tokens == pytest.approx(QWEN3_NEXT.tokens, rel=0.01) and running < budget


@pytest.mark.parametrize("wanted", [155, 165, 5000])
def test_more_requests_get_fewer_tokens_each(wanted):
    budget, small = 64 * GIB, replace(QWEN3_NEXT, window_bytes=QWEN3_NEXT.window_bytes // 40)
    states, _, requests, tokens = parts(budget, small, wanted)
    fit = share_states(budget, small).requests
    assert states >= fit * small.states * small.state_bytes
    least = wanted * (small.states * small.state_bytes + small.cache_bytes(LEAST_TOKENS))
    if least <= budget:
        assert requests == wanted > fit and LEAST_TOKENS <= tokens < small.tokens
    else:
        assert fit <= requests < wanted


def test_short_contexts_need_fewer_tokens():
    short = replace(QWEN3_NEXT, context=1024)
    assert short.tokens == 1024
    assert share_states(64 * GIB, short).ratio >= share_states(64 * GIB, QWEN3_NEXT).ratio


def test_nothing_to_divide():
    with pytest.raises(ValueError, match="no memory to divide"):
        share_states(0, QWEN3_NEXT)


@pytest.mark.parametrize("wanted", [8, 48, 1000])
def test_drafts_are_counted_for_those_that_run(wanted):
    """SGLang sizes states as if all had drafts, but then allocates drafts only for running requests."""
    budget, needs = 64 * GIB, replace(QWEN3_NEXT, states=5 + 4, drafts=4)
    share = share_states(budget, needs, wanted)
    told = budget * share.ratio / (1 + share.ratio)
    count = int(told / (needs.state_bytes * (1 + 4 / 5)))
    running = min(wanted, count // 5)
    left = budget - (count + 4 * running) * needs.state_bytes
    assert running >= share.requests > 0 and left * 0.1 >= share.requests * needs.window_bytes * 0.999
    kept = count - 5 * share.requests
    if wanted == 8:  # the rest is for conversations with one state and as many tokens as a request
        tokens = (left - 8 * needs.cache_bytes(needs.tokens)) * 0.9 / needs.token_bytes / kept
        assert kept > 100 and tokens == pytest.approx(needs.tokens, rel=0.01)
    else:
        assert left * 0.9 / needs.token_bytes / share.requests >= min(LEAST_TOKENS, share.tokens) * 0.99
    if wanted == 1000:
        assert kept <= 5, "states run out with the last request"
