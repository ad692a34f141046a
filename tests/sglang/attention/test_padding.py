"""Batches that SGLang pads (data-parallel attention, all-to-all MoE): padding reads, writes and changes nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.attention.reference import ReferenceOps
from sglang_kvq.cache.integrity import check_integrity
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.formats.page import PageFormat
from tests.sglang.attention.graph_views import decode_view

Q_HEADS, KV_HEADS, D, ROWS, PAGES = 4, 2, 64, 6, 30
LAYER = SimpleNamespace(head_dim=D, layer_id=0, scaling=D**-0.5, k_scale=None, v_scale=None)


class StrictOps(ReferenceOps):
    """Rejects input rows that belong to no request, for which kernels would read their plans out of bounds."""

    def extend(self, layer, q, k, v, batch, scale, sinks=None, out=None):
        assert len(q) == len(k) == len(v) == len(batch.loc) == sum(batch.new_lens)
        return super().extend(layer, q, k, v, batch, scale, sinks, out)


def mode(name: str) -> SimpleNamespace:
    return SimpleNamespace(
        is_idle=lambda: False, is_decode=lambda: name == "decode", is_target_verify=lambda: name == "verify"
    )


class Worker:
    """A backend over a small pool, whose rows hold pages 1, 2, ... in order."""

    def __init__(self, recent_pages: int = 2) -> None:
        from sglang_kvq.sglang.attention.backend import KVQuantBackend

        table = torch.zeros(ROWS, PAGES // 2 * P, dtype=torch.int32)
        for row in (1, 2):
            table[row] = (row - 1) * (PAGES // 2) * P + P + torch.arange(PAGES // 2 * P)
        self.pool = PagePool.allocate([PageFormat(D, D)], kv_heads=KV_HEADS, pages=PAGES, slots=20, req_to_token=table)
        ops = StrictOps(self.pool, LayerRotations())
        self.tiers = TierManager(self.pool, 1, recent_pages, ops.quantize_slots)
        self.backend = KVQuantBackend(ops, self.tiers, [0])
        self.stored = {1: 0, 2: 0}

    def activations(self, tokens: int, seed: int) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(seed)
        return [torch.randn(tokens, n * D, generator=draw).bfloat16() for n in (Q_HEADS, KV_HEADS, KV_HEADS)]

    def extend(
        self, new: dict[int, int], pad_to: int, seed: int, destination: torch.Tensor | None = None
    ) -> torch.Tensor:
        prefix = [self.stored[row] for row in new]
        tokens = sum(new.values())
        loc = torch.cat([self.pool.req_to_token[row, p : p + n] for (row, n), p in zip(new.items(), prefix)])
        q, k, v = (
            torch.cat([x, x.new_full((pad_to - tokens, x.shape[1]), 99.0)]) for x in self.activations(tokens, seed)
        )
        batch = SimpleNamespace(
            forward_mode=mode("extend"),
            req_pool_indices=torch.tensor(list(new)),
            extend_prefix_lens_cpu=prefix,
            extend_seq_lens_cpu=list(new.values()),
            out_cache_loc=torch.cat([loc, loc.new_zeros(pad_to - tokens)]),
            _attn_output=destination,
        )
        for row, n in new.items():
            self.stored[row] += n
        self.backend.init_forward_metadata_out_graph(batch)
        return self.backend.forward_extend(q, k, v, LAYER, batch)

    def decode(self, pad_to: int, seed: int) -> torch.Tensor:
        for row in self.stored:
            self.stored[row] += 1
        rows = list(self.stored)
        more = pad_to - len(rows)
        q, k, v = (torch.cat([x, x.new_full((more, x.shape[1]), 99.0)]) for x in self.activations(len(rows), seed))
        return self.decode_rows(rows, [q, k, v], more)

    def decode_rows(self, rows: list[int], qkv: list[torch.Tensor], padding: int = 0) -> torch.Tensor:
        """Decodes the last stored token of these rows in a CUDA graph with room for more."""
        lens = [self.stored[row] for row in rows]
        loc = [int(self.pool.req_to_token[row, length - 1]) for row, length in zip(rows, lens)]
        batch = decode_view(rows, lens, torch.tensor(loc + [0] * padding), padding)
        self.tiers.requests = tuple(f"row {row}" for row in rows)
        self.backend.init_forward_metadata_out_graph(batch)
        return self.backend.forward_decode(*qkv, LAYER, batch)


@pytest.mark.parametrize("align", [4, 64])
def test_padded_batches_answer_like_those_that_are_not(align):
    plain, padded = Worker(), Worker()
    up = lambda n: -(-n // align) * align  # noqa: E731
    for seed, new in enumerate(({1: 300, 2: 201}, {1: 5}, {1: 130, 2: 1}, {2: 33})):
        tokens = sum(new.values())
        want, got = plain.extend(new, tokens, seed), padded.extend(new, up(tokens), seed)
        assert len(got) == up(tokens) and torch.equal(got[:tokens], want)
        assert not got[tokens:].any(), "padding has an answer, or none was written"
    for seed in range(12):
        assert torch.equal(padded.decode(up(2), seed)[:2], plain.decode(2, seed))
    for worker in (plain, padded):
        check_integrity(worker.tiers)
        assert not (worker.pool.bf16_pages[:, 1:] == 99.0).any()


def rotated_worker() -> Worker:
    made = Worker()
    turn = torch.linalg.qr(torch.randn(1, 1, D, D))[0]
    made.backend.ops.rotations = LayerRotations(k=turn, v=turn)
    return made


@pytest.mark.parametrize("rotated", [False, True])
def test_a_prefill_writes_into_the_buffer_of_its_graph(rotated):
    """Results are written to the graph's buffer; SGLang copies a result that was rotated back."""
    torch.manual_seed(0)
    plain = rotated_worker() if rotated else Worker()
    graph = Worker()
    graph.backend.ops.rotations = plain.backend.ops.rotations
    for step, new in enumerate(({1: 300, 2: 201}, {1: 100, 2: 90})):
        tokens = sum(new.values())
        want = plain.extend(new, tokens, step)
        buffer = torch.full((tokens, Q_HEADS * D), 7.0, dtype=torch.bfloat16)
        got = graph.extend(new, tokens, step, buffer)
        copied = rotated and step > 0
        assert torch.equal(got, want) and (got.data_ptr() == buffer.data_ptr()) == (not copied)
        assert copied or torch.equal(buffer, want)


