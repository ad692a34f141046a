"""Prints the kernels that are compiled at startup and the ones that batches compile later, without a GPU.

test_compile_kernels.py runs this script. ``no_gpu`` compiles and launches nothing.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from sglang_kvq.attention import triton_ops
from sglang_kvq.attention.base import ExtendBatch, LayerRotations
from sglang_kvq.attention.compile_kernels import compile_kernels
from sglang_kvq.attention.drafts import DraftBatch, chain
from sglang_kvq.attention.fa3 import FlashAttention3
from sglang_kvq.attention.ragged import RaggedPrefill
from sglang_kvq.attention.scores.scoring import KeyScores, plan_scoring
from sglang_kvq.attention.triton_ops import TritonOps
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.shared.arena import Arena, padded
from sglang_kvq.cache.triton_tiers import TritonTierManager
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.planes import PlaneCode, PlaneFormat
from tests.kernels import no_gpu
from tests.kernels.no_gpu import compiled, forget

Q_HEADS, KV_HEADS, D, PAGES, ROWS, SMS = 8, 2, 128, 300, 40, 132
#: Lengths of stored and of new tokens, and numbers of requests.
PREFIXES, NEWS, COUNTS = [0, 1, P, 700, 5000, 18000], [1, 7, 40, 64, 100, 300, 1500], [1, 1, 2, 8, 34]
#: Some of SGLang's sizes of CUDA graphs, and the most requests of one that holds a whole prefill.
CAPTURED, REQUESTS = [2048, 512, 240, 64, 4], 32
#: Requests that decode together; the most is no power of two.
DECODED = [1300, 1025, 700, 512, 198, 128, 99, 96, 66, 24, 17, 3, 2, 1]
#: BF16 pages.
SLOTS = 12
#: Drafts of each request in a step that verifies some.
DRAFTS = 5
#: Bytes of shared memory of a kernel of which an SM holds so many programs.
ALL, FIVE, ONE = 0, 44 << 10, 180 << 10
#: Queries, keys and values, from which all batches take their own.
QKV = torch.zeros(20000, Q_HEADS + 2 * KV_HEADS, D, dtype=torch.bfloat16)
FORMATS = {
    "oscar": [PageFormat(D, D)] * 2,
    "two widths": [PlaneFormat(D, PlaneCode((4, 3, 1, 0)), PlaneCode((2, 1, 1, 0))), PageFormat(D, D)],
}


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, **how: Any) -> object:
    """Takes FlashAttention 3's place."""
    return (out, torch.zeros(q.shape[1], len(q))) if how.get("return_softmax_lse") else out


def make_ops(formats: list, *, library: bool, folded: bool, most: int = max(DECODED)) -> TritonOps:
    table = torch.zeros(ROWS, PAGES * P, dtype=torch.int32)
    page_bytes = padded(KV_HEADS * sum(f.record_bytes for f in formats))
    arena = Arena.smallest(page_bytes, 4 * KV_HEADS * P * D * len(formats), slots=SLOTS, pages=40)
    sizes = {"pages": arena.pages, "slots": arena.slots, "arena": arena}
    pool = PagePool.allocate(formats, kv_heads=KV_HEADS, req_to_token=table, **sizes)
    prefill = None
    if library:
        fa3 = FlashAttention3(attend, lambda *parts: None)
        prefill = RaggedPrefill(fa3, Q_HEADS, KV_HEADS, D, torch.device("cpu"), 64 * P)
    matrices = torch.eye(D).expand(len(formats), KV_HEADS, D, D).contiguous()
    rotations = LayerRotations(k=matrices, v=None if folded else matrices)
    return TritonOps(pool, rotations, Q_HEADS, most, prefill=prefill)


