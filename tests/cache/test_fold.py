"""Folds copy the codes, scales and gains of chosen tokens to new pages unchanged, in every layout."""

from __future__ import annotations

import pytest
import torch

from sglang_kvq.cache.fold import check_moves, fold_pages
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.constants import HEAD_DIMS
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.code import INT2, CodeFormat
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.planes import PlaneCode, PlaneFormat
from sglang_kvq.formats.record import RecordFormat
from sglang_kvq.methods import METHOD_NAMES, get_method
from tests.pairs import each

HEADS = 2
CENTRED = PageFormat(64, 64, k=CodeFormat(4, centred=True))
CHANNEL = PageFormat(64, 64, k=CodeFormat(axis="channel"))


def formats_of(head_dim: int) -> dict[str, RecordFormat]:
    """Returns formats with every width and statistic, small groups, and planes with every kind of cell."""
    group = min(head_dim, 128)
    sphere, moments = CodeFormat(3, "sphere", "norm"), CodeFormat(4, "lloyd-max", "moments")
    return {
        "2-2": PageFormat(head_dim, group, 0.96, 0.92),
        "2-3": PageFormat(head_dim, group, v=CodeFormat(3)),
        "3-4": PageFormat(head_dim, group, k=CodeFormat(3), v=CodeFormat(4)),
        "4-2-g32": PageFormat(head_dim, 32, k=CodeFormat(4)),
        "norm-moments": PageFormat(head_dim, 32, k=sphere, v=moments),
        "moments-norm": PageFormat(head_dim, 32, k=moments, v=sphere),
        "4310-3221": PlaneFormat(head_dim, PlaneCode((4, 3, 1, 0)), PlaneCode((3, 2, 2, 1))),
        "6532-5443": PlaneFormat(head_dim, PlaneCode((6, 5, 3, 2)), PlaneCode((5, 4, 4, 3))),
        "5443-2110": PlaneFormat(head_dim, PlaneCode((5, 4, 4, 3)), PlaneCode((2, 1, 1, 0))),
        "6420-4310": PlaneFormat(head_dim, PlaneCode((6, 4, 2, 0)), PlaneCode((4, 3, 1, 0))),
    }


def heavy(*shape: int) -> torch.Tensor:
    """Returns BF16 rows of very different magnitudes, so that no two rows share a scale."""
    return (torch.randn(shape) * torch.randn(*shape[:-1], 1).exp()).bfloat16()


def pool_of(formats: list[RecordFormat], pages: int = 9) -> PagePool:
    return PagePool.allocate(
        formats, kv_heads=HEADS, pages=pages, slots=1, req_to_token=torch.zeros(1, P, dtype=torch.int32)
    )


def choose(layers: int, sources: int, targets: int) -> torch.Tensor:
    """Draws distinct tokens for each layer and head, in any order."""
    drawn = [torch.randperm(sources * P)[: targets * P] for _ in range(layers * HEADS)]
    return torch.stack(drawn).view(layers, HEADS, -1)


def rows(pages: torch.Tensor) -> torch.Tensor:
    """Reshapes ``[n, heads, P, D]`` to ``[heads, n P, D]``."""
    return pages.transpose(0, 1).flatten(1, 2)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@each(kind=formats_of(64).keys(), head_dim=HEAD_DIMS)
def test_tokens_and_back_is_every_bit_of_a_record(kind, head_dim):
    format = formats_of(head_dim)[kind]
    records = torch.randint(256, (3, HEADS, format.record_bytes), dtype=torch.uint8)
    parts = format.split_tokens(records)
    assert all(part.shape[:3] == (3, HEADS, P) and part.dtype == torch.uint8 for part in parts)
    assert torch.equal(format.join_tokens(parts), records)


@each(kind=formats_of(64).keys(), head_dim=HEAD_DIMS)
def test_moved_tokens_are_what_they_would_be_quantized_there(kind, head_dim):
    """Folding gives the same bytes as quantizing the chosen tokens directly; layers choose different tokens."""
    format = formats_of(head_dim)[kind]
    pool = pool_of([format] * 2)
    source, target = torch.tensor([7, 2, 9, 4]), torch.tensor([5, 1, 8])
    k, v = heavy(2, 4, HEADS, P, head_dim), heavy(2, 4, HEADS, P, head_dim)
    for layer in range(2):
        pool.records[layer][source] = format.quantize_pages(k[layer], v[layer])
    before = [records.clone() for records in pool.records]
    tokens = choose(2, 4, 3)
    fold_pages(pool, source, target, tokens)
    for layer in range(2):
        chosen = tokens[layer, :, :, None].expand(-1, -1, head_dim)
        taken = [rows(x[layer]).gather(1, chosen).unflatten(1, (-1, P)).transpose(0, 1) for x in (k, v)]
        assert torch.equal(pool.records[layer][target], format.quantize_pages(*taken))
        for got, old in zip(*(format.dequantize_pages(x) for x in (pool.records[layer][target], before[layer]))):
            assert torch.equal(rows(got), rows(old[source]).gather(1, chosen))
        others = [page for page in range(10) if page not in target.tolist()]
        assert torch.equal(pool.records[layer][others], before[layer][others])


