"""The tables of a CUDA graph hold the plan of every batch, and of its padding."""

from __future__ import annotations

import random

import numpy as np
import torch

from sglang_kvq.attention.planning.extend_costs import Geometry
from sglang_kvq.attention.planning.graph_tables import DequantizedTables, DirectTables
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.kernels.extend.extend_attention import Item, extend_launch
from sglang_kvq.kernels.extend.gather_pages import PageRead

REQUESTS = 32


def batch(rng: random.Random, tokens: int, longest: int) -> tuple[list[int], list[int]]:
    """Returns stored and new tokens of the requests of a batch that fits ``tokens``."""
    count = rng.randint(1, min(REQUESTS, tokens))
    ends = sorted([*rng.sample(range(1, tokens), count - 1), rng.randint(count, tokens) if count == 1 else tokens])
    new = np.diff([0, *ends]).tolist()
    return [rng.choice([0, 1, rng.randint(0, longest)]) for _ in new], new


def test_direct_tables_hold_every_batch():
    """Items of random batches fit the tables of a CUDA graph, and cover each row of new tokens and of padding."""
    rng = random.Random(5)
    for _ in range(300):
        group, tokens = rng.choice([1, 2, 4, 5, 8, 16]), rng.choice([4, 16, 64, 80, 512])
        geometry = Geometry(8 * group, 8, rng.choice([64, 128, 256]), rng.choice([16, 78, 132]))
        launch = extend_launch(geometry.head_dim)
        tables = DirectTables(tokens, 32, geometry, launch, torch.device("cpu"))
        stored, new = batch(rng, tokens, 200_000)
        tables.fill(torch.arange(1, len(new) + 1), stored, new)
        items = [Item(*item) for item in tables.plan.items.tolist()]
        seen = set()
        for item in items:
            rows = range(item.first_row, min(item.first_row + launch.rows, item.new * group))
            seen |= {(item.start * group + row, item.part) for row in rows}
            last = item.begin + (item.new - 1) * item.parts + item.part if item.parts > 1 else 0
            assert last < tables.plan.partials
        assert {row for row, _ in seen} == set(range(tokens * group)), "a result would keep its old value"
        assert tables.rows[: len(new)].tolist() == list(range(1, len(new) + 1))


def test_dequantized_tables_hold_every_batch():
    """Every key of a request, and of padding, is written once, to the rows that its queries see, in order."""
    rng = random.Random(6)
    for _ in range(200):
        tokens = rng.choice([256, 288, 512])
        tables = DequantizedTables(tokens, REQUESTS, torch.full((2, 40 * PAGE_SIZE + tokens, 1, 16), torch.nan))
        for _ in range(2):  # nothing of the first batch is left
            stored, new = [1], [1]
            while not any(stored) or not tables.hold(stored):
                stored, new = batch(rng, tokens, rng.choice([100, 2000]))
            tables.fill(torch.arange(len(new)), stored, new)
        rows: list[object] = [None] * tables.space.shape[1]
        for read in (PageRead(*x) for x in tables.pages.tolist()):
            for token in range(read.count):
                assert rows[read.first + token] is None
                rows[read.first + token] = read.request, read.index * PAGE_SIZE + token
        for token, position in enumerate(tables.positions.tolist()):
            assert rows[position] is None
            rows[position] = "new", token
        queries, keys = (bound.tolist() for bound in tables.bounds)
        assert queries[0] == keys[0] == 0 and queries[-1] == tokens and keys[-1] == sum(stored) + tokens
        prefixes = [*stored, *[0] * (len(queries) - 1 - len(new))]
        assert np.diff(queries)[: len(new)].tolist() == new
        for request, prefix in enumerate(prefixes):
            first, last = queries[request : request + 2]
            want = [(request, token) for token in range(prefix)] + [("new", token) for token in range(first, last)]
            assert rows[keys[request] : keys[request + 1]] == want
        behind = tables.space[:, sum(stored) + tokens :][:, :256]
        assert not behind.any(), "FlashAttention 3 multiplies values behind the last key by 0, but NaN stays NaN"
    assert not tables.hold([40 * PAGE_SIZE, 1])
