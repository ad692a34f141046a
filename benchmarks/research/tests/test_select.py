"""The highest scores equal those found by a slow search."""

from __future__ import annotations

import torch

from benchmarks.research.episodes.select import pin, top_of_heads, top_of_layer

SCORES = torch.rand(3, 2, 40, generator=torch.Generator().manual_seed(0))


def test_top_of_heads() -> None:
    found = top_of_heads(SCORES, 7)
    for row in range(3):
        for head in range(2):
            order = sorted(range(40), key=lambda t, s=SCORES[row, head]: -s[t])
            assert found[row, head].tolist() == sorted(order[:7])
    assert top_of_heads(SCORES, 99).shape == (3, 2, 40)


def test_top_of_layer_shares_among_heads() -> None:
    lopsided = SCORES * torch.tensor([1.0, 0.4])[None, :, None]
    index, valid = top_of_layer(lopsided, 7)
    assert valid.sum((1, 2)).tolist() == [14] * 3
    assert index.shape == valid.shape and index.shape[2] == int(valid.sum(-1).max())
    for row in range(3):
        order = sorted(((head, t) for head in range(2) for t in range(40)), key=lambda at, s=lopsided[row]: -s[at])
        found = {(head, int(t)) for head in range(2) for t in index[row, head][valid[row, head]]}
        assert found == set(order[:14])
    assert (valid.sum(-1)[:, 0] > valid.sum(-1)[:, 1]).all()


def test_pinned_come_first_whatever_their_scores() -> None:
    pinned = torch.arange(40) < 5
    assert top_of_heads(pin(-SCORES, pinned), 5).tolist() == [[[0, 1, 2, 3, 4]] * 2] * 3
    index, valid = top_of_layer(pin(-SCORES, pinned), 6)
    assert all(set(range(5)) <= set(index[r, h][valid[r, h]].tolist()) for r in range(3) for h in range(2))
