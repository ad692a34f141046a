"""Requests whose past tokens are scored while their prompt runs: from the scheduler to the layers.

Whoever builds an episode calls ``collect`` before its request is scheduled and ``forget`` once it has taken the
result or the request is gone. In between, every batch with prompt tokens of the request raises its scores, on the
stream that runs the layers; what reads them on that stream, behind the request's last chunk, need not wait. Under
tensor parallelism every worker does so for its own heads.
"""

from __future__ import annotations

from sglang_kvq.attention.scores.scoring import KeyScores
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.types import ForwardBatch


def collect(rid: str, past: int) -> KeyScores:
    """Scores the first ``past`` tokens of the request with that id by the queries of all tokens behind them.

    The request must not find its prompt in the prefix cache: it should have a namespace (``extra_key``) of its own.

    Raises:
        KVQuantError: it is being scored already, or there is no past.
    """
    current = runtime.started()
    if rid in current.scores:
        raise KVQuantError(f"request {rid} is being scored already; forget it first.")
    pool = current.pages
    current.scores[rid] = scores = KeyScores(pool.layers, pool.kv_heads, past, pool.device)
    return scores


def forget(rid: str) -> None:
    """Stops scoring that request, if it is scored."""
    if (current := runtime.current()) is not None:
        current.scores.pop(rid, None)


def wanted(forward_batch: ForwardBatch) -> dict[int, KeyScores]:
    """The scores of a batch's requests, by index in it; none for most batches.

    Requests are known by their ids, which SGLang's copies of a batch keep; attributes of ours they would not.
    """
    current = runtime.current()
    if current is None or not current.scores:
        return {}
    rids = forward_batch.rids or ()  # none in batches that SGLang makes up: of padding alone, to warm up
    return {i: current.scores[rid] for i, rid in enumerate(rids) if rid in current.scores}
