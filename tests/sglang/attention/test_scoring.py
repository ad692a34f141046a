"""Requests that are scored while they run through the backend get the defined scores, in any chunks."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from benchmarks.kernel_bench import oracle
from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.attention.scores.key_scores import key_scores
from sglang_kvq.attention.scores.scoring import KeyScores
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.attention import scoring
from tests.sglang.attention.test_padding import KV_HEADS, PAGES, Q_HEADS, ROWS, D, StrictOps, mode

LAYERS = [SimpleNamespace(head_dim=D, layer_id=n, scaling=D**-0.5, k_scale=None, v_scale=None) for n in (3, 7)]
#: Rows of the scored request and of another one in its batches. Then, for the scored request: how many tokens get
#: scores, and its length.
ROW, OTHER = 1, 2
PAST, LENGTH = 6 * P + 20, 6 * P + 20 + 75


def rotations() -> LayerRotations:
    draw = torch.Generator().manual_seed(1)
    shape = (len(LAYERS), KV_HEADS, D, D)
    return LayerRotations(*(torch.linalg.qr(torch.randn(shape, generator=draw))[0].contiguous() for _ in "kv"))


def activations(layer: int, row: int, first: int, end: int) -> list[torch.Tensor]:
    """Returns q, k and v of some tokens of a row; they do not depend on the chunks."""
    draw = torch.Generator().manual_seed(10 * layer + row)
    parts = (torch.randn(1000, n * D, generator=draw).bfloat16() for n in (Q_HEADS, KV_HEADS, KV_HEADS))
    return [x[first:end] for x in parts]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Restores the current runtime after a test; ``Worker.extend`` replaces it to say which requests are scored."""
    monkeypatch.setattr(runtime, "_current", None)


