"""Chain from a history to an episode: folds block after block into a prefix of fixed size, named by content.

EpiCache's loop (arXiv 2509.17396), as a chain of ordinary requests ``[prefix | block | patched prompt]``. After each,
of the tokens of prefix and block every layer and KV head keeps its own ``budget``, and these are a prefix cached
under the step's ``name``. A name is a hash of all that its content follows from: equal histories share episodes,
a fork is free, and building again what was evicted gives the same names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError


@dataclass(frozen=True)
class ChainPlan:
    """Sizes in tokens, multiples of ``PAGE_SIZE``.

    Attributes:
        budget: tokens that an episode keeps (M).
        block: tokens that are folded at once (B).
        pinned: first tokens that every head keeps: sinks and the system prompt.

    Raises:
        KVQuantError: a size that is no multiple of a page, no block, or nothing beside the pinned tokens.
    """

    budget: int
    block: int
    pinned: int = PAGE_SIZE

    def __post_init__(self) -> None:
        for name in ("budget", "block", "pinned"):
            value = getattr(self, name)
            if value % PAGE_SIZE or value < 0 or not (value or name == "pinned"):
                raise KVQuantError(f"{name} of {value} tokens: must be a multiple of {PAGE_SIZE}, above 0.")
        if self.budget <= self.pinned:
            raise KVQuantError(f"a budget of {self.budget} tokens holds only the {self.pinned} pinned ones: raise it.")

    def folded(self, tokens: int) -> int:
        """Tokens of a history of so many that are folded: whole blocks up to its end, none while all fit the budget."""
        whole = tokens // self.block * self.block
        return whole if whole > self.budget else 0


@dataclass(frozen=True)
class Step:
    """One step of a chain: the block ``[start, end)`` of the history joins ``prefix`` tokens cached under ``before``.

    Attributes:
        before: namespace of the prefix: the client's own for the first step, else the name of the step before.
        name: namespace of the result.
    """

    before: str | None
    name: str
    prefix: int
    start: int
    end: int

    @property
    def offset(self) -> int:
        """Positions by which the request's tokens after the prefix stand further than their place in the request."""
        return self.start - self.prefix


def chain(
    history: np.ndarray,
    prompt: Sequence[int] | np.ndarray,
    plan: ChainPlan,
    *,
    tenant: str,
    namespace: str | None,
    method: str,
) -> list[Step]:
    """The steps that fold a history into one episode, in order; none while it fits the budget.

    Args:
        history: int token ids, at least ``plan.folded(len(history))`` of which count.
        prompt: ids of the episode's patched prompt.
        namespace: in which the history itself is cached.
        method: what the cache's content depends on beside tokens: method, bits, rotations, model.
    """
    end = plan.folded(len(history))
    fixed = hashlib.sha256("\0".join((tenant, namespace or "", method)).encode())
    fixed.update(np.array([plan.budget, plan.block, plan.pinned, len(prompt), *prompt], np.int64).tobytes())
    first = plan.budget // plan.block * plan.block if end else 0
    digest = hashlib.sha256(fixed.digest() + _bytes(history[:first]))
    before, prefix, steps = namespace, first, []
    for start in range(first, end, plan.block):
        digest = hashlib.sha256(digest.digest() + _bytes(history[start : start + plan.block]))
        name = f"kvq-episode-{digest.hexdigest()}"
        steps.append(Step(before, name, prefix, start, start + plan.block))
        before, prefix = name, plan.budget
    return steps


def stand_ins(history: np.ndarray, plan: ChainPlan) -> np.ndarray:
    """Ids int64 ``[budget]`` that stand for an episode's tokens in requests: the first ones of its history.

    In an episode's namespace they mean its pages, which hold other tokens in every layer and head.
    """
    return np.asarray(history[: plan.budget], dtype=np.int64)


def _bytes(tokens: np.ndarray) -> bytes:
    return np.asarray(tokens, dtype=np.int64).tobytes()
