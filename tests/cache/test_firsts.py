"""First tokens outlive the overlays of their pages, where the format of records asks for it."""

from __future__ import annotations

import pytest
import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.attention.reference import ReferenceOps
from sglang_kvq.cache.firsts import FirstTokens, entry_count
from sglang_kvq.cache.integrity import check_integrity
from sglang_kvq.cache.layout import KVGeometry
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.config import PAGE_SIZE as P
from sglang_kvq.formats.page import PageFormat
from tests.cache.scheduler_model import PLANES, Model, Request
from tests.cache.test_tier_folds import chosen, go_on
from tests.cache.test_tiers import generate, prefill

LAYERS, HEADS = 2, 2


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more entries than pages pay for, however small the pool."""
    monkeypatch.setattr("sglang_kvq.cache.firsts.LEAST_ENTRIES", 0)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LAYERS, count, 2, HEADS, 64, generator=generator).bfloat16()


def table(pages: int = 40) -> FirstTokens:
    return FirstTokens.allocate(LAYERS, pages, HEADS, 64, torch.device("cpu"))


def model(slots: int = 8, rows: int = 2, **more) -> Model:
    return Model(60, slots, rows, 1, 2, **{"format": PLANES, **more})


def prompt(kind: int, length: int = 5 * P) -> list[int]:
    return [(i * 3 + kind * 29) % 241 for i in range(length)]


def press(m: Model) -> None:
    """Two conversations take every overlay that can be taken, and leave nothing in the tree."""
    pressing = [prefill(m, prompt(kind, 400), publish=False) for kind in (50, 60)]
    for request in pressing:
        m.leave(request, publish=False)
    m.tiers.apply_pending()


def first_page(m: Model, text: list[int]) -> int:
    return m.tree[tuple(text[:P])]


def idle(m: Model, text: list[int], publish: bool = True) -> int:
    """A conversation that was prefilled and left, whose overlays were then taken; its first page."""
    m.leave(prefill(m, text, publish=publish), publish=True)
    page = first_page(m, text)
    press(m)
    assert int(m.pool.page_slot[page]) < 0, "the setting: the sink's overlay was taken"
    return page


def again(m: Model, text: list[int], tail: int = 30) -> Request:
    """It goes on; the model checks what is read."""
    request = m.start(text[: len(text) // P * P] + [5] * tail)
    assert request.stored >= P and m.extend([(request, len(request.tokens) - request.stored)])
    return request


# -- the table -------------------------------------------------------------------------------------


def test_a_page_has_one_entry_and_is_kept_until_it_is_freed():
    firsts, given = table(), tokens(3)
    assert firsts.count == 4 and entry_count(40) == 5 and entry_count(3) == 2
    firsts.keep(ids(6, 0, 3), torch.tensor([True, False, True]), given)
    assert firsts.pages.tolist() == [0, 0, 0, 6, 3]
    assert torch.equal(firsts.tokens[:, [3, 4]], given[:, [0, 2]])
    assert firsts.kept(ids(6, 10, 3, 0)).tolist() == [True, False, True, False]
    firsts.free(ids(10, 14, 3))
    assert firsts.pages.tolist() == [0, 0, 0, 6, 0]
    firsts.clear()
    assert not firsts.pages.any()


def test_a_later_page_takes_the_entry_unless_it_is_spared():
    firsts, later = table(), tokens(2, seed=1)
    firsts.keep(ids(6, 3), torch.tensor([True, True]), tokens(2))
    spared = torch.tensor([True, False, False, False, True])
    firsts.keep(ids(10, 7), torch.tensor([True, True]), later, spared)
    assert firsts.pages.tolist() == [0, 0, 0, 10, 3]
    assert torch.equal(firsts.tokens[:, [3, 4]], torch.stack([later[:, 0], tokens(2)[:, 1]], 1))


def test_of_pages_with_one_entry_the_first_is_kept():
    firsts, given = table(), tokens(4)
    firsts.keep(ids(5, 9, 1, 9), torch.tensor([False, True, True, True]), given)
    assert firsts.pages.tolist() == [0, 0, 9, 0, 0] and torch.equal(firsts.tokens[:, 2], given[:, 1])


def test_freed_pages_with_one_entry_free_what_is_theirs():
    firsts = table()
    firsts.keep(ids(9, 3), torch.tensor([True, True]), tokens(2))
    firsts.free(ids(1, 9, 5, 9))
    assert firsts.pages.tolist() == [0, 0, 0, 0, 3]


def test_a_copy_gets_the_token_from_the_overlay_or_from_the_table():
    firsts, given, read = table(), tokens(2), tokens(3, seed=1)
    firsts.keep(ids(6, 3), torch.tensor([True, True]), given)
    everyone = torch.ones(3, dtype=torch.bool)
    firsts.pass_on(ids(6, 2, 5), ids(8, 9, 12), everyone, ids(0, 4, -1), read)  # 5 is in neither
    assert firsts.pages.tolist() == [0, 8, 9, 6, 3]
    assert torch.equal(firsts.tokens[:, [1, 2]], torch.stack([given[:, 0], read[:, 1]], 1))
    firsts.pass_on(ids(6), ids(9), ~everyone[:1], ids(0), read[:, :1])
    assert torch.equal(firsts.tokens[:, 2], read[:, 1])


def test_only_some_formats_have_it_and_pay_for_it():
    for format, paid in ((PageFormat(64, 64, 0.96, 0.92), False), (PLANES, True)):
        for pages in (16, 1000, 4007):
            r2t = torch.zeros(2, 4 * P, dtype=torch.int32)
            pool = PagePool.allocate([format] * LAYERS, kv_heads=HEADS, pages=pages, slots=4, req_to_token=r2t)
            geometry = KVGeometry(HEADS, (format,) * LAYERS)
            assert (pool.firsts is not None) == paid == (geometry.first_bytes > 0)
            took = sum(store.records.nbytes for store in pool.stores)
            took += pool.firsts.tokens.nbytes if paid else 0
            assert took <= (pages + 1) * geometry.page_bytes <= took * 1.01 + pages * P
            assert geometry.page_bytes % P == 0, "SGLang counts bytes per token"


# -- the tiers -------------------------------------------------------------------------------------


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry for nearly every page, so that none takes another's."""
    monkeypatch.setattr("sglang_kvq.cache.firsts.PAGES_PER_ENTRY", 1)


