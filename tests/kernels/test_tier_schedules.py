"""Plans by kernels equal those by torch bit for bit, whatever a scheduler does."""

from __future__ import annotations

import random

import pytest
import torch

from sglang_kvq.cache.pool import PagePool
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.record import RecordFormat
from sglang_kvq.kernels.quantize import keep_sink_tokens
from sglang_kvq.kernels.tiers import bf16_pages, events, ranges
from tests.cache.scheduler_model import PLANES, Model
from tests.cache.schedules import Driver, Returning, converse, crowd, shared_model
from tests.kernels.tier_twins import TwinTierManager
from tests.pairs import each, few


def use_blocks(monkeypatch: pytest.MonkeyPatch, elements: int, pages: int) -> None:
    """Sets small blocks, so that every loop over blocks has more than one iteration."""
    monkeypatch.setattr(bf16_pages, "_ELEMENTS", elements)
    monkeypatch.setattr(bf16_pages, "_ENTRIES", pages)
    monkeypatch.setattr(ranges, "_PAGES", pages)
    monkeypatch.setattr(events, "_BLOCK", pages)


@each(seed=range(3), drafts=[1, 5])
def test_random_schedules(seed, drafts, monkeypatch):
    use_blocks(monkeypatch, 32, 4)
    rng = random.Random(seed)
    rows, sinks, recent = rng.randint(2, 4), seed % 3, rng.randint(1, 3)
    slots = rows * (sinks + recent + 2) + rng.randint(0, 4)
    more = {"overlap": seed != 1, "prefill_pages": (0, 2, 9)[seed]}
    model = Model(rng.randint(40, 60), slots, rows, sinks, recent, TwinTierManager, **more)
    driver = Driver(model, rng, drafts=drafts)
    driver.run(75)
    driver.finish()
    assert model.tiers.plans > 20 and model.tiers.quantized > 5
    assert model.copied and model.folded and model.tiers.filled


@pytest.mark.parametrize("write_back", [False, True], ids=["write-through", "write-back"])
def test_random_schedules_with_host_memory(write_back, monkeypatch):
    """Tables are also equal before every copy."""
    use_blocks(monkeypatch, 32, 4)
    rng = random.Random(1)
    model = Model(40, 3 * 5 + 2, 3, 1, 2, TwinTierManager, overlap=True).add_host(50, rng, write_back=write_back)
    driver = Returning(model, rng)
    driver.run(25)
    driver.finish()
    assert model.host.loads and model.host.backups and model.tiers.quantized


@pytest.mark.parametrize("drafts", [1, 4])
def test_random_schedules_of_soft_windows(drafts, monkeypatch):
    use_blocks(monkeypatch, 32, 4)
    slots = 3 * (1 + 1 + (drafts > 1)) + 5
    more = {"overlap": True, "look_every": 8, "kept_pages": 0, "written": drafts}
    model = Model(48, slots, 3, 1, 4, TwinTierManager, **more)
    crowd(model, random.Random(1), 2, drafts)
    assert model.tiers.plans > 10 and model.shortened


@each(seed=few([620, 621, 622], 2))
def test_random_schedules_of_a_shared_memory(seed, monkeypatch):
    run_shared(seed, 1, monkeypatch)


@each(seed=few([674, 670], 1))
def test_random_schedules_of_a_shared_memory_with_drafts(seed, monkeypatch):
    run_shared(seed, 4, monkeypatch)