def run_layers(ops: TritonOps, batch: ExtendBatch, sinks: torch.Tensor | None) -> None:
    """Runs all layers for new tokens."""
    loc = batch.loc
    q, k, v = QKV[: len(loc)].split([Q_HEADS, KV_HEADS, KV_HEADS], 1)
    for layer in range(ops.pool.layers):
        if not any(batch.prefix_lens) and batch.tables is None:  # as the backend does without stored tokens
            ops.extend(layer, q, k, v, batch, 0.1, sinks)
            ops.keep_tokens(layer, loc, k, v)
            continue
        rotated = ops.rotate_and_keep(layer, loc, q, k, v)
        ops.rotate_output(layer, ops.extend(layer, *rotated, batch, 0.1, sinks))


def prefill(ops: TritonOps, lens: list[tuple[int, int]], sinks: torch.Tensor | None) -> None:
    """Runs a batch of requests with stored and new tokens."""
    prefixes, news = (list(x) for x in zip(*lens))
    loc = zeros(sum(news))
    run_layers(ops, ExtendBatch(torch.arange(1, len(news) + 1), prefixes, news, loc, loc[:0]), sinks)


def capture(ops: TritonOps, tokens: int, sinks: torch.Tensor | None) -> None:
    """Runs what SGLang and the plugin capture for a size of new prompts."""
    loc = zeros(tokens)
    run_layers(ops, ExtendBatch(loc[:1], [0], [tokens], loc, loc[:0]), sinks)
    if ops.in_graphs:
        bounds = zeros(REQUESTS + 2).int()
        run_layers(ops, ExtendBatch(loc[:1], [0], [tokens], loc, loc[:0], bounds=bounds), sinks)
    for tables in ops.graph_tables(tokens, REQUESTS):
        run_layers(ops, ExtendBatch(tables.rows, [0], [tokens], loc, loc[:0], tables=tables), sinks)
    for layer in range(ops.pool.layers):
        k, v = QKV[:tokens].split([Q_HEADS, KV_HEADS, KV_HEADS], 1)[1:]
        pages = zeros(-(-tokens // P))
        ops.quantize_tokens(layer, pages, pages, k, v)


def decode(ops: TritonOps, requests: int, sinks: torch.Tensor | None) -> None:
    """Runs a step of decoding."""
    rows = zeros(requests)
    ops.plan_attention(rows, rows + 1)
    q, k, v = QKV[:requests].split([Q_HEADS, KV_HEADS, KV_HEADS], 1)
    for layer in range(ops.pool.layers):
        rotated = ops.rotate_and_store(layer, rows, q, k, v)
        ops.rotate_output(layer, ops.decode(layer, rotated, rows, rows + 1, 0.1, sinks))


def verify(ops: TritonOps, requests: int, count: int, sinks: torch.Tensor | None) -> None:
    """Runs a step that verifies ``count`` drafts of each request."""
    rows = zeros(requests)
    drafts = DraftBatch(rows, rows + count, chain(count).repeat(requests, 1))  # strided as in ``SeenBuffers``
    ops.plan_drafts(drafts)
    q, k, v = QKV[: requests * count].split([Q_HEADS, KV_HEADS, KV_HEADS], 1)
    for layer in range(ops.pool.layers):
        rotated = ops.rotate_and_store(layer, zeros(requests * count), q, k, v)
        ops.verify(layer, rotated, drafts, 0.1, sinks)


def plan(tiers: TritonTierManager, draw: random.Random) -> None:
    """Plans batches; before, does what requests and the scheduler leave to do between two."""
    rows = torch.arange(1, 1 + draw.choice(COUNTS))
    lens = torch.full_like(rows, draw.choice([P, 3 * P]))
    some, events = torch.arange(1, 2 + draw.choice([1, 2, 3])), tiers.pending
    source, target = some[:-1], some[1:]
    whole = torch.arange(len(source) * P).expand(tiers.pool.layers, KV_HEADS, -1).contiguous()
    first_slot = tiers.pool.arena.first_slot(draw.choice([20, 30, 40]))
    for do in (
        lambda: events.allocate_pages(some),
        lambda: events.free_pages(some),
        lambda: events.copy_pages(source, target, source - 1),
        lambda: events.fold_pages(source, target, whole, source[:1] - 1),
        lambda: events.free_rows(rows.tolist()),
        lambda: events.move_boundary(first_slot),
    ):
        if draw.random() < 0.5:
            do()
    tiers.plan_extend(rows, lens - P, lens, int(lens.max()), some[: draw.choice([0, 1])])
    tiers.plan_decode(rows, lens + 1, int(lens.max()) + 1)
    tiers.record_pages(some)


def score(ops: TritonOps, draw: random.Random) -> None:
    """Scores stored and new keys by later tokens of a prompt."""
    stored, new = draw.choice([0, 40, 700, 5000]), draw.choice([130, 1500])
    loc = zeros(new)
    batch = ExtendBatch(loc[:1] + 1, [stored], [new], loc, loc[:0])
    scores = KeyScores(ops.pool.layers, KV_HEADS, stored + draw.choice([1, 65]), "cpu")
    q, k, _ = QKV[:new].split([Q_HEADS, KV_HEADS, KV_HEADS], 1)
    for part in plan_scoring(batch.prefix_lens, batch.new_lens, {0: scores}):
        for layer in range(ops.pool.layers):
            ops.score_keys(layer, q, k, batch, part, 0.1)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def check_programs(ops: TritonOps, drafts: int, expected: set[int]) -> None:
    """Checks the programs per SM of all plans, also once these are made for more requests."""
    for _ in range(2):
        plans = (*ops.plans, *ops._verifications[drafts].plans)
        assert {plan.launch.programs_per_sm for plan in plans} <= expected
        ops.reserve(ops.max_batch + 1)
        ops.reserve_drafts(ops.max_batch, drafts)


def main() -> None:
    no_gpu.install()
    triton_ops.INTERPRETED = True  # only lets the operations start without a GPU
    triton_ops.can_overlap = lambda device: True
    triton_ops.multiprocessors = lambda device: SMS
    for name, formats in FORMATS.items():
        for library in (True, False):
            for folded in (True, False):
                ops = make_ops(formats, library=library, folded=folded)
                kind = torch.bfloat16 if library is folded else None
                drafts = DRAFTS if folded else 1  # NGRAM may have 1, the last sampled token
                no_gpu.STATE.shared = ALL if library else FIVE
                compile_kernels(ops, drafts, [kind], scores=True)
                tiers = TritonTierManager(ops.pool, 1, 4, ops.quantize_slots, ops.restore_pages, 4, 2)
                tiers._compile()
                tiers.prepare_folds()
                print(f"{name}, at startup: {' '.join(compiled)}")
                compiled.clear()
                draw, sinks = random.Random(3), None if kind is None else torch.zeros(Q_HEADS, dtype=kind)
                for requests in DECODED:
                    decode(ops, requests, sinks)
                    verify(ops, requests, drafts, sinks)
                for n in range(90):
                    count = draw.choice(COUNTS)
                    lens = [(draw.choice(PREFIXES[: 1 + n % 6]), draw.choice(NEWS[: 1 + n % 7])) for _ in range(count)]
                    while sum(new for _, new in lens) > len(QKV):
                        lens.pop()
                    prefill(ops, lens, sinks)
                    plan(tiers, draw)
                    score(ops, draw)
                for tokens in CAPTURED:
                    capture(ops, tokens, sinks)
                print(f"{name}, later: {' '.join(compiled)}")
                check_programs(ops, drafts, {8, 12} if library else {5})
                forget()
    no_gpu.STATE.shared = ONE
    ops = make_ops(FORMATS["oscar"], library=False, folded=True, most=1)
    compile_kernels(ops)
    compiled.clear()
    decode(ops, 1, None)
    print(f"one request, later: {' '.join(compiled)}")


main()
