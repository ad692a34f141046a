"""First tokens outlive the BF16 copies of their pages, if the record format asks for it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.attention.reference import ReferenceOps
from sglang_kvq.cache.integrity import check_integrity
from sglang_kvq.cache.layout import KVGeometry
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.shared.split import WindowSlots
from sglang_kvq.cache.sink_token_cache import SinkTokenCache, entry_count
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.formats.page import PageFormat
from tests.cache.scheduler_model import PLANES, Model, Request
from tests.cache.test_tier_folds import chosen, go_on
from tests.cache.test_tiers import generate, prefill

LAYERS, HEADS = 2, 2


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allows no more cache entries than the number of pages gives, however small the pool is."""
    monkeypatch.setattr("sglang_kvq.cache.sink_token_cache.LEAST_ENTRIES", 0)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LAYERS, count, 2, HEADS, 64, generator=generator).bfloat16()


def table(pages: int = 40) -> SinkTokenCache:
    return SinkTokenCache.allocate(LAYERS, pages, HEADS, 64, torch.device("cpu"))


def model(slots: int = 8, rows: int = 2, **more) -> Model:
    return Model(60, slots, rows, 1, 2, **{"format": PLANES, **more})


def prompt(kind: int, length: int = 5 * P) -> list[int]:
    return [(i * 3 + kind * 29) % 241 for i in range(length)]


def press(m: Model) -> None:
    """Makes two conversations take every BF16 copy that can be taken, and leave nothing in the tree."""
    pressing = [prefill(m, prompt(kind, 400), publish=False) for kind in (50, 60)]
    for request in pressing:
        m.leave(request, publish=False)
    m.tiers.apply_pending()


def first_page(m: Model, text: list[int]) -> int:
    return m.tree[tuple(text[:P])]


def idle(m: Model, text: list[int], publish: bool = True) -> int:
    """Prefills a conversation, ends it, and lets others take its BF16 copies. Returns its first page."""
    m.leave(prefill(m, text, publish=publish), publish=True)
    page = first_page(m, text)
    press(m)
    assert int(m.pool.page_slot[page]) < 0, "the setting: the sink's BF16 copy was taken"
    return page