def run_shared(seed: int, drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_blocks(monkeypatch, 32, 4)
    rng = random.Random(seed)
    model = shared_model(rng, drafts, manager=TwinTierManager, overlap=True)
    driver = Driver(model, rng, drafts=drafts)
    driver.run(35)
    driver.finish()
    assert model.tiers.plans > 15 and model.tiers.quantized > 3 and model.moved > 50


def test_random_schedules_of_a_shared_memory_with_host_memory(monkeypatch):
    """Pages that are copied to and from the host move, too, after the copies."""
    use_blocks(monkeypatch, 32, 4)
    rng = random.Random(683)
    model = shared_model(rng, manager=TwinTierManager, overlap=True, rows=2, room=3)
    model.add_host(2 * model.pages, rng, soon=0.1)
    driver = Returning(model, rng)
    driver.run(25)
    driver.finish()
    assert model.moved > 50 and model.host.loads and model.host.backups and model.host.waited


@pytest.mark.parametrize("pages", few([3, 1, 40], 1))
def test_prefills_read_what_left_the_window_lately(pages, monkeypatch):
    """With spare BF16 pages, prefills read tokens that left the window recently, until later prompts take the pages."""
    use_blocks(monkeypatch, 32, 4)
    model = Model(60, 16, 2, 1, 1, TwinTierManager, overlap=True, prefill_pages=pages)
    for n in range(4):
        request = model.start([1000 * n + i for i in range(700)])
        for chunk in (40, 60, 64, 1, 63, 60, 64, 64, 30, 64, 150, 20):
            assert model.extend([(request, chunk)])
        request.tokens.append(3)
        assert model.decode([request])
        model.land()
        model.leave(request, publish=True)
    assert model.tiers.plans > 20 and model.tiers.quantized > 5
    assert model.reached >= 4 * min(pages, 3)


@pytest.mark.parametrize("overlap", few([True, False], 1), ids=few(["in-flight", "alone"], 1))
def test_random_schedules_keep_first_tokens(overlap, monkeypatch):
    """There are enough conversations, and few enough BF16 pages, that sinks lose them and first pages are restored."""
    use_blocks(monkeypatch, 32, 4)
    monkeypatch.setattr(keep_sink_tokens, "_ROWS", 2)
    monkeypatch.setattr("sglang_kvq.cache.sink_token_cache.PAGES_PER_ENTRY", 14)
    monkeypatch.setattr("sglang_kvq.cache.sink_token_cache.LEAST_ENTRIES", 0)
    model = Model(60, 7, 2, 1, 1, TwinTierManager, overlap=overlap, format=PLANES)
    kept, displaced = model.pool.sink_cache.keep, []

    def keep(*given):
        before = model.pool.sink_cache.pages.clone()
        kept(*given)
        displaced.extend(before[(before > 0) & (before != model.pool.sink_cache.pages)].tolist())

    monkeypatch.setattr(model.pool.sink_cache, "keep", keep)
    converse(model, random.Random(3), 30)
    assert displaced and model.unkept, "no page took another's entry"
    assert model.tiers.plans > 20 and model.tiers.restored > 3 and model.restored > 3
    assert model.copied and model.folded


def twins(
    rows: int, pages_each: int, slots: int, sinks: int = 1, recent: int = 4, format: RecordFormat | None = None
) -> TwinTierManager:
    """Returns twin tier managers over rows of distinct, shuffled pages; nothing is really quantized or restored."""
    order = torch.randperm(rows * pages_each).view(rows, pages_each) + 1
    table = torch.zeros(rows + 1, pages_each * P, dtype=torch.int32)
    table[1:] = (order[:, :, None] * P + torch.arange(P)).flatten(1)
    formats = [format or PageFormat(64, 64, 0.96, 0.92)]
    pool = PagePool.allocate(formats, kv_heads=1, pages=order.numel(), slots=slots, req_to_token=table)
    return TwinTierManager(pool, sinks, recent, lambda *batch: None, lambda pages: None)


def test_many_rows_and_slots(monkeypatch):
    """BF16 pages of earlier batches, freed or not, are reused by later ones, dozens at a time."""
    use_blocks(monkeypatch, 256, 64)
    tiers = twins(rows=80, pages_each=9, slots=270)
    everyone = torch.randperm(80) + 1
    none = torch.empty(0, dtype=torch.int64)
    for rows in (everyone[:40], everyone[40:], everyone[20:60]):
        lens = torch.randint(2, 9 * P - 70, (40,))
        prefix = (lens * torch.randint(0, 2, (40,)) // 2).clamp(min=1)
        tiers.plan_extend(rows, prefix * 0, prefix, 1, none)  # a prompt of one new token reads it
        tiers.plan_extend(rows, prefix, lens, 9 * P, none)
        for _ in range(2):
            lens += 33
            tiers.plan_decode(torch.cat([rows, rows[:3] * 0]), torch.cat([lens, lens[:3] * 0 + 1]), 9 * P)
        tiers.pending.free_rows(rows.tolist())
        tiers.pending.free_pages(tiers.pool.req_to_token[rows[:20], ::P].flatten() // P)
        tiers.pending.free_pages(tiers.pool.req_to_token[rows[19:23], ::P].flatten() // P)
    tiers.apply_pending()
    assert tiers.quantized > 100 and tiers.plans == 12


def test_a_request_with_one_new_token_reads_it_like_a_decode_step():
    """One request's token begins a page, another's completes one; the third request prefills."""
    tiers = twins(rows=3, pages_each=9, slots=24)
    ids, none = lambda *x: torch.tensor(x), torch.empty(0, dtype=torch.int64)
    pages = tiers.pool.req_to_token[:, ::P] // P
    tiers.plan_extend(ids(1, 2, 3), ids(0, 0, 0), ids(320, 447, 130), 0, pages[2, 1:2].long())
    tiers.plan_extend(ids(1, 2, 3), ids(320, 447, 130), ids(321, 448, 400), 448, none)
    assert torch.equal(tiers.pool.row_pages[1, :6], pages[1, :6]) and int(tiers.pool.row_history_end[2]) == 3 * P
    tiers.plan_decode(ids(1, 2), ids(321, 448), 448)
    assert torch.equal(tiers.pool.row_history_end[:3], ids(0, P, 3 * P).int()) and int(tiers.errors) == 0


def test_bf16_pages_that_are_too_few_are_counted_and_none_in_use_is_taken():
    tiers = twins(rows=4, pages_each=8, slots=7)
    ids = lambda *x: torch.tensor(x)  # noqa: E731
    tiers.plan_extend(ids(1), ids(0), ids(200), 0, ids().long())
    held = tiers.slot_page.clone()
    tiers.plan_extend(ids(2, 3), ids(0, 0), ids(200, 400), 0, ids().long())  # need 4 and 6 more, but 3 are left
    assert int(tiers.errors) == 7
    assert torch.equal(tiers.slot_page[held > 0], held[held > 0])


def test_events_keep_their_order():
    tiers = twins(rows=4, pages_each=8, slots=20)
    tiers.plan_extend(torch.tensor([1, 2]), torch.tensor([0, 0]), torch.tensor([300, 300]), 0, torch.empty(0).long())
    pages = tiers.pool.req_to_token[:, ::P].long() // P
    ticket = tiers.pending.reserve_move()
    tiers.pending.free_pages(pages[1, :3])  # after the move, these pages have no BF16 copies
    tiers.pending.free_rows([1])
    tiers.pending.free_pages(pages[1, 2:6])  # one of these is freed again
    tiers.pending.reserve_move()  # a move that turns out to be empty
    tiers.pending.fill_move(ticket, pages[1, :3], pages[3, :3])
    tiers.pending.free_pages(pages[3, 1:2])
    own, kept = torch.cat([pages[2, :5], pages[2, :1]]), torch.cat([pages[2, :2], pages[4, 2:5], pages[4, :1]])
    tiers.pending.fill_move(tiers.pending.reserve_move(), own, kept)  # the first two pages stay in place
    tiers.apply_pending()
    slots = tiers.pool.page_slot
    assert (slots[pages[1]] < 0).all() and (slots[pages[3, :3]] > 0).tolist() == [True, False, True]
    assert (slots[pages[4, :5]] > 0).tolist() == [True, False, True, True, True]
    assert tiers.row_len[:3].tolist() == [0, 0, 300]