def test_without_a_prefix_a_rotated_cache_answers_like_bf16():
    """The first chunk reads nothing from the cache, so it is not rotated; the next one reads what was stored."""
    torch.manual_seed(0)
    rotated, plain = rotated_worker(), Worker()
    first, second = ([each.extend(new, 501, 0) for each in (rotated, plain)] for new in ({1: 300, 2: 201}, {1: 501}))
    assert torch.equal(*first)
    error = (second[0].float() - second[1].float()).norm() / second[1].float().norm()
    assert 0 < error < 0.5, "both caches quantize, in different bases"


def test_a_batch_of_padding_alone_changes_nothing():
    """An idle data-parallel rank runs such a batch while another rank prefills."""
    worker = Worker()
    worker.extend({1: 300, 2: 201}, 501, 0)
    before = worker.tiers.counts(), worker.pool.records[0][1:].clone()
    batch = SimpleNamespace(
        forward_mode=mode("extend"),
        req_pool_indices=torch.tensor([0]),
        extend_prefix_lens_cpu=[0],
        extend_seq_lens_cpu=[512],
        out_cache_loc=torch.zeros(512, dtype=torch.int64),
    )
    worker.backend.init_forward_metadata_out_graph(batch)
    worker.backend.forward_extend(*worker.activations(512, 1), LAYER, batch)
    assert worker.tiers.counts() == before[0] and torch.equal(worker.pool.records[0][1:], before[1])
    assert not worker.pool.row_pages[0].any()
    check_integrity(worker.tiers)


@pytest.mark.parametrize("requests", [1, 3])
def test_a_capture_of_a_prefill_graph_changes_nothing(requests):
    """SGLang captures with made-up requests in rows 0, 1, 2, …; here rows 1 and 2 belong to real requests."""
    from sglang_kvq.sglang.attention.backend import around_capture_plan

    worker = Worker()
    worker.extend({1: 300, 2: 201}, 501, 0)
    before, records = worker.tiers.counts(), worker.pool.records[0][1:].clone()
    pages, lens = worker.pool.row_pages.clone(), worker.tiers.row_len.clone()
    each = 512 // requests
    batch = SimpleNamespace(
        forward_mode=mode("extend"),
        req_pool_indices=torch.arange(requests),
        extend_prefix_lens_cpu=[0] * requests,
        extend_seq_lens_cpu=[each] * requests,
        out_cache_loc=torch.zeros(each * requests, dtype=torch.int64),
    )
    runner = SimpleNamespace(model_runner=SimpleNamespace(is_draft_worker=False))
    plan = lambda self, batch, key: worker.backend.init_forward_metadata(batch)  # noqa: E731
    around_capture_plan(plan, runner, batch, shape_key=512)
    worker.backend.forward_extend(*worker.activations(each * requests, 1), LAYER, batch)
    assert batch.req_pool_indices.tolist() == list(range(requests))  # graphs read the batch, so it stays as it is
    assert worker.tiers.counts() == before and torch.equal(worker.pool.records[0][1:], records)
    assert torch.equal(worker.pool.row_pages, pages) and torch.equal(worker.tiers.row_len, lens)
    check_integrity(worker.tiers)


def test_the_capture_of_a_draft_model_is_sglangs_own():
    from sglang_kvq.sglang.attention.backend import around_capture_plan

    batch, seen = SimpleNamespace(req_pool_indices=torch.arange(2)), []
    runner = SimpleNamespace(model_runner=SimpleNamespace(is_draft_worker=True))
    around_capture_plan(lambda self, given, key: seen.append(given), runner, batch, shape_key=512)
    assert seen == [batch]


def test_graphs_reserve_the_batches_that_they_pad_to():
    """For five running requests and an attention TP of four, graphs are captured for eight rows."""
    worker, reserved = Worker(), []
    worker.backend.ops.reserve = reserved.append
    worker.backend.init_cuda_graph_state(8, 8)
    assert reserved == [8]
