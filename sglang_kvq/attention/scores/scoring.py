"""Scores of a running request's past keys, collected chunk by chunk and layer by layer (``key_scores``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sglang_kvq.errors import KVQuantError


class KeyScores:
    """Scores of a request's first ``past`` tokens, by the queries of all its tokens after them.

    Scores are maxima over the chunks of the request, so repeating a chunk after a retraction is harmless. Each query's
    softmax is exact, because all past tokens precede the prompt.

    Attributes:
        past: number of scored tokens: the first ones of the request, regardless of their RoPE positions.
        values: float32 ``[layers, kv_heads, past]`` of this worker's layers and heads, initially 0. If workers share a
            KV head, each has the maximum over its own query heads.
        seen: end of the tokens ``past .. seen`` whose queries have scored, in launches that may still run.
    """

    def __init__(self, layers: int, kv_heads: int, past: int, device: torch.device | str) -> None:
        if past < 1:
            raise KVQuantError(f"scores of the first {past} tokens of a request: there must be at least one.")
        self.past, self.seen = past, past
        self.values = torch.zeros(layers, kv_heads, past, device=device)

    def add(self, first: int, end: int) -> None:
        """Records that the queries of tokens ``first .. end`` score in launches on the current stream."""
        if first <= self.seen:
            self.seen = max(self.seen, end)
        if self.values.is_cuda:  # keeps the memory until the stream has used it, even if the owner drops the tensor
            self.values.record_stream(torch.cuda.current_stream(self.values.device))

    def result(self, length: int) -> torch.Tensor:
        """Returns ``values``, once all queries of a request of ``length`` tokens have scored.

        Raises:
            KVQuantError: there are no queries, or part of the prompt was in the prefix cache, so that its queries were
                not computed.
        """
        if length <= self.past:
            raise KVQuantError(
                f"scores of {self.past} tokens in a request of {length}: a prompt of at least one token must follow."
            )
        if self.seen < length:
            raise KVQuantError(
                f"scores by the prompt's tokens {self.past} to {length}: the query of token {self.seen} was not "
                "computed. Run the request under a name of its own, where the prompt is not cached."
            )
        return self.values


@dataclass(frozen=True)
class ScoringPart:
    """One batch's contribution to one request's scores.

    Attributes:
        request: the request's index in the batch.
        stored: number of past tokens that are read from pages, the first ones of the request.
        keys: range ``[begin, end)`` of the batch's tokens that are past tokens; they follow the stored ones.
        queries: range ``[begin, end)`` of the batch's tokens whose queries score.
        values: see ``KeyScores``.
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
        """Returns the past keys among the batch's keys ``[T, kv_heads, D]``: ``[n, kv_heads, D]``."""
        return k[slice(*self.keys)]

    def scoring(self, q: torch.Tensor) -> torch.Tensor:
        """Returns the queries that score, among the batch's ``[T, q_heads, D]``: ``[P, q_heads, D]``."""
        return q[slice(*self.queries)]


def plan_scoring(
    prefix_lens: Sequence[int], new_lens: Sequence[int], wanted: Mapping[int, KeyScores]
) -> list[ScoringPart]:
    """Returns a batch's contributions to ``wanted``; a request has none before its chunks reach the prompt.

    Args:
        prefix_lens, new_lens: see ``ExtendBatch``.
        wanted: scores to collect, by the request's index in the batch.

    Raises:
        KVQuantError: an index is not in the batch.
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
