"""Our allocator over SGLang's: it hands out pages on a CPU too, and records each returned page once."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import EVENT_FREE
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.releases import OLD_TREE
from sglang_kvq.sglang import compat, runtime
from sglang_kvq.sglang.memory.allocator import KVQuantAllocator, OnCpu
from sglang_kvq.sglang.memory.build import build_allocator
from sglang_kvq.sglang.memory.pool import KVQuantPool

PAGES = 40
CPU = torch.device("cpu")
OLD = compat.applies(OLD_TREE, compat.sglang_version())


@pytest.fixture
def allocator(monkeypatch):
    """Returns our hook's allocator, as in a scheduler on a CPU, with a tier manager that quantizes nothing."""
    pool = object.__new__(KVQuantPool)
    geometry = SimpleNamespace(formats=[PageFormat(64, 64, 0.96, 0.92)], kv_heads=1)
    pool.layout, pool.page_size = SimpleNamespace(geometry=geometry, pages=PAGES, slots=12, arena=None), P
    state = runtime.Runtime(KVQuantConfig("int2"), geometry, (0,))
    monkeypatch.setattr(runtime, "_current", state)
    rows = SimpleNamespace(req_to_token=torch.zeros(3, PAGES * P, dtype=torch.int32))
    built = build_allocator(
        None,
        SimpleNamespace(device="cpu", kv_cache_dtype=torch.bfloat16),
        sizes=SimpleNamespace(max_total_num_tokens=PAGES * P),
        token_to_kv_pool=pool,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=None,
    )
    state.tiers = TierManager(state.pages, 1, 2, lambda *batch: None)
    assert built is state.allocator
    return built


def extend(allocator, tokens: int) -> torch.Tensor:
    """Returns the locations of a new request's tokens, int64 ``[tokens]``."""
    none, lens = torch.zeros(1, dtype=torch.int64), torch.tensor([tokens])
    return allocator.alloc_extend(none, none, lens, lens, none - 1, tokens)


def recorded() -> list[int]:
    """Returns the pages recorded as freed since the last call, repeats included."""
    packed = runtime.tiers().pending.pack(CPU)
    if packed is None:
        return []
    spans, ids, events = packed
    assert spans[: 3 * events].view(-1, 3)[:, 0].tolist() == [EVENT_FREE] * events
    return ids.tolist()


def test_pages_are_handed_out(allocator):
    locations = extend(allocator, 3 * P + 10)
    assert locations.unique().numel() == 3 * P + 10
    last = locations[-1:]
    for length in range(3 * P + 11, 4 * P + 2):
        lens = torch.tensor([length])
        last = allocator.alloc_decode(lens, lens, last)
    assert int(last) // P not in (locations // P).tolist() and int(last) % P == 0
    assert allocator.available_size() == (PAGES - 5) * P


@pytest.mark.parametrize("sorts", [False] if OLD else [False, True])
def test_a_lone_prompt_gets_the_pages_that_sglang_gives(allocator, sorts):
    """Ours reads no tensor on the device; requests end between prompts, and also because pages run out."""
    args = dict(page_size=P, dtype=torch.bfloat16, device="cpu", kvcache=None, need_sort=sorts)
    ours = KVQuantAllocator(PAGES * P, **args)
    theirs = (OnCpu if OLD else PagedTokenToKVPoolAllocator)(PAGES * P, **args)
    rng, none, running, refused = random.Random(0), torch.zeros(1, dtype=torch.int64), [], 0
    for tokens in rng.sample(range(1, 301), 300):
        while running and rng.random() < 0.2:
            ended = running.pop(rng.randrange(len(running)))
            ours.free(ended), theirs.free(ended)
        while (given := ours.alloc_extend(None, none, None, torch.tensor([tokens]), None, tokens)) is None:
            assert extend(theirs, tokens) is None
            refused += 1
            ended = running.pop(rng.randrange(len(running)))
            ours.free(ended), theirs.free(ended)
        expected = extend(theirs, tokens)
        assert torch.equal(given, expected) and given.dtype == expected.dtype and given.is_contiguous()
        assert torch.equal(ours.free_pages, theirs.free_pages)
        running.append(given)
    assert refused > 10 and extend(theirs, 0).shape == extend(ours, 0).shape == (0,)


