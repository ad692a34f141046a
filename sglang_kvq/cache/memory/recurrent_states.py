"""Divides a hybrid model's memory between recurrent states and its KV cache.

In a model with linear attention, a request needs some states of fixed size, whatever its length. It also needs cache
tokens in the full-attention layers. By default, the memory of SGLang's states is a fixed multiple (``SGLANG_RATIO``) of
the cache's memory, chosen for a BF16 cache. In a quantized cache a token takes fewer bytes, so the cache would hold
more requests than the states allow.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_kvq.cache.layout import KVGeometry
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE

#: SGLang's default ``--mamba-full-memory-ratio``.
SGLANG_RATIO = 0.9
#: Fewest cache tokens per request with which as many requests run as the user asked for.
LEAST_TOKENS = 2048
#: Largest share of the memory that the result may assign to states.
_MOST_FOR_STATES = 0.99


@dataclass(frozen=True)
class RequestNeeds:
    """Memory needs of a running request.

    Attributes:
        state_bytes: bytes of one state, all layers of this worker.
        states: states per request: its own, those being saved, SGLang's allowance for prefixes in the tree, and one for
            each draft.
        token_bytes: bytes of one token's records, all layers.
        bf16_token_bytes: bytes of one token in BF16.
        window_bytes: bytes of the BF16 pages that a request may pin.
        bf16_budget: BF16 pages' share of the cache's memory.
        context: maximum tokens of a request.
        drafts: how many of ``states`` belong to drafts; a request has these only while it runs.
    """

    state_bytes: int
    states: int
    token_bytes: int
    bf16_token_bytes: int
    window_bytes: int
    bf16_budget: float
    context: int
    drafts: int = 0

    @property
    def tokens(self) -> int:
        """Tokens per request in a BF16 cache, with as many requests running as its states admit."""
        return min(self.context, int(self.states * self.state_bytes / SGLANG_RATIO / self.bf16_token_bytes))

    def cache_bytes(self, tokens: int) -> float:
        """Returns the cache memory that a running request of ``tokens`` tokens needs.

        Records and BF16 pages have fixed shares of the cache, so the larger of both needs determines the result.
        """
        return max(tokens * self.token_bytes / (1 - self.bf16_budget), self.window_bytes / self.bf16_budget)


def needs_of(
    config: KVQuantConfig, geometry: KVGeometry, *, state_bytes: int, states: int, context: int, drafts: int = 0
) -> RequestNeeds:
    """Returns a request's needs in a cache of this geometry, a draft model's cache included; see ``RequestNeeds``."""
    draft_bytes = geometry.draft_page_bytes // PAGE_SIZE
    return RequestNeeds(
        state_bytes=state_bytes,
        states=states,
        token_bytes=geometry.page_bytes // PAGE_SIZE + draft_bytes,
        bf16_token_bytes=geometry.slot_bytes // PAGE_SIZE + draft_bytes,
        window_bytes=config.pinned_slots(max(drafts, 1)) * geometry.slot_bytes,
        bf16_budget=config.bf16_share,
        context=context,
        drafts=drafts,
    )


@dataclass(frozen=True)
class StateShare:
    """Result of the division.

    Attributes:
        ratio: memory of states divided by memory of the cache, as SGLang defines it. SGLang first counts states as if
            all requests had drafts, then gives back the drafts of requests that cannot run.
        requests: requests that may run at once.
        tokens: cache tokens for each request.
    """

    ratio: float
    requests: int
    tokens: int


def share_states(budget: float, needs: RequestNeeds, wanted: int | None = None) -> StateShare:
    """Divides ``budget`` bytes so that states and tokens run out together, at ``needs.tokens`` for each request.

    Args:
        wanted: requests to run at once; None for as many as fit. If fewer are wanted than fit, the rest of the memory
            is for cached conversations, each with one state and ``needs.tokens``. If more are wanted, each gets fewer
            tokens, but not fewer than ``LEAST_TOKENS``.

    Raises:
        ValueError: the budget is not positive.
    """
    if budget <= 0:
        raise ValueError(f"no memory to divide: {budget}")
    states = needs.states * needs.state_bytes
    cache = needs.cache_bytes(needs.tokens)
    fit = budget / (states + cache)
    if wanted is None:
        for_states = fit * states
    elif wanted <= fit:
        rest = budget - wanted * (states + cache)
        kept = needs.tokens * needs.token_bytes / (1 - needs.bf16_budget)
        for_states = wanted * states + rest * needs.state_bytes / (needs.state_bytes + kept)
    else:
        least = needs.cache_bytes(min(LEAST_TOKENS, needs.tokens))
        for_states = max(fit * states, min(wanted * states, budget - wanted * least))
    left = budget - for_states
    requests = max(int(for_states / states), 1)  # their BF16 pages fit, because ``cache_bytes`` counts them
    requests = requests if wanted is None else min(requests, wanted)
    tokens = int(left * (1 - needs.bf16_budget) / needs.token_bytes / requests)
    if needs.drafts:
        kept = for_states - requests * needs.drafts * needs.state_bytes
        for_states = min(kept * needs.states / (needs.states - needs.drafts), _MOST_FOR_STATES * budget)
    return StateShare(for_states / (budget - for_states), requests, min(tokens, needs.context))