@pytest.mark.parametrize("steps", [0, 1, 70])
@pytest.mark.usefixtures("roomy")
def test_a_first_token_is_read_as_it_was_written_after_its_overlay_was_taken(steps):
    m, text = model(), prompt(0)
    request = prefill(m, text)
    generate(m, request, steps)
    m.leave(request, publish=True)
    page = first_page(m, text)
    press(m)
    assert int(m.pool.page_slot[page]) < 0
    request = again(m, text)
    k, v = m.ops._stored(0, request.row, P)
    assert torch.equal(torch.stack([k[0, 0], v[0, 0]]), request.expected(0, 1)[0])
    assert not torch.equal(k[0, 1:], request.expected(1, P)[:, 0]), "the others are a record's"
    assert int(m.pool.row_sink_end[request.row]) == P and int(m.pool.page_slot[page]) > 0
    generate(m, request, 70)
    m.check()
    assert m.restored > 70 and not m.unkept


@pytest.mark.usefixtures("roomy")
def test_it_is_restored_as_often_as_it_is_taken_and_never_quantized_again():
    m, text = model(), prompt(0)
    page = idle(m, text)
    record = m.pool.records[0][page].clone()
    for _ in range(3):
        request = again(m, text)
        assert int(m.pool.page_slot[page]) > 0 and bool(m.tiers.page_valid[page])
        m.leave(request, publish=False)
        press(m)
        assert int(m.pool.page_slot[page]) < 0
        assert torch.equal(m.pool.records[0][page], record) and bool(m.pool.firsts.kept(ids(page)))


@pytest.mark.usefixtures("roomy")
def test_two_requests_of_a_batch_share_what_is_restored():
    m, text = model(), prompt(0)
    page = idle(m, text)
    requests = [m.start(text + [tail] * 40) for tail in (1, 2)]
    assert m.extend([(request, len(request.tokens) - request.stored) for request in requests])
    m.check()
    assert int((m.tiers.slot_page == page).sum()) == 1
    for request in requests:
        assert int(m.pool.row_sink_end[request.row]) == P


@pytest.mark.usefixtures("roomy")
def test_pages_that_a_batch_writes_and_those_it_restores_fit_when_all_rows_run():
    """The sink of every request was lost, and the rows' windows are all there is."""
    m = model(slots=12, rows=3)
    texts = [prompt(kind, 4 * P) for kind in range(3)]
    for text in texts:
        m.leave(prefill(m, text), publish=True)
    for kind in (50, 60, 70):
        prefill(m, prompt(kind, 400), publish=False)
    for request in list(m.running):
        m.leave(request, publish=False)
    m.tiers.apply_pending()
    requests = [m.start(text + [1] * 300) for text in texts]
    assert all(int(m.pool.page_slot[first_page(m, text)]) < 0 for text in texts)
    assert m.extend([(request, 300) for request in requests])
    m.check()
    assert m.tiers.counts().errors == 0 and m.restored == 3


def test_of_idle_pages_that_collide_the_later_one_is_restored():
    m = model()
    one, two = prompt(0), prompt(1)
    first = idle(m, one)
    n = m.pool.firsts.count
    same = [page for page in m.free if (page - first) % n == 0]
    m.free[:] = [same[0], *(page for page in m.free if page not in same), *same[1:]]
    second = idle(m, two)
    assert second == same[0] and m.pool.firsts.kept(ids(first, second)).tolist() == [False, True]
    for text in (one, two):
        m.leave(again(m, text), publish=False)
    assert m.restored == 1 and m.unkept == 1
    m.release([m.tree.pop(tuple(two[:end])) for end in range(5 * P, 0, -P)])
    m.check()
    assert not m.pool.firsts.pages.any()


