"""Batches of ``--enable-mixed-chunk``, prefills before decoding requests, answer like two separate batches."""

from __future__ import annotations

import pytest
import torch

from sglang_kvq.attention.scores.scoring import KeyScores
from sglang_kvq.cache.integrity import check_integrity
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.sglang.attention import backend as backends
from sglang_kvq.sglang.attention import scoring
from tests.sglang.attention.test_padding import StrictOps, Worker

#: Stored lengths before a mixed batch: of the request that continues its prompt, and of the one that decodes. The
#: decoded token completes a page, begins one, or does neither. In the first pair the decoding request has no history
#: yet.
LENGTHS = [(300, 63), (64, 511), (130, 512), (0, 700), (333, 320)]


class CountingOps(StrictOps):
    """Records which rows are extended, planned and decoded."""

    def __init__(self, *args):
        super().__init__(*args)
        self.extended, self.decoded, self.planned = [], [], []

    def extend(self, layer, q, k, v, batch, scale, sinks=None, out=None):
        self.extended.append((batch.rows.tolist(), batch.prefix_lens, batch.new_lens))
        return super().extend(layer, q, k, v, batch, scale, sinks, out)

    def rotate_and_store(self, layer, loc, q, k, v):
        assert loc.data_ptr() % 16 == 0, "another kernel than that of plain steps would be compiled"
        return super().rotate_and_store(layer, loc, q, k, v)

    def plan_attention(self, rows, seq_lens):
        assert rows.data_ptr() % 16 == seq_lens.data_ptr() % 16 == 0, "another kernel than that of plain steps"
        self.planned.append((rows.tolist(), seq_lens.tolist()))

    def decode(self, layer, q, rows, seq_lens, scale, sinks=None):
        self.decoded.append((rows.tolist(), seq_lens.tolist()))
        return super().decode(layer, q, rows, seq_lens, scale, sinks)


def worker(mixed: bool) -> Worker:
    made = Worker()
    made.backend.ops = CountingOps(made.pool, made.backend.ops.rotations)
    made.backend.mixed = mixed
    return made


def decode_row(each: Worker, row: int, qkv: list[torch.Tensor]) -> torch.Tensor:
    each.stored[row] += 1
    return each.decode_rows([row], qkv)


def extend_row(each: Worker, row: int, new: int, qkv: list[torch.Tensor]) -> torch.Tensor:
    each.activations = lambda tokens, seed: qkv
    return each.extend({row: new}, new, 0)


@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize(("prompt", "answer"), LENGTHS)
def test_a_mixed_batch_computes_what_two_batches_do(prompt, answer, padding):
    mixed, apart = worker(True), worker(False)
    for each in (mixed, apart):
        if prompt:
            each.extend({1: prompt}, prompt, 1)
        each.extend({2: answer}, answer, 2)
    q, k, v = Worker.activations(apart, 201, 3)
    expected = torch.cat(
        [
            extend_row(apart, 1, 200, [x[:200] for x in (q, k, v)]),
            decode_row(apart, 2, [x[200:] for x in (q, k, v)]),
        ]
    )
    mixed.backend.ops.extended.clear()
    got = mixed.extend({1: 200, 2: 1}, 201 + padding, 3)
    assert torch.equal(got[:201], expected) and not got[201:].any()
    ops = mixed.backend.ops
    assert ops.extended == [([1], [prompt], [200])], "a decoding request's history is dequantized"
    assert ops.decoded == ops.planned == [([2], [answer + 1])]
    for row in (1, 2):
        stored = [each.backend.ops._stored(0, row, each.stored[row]) for each in (mixed, apart)]
        assert all(torch.equal(a, b) for a, b in zip(*stored))
    check_integrity(mixed.tiers)
    assert int(mixed.tiers.errors) == 0


def test_answers_go_on_in_mixed_and_other_batches():
    """An answer of two hundred steps, every third in a mixed batch, equals that of a request that decodes alone."""
    mixed, alone = worker(True), worker(True)
    for each in (mixed, alone):
        each.extend({2: 100}, 100, 2)
    for step in range(200):
        qkv = Worker.activations(alone, 1, 100 + step)
        expected = decode_row(alone, 2, qkv)
        if step % 3 or mixed.stored[1] > 800:
            got = decode_row(mixed, 2, qkv)
        else:
            more = Worker.activations(mixed, 13, step)
            mixed.activations = lambda tokens, seed, more=more, qkv=qkv: [torch.cat(x) for x in zip(more, qkv)]
            got = mixed.extend({1: 13, 2: 1}, 14, 0)[13:]
        assert torch.equal(got, expected), step
    assert sum(rows == [2] for rows, *_ in mixed.backend.ops.decoded) == 200
    check_integrity(mixed.tiers)


def test_a_batch_of_decoding_requests_alone_extends_nothing():
    mixed = worker(True)
    mixed.extend({1: 300, 2: 201}, 501, 0)
    mixed.backend.ops.extended.clear()
    mixed.extend({1: 1, 2: 1}, 2, 1)
    assert not mixed.backend.ops.extended and mixed.backend.ops.decoded == [([1, 2], [301, 202])]


def test_without_mixed_chunks_every_request_of_a_prefill_extends():
    plain = worker(False)
    plain.extend({1: 300, 2: 201}, 501, 0)
    plain.backend.ops.extended.clear()
    plain.extend({1: 64, 2: 1}, 65, 1)
    assert plain.backend.ops.extended == [([1, 2], [300, 201], [64, 1])] and not plain.backend.ops.decoded


@pytest.mark.parametrize(
    ("prefix", "new", "count"),
    [
        ([0, 300], [200, 1], 1),
        ([0, 64, 65], [200, 1, 1], 2),
        ([64, 0], [1, 1], 0),  # a prompt of one token has nothing stored to read
        ([64, 64], [1, 2], 0),
        ([64, 64, 64], [1, 5, 1], 1),
        ([], [], 0),
    ],
)
def test_last_requests_of_one_token_decode(prefix, new, count):
    assert backends.decoding_requests(prefix, new) == count


def test_a_scored_request_is_a_prefill_to_its_last_token(monkeypatch):
    """A scored request remains a prefill even in a chunk of one token, because that token's query scores."""
    mixed, scores = worker(True), KeyScores(1, 2, 100, torch.device("cpu"))
    mixed.extend({1: 130, 2: 201}, 331, 0)
    scores.add(100, 130)
    monkeypatch.setattr(scoring, "wanted", lambda batch: {0: scores})
    mixed.extend({1: 1, 2: 1}, 2, 1)
    assert scores.result(131).any()
    assert mixed.backend.ops.decoded == [([2], [202])]


def test_rows_hold_the_page_that_a_decoding_request_begins():
    mixed = worker(True)
    mixed.extend({2: 4 * P}, 4 * P, 0)
    mixed.extend({1: 10, 2: 1}, 11, 1)
    assert int(mixed.pool.row_pages[2, 4]) == int(mixed.pool.req_to_token[2, 4 * P]) // P
