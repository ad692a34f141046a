"""Requests over episodes, in the scheduler: a prefix that must be there, positions behind it, blocks that are folded.

A request that goes on behind an episode says so in ``custom_params`` (``episodic.prefix``): if the episode is not
cached whole it ends with an error, since the tokens that stand for it mean nothing, and the router builds it again. One
that ends as a fold (``episodic.fold``) is scored while its patched prompt runs.
"""

from __future__ import annotations

import weakref
from array import array

import torch

from sglang_kvq.attention.scores.token_choice import choose_tokens
from sglang_kvq.episodic.fold import Fold
from sglang_kvq.episodic.prefix import PARAMETER, FoldedPrefix
from sglang_kvq.episodic.selection import GONE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.attention import scoring
from sglang_kvq.sglang.prefix import folding, tree_keys
from sglang_kvq.sglang.types import Original, PrefixCache, Req

#: On a request: its prefix, once decoded.
_ATTRIBUTE = "_kvq_prefix"


def serve() -> None:
    """From now on requests may go on behind episodes and end as folds; called once, when this worker starts.

    Raises:
        KVQuantError: as ``folding.serve``.
    """
    folding.serve(_chosen_tokens)


def prefix_of(req: Req) -> FoldedPrefix | None:
    """The episode that a request goes on behind; None for most.

    Raises:
        KVQuantError: it cannot be read, or this server serves no episodes.
    """
    if hasattr(req, _ATTRIBUTE):
        known: FoldedPrefix | None = getattr(req, _ATTRIBUTE)
        return known
    setattr(req, _ATTRIBUTE, None)  # unless it is found to be right
    params = getattr(req.sampling_params, "custom_params", None)
    text = params.get(PARAMETER) if isinstance(params, dict) else None
    if text is None:
        return None
    state = runtime.current()
    if state is None or state.chosen_tokens is None:
        raise KVQuantError(f"custom_params {PARAMETER}: this server lets no client go on behind an episode.")
    prefix = FoldedPrefix.decode(text)
    setattr(req, _ATTRIBUTE, prefix)
    return prefix


def forget_prefix(req: Req) -> None:
    """A request that ends with an error goes on behind no episode."""
    setattr(req, _ATTRIBUTE, None)


def prepare(tree: PrefixCache, req: Req) -> None:
    """Right before SGLang matches a waiting request against its tree.

    Raises:
        KVQuantError: its episode is not there, or what it says of itself cannot be read.
    """
    fold, prefix = folding.fold_of(req), prefix_of(req)
    if prefix is not None:
        ids = req.origin_input_ids
        if len(ids) <= prefix.tokens:
            raise KVQuantError(f"an episode of {prefix.tokens} tokens in a prompt of {len(ids)}: nothing follows it.")
        found = len(tree_keys.match(tree, tree_keys.key(req, array("q", ids[: prefix.tokens]), req.extra_key))[0])
        if found < prefix.tokens:
            raise KVQuantError(f"{prefix.tokens - found} of {prefix.tokens} tokens of the episode are {GONE}.")
    if fold is not None and req.rid not in runtime.started().scores:
        scoring.collect(req.rid, fold.length)
        weakref.finalize(req, scoring.forget, req.rid)  # also of requests that end before they ran


def _chosen_tokens(req: Req, fold: Fold) -> torch.Tensor | None:
    """``folding.ChosenTokens``: of highest score, each KV head its own."""
    scores = runtime.started().scores.get(req.rid)
    if scores is None:
        return None
    chosen = choose_tokens(scores.result(len(req.origin_input_ids)), fold.kept, fold.pinned)
    scoring.forget(req.rid)
    return chosen


def around_longest_match(original: Original, self: Req, input_len: int) -> int:
    """AROUND ``Req._compute_max_prefix_len``: the queries of a patched prompt are computed, cached or not."""
    longest: int = original(self, input_len)
    fold: Fold | None = getattr(self, folding.ATTRIBUTE, None)
    return longest if fold is None else min(longest, fold.length)
