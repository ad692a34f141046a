"""Decode batches that take turns, as micro-batches of pipeline stages do, answer as if each ran alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_kvq.cache.integrity import check_integrity
from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.prefix import selection
from tests.sglang.attention.test_mixed_batches import decode_row, worker


@pytest.mark.parametrize("later", [0, 1, 2, 64])
def test_batches_that_take_turns_answer_as_alone(later):
    """With ``later`` = 1 the second batch could be mistaken for the next step of the first, by its length."""
    lens = {1: 300, 2: 300 + later}
    both, alone = worker(False), {row: worker(False) for row in lens}
    for row, length in lens.items():
        for each in (both, alone[row]):
            each.extend({row: length}, length, row)
    for step in range(100):
        for row in lens:
            qkv = both.activations(1, 1000 * row + step)
            assert torch.equal(decode_row(both, row, qkv), decode_row(alone[row], row, qkv)), (row, step)
    check_integrity(both.tiers)
    assert int(both.tiers.errors) == 0


def test_tiers_know_whose_batch_runs(monkeypatch):
    """SGLang's view of a batch in a CUDA graph has no ids, so the tiers get them when SGLang builds the batch."""
    each = worker(False)
    monkeypatch.setattr(runtime, "tiers", lambda: each.tiers)
    for ids, known in ((["a", "b"], ("a", "b")), (["b"], ("b",)), (None, ())):
        batch = SimpleNamespace(rids=ids)
        assert selection.after_new_batch(batch, type(batch), SimpleNamespace()) is batch
        assert each.tiers.requests == known
