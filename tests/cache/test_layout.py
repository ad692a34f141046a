"""The one memory budget is divided in bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_kvq import KVQuantConfig, KVQuantError
from sglang_kvq.cache.layout import KVGeometry, bf16_slots, divide, fit_shared, share, shared_reserve
from sglang_kvq.cache.shared.split import WindowSlots
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.planes import PlaneCode, PlaneFormat

QWEN3_8B = KVGeometry(8, (PageFormat(128, 128),) * 36)
#: A geometry whose first tokens are kept.
FIRST_TOKENS = KVGeometry(8, (PlaneFormat(128, PlaneCode((4, 3, 1, 0)), PlaneCode((3, 2, 2, 1))),) * 36)
GIB = 2**30


def layout_of(config: KVQuantConfig, budget: int, geometry: KVGeometry = QWEN3_8B):
    slots = bf16_slots(config, geometry, budget)
    pages = (budget - (slots + 1) * geometry.slot_bytes - geometry.page_bytes) // geometry.page_bytes
    return divide(config, geometry, pages=pages, slots=slots)


def test_both_pools_fit_into_the_budget_and_hold_over_six_times_the_tokens():
    budget = 100 * GIB
    layout = layout_of(KVQuantConfig("oscar"), budget)
    assert budget - 2 * QWEN3_8B.slot_bytes < layout.total_bytes + QWEN3_8B.slot_bytes <= budget
    assert layout.tokens / layout.bf16_tokens >= 6.3
    assert layout.bits_per_element == pytest.approx(16 * layout.bf16_tokens / layout.tokens, rel=1e-4)


def test_every_running_request_has_its_whole_window():
    for budget in (0.05, 0.1, 0.3):
        config = KVQuantConfig("oscar", bf16_budget=budget)
        layout = layout_of(config, 100 * GIB)
        assert layout.max_requests * config.slots_per_request < layout.slots
        assert (layout.max_requests + 1) * config.slots_per_request >= layout.slots


def test_streaming_sessions_reserve_a_page_more_for_each_request():
    config = KVQuantConfig("oscar")
    assert divide(config, QWEN3_8B, pages=700, slots=70, wanted=99, resumes=1).max_requests == 11
    assert divide(config, QWEN3_8B, pages=700, slots=70, wanted=99, resumes=8).max_requests == 10


def test_bf16_pages_never_exceed_pages():
    assert divide(KVQuantConfig("oscar"), QWEN3_8B, pages=64, slots=5000, wanted=100).slots == 64


def test_bf16_pages_shrink_with_a_capped_pool_but_serve_the_requests_asked_for():
    config = KVQuantConfig("oscar")
    assert divide(config, QWEN3_8B, pages=1000, slots=5000, wanted=2).slots == 15  # a tenth of the bytes
    assert divide(config, QWEN3_8B, pages=1000, slots=5000, wanted=10).slots == 61
    assert divide(config, QWEN3_8B, pages=1000, slots=5000).max_requests == 8


@pytest.mark.parametrize("chunk, kept", [(128, 128), (256, 128), (257, 0), (8192, 0), (None, 0)])
def test_small_chunks_keep_the_window_of_one_prefill_free(chunk, kept):
    config = KVQuantConfig("oscar")
    large = divide(config, QWEN3_8B, pages=50_000, slots=1000, chunk=chunk)
    assert large.slots == 781 and large.max_requests == (781 - 1 - kept) // 6
    capped = divide(config, QWEN3_8B, pages=1000, slots=1000, chunk=chunk)
    assert capped.slots == 49 + kept and capped.max_requests == 8


def test_the_requests_asked_for_come_before_the_window_of_a_prefill():
    config = KVQuantConfig("oscar")
    assert divide(config, QWEN3_8B, pages=50_000, slots=200, wanted=30, chunk=128).max_requests == 30
    assert divide(config, QWEN3_8B, pages=50_000, slots=200, wanted=99, chunk=128).max_requests == 33
    assert divide(replace(config, prefill_window=0), QWEN3_8B, pages=50_000, slots=200, chunk=128).max_requests == 33


def test_bf16_pages_are_not_counted_as_token_room():
    """Earlier systems admitted requests into BF16 slots; here only quantized pages count as capacity."""
    few = divide(KVQuantConfig("oscar"), QWEN3_8B, pages=100, slots=20)
    many = divide(KVQuantConfig("oscar"), QWEN3_8B, pages=100, slots=90)
    assert few.tokens == many.tokens == 6400


@pytest.mark.parametrize("draft", [0, 1 << 18], ids=["alone", "with a draft model"])
@pytest.mark.parametrize("geometry", [QWEN3_8B, FIRST_TOKENS], ids=["records", "first tokens"])
@pytest.mark.parametrize("spare", range(0, QWEN3_8B.slot_bytes, QWEN3_8B.slot_bytes // 5))
def test_a_shared_memory_takes_no_more_than_its_budget(geometry, draft, spare):
    geometry, windows = replace(geometry, draft_page_bytes=draft), WindowSlots(whole=8, least=2, spare=40)
    page_bytes = geometry.shared_page_bytes + draft
    budget = shared_reserve(geometry, windows) + 500 * page_bytes + spare
    pages = 500 + spare // page_bytes
    layout = share(geometry, windows, pages=pages, budget_bytes=budget)
    assert layout.total_bytes == layout.arena.total_bytes + pages * geometry.first_bytes
    assert budget - geometry.slot_bytes < layout.total_bytes + (pages + 1) * draft <= budget
    assert layout.arena.slots_beside(pages) >= windows.needed(1), "one request runs beside all pages"


def test_a_budget_too_small_for_one_request_names_the_flags():
    with pytest.raises(KVQuantError, match=r"room for 5 BF16 pages, but one request needs 7.*--kv-quant-bf16-budget"):
        divide(KVQuantConfig("oscar"), QWEN3_8B, pages=100, slots=5)


def test_requests_are_limited_by_tokens_and_by_windows():
    layout = layout_of(KVQuantConfig("oscar"), 100 * GIB)
    long, short = layout.requests_at(32768), layout.requests_at(64)
    assert long == (layout.bf16_tokens // 32768, layout.tokens // 32768) and long[1] > 6 * long[0]
    assert short == (layout.bf16_tokens // 64, layout.max_requests)


def test_a_context_beyond_the_cache_fits_no_request():
    layout = fit_shared(KVQuantConfig("oscar"), QWEN3_8B, 3 * GIB, 8192)
    assert layout.requests_at(layout.tokens)[1] == 1
    assert layout.requests_at(layout.tokens + 1)[1] == 0 and layout.requests_at(1 << 20)[1] == 0
    assert 1 < layout.requests_at(2048)[1] < layout.tokens // 2048 < layout.max_requests, "windows take room"


def test_requests_that_may_lose_recent_pages_are_more():
    """More requests fit if they may lose recent pages: each keeps its sink and the page being filled.

    There is also room for what one prefill batch writes.
    """
    config, whole = KVQuantConfig("oscar", recent_min=0), KVQuantConfig("oscar")
    assert config.slots_per_request == 6
    assert [config.pinned_slots(n) for n in (1, 2, 65, 66, 900)] == [2, 3, 3, 4, 6]
    more = {"pages": 4000, "slots": 600, "wanted": 999, "batch": 2048}
    most = divide(config, QWEN3_8B, **more)
    assert most.max_requests == (most.slots - 1 - 2048 // 64) // 2
    assert divide(config, QWEN3_8B, **more, written=4).max_requests < most.max_requests
    assert divide(replace(config, recent_min=256), QWEN3_8B, **more) == divide(whole, QWEN3_8B, **more)
    some = divide(replace(config, recent_min=128), QWEN3_8B, **more)
    assert divide(whole, QWEN3_8B, **more).max_requests < some.max_requests < most.max_requests
    assert most.whole_windows == some.whole_windows == divide(whole, QWEN3_8B, **more).max_requests


def test_whole_windows_are_all_where_none_may_be_lost():
    for resumes in (1, 8):
        layout = divide(KVQuantConfig("oscar"), QWEN3_8B, pages=700, slots=70, wanted=99, resumes=resumes)
        assert layout.whole_windows == layout.max_requests
    soft = divide(KVQuantConfig("oscar", recent_min=0), QWEN3_8B, pages=700, slots=70, wanted=99, resumes=8)
    assert soft.whole_windows == layout.max_requests < soft.max_requests


def test_few_bf16_pages_may_hold_no_whole_window():
    layout = divide(KVQuantConfig("oscar", recent_min=0), QWEN3_8B, pages=40, slots=9, wanted=1)
    assert (layout.max_requests, layout.whole_windows) == (1, 1)
    tight = divide(KVQuantConfig("oscar", recent_min=0, recent_tokens=512), QWEN3_8B, pages=40, slots=13, wanted=1)
    assert tight.max_requests == tight.whole_windows == 1
