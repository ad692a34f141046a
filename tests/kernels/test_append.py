"""New keys and values behind stored ones in a workspace."""

from __future__ import annotations

import pytest
import torch

from sglang_kvq.kernels.extend.append_tokens import append_tokens
from tests.kernels.scene import DEVICE


@pytest.mark.parametrize("tokens", [0, 1, 31, 33, 100])
@pytest.mark.parametrize(("heads", "d"), [(2, 128), (1, 96), (3, 64)])
def test_rows_of_the_workspace_are_replaced(tokens, heads, d):
    """New values come from a slice of a projection's result, as SGLang gives them; other rows stay as they are."""
    draw = torch.Generator().manual_seed(tokens)
    stored = torch.randn(2, 150, heads, d, generator=draw).bfloat16().to(DEVICE)
    projected = torch.randn(tokens, 3 * heads * d, generator=draw).bfloat16().to(DEVICE)
    new = tuple(part.view(tokens, heads, d) for part in projected.split(heads * d, 1))[1:]
    positions = torch.randperm(150, generator=draw)[:tokens].to(DEVICE)
    expected = stored.clone()
    for x, y in zip(expected, new):
        x[positions] = y
    append_tokens((stored[0], stored[1]), positions.int(), new)
    assert torch.equal(stored, expected)
