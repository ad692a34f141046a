"""Scores the past tokens of a request while its prompt runs; passes the scores from the scheduler to the layers.

The code that builds an episode calls ``collect`` before its request is scheduled. It calls ``forget`` when it has taken
the result, or when the request is gone. In between, every batch with prompt tokens of the request updates its scores,
on the stream that runs the layers. Work on that stream after the request's last chunk can read the scores without a
wait. With tensor parallelism each worker scores for its own heads.
"""

from __future__ import annotations

from sglang_kvq.attention.scores.scoring import KeyScores
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.types import ForwardBatch


def collect(rid: str, past: int) -> KeyScores:
    """Starts scoring the first ``past`` tokens of the request ``rid`` by the queries of all later tokens.

    The request must not find its prompt in the prefix cache, so it should have its own namespace (``extra_key``).

    Raises:
        KVQuantError: the request is being scored already, or there is no past.
    """
    current = runtime.started()
    if rid in current.scores:
        raise KVQuantError(f"request {rid} is being scored already. Forget it first.")
    pool = current.pages
    current.scores[rid] = scores = KeyScores(pool.layers, pool.kv_heads, past, pool.device)
    return scores


def forget(rid: str) -> None:
    """Stops scoring the request ``rid``, if it is being scored."""
    if (current := runtime.current()) is not None:
        current.scores.pop(rid, None)


def wanted(forward_batch: ForwardBatch) -> dict[int, KeyScores]:
    """Returns the scores to update for a batch, by the request's index in the batch; empty for most batches.

    Requests are identified by their ids, because SGLang's copies of a batch keep ids but not our attributes.
    """
    current = runtime.current()
    if current is None or not current.scores:
        return {}
    rids = forward_batch.rids or ()  # None in SGLang's dummy batches: pure padding, and warm-ups
    return {i: current.scores[rid] for i, rid in enumerate(rids) if rid in current.scores}