def test_a_lone_request_goes_on_in_its_last_page(allocator):
    first, stored, total = extend(allocator, P + 10), torch.tensor([P + 10]), torch.tensor([3 * P])
    more = allocator.alloc_extend(stored, stored, total, total, first[-1:], 2 * P - 10)
    assert (more[: P - 10] - first[-1]).tolist() == list(range(1, P - 9))
    assert len((torch.cat([first, more]) // P).unique()) == 3


@pytest.mark.parametrize("group", [False, True], ids=["at once", "in a group"])
def test_each_page_is_recorded_once(allocator, group):
    """A returned page is recorded once, not once per token: a million tokens of a row are 16 thousand ids."""
    locations = extend(allocator, 9 * P + 5)
    pages = locations[::P] // P
    before = allocator.available_size()
    if group:
        allocator.free_group_begin()
    allocator.free(locations[: 4 * P])
    allocator.free(locations[6 * P :])  # only a part of the last page
    if group:
        assert not runtime.tiers().pending, "SGLang has not given them back yet"
        allocator.free_group_end()
    freed = recorded()
    assert sorted(freed) == sorted(pages[[0, 1, 2, 3, 6, 7, 8, 9]].tolist())
    assert allocator.available_size() == before + 8 * P


def test_recorded_pages_do_not_keep_the_free_list(allocator):
    """A recorded event copies its pages, because hundreds of events may wait in one step."""
    allocator.free(extend(allocator, 2 * P))
    ((pages,),) = runtime.tiers().pending._events
    assert pages.untyped_storage().nbytes() == 2 * 8


def test_nothing_freed_records_nothing(allocator):
    allocator.free(torch.empty(0, dtype=torch.int64))
    assert not runtime.tiers().pending


def test_integrity_of_a_cache_in_use(allocator):
    """An idle server's check passes a cache in use, and finds a page that was freed without our allocator."""
    state, (page, *records) = runtime.current(), (extend(allocator, 3 * P)[::P] // P).tolist()
    state.pages.page_slot[page], state.tiers.slot_page[1] = 1, page
    state.tiers.page_valid[records] = True
    allocator.check_integrity()
    state.tiers.page_valid[records[0]] = False
    with pytest.raises(RuntimeError, match="neither free nor in a record nor in BF16"):
        allocator.check_integrity()
    state.tiers.page_valid[records] = True
    allocator.free_pages = torch.cat([allocator.free_pages, torch.tensor([page])])
    with pytest.raises(RuntimeError, match="a free page still has a BF16 slot"):
        allocator.check_integrity()


def test_kernels_are_loaded_for_every_size_of_batch(allocator, monkeypatch):
    """No page is taken, and each kernel sees the types and the page size that SGLang's scheduler gives it."""
    launched, offsets = {"extend": [], "decode": []}, set()

    class Kernel:
        def __init__(self, kind: str) -> None:
            self.kind = kind

        def __getitem__(self, grid: tuple[int]):
            def launch(*args) -> None:
                *tensors, upper, page = args
                types = [x.dtype for x in tensors]
                launched[self.kind].append((*grid, upper, page, types))
                offsets.update(x.storage_offset() for x in tensors[:-2])
                (tensors[-1] if self.kind == "decode" else torch.empty(0)).copy_(torch.arange(len(tensors[-1])))

            return launch

    for kind in launched:
        monkeypatch.setattr(f"sglang.srt.mem_cache.allocator.paged.alloc_{kind}_kernel", Kernel(kind))
    monkeypatch.setattr(allocator, "use_triton_kernels", True, raising=False)
    monkeypatch.setattr(allocator, "debug_mode", True)  # SGLang checks that lengths and locations fit together
    free = allocator.free_pages.clone()
    allocator.load_kernels(5, drafts=False)
    assert torch.equal(allocator.free_pages, free) and recorded() == []
    long, rows = torch.int64, torch.int32
    assert launched["extend"] == [(size, size, P, [long] * 5) for size in (1, 1, 2, 4, 8)]
    assert launched["decode"] == [(size, size, P, [long, rows, long, long]) for size in (1, 2, 4, 8)]
    assert offsets == {0, 1}, "one request's last location is not aligned"
    launched["extend"].clear(), launched["decode"].clear()
    allocator.load_kernels(1, drafts=True)
    new, drafted = [long] * 5, [rows] * 3 + [long] * 2
    assert launched == {"extend": [(1, 1, P, types) for types in (new, new, drafted)], "decode": []}
    for most, sizes in ((1, 1), (2, 2), (1024, 11), (1025, 12)):
        launched["decode"].clear()
        monkeypatch.setattr(allocator, "free_pages", torch.arange(1, 5000))
        allocator.load_kernels(most, drafts=False)
        assert len(launched["decode"]) == sizes, most