class Worker:
    """A backend of two layers, whose batches are built as SGLang builds them."""

    def __init__(self, recent_pages: int) -> None:
        from sglang_kvq.sglang.attention.backend import KVQuantBackend

        table = torch.zeros(ROWS, PAGES // 2 * P, dtype=torch.int32)
        for row in (ROW, OTHER):
            table[row] = (row - 1) * (PAGES // 2) * P + P + torch.arange(PAGES // 2 * P)
        formats = [PageFormat(D, D)] * len(LAYERS)
        self.pool = PagePool.allocate(formats, kv_heads=KV_HEADS, pages=PAGES, slots=26, req_to_token=table)
        self.ops = StrictOps(self.pool, rotations())
        self.tiers = TierManager(self.pool, 1, recent_pages, self.ops.quantize_slots)
        self.backend = KVQuantBackend(self.ops, self.tiers, [layer.layer_id for layer in LAYERS])
        self.stored = {ROW: 0, OTHER: 0}

    def extend(self, new: dict[int, int], scores: dict[int, KeyScores] | None = None, padding: int = 0) -> torch.Tensor:
        """Runs one chunk of each row in ``new`` and returns both layers' outputs; ``scores`` is by row."""
        prefix = [self.stored[row] for row in new]
        spans = [(row, p, p + n) for (row, n), p in zip(new.items(), prefix)]
        loc = torch.cat([self.pool.req_to_token[row, first:end] for row, first, end in spans])
        fb = SimpleNamespace(
            forward_mode=mode("extend"),
            req_pool_indices=torch.tensor(list(new)),
            extend_prefix_lens_cpu=prefix,
            extend_seq_lens_cpu=list(new.values()),
            out_cache_loc=torch.cat([loc, loc.new_zeros(padding)]),
            rids=[f"row {row}" for row in new],
        )
        runtime._current = SimpleNamespace(scores={f"row {row}": found for row, found in (scores or {}).items()})
        for row, n in new.items():
            self.stored[row] += n
        self.backend.init_forward_metadata_out_graph(fb)
        outputs = []
        for layer in LAYERS:
            x = (torch.cat(parts) for parts in zip(*(activations(layer.layer_id, *span) for span in spans)))
            q, k, v = (torch.cat([part, part.new_full((padding, part.shape[1]), 99.0)]) for part in x)
            outputs.append(self.backend.forward_extend(q, k, v, layer, fb))
        return torch.stack(outputs)

    def collected(self) -> KeyScores:
        return KeyScores(len(LAYERS), KV_HEADS, PAST, "cpu")


def rotated(worker: Worker, layer: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = (part.unflatten(1, (-1, D)) for part in activations(LAYERS[layer].layer_id, ROW, first, end))
    q, k, _ = worker.ops.rotate(layer, *x)
    return q, k


def defined(worker: Worker) -> torch.Tensor:
    """Returns the defined scores of the computed keys, none of which is quantized."""
    scores = []
    for layer in range(len(LAYERS)):
        q, k = rotated(worker, layer, 0, LENGTH)
        scores.append(key_scores(q[PAST:], k[:PAST], D**-0.5))
    return torch.stack(scores)


CHUNKS = {
    "one": [LENGTH],
    "prefix, block and prompt": [2 * P, LENGTH - 2 * P],
    "the prompt alone": [PAST, LENGTH - PAST],
    "the prompt in parts": [P, PAST + 7 - P, 1, LENGTH - PAST - 8],
    "pages": [2 * P, 2 * P, 3 * P, LENGTH - 7 * P],
}


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_scores_are_the_definitions_whatever_the_chunks(chunks):
    """While all keys are in BF16, neither chunks nor another request's chunk nor padding change the scores."""
    worker = Worker(recent_pages=12)
    scores = worker.collected()
    for n, new in enumerate(chunks):
        order = (OTHER, ROW) if n % 2 else (ROW, OTHER)
        sizes = {ROW: new, OTHER: 11}
        worker.extend({row: sizes[row] for row in order}, {ROW: scores}, padding=3 * (n % 2))
    torch.testing.assert_close(scores.result(LENGTH), defined(worker), rtol=1e-5, atol=1e-9)


def test_without_rotations_scores_are_the_same():
    """Keys in the rotated basis give the scores of plain keys, up to BF16's rounding."""
    worker = Worker(recent_pages=12)
    scores = worker.collected()
    worker.extend({ROW: LENGTH}, {ROW: scores})
    for layer in range(len(LAYERS)):
        q, k, _ = activations(LAYERS[layer].layer_id, ROW, 0, LENGTH)
        q, k = q.unflatten(1, (-1, D)), k.unflatten(1, (-1, D))
        want = key_scores(q[PAST:], k[:PAST], D**-0.5)
        torch.testing.assert_close(scores.values[layer], want, rtol=0.05, atol=1e-4)


def test_stored_keys_are_scored_as_attention_reads_them():
    """Scores use the keys that attention reads: BF16 sinks, 2-bit records, the window, and the new tokens."""
    worker = Worker(recent_pages=1)
    scores = worker.collected()
    pool, stored = worker.pool, 5 * P + 30
    worker.extend({ROW: stored})
    worker.extend({ROW: LENGTH - stored}, {ROW: scores})
    assert P < int(pool.row_history_end[ROW]) < stored
    for layer in range(len(LAYERS)):
        q, k = rotated(worker, layer, 0, LENGTH)
        keys, _ = oracle.stored(pool, layer, ROW, stored)
        past = torch.cat([keys.transpose(0, 1).bfloat16(), k[stored:PAST]])
        want = key_scores(q[PAST:], past, D**-0.5)
        torch.testing.assert_close(scores.result(LENGTH)[layer], want, rtol=1e-5, atol=1e-9)
        assert not torch.allclose(want, key_scores(q[PAST:], k[:PAST], D**-0.5), rtol=1e-2), "nothing was quantized"


def test_batches_without_scored_requests_are_as_before(monkeypatch):
    """Scoring changes no output, and batches without scored requests never call it."""
    plain, scored = Worker(2), Worker(2)
    monkeypatch.setattr(plain.ops, "score_keys", None)  # a call would raise
    scores = scored.collected()
    for new in ({ROW: 4 * P, OTHER: 5}, {ROW: LENGTH - 4 * P}, {OTHER: 300}):
        want = plain.extend(new)
        assert torch.equal(scored.extend(new, {ROW: scores} if ROW in new else None), want)
        assert plain.backend.scored == []
    assert scored.backend.scored == [], "the last batch's are kept"
    assert torch.equal(plain.pool.records[1], scored.pool.records[1])


# -- from the scheduler's requests to the batch ------------------------------------------------------


@pytest.fixture
def current(monkeypatch):
    found = SimpleNamespace(scores={}, pages=Worker(2).pool)
    monkeypatch.setattr(runtime, "_current", found)
    return found


def batch_of(*rids: str) -> ForwardBatch:
    """Returns a batch as SGLang passes it on: a copy of the one that it made."""
    none = torch.empty(0)
    return dataclasses.replace(ForwardBatch(None, len(rids), none, none, none, none, 0, rids=list(rids)))


def test_a_batch_is_asked_for_its_requests(current):
    first, second = scoring.collect("a", 100), scoring.collect("b", 64)
    assert first.values.shape == (len(LAYERS), KV_HEADS, 100)
    assert scoring.wanted(batch_of("x", "b", "a")) == {1: second, 2: first}
    assert scoring.wanted(batch_of("x", "y")) == {}
    assert scoring.wanted(dataclasses.replace(batch_of(), rids=None)) == {}, "padding alone"
    scoring.forget("b")
    scoring.forget("never was")
    assert scoring.wanted(batch_of("b", "a")) == {1: first}


def test_without_scored_requests_nothing_is_looked_at(current):
    assert scoring.wanted(None) == {}


def test_a_request_is_scored_once_at_a_time(current):
    scoring.collect("a", 100)
    with pytest.raises(KVQuantError, match="request a is being scored already. Forget"):
        scoring.collect("a", 100)
    scoring.forget("a")
    scoring.collect("a", 100)


def test_without_a_cache_nothing_happens(monkeypatch):
    monkeypatch.setattr(runtime, "_current", None)
    scoring.forget("a")
    assert scoring.wanted(None) == {}
