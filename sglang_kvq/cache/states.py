"""How a hybrid model's memory is divided between recurrent states and its KV cache.

A request of a model with linear attention needs some states of fixed size, however long it is, and tokens in the cache
of its layers of full attention. SGLang gives states a fixed multiple of the cache's memory (``SGLANG_RATIO``). That
was chosen for a cache in BF16: with a smaller token the cache would hold more than the states admit requests for.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_kvq.cache.layout import KVGeometry
from sglang_kvq.config import PAGE_SIZE, KVQuantConfig

#: SGLang's ``--mamba-full-memory-ratio`` where none is given.
SGLANG_RATIO = 0.9
#: Tokens that each request can have at least, if as many run as the user asked for.
LEAST_TOKENS = 2048
#: Share of the memory that SGLang may be told is for states.
_MOST_FOR_STATES = 0.99


@dataclass(frozen=True)
class RequestNeeds:
    """What a running request takes.

    Attributes:
        state_bytes: of one state, all layers of this worker.
        states: of a request: its own, those that are being kept, SGLang's allowance for prefixes in the tree, and
            one after each of its drafts.
        token_bytes: of one token's records, all layers.
        bf16_token_bytes: of one token in BF16.
        window_bytes: of the overlays that a request may pin.
        bf16_budget: share of the cache's memory that is for overlays.
        context: most tokens of a request.
        drafts: how many of ``states`` are of drafts: a request has them while it runs.
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
        """Tokens that a request could have in a BF16 cache, with all requests running that its states admit."""
        return min(self.context, int(self.states * self.state_bytes / SGLANG_RATIO / self.bf16_token_bytes))

    def cache_bytes(self, tokens: int) -> float:
        """Of the cache, for a request of so many tokens to run: its records or its window, whichever needs more."""
        return max(tokens * self.token_bytes / (1 - self.bf16_budget), self.window_bytes / self.bf16_budget)


def needs_of(
    config: KVQuantConfig, geometry: KVGeometry, *, state_bytes: int, states: int, context: int, drafts: int = 0
) -> RequestNeeds:
    """What a request takes of a cache of this geometry, a draft model's counted; arguments as its fields."""
    draft_bytes = geometry.draft_page_bytes // PAGE_SIZE
    return RequestNeeds(
        state_bytes=state_bytes,
        states=states,
        token_bytes=geometry.page_bytes // PAGE_SIZE + draft_bytes,
        bf16_token_bytes=geometry.slot_bytes // PAGE_SIZE + draft_bytes,
        window_bytes=config.slots_per_request * geometry.slot_bytes,
        bf16_budget=config.bf16_budget,
        context=context,
        drafts=drafts,
    )


@dataclass(frozen=True)
class StateShare:
    """How it was divided.

    Attributes:
        ratio: memory of states to that of the cache, as SGLang takes it: it reads the number of states from the former
            as if there were drafts for all, then gives back what those have that cannot run.
        requests: that may run at once, by both.
        tokens: of the cache for each of them.
    """

    ratio: float
    requests: int
    tokens: int


def share_states(budget: float, needs: RequestNeeds, wanted: int | None = None) -> StateShare:
    """Divide ``budget`` bytes so that states and tokens run out together, at ``needs.tokens`` for each request.

    Args:
        wanted: requests that shall run at once. If fewer than fit, the rest is for cached conversations, each of one
            state and ``needs.tokens``. If more, they get fewer tokens each, but not below ``LEAST_TOKENS``.

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
    requests = max(int(min(for_states / states, left * needs.bf16_budget / needs.window_bytes)), 1)
    requests = requests if wanted is None else min(requests, wanted)
    tokens = int(left * (1 - needs.bf16_budget) / needs.token_bytes / requests)
    if needs.drafts:
        kept = for_states - requests * needs.drafts * needs.state_bytes
        for_states = min(kept * needs.states / (needs.states - needs.drafts), _MOST_FOR_STATES * budget)
    return StateShare(for_states / (budget - for_states), requests, min(tokens, needs.context))