def again(m: Model, text: list[int], tail: int = 30) -> Request:
    """Goes on with a conversation; the model checks what is read."""
    request = m.start(text[: len(text) // P * P] + [5] * tail)
    assert request.stored >= P and m.extend([(request, len(request.tokens) - request.stored)])
    return request


# -- the table -------------------------------------------------------------------------------------


def keep(
    sink_cache: SinkTokenCache, pages: list[int], given: torch.Tensor, step: int, bf16_pages: Sequence[int] = (), **more
):
    """Keeps tokens of pages while some of the pages have BF16 copies; 0 means a page that is not wanted."""
    slots = torch.full((len(sink_cache.entry),), -1, dtype=torch.int32)
    slots[ids(*bf16_pages)] = 1
    sink_cache.keep(ids(*pages), ids(*pages) > 0, given, slots, step, **more)


def check_table(sink_cache: SinkTokenCache) -> None:
    at = sink_cache.pages.nonzero().flatten()
    assert torch.equal(sink_cache.entries(sink_cache.pages[at].long()), at) and int(
        (sink_cache.entry > 0).sum()
    ) == len(at)
    assert not sink_cache.pages[0] and not sink_cache.entry[0]


def test_pages_take_free_entries_and_give_them_back():
    sink_cache, given = table(), tokens(3)
    assert sink_cache.count == 4 and entry_count(40) == 5 and entry_count(3) == 2
    keep(sink_cache, [6, 0, 30], given, step=1)
    assert sink_cache.pages.tolist() == [0, 6, 30, 0, 0]
    assert torch.equal(sink_cache.tokens[:, [1, 2]], given[:, [0, 2]])
    assert sink_cache.kept(ids(6, 10, 30, 0)).tolist() == [True, False, True, False]
    check_table(sink_cache)
    sink_cache.free(ids(10, 14, 6, 6))
    assert sink_cache.pages.tolist() == [0, 0, 30, 0, 0]
    keep(sink_cache, [7, 8], given[:, :2], step=2)
    assert sink_cache.pages.tolist() == [0, 7, 30, 8, 0]
    check_table(sink_cache)
    sink_cache.clear()
    assert not sink_cache.pages.any() and not sink_cache.entry.any()


@pytest.mark.parametrize("apart", [1, 2, 4, 8, 9])
def test_nothing_is_lost_while_there_are_entries(apart):
    """No first token is lost while entries are free, however far apart the pages lie, kept one or many at a time."""
    sink_cache, given = table(80), tokens(9)
    pages = [1 + apart * i for i in range(sink_cache.count)]
    assert len(pages) == 9
    for step in range(3):
        keep(sink_cache, pages[3 * step : 3 * step + 3], given[:, 3 * step : 3 * step + 3], step)
    assert sink_cache.kept(ids(*pages)).all()
    assert torch.equal(sink_cache.tokens[:, sink_cache.entries(ids(*pages))], given)
    check_table(sink_cache)


def test_a_page_that_lost_its_bf16_page_again_has_its_entry_and_is_the_youngest():
    sink_cache, given = table(), tokens(6)
    for step, page in enumerate((5, 6, 7, 8)):
        keep(sink_cache, [page], given[:, step : step + 1], step)
    keep(sink_cache, [5], given[:, :1], step=4)
    assert sink_cache.pages.tolist() == [0, 5, 6, 7, 8]
    keep(sink_cache, [9], given[:, 4:5], step=5)
    assert sink_cache.pages.tolist() == [0, 5, 9, 7, 8], "6 was the oldest"
    assert torch.equal(sink_cache.tokens[:, 1], given[:, 0]) and torch.equal(sink_cache.tokens[:, 2], given[:, 4])
    check_table(sink_cache)


def test_a_page_with_a_bf16_page_gives_its_entry_before_the_oldest_does():
    sink_cache, given = table(), tokens(7)
    for step, page in enumerate((5, 6, 7, 8)):
        keep(sink_cache, [page], given[:, step : step + 1], step)
    keep(sink_cache, [9, 10, 11], given[:, 4:], 5, bf16_pages=(7, 8))
    assert sink_cache.pages.tolist() == [0, 9, 6, 10, 11], "those with BF16 pages, then the oldest"
    check_table(sink_cache)


def test_what_is_restored_or_was_kept_in_this_step_stays():
    sink_cache, given = table(), tokens(7)
    for step, page in enumerate((5, 6, 7, 8)):
        keep(sink_cache, [page], given[:, step : step + 1], step)
    spared = torch.tensor([False, False, False, True, False])
    keep(
        sink_cache,
        [9, 5, 10, 11, 12],
        torch.cat([given[:, 4:5], given[:, :1], given[:, 4:]], 1),
        9,
        (7,),
        spared=spared,
    )
    assert sink_cache.pages.tolist() == [0, 5, 9, 7, 10], "the first pages; for others there was no entry"
    assert sink_cache.kept(ids(11, 12)).tolist() == [False, False]
    assert torch.equal(sink_cache.tokens[:, 1], given[:, 0]) and torch.equal(sink_cache.tokens[:, 4], given[:, 4])
    check_table(sink_cache)


def test_of_requests_that_share_a_page_the_first_restores_it():
    sink_cache = table()
    keep(sink_cache, [6, 30], tokens(2), step=1)
    found = sink_cache.first_of_each(ids(30, 6, 7, 6, 30, 0), torch.tensor([False, True, True, True, True, True]))
    assert found.tolist() == [False, True, False, False, True, False]


def test_only_some_formats_have_it_and_pay_for_it():
    for format, paid in ((PageFormat(64, 64, 0.96, 0.92), False), (PLANES, True)):
        for pages in (16, 1000, 4007):
            r2t = torch.zeros(2, 4 * P, dtype=torch.int32)
            pool = PagePool.allocate([format] * LAYERS, kv_heads=HEADS, pages=pages, slots=4, req_to_token=r2t)
            geometry = KVGeometry(HEADS, (format,) * LAYERS)
            assert (pool.sink_cache is not None) == paid == (geometry.first_bytes > 0)
            took = sum(store.records.nbytes for store in pool.stores)
            took += pool.sink_cache.tokens.nbytes if paid else 0
            assert took <= (pages + 1) * geometry.page_bytes <= took * 1.01 + pages * P
            assert geometry.page_bytes % P == 0, "SGLang counts bytes per token"


# -- the tiers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 70])
def test_a_first_token_is_read_as_it_was_written_after_its_bf16_page_was_taken(steps):
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
        assert torch.equal(m.pool.records[0][page], record) and bool(m.pool.sink_cache.kept(ids(page)))


def test_two_requests_of_a_batch_share_what_is_restored():
    m, text = model(), prompt(0)
    page = idle(m, text)
    requests = [m.start(text + [tail] * 40) for tail in (1, 2)]
    assert m.extend([(request, len(request.tokens) - request.stored) for request in requests])
    m.check()
    assert int((m.tiers.slot_page == page).sum()) == 1
    for request in requests:
        assert int(m.pool.row_sink_end[request.row]) == P


def test_pages_that_a_batch_writes_and_those_it_restores_fit_when_all_rows_run():
    """Every request has lost its sink, and the BF16 pages just suffice for the rows' windows."""
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


def test_of_more_idle_conversations_than_entries_the_oldest_is_read_from_its_record():
    m = Model(90, 8, 2, 1, 2, format=PLANES)
    n = m.pool.sink_cache.count
    texts = [prompt(kind) for kind in range(n + 1)]
    pages = [idle(m, text) for text in texts]
    assert m.pool.sink_cache.kept(ids(*pages)).tolist() == [False] + [True] * n
    for text in texts:
        m.leave(again(m, text), publish=False)
    assert m.restored == n and m.unkept == 1
    for text in texts:
        m.release([m.tree.pop(tuple(text[:end])) for end in range(5 * P, 0, -P)])
    m.check()
    assert not m.pool.sink_cache.pages.any()


def test_a_page_with_a_bf16_page_leaves_its_entry_to_others():
    """A page with a BF16 copy gives its entry up when others need it, and gets another entry when the copy is taken."""
    m = Model(90, 8, 2, 1, 2, format=PLANES)
    n = m.pool.sink_cache.count
    texts = [prompt(kind) for kind in range(n + 1)]
    pages = [idle(m, text) for text in texts[:n]]
    running = again(m, texts[0])
    for text in (texts[n], *(prompt(kind, 400) for kind in (50, 60, 70))):  # into the remaining BF16 pages
        m.leave(prefill(m, text), publish=True)
    pages.append(first_page(m, texts[n]))
    kept = m.pool.sink_cache.kept(ids(*pages))
    assert kept.tolist() == [False] + [True] * n and int(m.pool.page_slot[pages[0]]) > 0
    for text in texts[1:]:
        m.leave(again(m, text), publish=False)
    assert m.restored == n + 1 and not m.unkept
    m.leave(running, publish=True)
    press(m)
    m.check()
    assert bool(m.pool.sink_cache.kept(ids(pages[0])))


def test_nothing_is_kept_without_sinks_or_where_the_format_does_without():
    for m in (Model(60, 10, 2, 0, 2, format=PLANES), model(format=PageFormat(64, 64, 0.96, 0.92))):
        text = prompt(0)
        m.leave(prefill(m, text), publish=True)
        press(m)
        again(m, text)
        m.check()
        assert m.tiers.sink_cache is None and not m.restored


def test_freed_and_flushed_pages_keep_nothing():
    m, text = model(), prompt(0)
    page = idle(m, text)
    m.evict(5)
    m.check()
    assert not m.pool.sink_cache.kept(ids(page))
    m.leave(prefill(m, text), publish=True)
    m.flush()
    m.check_empty()
    assert not m.pool.sink_cache.pages.any(), "not those of the last batch either"


def test_a_copied_conversation_keeps_its_first_token():
    m, text = model(), prompt(0)
    idle(m, text)
    request = m.select(tuple(text), [0, 2, 3], [7] * 50)
    assert m.extend([(request, 50)])
    assert m.restored == 1 and not m.unkept
    assert bool(m.pool.sink_cache.kept(ids(m.row_pages(request, 1)[0])))


@pytest.mark.parametrize("whole", [True, False])
def test_a_fold_keeps_its_first_token_if_its_first_page_is_whole(whole):
    m, text = model(), prompt(0)
    idle(m, text)
    request = again(m, text)
    kept = chosen(3 * P, 5 * P) if whole else list(range(P, 4 * P))
    names = m.fold(request, kept, publish=True)
    target = m.tree[tuple(names[:P])]
    press(m)
    assert int(m.pool.page_slot[target]) < 0 and bool(m.pool.sink_cache.kept(ids(target))) == whole
    m.leave(go_on(m, names), publish=False)
    assert not m.unkept
    m.check()


def copy_that_waits(m: Model, text: list[int]) -> list[int]:
    """Copies a conversation that no request has run with yet. Returns the tokens that name the copy."""
    m.leave(prefill(m, text), publish=True)
    waiting = m.select(tuple(text), [0, 2, 3], [7] * 50)
    names = waiting.tokens[: 3 * P]
    m.leave(waiting, publish=False)
    m.tiers.apply_pending()
    return names


@pytest.mark.parametrize("kind", ["fold", "copy"])
def test_a_fold_or_copy_that_nothing_ran_with_keeps_its_first_token_when_its_bf16_page_is_taken(kind):
    """Its entry went to another conversation while it had a BF16 copy, so it needs a new one."""
    m = Model(90, 8, 2, 1, 2, format=PLANES)
    texts = [prompt(n) for n in range(m.pool.sink_cache.count - 1)]
    for text in texts:
        idle(m, text)
    if kind == "fold":
        names = m.fold(prefill(m, prompt(40)), chosen(3 * P, 5 * P), publish=False)
    else:
        names = copy_that_waits(m, prompt(40))
    m.tiers.apply_pending()
    page = m.tree[tuple(names[:P])]
    assert int(m.pool.page_slot[page]) > 0, "the setting: its sink has a BF16 copy"
    other = prompt(41)
    m.leave(prefill(m, other), publish=True)
    m.tiers.slot_stamp[m.pool.page_slot[first_page(m, other)]] = 0  # the next to be taken
    m.leave(prefill(m, prompt(50, 400), publish=False), publish=False)
    assert bool(m.pool.sink_cache.kept(ids(first_page(m, other)))) and int(m.pool.page_slot[page]) > 0
    for text in [*texts[:2], *([prompt(40)] if kind == "copy" else [])]:  # entries become free again
        m.release([m.tree.pop(tuple(text[:end])) for end in range(5 * P, 0, -P)])
    m.tiers.apply_pending()
    press(m)
    assert int(m.pool.page_slot[page]) < 0 and bool(m.pool.sink_cache.kept(ids(page)))
    go_on(m, names)
    assert m.restored == 1 and not m.unkept
    m.check()


@pytest.mark.parametrize("kind", ["fold", "copy"])
def test_a_fold_or_copy_with_a_bf16_page_takes_no_entry_from_who_idles(kind):
    """All entries are taken, and a page with a BF16 copy needs none."""
    m = Model(90, 8, 2, 1, 2, format=PLANES)
    pages = [idle(m, prompt(n)) for n in range(m.pool.sink_cache.count)]
    assert m.pool.sink_cache.kept(ids(*pages)).all()
    if kind == "fold":
        names = m.fold(prefill(m, prompt(40)), chosen(3 * P, 5 * P), publish=False)
    else:
        names = copy_that_waits(m, prompt(40))
    m.tiers.apply_pending()
    assert int(m.pool.page_slot[m.tree[tuple(names[:P])]]) > 0, "the setting: its sink has a BF16 copy"
    assert m.pool.sink_cache.kept(ids(*pages)).all()
    m.check()


def test_a_copy_of_a_fold_that_begins_otherwise_keeps_no_first_token():
    m, text = model(), prompt(0)
    idle(m, text)
    names = m.fold(again(m, text), list(range(P, 4 * P)), publish=False)
    (copy,) = m.take_pages(1)
    m.tiers.pending.copy_pages(ids(first_page(m, names)), ids(copy), ids())
    m.tiers.apply_pending()
    assert not m.pool.sink_cache.kept(ids(first_page(m, names), copy)).any()


@pytest.mark.parametrize("down", [True, False], ids=["pages", "bf16-pages"])
def test_first_tokens_are_kept_where_a_boundary_passes(down):
    """A first page that moves takes its entry along; one that loses its BF16 copy gets one, and no other page does."""
    m, text, given = model(slots=40, shared=WindowSlots(4, 4, 6)), prompt(0), torch.randn(1, 1, 2, 1, 64).bfloat16()
    before = prefill(m, prompt(1, 30 * P), publish=False)
    m.leave(prefill(m, text), publish=True)
    page = m.place(first_page(m, text))
    if down:
        m.tiers.keep_first_tokens(ids(page), given)
        m.leave(before, publish=False)
        m.tiers.pending.move_boundary(m.pool.arena.first_slot(page - 10))
    else:
        m.tiers.pending.move_boundary(m.pool.slots - 5)
    m.tiers.apply_pending()
    there, cache = m.place(first_page(m, text)), m.pool.sink_cache
    assert down == (there < page) and cache.pages[cache.pages > 0].tolist() == [there]
    assert m.tiers.page_first[[there, page]].tolist() == [True, not down]
    if down:
        assert torch.equal(cache.tokens[:, cache.entries(ids(there))], given)
    else:
        assert int(m.pool.page_slot[page]) < 0
    check_table(cache)


def test_a_copy_of_a_copy_begins_with_the_first_token_before_any_plan():
    """Neither copy has a BF16 copy, because all BF16 pages are pinned or taken."""
    m, text = model(), prompt(0)
    source = idle(m, text)
    first, second = m.take_pages(2)
    m.tiers.pending.copy_pages(ids(source), ids(first), ids())
    m.tiers.pending.copy_pages(ids(first), ids(second), ids())
    m.tiers.pending.free_pages(ids(first))
    m.free.append(first)
    m.tiers.apply_pending()
    assert m.pool.sink_cache.kept(ids(source, first, second)).tolist() == [True, False, True]
    kept = m.pool.sink_cache.tokens[:, m.pool.sink_cache.entries(ids(source, second))]
    assert torch.equal(kept[:, 0], kept[:, 1])


def test_bf16_pages_of_layers_of_any_format_are_restored():
    """If the layers' formats differ, one layer that needs first tokens decides for all."""
    formats = [PLANES, PageFormat(64, 64, 0.96, 0.92)]
    r2t = torch.zeros(2, 4 * P, dtype=torch.int32)
    pool = PagePool.allocate(formats, kv_heads=HEADS, pages=20, slots=4, req_to_token=r2t)
    written = torch.randn(LAYERS, 2, HEADS, P, 64).bfloat16()
    ops, pool.page_slot[7] = ReferenceOps(pool, LayerRotations()), 3
    pool.bf16_pages[:, 3] = written
    ops.quantize_slots(ids(3), ids(7), ids(1))
    keep(pool.sink_cache, [7], written[:, None, :, :, 0], step=1)
    pool.bf16_pages.zero_()
    ops.restore_pages(ids(0, 7, 5))
    for layer, format in enumerate(formats):
        want = torch.stack(format.dequantize_pages(pool.records[layer][7])).bfloat16()
        want[:, :, 0] = written[layer, :, :, 0]
        assert torch.equal(pool.bf16_pages[layer, 3], want)
    assert not pool.bf16_pages[:, [0, 1, 2, 4]].any()


@pytest.mark.parametrize("damage", ["elsewhere", "free"])
def test_the_integrity_check_sees(damage):
    m, text = model(), prompt(0)
    page = idle(m, text)
    sink_cache = m.pool.sink_cache
    if damage == "free":
        other = m.free[0]
        at = int((sink_cache.pages == 0).nonzero()[1])
        sink_cache.pages[at], sink_cache.entry[other] = other, at
    else:
        sink_cache.entry[page] += 1
    with pytest.raises(RuntimeError, match="KV cache integrity: .*first token"):
        check_integrity(m.tiers, torch.tensor(m.free), idle=True)


def test_the_oracle_sees_a_token_that_is_lost_while_entries_are_free(monkeypatch):
    """Invariant 12: the model reports the loss at the plan that causes it."""
    m, text = model(), prompt(0)
    m.leave(prefill(m, text), publish=True)
    monkeypatch.setattr(m.pool.sink_cache, "keep", lambda *args, **kwargs: None)
    with pytest.raises(AssertionError, match="first token of page .* is lost"):
        press(m)


def test_without_an_operation_that_restores_nothing_is_kept():
    m = model()
    assert TierManager(m.pool, 1, 2, m.ops.quantize_slots).sink_cache is None
