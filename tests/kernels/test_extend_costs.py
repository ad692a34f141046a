"""The model of what extends take: it finds the better way wherever both were measured, and goes on sensibly from there."""

from __future__ import annotations

import pytest

from sglang_kvq.attention.extend_costs import Attention, pages_us, workspace_us

QWEN = Attention(32, 8, 128, 132)
CAPACITY = 65536
#: Requests, new tokens of each, stored prefix; microseconds on an H200 of reading pages and of a workspace of 66K tokens.
MEASURED = [
    (1, 16, 32768, 52.4, 410.8), (1, 64, 32768, 122.2, 406.1), (1, 128, 8192, 73.7, 116.1), (1, 256, 32768, 412.9, 413.3),
    (1, 512, 8192, 243.8, 130.1), (1, 128, 131072, 786.7, 1557.3), (4, 16, 8192, 53.4, 155.9), (4, 64, 32768, 413.7, 581.9),
    (4, 128, 32768, 805.7, 599.2), (4, 512, 8192, 910.7, 505.0), (8, 16, 2048, 41.0, 96.3), (8, 64, 8192, 243.9, 309.6),
    (8, 128, 8192, 460.2, 314.4), (8, 256, 8192, 893.5, 548.3), (16, 32, 8192, 244.9, 695.6), (16, 128, 32768, 3188.4, 2770.9),
    (32, 32, 8192, 465.8, 1502.5), (32, 64, 2048, 306.6, 355.1), (64, 16, 8192, 474.0, 2719.7), (64, 128, 2048, 1153.6, 774.6),
]  # fmt: skip


def modelled(requests: int, new: int, prefix: int, attention: Attention = QWEN) -> tuple[float, float]:
    lens = [prefix] * requests, [new] * requests
    return pages_us(*lens, attention), workspace_us(*lens, attention, CAPACITY)


@pytest.mark.parametrize("requests,new,prefix,pages,workspace", MEASURED)
def test_the_way_it_chooses_is_within_a_few_percent_of_the_better(requests, new, prefix, pages, workspace):
    ours, other = modelled(requests, new, prefix)
    chosen = pages if ours <= other else workspace
    assert chosen <= 1.03 * min(pages, workspace), (ours, other)


@pytest.mark.parametrize("requests,new,prefix,pages,workspace", [m for m in MEASURED if m[1] >= 64])
def test_it_predicts_what_was_measured(requests, new, prefix, pages, workspace):
    for got, want in zip(modelled(requests, new, prefix), (pages, workspace)):
        assert 0.75 * want < got < 1.25 * want


def test_more_of_anything_takes_longer():
    for way in range(2):
        for lens in ((1, 64, 8192), (8, 64, 8192), (64, 16, 2048)):
            base = modelled(*lens)[way]
            for larger in ((lens[0] * 2, *lens[1:]), (lens[0], lens[1] * 4, lens[2]), (*lens[:2], lens[2] * 4)):
                assert modelled(*larger)[way] > base, (way, lens, larger)


def test_requests_of_unequal_length():
    """One long conversation beside many short ones costs at least what it costs alone."""
    prefix, new = [131072, *[2048] * 15], [128, *[16] * 15]
    assert pages_us(prefix, new, QWEN) > pages_us(prefix[:1], new[:1], QWEN)
    assert workspace_us(prefix, new, QWEN, CAPACITY) > workspace_us(prefix[:1], new[:1], QWEN, CAPACITY)
    assert pages_us([0], [0], QWEN) < 20 and workspace_us([0], [0], QWEN, CAPACITY) < 20


@pytest.mark.parametrize("heads", [(8, 8, 64), (16, 1, 128), (12, 1, 128), (64, 8, 64), (16, 4, 256)])
def test_a_few_tokens_after_a_long_prefix_are_read_from_the_pages_whatever_the_heads(heads):
    attention = Attention(*heads, 132)
    assert modelled(1, 4, 131072, attention)[0] < modelled(1, 4, 131072, attention)[1]
