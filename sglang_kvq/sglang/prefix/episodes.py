"""Requests that read or build episodes, in the scheduler.

A request that continues an episode says so in ``custom_params`` (``sessions.messages``). Its first tokens stand for the
episode and mean nothing themselves. So if the episode is not cached whole, the request ends with an error, and the
router builds the episode again. A request that ends as a fold (``sessions.messages``) scores its past tokens while its
patched prompt runs.
"""

from __future__ import annotations

import weakref
from array import array

import torch

from sglang_kvq.attention.scores.token_choice import choose_tokens
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.messages import GONE, PREFIX, Fold, FoldedPrefix
from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.attention import scoring
from sglang_kvq.sglang.prefix import folding, tree_keys
from sglang_kvq.sglang.types import Original, PrefixCache, Req

#: Attribute of a request that holds its prefix, once decoded.
_ATTRIBUTE = "_kvq_prefix"


def serve() -> None:
    """Allows requests to continue episodes and to end as folds. Call it once, when this worker starts.

    Raises:
        KVQuantError: as in ``folding.serve``.
    """
    folding.serve(_chosen_tokens)


def prefix_of(req: Req) -> FoldedPrefix | None:
    """Returns the episode that a request continues; None for most requests.

    Raises:
        KVQuantError: the message cannot be read, or this server serves no episodes.
    """
    if hasattr(req, _ATTRIBUTE):
        known: FoldedPrefix | None = getattr(req, _ATTRIBUTE)
        return known
    setattr(req, _ATTRIBUTE, None)  # stays None if an error is raised below
    params = getattr(req.sampling_params, "custom_params", None)
    text = params.get(PREFIX) if isinstance(params, dict) else None
    if text is None:
        return None
    state = runtime.current()
    if state is None or state.chosen_tokens is None:
        raise KVQuantError(f"custom_params {PREFIX}: this server does not let clients continue an episode.")
    prefix = FoldedPrefix.decode(text)
    setattr(req, _ATTRIBUTE, prefix)
    return prefix


def forget_prefix(req: Req) -> None:
    """Removes the episode from a request that ends with an error."""
    setattr(req, _ATTRIBUTE, None)


def prepare(tree: PrefixCache, req: Req) -> None:
    """Checks a waiting request's episode and starts its scoring, right before SGLang matches the request in its tree.

    Raises:
        KVQuantError: the episode is not cached, or the request's messages cannot be read.
    """
    fold, prefix = folding.fold_of(req), prefix_of(req)
    if prefix is not None:
        ids = req.origin_input_ids
        if len(ids) <= prefix.tokens:
            raise KVQuantError(
                f"an episode of {prefix.tokens} tokens in a prompt of {len(ids)}: the prompt must be longer."
            )
        found = len(tree_keys.match(tree, tree_keys.key(req, array("q", ids[: prefix.tokens]), req.extra_key))[0])
        if found < prefix.tokens:
            raise KVQuantError(f"{prefix.tokens - found} of {prefix.tokens} tokens of the episode are {GONE}.")
    if fold is not None and req.rid not in runtime.started().scores:
        scoring.collect(req.rid, fold.length)
        weakref.finalize(req, scoring.forget, req.rid)  # also covers requests that end before they ran


def _chosen_tokens(req: Req, fold: Fold) -> torch.Tensor | None:
    """Returns each KV head's tokens of highest score, as ``folding.ChosenTokens``; None if there are no scores."""
    scores = runtime.started().scores.get(req.rid)
    if scores is None:
        return None
    chosen = choose_tokens(scores.result(len(req.origin_input_ids)), fold.kept, fold.pinned)
    scoring.forget(req.rid)
    return chosen


def around_longest_match(original: Original, self: Req, input_len: int) -> int:
    """AROUND ``Req._compute_max_prefix_len``: computes a patched prompt even if it is cached: its queries score."""
    longest: int = original(self, input_len)
    fold: Fold | None = getattr(self, folding.ATTRIBUTE, None)
    return longest if fold is None else min(longest, fold.length)