def test_layers_of_different_layouts_fold_together():
    """Layers with several stores fold together, in the mixed order that ``auto`` budgets give."""
    narrow, wide, planes = (formats_of(64)[kind] for kind in ("2-2", "3-4", "4310-3221"))
    pool = pool_of([narrow, planes, wide, narrow, planes])
    for records in pool.records:
        records.random_(256)
    source, target = torch.arange(1, 6), torch.tensor([8, 6])
    tokens = choose(5, 5, 2)
    want = [format.split_tokens(records[source]) for format, records in zip(pool.formats, pool.records)]
    fold_pages(pool, source, target, tokens)
    for layer, (format, records) in enumerate(zip(pool.formats, pool.records)):
        for got, old in zip(format.split_tokens(records[target]), want[layer], strict=True):
            for head in range(HEADS):
                assert torch.equal(rows(got)[head], rows(old)[head][tokens[layer, head]])


def test_whole_pages_are_copies():
    pool = pool_of([formats_of(64)["2-3"]])
    pool.records[0].random_(256)
    everything = torch.arange(3 * P).expand(1, HEADS, -1).contiguous()
    fold_pages(pool, torch.tensor([1, 2, 3]), torch.tensor([6, 5, 4]), everything)
    assert torch.equal(pool.records[0][[6, 5, 4]], pool.records[0][[1, 2, 3]])


def means_the_same_elsewhere(format: RecordFormat) -> bool:
    """Returns whether tokens of two pages keep their values when they are quantized together in one page."""
    k, v = heavy(2, P, format.head_dim), heavy(2, P, format.head_dim)
    mixed = torch.randperm(2 * P)[:P]
    there = format.dequantize_pages(format.quantize_pages(k, v))
    here = format.dequantize_pages(format.quantize_pages(*(x.flatten(0, 1)[mixed] for x in (k, v))))
    return all(torch.equal(b, a.flatten(0, 1)[mixed]) for a, b in zip(there, here))


def format_of(name: str, width: float) -> RecordFormat:
    if get_method(name).planes:
        return PlaneFormat(64, PlaneCode((4, 3, 1, 0)), PlaneCode((3, 2, 2, 1)))
    k, v = get_method(name).codes(width)
    return PageFormat(64, 64, k=k, v=v)


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_a_method_moves_tokens_if_their_codes_are_their_own(name):
    for width in get_method(name).widths:
        format = format_of(name, width)
        assert means_the_same_elsewhere(format) == format.per_token == get_method(name).moves_tokens
        if format.per_token:
            check_moves(name, [format] * 2)
            continue
        with pytest.raises(
            KVQuantError, match=rf"--kv-quant {name}: keys in .* \(layer 1\).*Choose one of oscar, "
        ) as e:
            check_moves(name, [PageFormat(64, 64), format])
        named = str(e.value).rpartition("one of ")[2].rstrip(".").split(", ")
        assert named == [other for other in METHOD_NAMES if get_method(other).moves_tokens] and name not in named


def test_some_methods_cannot():
    assert {name for name in METHOD_NAMES if not get_method(name).moves_tokens} == {"int4", "kivi"}


@pytest.mark.parametrize("format", [CENTRED, CHANNEL, PageFormat(64, 64, v=CodeFormat(axis="channel"))])
def test_records_that_tokens_share_are_not_split(format):
    records = torch.zeros(1, format.record_bytes, dtype=torch.uint8)
    with pytest.raises(KVQuantError, match="tokens of a page share.*Use codes per token that are not centred"):
        format.split_tokens(records)
    with pytest.raises(KVQuantError, match="tokens of a page share"):
        format.join_tokens(())


@pytest.mark.parametrize(
    ("source", "target", "tokens", "said"),
    [
        (
            torch.zeros(0).long(),
            torch.tensor([1]),
            (1, HEADS, P),
            r"source_pages: torch.int64 \[0\].*one page at least",
        ),
        (torch.tensor([1]).int(), torch.tensor([2]), (1, HEADS, P), r"source_pages: torch.int32 \[1\]; must be int64"),
        (torch.tensor([1]), torch.tensor([[2]]), (1, HEADS, P), r"target_pages: torch.int64 \[1, 1\]"),
        (torch.tensor([1]), torch.tensor([2, 3]), (1, HEADS, 2 * P), "2 target pages for the tokens of 1"),
        (
            torch.tensor([1]),
            torch.tensor([2]),
            (2, HEADS, P),
            r"tokens: torch.int64 \[2, 2, 64\]; .*int64 \[1, 2, 64\]",
        ),
        (torch.tensor([1]), torch.tensor([2]), (1, HEADS, 10), r"tokens: torch.int64 \[1, 2, 10\]"),
    ],
)
def test_what_does_not_fit_is_named(source, target, tokens, said):
    with pytest.raises(KVQuantError, match=said):
        fold_pages(pool_of([PageFormat(64, 64, k=INT2)]), source, target, torch.zeros(tokens, dtype=torch.int64))
