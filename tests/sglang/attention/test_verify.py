"""TARGET_VERIFY batches at the backend: accepted drafts give what decoding gives, whatever else was rejected."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from sglang_kvq.cache.integrity import check_integrity
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.sglang.attention.drafts import SeenBuffers
from tests.sglang.attention.test_padding import KV_HEADS, LAYER, PAGES, Q_HEADS, D, Worker, mode

PROMPT = {1: 150, 2: 70}


def activations(row: int, position: int, wrong: int = 0) -> list[torch.Tensor]:
    """Returns q, k and v of one token; ``wrong`` selects other values, for a rejected draft."""
    draw = torch.Generator().manual_seed(1000 * position + 10 * row + wrong)
    return [torch.randn(1, n * D, generator=draw).bfloat16() for n in (Q_HEADS, KV_HEADS, KV_HEADS)]


class Drafting(Worker):
    """Decodes and verifies tokens of both rows; ``host_lens``: whether SGLang gives the lengths on the host."""

    def __init__(self, recent_pages: int, host_lens: bool = True, branching: bool = False) -> None:
        super().__init__(recent_pages)
        self.host_lens = host_lens
        self.backend.seen = SeenBuffers(8, branching, torch.device("cpu"))
        self.extend(PROMPT, sum(PROMPT.values()), 0)

    def step(self) -> dict[int, torch.Tensor]:
        """Decodes a token of each row and returns the results by row."""
        new = [activations(row, n) for row, n in self.stored.items()]
        self.activations = lambda tokens, seed: [torch.cat(x) for x in zip(*new)]
        out = self.decode(2, 0)
        return dict(zip(self.stored, out))

    def verify(
        self,
        count: int,
        right: dict[int, int],
        pad_rows: int = 0,
        pad_tokens: int = 0,
        masks: torch.Tensor | None = None,
    ) -> dict[int, torch.Tensor]:
        """Verifies drafts; each row's first ``right`` drafts are what decoding gives, and are accepted.

        Returns:
            each row's results, ``[count, ...]``.
        """
        new = [
            activations(row, n + t, 0 if t < right[row] else 1 + t)
            for row, n in self.stored.items()
            for t in range(count)
        ]
        rows, lens = list(self.stored), list(self.stored.values())
        loc = [int(self.pool.req_to_token[r, n + t]) for r, n in zip(rows, lens) for t in range(count)]
        more = pad_rows * count + pad_tokens
        q, k, v = (torch.cat([*x, x[0].new_full((more, x[0].shape[1]), 99.0)]) for x in zip(*new))
        stored = torch.tensor(lens + [1] * pad_rows)
        batch = SimpleNamespace(
            forward_mode=mode("verify"),
            spec_info=SimpleNamespace(draft_token_num=count, custom_mask=masks),
            req_pool_indices=torch.tensor(rows + [0] * pad_rows),
            seq_lens=stored,
            seq_lens_cpu=stored if self.host_lens else None,
            out_cache_loc=torch.tensor(loc + [0] * more),
        )
        self.backend.init_forward_metadata_out_graph(batch)
        out = self.backend.forward_extend(q, k, v, LAYER, batch)
        assert len(out) == len(q) and not out[len(rows) * count + pad_rows * count :].any()
        for row in rows:
            self.stored[row] += right[row]
        return {row: out[i * count : (i + 1) * count] for i, row in enumerate(rows)}


@pytest.mark.parametrize(
    ("count", "host_lens"), [(2, False), (4, True), (7, False)], ids=["2", "4, lengths on the host", "7"]
)
def test_accepted_drafts_are_what_decoding_gives(count, host_lens):
    """With everything in BF16, across pages and with padding, results agree to rounding and stored values exactly."""
    rng = random.Random(count)
    plain, drafting = Drafting(12), Drafting(12, host_lens)
    want: dict[tuple[int, int], torch.Tensor] = {}
    for _ in range(90):
        lens = dict(plain.stored)
        want |= {(row, lens[row]): out for row, out in plain.step().items()}
    for n in range(90 // count):
        right = {row: rng.randint(1, count) for row in drafting.stored}
        before = dict(drafting.stored)
        pad = (2, 3) if n % 3 == 2 else (0, 0)
        for row, out in drafting.verify(count, right, *pad).items():
            for t in range(right[row]):
                torch.testing.assert_close(out[t], want[row, before[row] + t], rtol=2e-2, atol=2e-2)
    check_integrity(drafting.tiers)
    for row, length in drafting.stored.items():
        loc = drafting.pool.req_to_token[row, :length].long()
        got, stored = (
            w.pool.bf16_pages[0, w.pool.page_slot[loc // P].long(), :, :, loc % P] for w in (drafting, plain)
        )
        assert torch.equal(got, stored), f"row {row}: a rejected draft is stored"


@pytest.mark.parametrize("count", [5, 64])
def test_records_are_those_of_decoding(count):
    """Records hold committed tokens only, whenever their pages were quantized."""
    rng = random.Random(count)
    plain, drafting = Drafting(1), Drafting(1, host_lens=False)
    for _ in range(130):
        plain.step()
    while max(drafting.stored.values()) < max(plain.stored.values()):
        drafting.verify(count, {row: rng.randint(1, max(count // 4, 2)) for row in drafting.stored})
    both = plain.tiers.page_valid & drafting.tiers.page_valid
    assert int(both[1:].sum()) >= 2
    assert torch.equal(plain.pool.records[0][both], drafting.pool.records[0][both])
    for worker in (plain, drafting):
        check_integrity(worker.tiers)
    for row, length in drafting.stored.items():
        end = int(drafting.pool.row_history_end[row])
        assert P < end <= length, "the history has tokens that are not committed"


def test_branches_do_not_see_each_other():
    """Two guesses for one position each give the result that they would give alone."""
    workers = [Drafting(12, branching=True) for _ in range(3)]
    chain = torch.ones(2, 2).tril().bool()
    fork = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    right = dict.fromkeys(PROMPT, 1)
    first = workers[0].verify(2, right, masks=chain.repeat(2, 1, 1).flatten())
    both = workers[1].verify(3, right, masks=fork.repeat(2, 1, 1).flatten())
    straight = workers[2].verify(3, right, masks=torch.ones(3, 3).tril().bool().repeat(2, 1, 1).flatten())
    for row in PROMPT:
        torch.testing.assert_close(both[row][:2], first[row], rtol=2e-2, atol=2e-2)
        assert not torch.equal(both[row][2], straight[row][2]), "the third sees the second"
        assert torch.equal(both[row][:2], straight[row][:2])


def test_graphs_of_verification_are_reserved():
    worker, reserved = Drafting(2), []
    worker.backend.ops.reserve = reserved.append
    worker.backend.ops.reserve_drafts = lambda *sizes: reserved.append(sizes)
    worker.backend.init_cuda_graph_state(8, 8 * 4)
    assert reserved == [8, (8, 4)]
    assert PAGES >= 8