def test_a_page_with_an_overlay_leaves_its_entry_to_others():
    m = model(slots=11, rows=3)
    one, two = prompt(0), prompt(1)
    running = prefill(m, one)
    first, n = first_page(m, one), m.pool.firsts.count
    same = [page for page in m.free if (page - first) % n == 0]
    m.free[:] = [same[0], *(page for page in m.free if page not in same), *same[1:]]
    second = idle(m, two)
    assert second == same[0] and int(m.pool.page_slot[first]) > 0
    m.leave(again(m, two), publish=False)
    assert m.restored == 1 and not m.unkept
    m.leave(running, publish=True)
    m.check()


def test_nothing_is_kept_without_sinks_or_where_the_format_does_without():
    for m in (Model(60, 10, 2, 0, 2, format=PLANES), model(format=PageFormat(64, 64, 0.96, 0.92))):
        text = prompt(0)
        m.leave(prefill(m, text), publish=True)
        press(m)
        again(m, text)
        m.check()
        assert m.tiers.firsts is None and not m.restored


def test_freed_and_flushed_pages_keep_nothing():
    m, text = model(), prompt(0)
    page = idle(m, text)
    m.evict(5)
    m.check()
    assert not m.pool.firsts.kept(ids(page))
    m.leave(prefill(m, text), publish=True)
    m.flush()
    m.check_empty()
    assert not m.pool.firsts.pages.any(), "not those of the last batch either"


@pytest.mark.usefixtures("roomy")
def test_a_copied_conversation_keeps_its_first_token():
    m, text = model(), prompt(0)
    page = idle(m, text)
    m.free.sort(key=lambda other: (other - page) % m.pool.firsts.count == 0)
    request = m.select(tuple(text), [0, 2, 3], [7] * 50)
    assert m.extend([(request, 50)])
    assert m.restored == 1 and not m.unkept
    assert bool(m.pool.firsts.kept(ids(m.row_pages(request, 1)[0])))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.usefixtures("roomy")
def test_a_fold_keeps_its_first_token_if_its_first_page_is_whole(whole):
    m, text = model(), prompt(0)
    page = idle(m, text)
    request = again(m, text)
    m.free.sort(key=lambda other: (other - page) % m.pool.firsts.count == 0)
    kept = chosen(3 * P, 5 * P) if whole else list(range(P, 4 * P))
    names = m.fold(request, kept, publish=True)
    target = m.tree[tuple(names[:P])]
    press(m)
    assert int(m.pool.page_slot[target]) < 0 and bool(m.pool.firsts.kept(ids(target))) == whole
    m.leave(go_on(m, names), publish=False)
    assert not m.unkept
    m.check()


def test_overlays_of_layers_of_any_format_are_restored():
    """Where layers differ, one that needs it decides for all."""
    formats = [PLANES, PageFormat(64, 64, 0.96, 0.92)]
    r2t = torch.zeros(2, 4 * P, dtype=torch.int32)
    pool = PagePool.allocate(formats, kv_heads=HEADS, pages=20, slots=4, req_to_token=r2t)
    written = torch.randn(LAYERS, 2, HEADS, P, 64).bfloat16()
    ops, pool.page_slot[7] = ReferenceOps(pool, LayerRotations()), 3
    pool.overlays[:, 3] = written
    ops.quantize_slots(ids(3), ids(7), ids(1))
    pool.firsts.keep(ids(7), torch.tensor([True]), written[:, None, :, :, 0])
    pool.overlays.zero_()
    ops.restore_pages(ids(0, 7, 5))
    for layer, format in enumerate(formats):
        want = torch.stack(format.dequantize_pages(pool.records[layer][7])).bfloat16()
        want[:, :, 0] = written[layer, :, :, 0]
        assert torch.equal(pool.overlays[layer, 3], want)
    assert not pool.overlays[:, [0, 1, 2, 4]].any()


@pytest.mark.parametrize("damage", ["elsewhere", "free"])
def test_the_integrity_check_sees(damage):
    m, text = model(), prompt(0)
    page = idle(m, text)
    firsts = m.pool.firsts
    if damage == "free":
        other = m.free[0]
        firsts.pages[firsts.entries(ids(other))] = other
    else:
        firsts.pages[page % firsts.count or firsts.count] = page
    with pytest.raises(RuntimeError, match="KV cache integrity: .*first token"):
        check_integrity(m.tiers, torch.tensor(m.free), idle=True)


def test_without_an_operation_that_restores_nothing_is_kept():
    m = model()
    assert TierManager(m.pool, 1, 2, m.ops.quantize_slots).firsts is None
