"""Scores of a running request's past keys, collected chunk by chunk and layer by layer (``key_scores``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sglang_kvq.errors import KVQuantError


class KeyScores:
    """One request's scores of its first ``past`` tokens, by the queries of all tokens behind them.

    They are maxima over the chunks that SGLang divides the request into, and stay so if some run again after a
    retraction. Each query's softmax is exact: the past precedes the prompt, so all of it is there.

    Attributes:
        past: tokens whose keys are scored, the first of the request, counted from 0 wherever they stand for RoPE.
        values: float32 ``[layers, kv_heads, past]``, of this worker's layers and heads; 0 where nothing has scored.
            Where several workers share a KV head, each has the maximum over its own query heads.
        seen: the queries of tokens ``past .. seen`` have scored, in launches that may still run.
    """

    def __init__(self, layers: int, kv_heads: int, past: int, device: torch.device | str) -> None:
        if past < 1:
            raise KVQuantError(f"scores of the first {past} tokens of a request: there must be at least one.")
        self.past, self.seen = past, past
        self.values = torch.zeros(layers, kv_heads, past, device=device)

    def add(self, first: int, end: int) -> None:
        """Queries of tokens ``first .. end`` score, on the current stream."""
        if first <= self.seen:
            self.seen = max(self.seen, end)
        if self.values.is_cuda:  # whoever lets go of them meanwhile, they stay until that has happened
            self.values.record_stream(torch.cuda.current_stream(self.values.device))

    def result(self, length: int) -> torch.Tensor:
        """``values``, once all queries of a request of that length have scored.

        Raises:
            KVQuantError: there are none, or the request found a part of its prompt in the prefix cache, whose queries
                were not computed.
        """
        if length <= self.past:
            raise KVQuantError(
                f"scores of {self.past} tokens in a request of {length}: a prompt of at least one token must follow."
            )
        if self.seen < length:
            raise KVQuantError(
                f"scores by the prompt's tokens {self.past} to {length}: the query of token {self.seen} was not "
                "computed; run the request under a name of its own, where the prompt is not cached."
            )
        return self.values


@dataclass(frozen=True)
class ScoringPart:
    """What one batch adds to one request's scores.

    Attributes:
        request: index in the batch.
        stored: past tokens that are read from pages, the first of the request.
        keys: past tokens among the batch's own, ``[begin, end)``; they follow those stored.
        queries: tokens of the batch that score, ``[begin, end)``.
        values: of ``KeyScores``.
    """

    request: int
    stored: int
    keys: tuple[int, int]
    queries: tuple[int, int]
    values: torch.Tensor

    @property
    def past(self) -> int:
        return self.values.shape[-1]

    def new_past(self, k: torch.Tensor) -> torch.Tensor:
        """The batch's keys ``[T, kv_heads, D]`` that are past: ``[n, kv_heads, D]``."""
        return k[slice(*self.keys)]

    def scoring(self, q: torch.Tensor) -> torch.Tensor:
        """The queries ``[T, q_heads, D]`` that score: ``[P, q_heads, D]``."""
        return q[slice(*self.queries)]


def plan_scoring(
    prefix_lens: Sequence[int], new_lens: Sequence[int], wanted: Mapping[int, KeyScores]
) -> list[ScoringPart]:
    """What a batch adds to the scores of some of its requests; nothing for one that has no prompt tokens in it yet.

    Args:
        prefix_lens, new_lens: of ``ExtendBatch``.
        wanted: by index in the batch.

    Raises:
        KVQuantError: an index that is not of the batch.
    """
    parts = []
    for request, scores in wanted.items():
        if not 0 <= request < len(new_lens):
            raise KVQuantError(f"scores of request {request} in a batch of {len(new_lens)}: use its index there.")
        start, prefix, new = sum(new_lens[:request]), prefix_lens[request], new_lens[request]
        stored = min(prefix, scores.past)
        first, end = start + max(scores.past - prefix, 0), start + new
        if first < end:
            parts.append(ScoringPart(request, stored, (start, first), (first, end), scores.values))
            scores.add(prefix + first - start, prefix + new)
    return parts
