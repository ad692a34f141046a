"""The allocator of a memory that records and BF16 pages share: admitted requests fit, and allocations fit too."""

from __future__ import annotations

import random
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch

from sglang_kvq.cache.integrity import check_integrity
from sglang_kvq.cache.layout import KVGeometry, fit_shared, share, shared_reserve, window_slots
from sglang_kvq.cache.pending import AllocatedPages
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.releases import NEW_TREE_RELEASES
from sglang_kvq.sglang import compat, hooks, runtime
from sglang_kvq.sglang.memory import capacity
from sglang_kvq.sglang.memory.build import build_allocator
from sglang_kvq.sglang.memory.pool import KVQuantPool, describe_windows
from sglang_kvq.sglang.runtime import attach

pytestmark = pytest.mark.skipif(version("sglang") not in NEW_TREE_RELEASES, reason="older releases divide it once")

CONFIG = KVQuantConfig("int2", recent_tokens=128, recent_min=0)
GEOMETRY = KVGeometry(1, (PageFormat(64, 64, 0.96, 0.92),))
BATCH = 4 * P


class Tree:
    """A prefix cache of single pages, which evicts the oldest first."""

    def __init__(self, allocator) -> None:
        self.allocator, self.pages, self.evicted = allocator, [], 0

    def supports_mamba(self) -> bool:
        return False

    def supports_prefix_sharing(self) -> bool:
        return True

    def evictable_size(self) -> int:
        return len(self.pages) * P

    def evict_for_alloc(self, params) -> None:
        count = min(-(-params.num_tokens // P), len(self.pages))
        gone, self.pages = self.pages[:count], self.pages[count:]
        self.evicted += count
        if gone:
            self.allocator.free(torch.tensor([page * P for page in gone]))


class Server:
    """One worker's rows, allocator and tree, used as SGLang's scheduler uses them."""

    def __init__(self, monkeypatch, pages: int, rows: int) -> None:
        windows = window_slots(CONFIG, BATCH)
        budget = shared_reserve(GEOMETRY, windows) + pages * GEOMETRY.shared_page_bytes
        self.layout = fit_shared(CONFIG, GEOMETRY, budget, BATCH)
        assert self.layout.pages == pages
        pool = object.__new__(KVQuantPool)
        pool.layout, pool.page_size = self.layout, P
        state = runtime.Runtime(CONFIG, GEOMETRY, (0,))
        monkeypatch.setattr(runtime, "_current", state)
        table = torch.zeros(rows + 1, (pages + 1) * P, dtype=torch.int32)
        self.free_rows = list(range(1, rows + 1))
        self.allocator = build_allocator(
            None,
            SimpleNamespace(device="cpu", kv_cache_dtype=torch.bfloat16),
            sizes=SimpleNamespace(max_total_num_tokens=pages * P),
            token_to_kv_pool=pool,
            req_to_token_pool=SimpleNamespace(
                req_to_token=table, size=rows, available_size=lambda: len(self.free_rows)
            ),
            token_to_kv_pool_allocator=None,
        )
        state.tiers = self.tiers = TierManager(
            state.pages, CONFIG.sink_pages, CONFIG.recent_pages, lambda *batch: None, kept_pages=0
        )
        self.tree, self.table = Tree(self.allocator), table

    def budget(self):
        return self.allocator.create_prefill_budget(self.tree)

    def admits(self, budget, tokens: int, answer: int) -> bool:
        """Asks for one request as ``PrefillAdder.add_one_req`` does."""
        more = {"max_new_tokens": answer, "input_tokens": tokens, "swa_host_hit_length": 0}
        total = tokens + answer + P
        fits, _ = budget.check_prefill(extend_input_len=tokens, total_tokens=total, chunk_limit=None, **more)
        if fits:
            budget.reserve(-(-tokens // P) * P, answer)
        return fits

    def prefill(self, tokens: list[int]) -> list[tuple[int, torch.Tensor]]:
        """Allocates a batch of new requests; returns their rows and locations."""
        rows = [self.free_rows.pop(0) for _ in tokens]
        self.allocator.evict_to_free_tokens(self.tree, sum(tokens) + len(tokens) * P)
        none, lens = torch.zeros(len(tokens), dtype=torch.int64), torch.tensor(tokens)
        found = self.allocator.alloc_extend(none, none, lens, lens, none - 1, sum(tokens))
        assert found is not None, "admitted, but there is no room"
        return list(zip(rows, found.split(tokens)))

    def check(self) -> None:
        """Checks that the tables agree and that windows have their room."""
        running = self.allocator.running
        assert self.allocator.split.slots >= self.layout.windows.needed(running)
        assert self.allocator.used <= self.allocator.split.pages
        check_integrity(self.tiers, self.allocator.get_all_free_pages())
        assert self.tiers.first_slot == self.allocator.split.first_slot


@pytest.fixture
def server(monkeypatch):
    return lambda pages=120, rows=30: Server(monkeypatch, pages, rows)


def test_pages_from_the_host_take_the_place_of_cached_ones(server):
    """Ids are free, but the memory is full of other prefixes: these are evicted, as far as the load needs it."""
    one = server()
    (_, stored), *_ = one.prefill([one.layout.tokens - 10 * P])
    one.free_rows.append(1)  # the request has ended, and the tree has its pages
    one.tree.pages = (stored[::P] // P).tolist()
    cached, budget = len(one.tree.pages), one.budget()
    assert one.admits(budget, 40 * P, P)
    assert budget.load_back_needs_full_tokens is False, "SGLang passes what comes from the host"
    assert budget.prepare_load_back(full_tokens=42 * P, extend_input_len=P, max_new_tokens=P)
    assert 0 < one.tree.evicted < cached
    locations = one.allocator.alloc(39 * P)
    assert locations is not None and len(locations) == 39 * P
    one.prefill([P])  # admitted with them
    one.check()
    assert not budget.prepare_load_back(full_tokens=one.layout.tokens, extend_input_len=P, max_new_tokens=P)
    assert one.tree.evicted == cached, "what can be evicted was not enough"


@pytest.mark.parametrize("seed", range(3))
def test_what_is_admitted_with_pages_from_the_host_fits(server, seed):
    """Loads begin while a batch is admitted, before its requests have rows; evictable pages count as room."""
    rng = random.Random(seed)
    some, loads = server(rng.randint(60, 200), 40), 0
    for _ in range(40):
        budget, batch = some.budget(), []
        while some.free_rows[len(batch) :] and sum(tokens for tokens, _ in batch) < BATCH and rng.random() < 0.8:
            host, answer = rng.choice((0, rng.randint(1, 20), rng.randint(1, some.layout.pages))), rng.randint(1, 3 * P)
            new = rng.randint(1, BATCH - sum(tokens for tokens, _ in batch))
            more = {"extend_input_len": new, "max_new_tokens": answer, "chunk_limit": None, "swa_host_hit_length": 0}
            total = host * P + new + answer + P
            if not budget.check_prefill(total_tokens=total, input_tokens=total, **more)[0]:
                break
            given = []
            if host:
                assert budget.prepare_load_back(full_tokens=total, **more), "it would wait forever"
                given = some.allocator.alloc(host * P)[::P].tolist()
                loads += 1
            budget.reserve(-(-new // P) * P, answer)
            batch.append((new, given))
        if not batch:
            some.free_rows, some.tree.pages = list(range(1, 41)), some.tree.pages + taken(some)
            continue
        some.prefill([tokens for tokens, _ in batch])
        some.check()
    assert loads > 5 and some.tree.evicted > 5


def taken(server: Server) -> list[int]:
    """Returns the pages that requests have, which the tree gets when all of them end."""
    return sorted({*range(1, server.layout.pages + 1)} - {*server.allocator.free_pages.tolist(), *server.tree.pages})


@pytest.mark.parametrize("name", ["SharedAllocator", "SharedBudget"])
def test_what_replaces_a_method_of_sglang_is_in_the_table_of_hooks(name):
    """A release that renames such a method is then refused, instead of no longer calling ours."""
    from sglang_kvq.sglang.memory import shared

    kind = getattr(shared, name)
    theirs = [base for base in kind.__mro__ if base.__module__.startswith("sglang.srt.")]
    used = {hook.target.split(".")[-1] for hook in hooks.TABLE if hook.kind is hooks.Kind.SUBCLASS}
    own = {key for key, value in vars(kind).items() if callable(value) or isinstance(value, property)}
    replaced = {key for key in own if any(key in vars(base) for base in theirs)}
    assert len(replaced) > 5 and replaced <= used


def test_one_request_may_have_the_whole_cache(server):
    one = server()
    capacity_ = one.layout.tokens
    answer = one.allocator.max_new_tokens_for_memory(
        P, 10**6, token_capacity=capacity_, sliding_window_size=None, chunk_size=None
    )
    assert answer == capacity_ - 2 * P - 1
    assert one.admits(one.budget(), P, answer)
    assert not one.admits(one.budget(), P, answer + 2)
    one.prefill([capacity_])
    one.check()
    assert one.allocator.used == one.layout.pages and not one.allocator.check_decode_capacity(
        num_tokens=P, tree_cache=one.tree
    )


@pytest.mark.parametrize("checked", [False, True], ids=["in one operation", "by SGLang"])
@pytest.mark.parametrize("prompts", [[3 * P + 5], [3 * P, 9]], ids=["lone", "two"])
def test_new_ids_are_recorded(server, prompts, checked):
    """SGLang's function, which also checks its work, gives a lone prompt the same ids."""
    one = server()
    one.allocator.debug_mode = checked
    for begin in (1, 5):
        given = one.prefill(prompts)
        pages = torch.cat([locations[::P] // P for _, locations in given])
        event = one.tiers.pending._events[-1]
        assert isinstance(event, AllocatedPages) and event.pages.tolist() == pages.tolist()
        assert len(event.pages) * 8 == event.pages.untyped_storage().nbytes(), "a view keeps all free ids"
        assert pages.tolist() == list(range(begin, begin + 4))
    one.check()


def test_as_many_run_as_the_layout_says(server):
    """With short requests, windows rather than records take the memory."""
    many = server(400, 200)
    budget, admitted = many.budget(), 0
    while many.admits(budget, 50, 10):
        many.prefill([50])
        admitted, budget = admitted + 1, many.budget()
    many.check()
    assert many.layout.max_requests - 4 <= admitted <= many.layout.max_requests
    assert admitted > 3 * many.layout.slots * 0.1 / CONFIG.slots_per_request, "what a tenth of the memory admits"
    assert many.allocator.room() < 15, "a window in pages, the request's own and one for rounding"
    held = many.allocator.used
    many.allocator.alloc((many.allocator.room() - 2) * P)
    assert not many.allocator.admits_another()
    window = many.layout.arena.pages_beside(0) - many.layout.arena.pages_beside(many.layout.windows.least)
    many.tree.pages = list(range(many.allocator.used - held + window))
    assert many.allocator.admits_another(), "cached pages give way"


def test_a_budget_counts_memory_and_the_windows_of_its_batch(server):
    """Ids are free for more tokens than the memory holds beside windows; SGLang's own limits count ids only."""
    one = server(400, 40)
    one.prefill([50] * 3)
    room = one.allocator.room() * P
    assert room < one.allocator.available_size()
    budget = one.budget()
    window = budget.window
    assert window >= one.layout.windows.least * GEOMETRY.slot_bytes / GEOMETRY.shared_page_bytes * P
    assert budget.remaining_total == budget.remaining_current == room
    budget.reserve(2 * P, 10)
    budget.reserve(2 * P, 10, is_chunked_continuation=True)  # its window is counted already
    left = room - window - 2 * 3 * P  # SGLang counts a page more for each request
    assert (budget.remaining_current, budget.remaining_total) == (left, left - 20)
    asks = [budget.can_allocate_prefill(paged_input=left - 20 - window + more, extend_input_len=0) for more in (0, 1)]
    assert asks == [True, False]
    one.tree.pages = [1, 2]
    assert budget.remaining_total == left - 20 + 2 * P, "cached pages give way"


@pytest.mark.parametrize("seed", range(4))
def test_what_is_admitted_fits(server, seed):
    """Admitted requests fit through admission, decoding, retraction and eviction; every step checks the tables."""
    rng = random.Random(seed)
    some = server(rng.randint(60, 200), 40)
    running: list[list] = []  # each: row, tokens, locations of pages
    retracted = 0
    for _ in range(120):
        budget, batch = some.budget(), []
        while some.free_rows[len(batch) :] and sum(batch) < BATCH and rng.random() < 0.7:
            tokens = rng.choice((rng.randint(1, 2 * P), rng.randint(1, BATCH)))
            if sum(batch) + tokens > BATCH or not some.admits(budget, tokens, rng.randint(1, P)):
                break
            batch.append(tokens)
        if batch:
            running += [[row, len(locations), locations[::P].tolist()] for row, locations in some.prefill(batch)]
        for _ in range(rng.randint(0, 40)):
            lens = torch.tensor([tokens + 1 for _, tokens, _ in running])
            needed = int(((lens - 1) % P == 0).sum()) * P
            while running and not some.allocator.check_decode_capacity(num_tokens=needed, tree_cache=some.tree):
                row, _, pages = running.pop()
                some.allocator.free(torch.tensor(pages))
                some.free_rows.append(row)
                some.tiers.pending.free_rows([row])
                retracted += 1
                lens = lens[: len(running)]
                needed = int(((lens - 1) % P == 0).sum()) * P
            if not running:
                break
            last = torch.tensor([pages[-1] // P * P + (tokens - 1) % P for _, tokens, pages in running])
            given = some.allocator.alloc_decode(lens, lens, last)
            assert given is not None
            for request, location in zip(running, given.tolist()):
                request[1] += 1
                if request[1] % P == 1:
                    request[2].append(location)
        some.check()
        for request in [r for r in running if rng.random() < 0.15]:
            running.remove(request)
            kept = rng.randint(0, len(request[2]))
            some.tree.pages += [location // P for location in request[2][:kept]]
            if request[2][kept:]:
                some.allocator.free(torch.tensor(request[2][kept:]))
            some.free_rows.append(request[0])
            some.tiers.pending.free_rows([request[0]])
        some.check()
    assert some.tree.evicted > 5


@pytest.mark.parametrize("seed", range(3))
def test_batches_of_short_prompts_find_bf16_pages(server, seed):
    """A batch has as many tokens as its limit, so it may fill more pages; memory is full in the end."""
    rng = random.Random(seed)
    some, most = server(150, 120), 0
    while True:
        budget, batch = some.budget(), []
        while some.free_rows[len(batch) :]:
            tokens = rng.choice((rng.randint(1, 20), rng.randint(P + 1, P + 20)))
            if sum(batch) + tokens > BATCH or not some.admits(budget, tokens, P):
                break
            batch.append(tokens)
        if not batch:
            break
        most = max(most, sum(-(-tokens // P) for tokens in batch))
        given = some.prefill(batch)
        for row, locations in given:
            some.table[row, : len(locations)] = locations.int()
        rows, lens = torch.tensor([row for row, _ in given]), torch.tensor(batch)
        some.tiers.plan_extend(rows, torch.zeros_like(lens), lens, 0, rows[:0])
        assert int(some.tiers.errors) == 0, "a page to be written got no BF16 page"
        some.check()
    assert most > BATCH // P and some.allocator.running > 10


def test_cached_prefixes_give_way_to_whole_windows(server):
    full = server(400, 40)
    (row, locations), *_ = full.prefill([360 * P])
    full.free_rows.append(row)
    full.tree.pages = (locations[::P] // P).tolist()
    full.prefill([3 * P] * 10)
    full.check()
    windows = full.layout.windows
    assert full.tree.evicted and full.allocator.split.slots >= windows.wanted(10) - full.layout.slots // 256
    assert full.tree.pages, "no more than these need"


def test_copies_evict_by_memory_too(server):
    """Where ids are free, memory may be full of cached prefixes; then copies of a session's pages have room, too."""
    from sglang_kvq.sglang.prefix.tree_keys import allocate

    one = server(400, 40)
    one.prefill([50] * 3)
    allocator, tree = one.allocator, one.tree
    tree.token_to_kv_pool_allocator = allocator
    whole = allocator.split.arena.pages_beside(one.layout.windows.wanted(3)) - allocator.used
    cached = allocator.alloc(min(whole, len(allocator.free_pages)) * P)
    tree.pages = (cached[::P] // P).tolist()
    copies = len(allocator.free_pages)
    assert copies > allocator.room() and len(tree.pages) > copies, "ids suffice, memory does not"
    assert len(allocate(tree, copies * P)) == copies * P and tree.evicted
    one.check()
    evicted = tree.evicted
    assert allocate(tree, allocator.size) is None and tree.evicted == evicted, "nothing is evicted in vain"


def test_a_flush_keeps_the_boundary(server):
    one = server()
    one.prefill([90 * P])
    one.check()
    before = one.allocator.split.first_slot
    one.free_rows.append(1)
    one.allocator.free(torch.arange(P, 81 * P))
    one.prefill([5] * 7)  # moves the boundary, but no plan has applied that yet
    one.free_rows += range(2, 9)
    one.allocator.clear()
    one.check()
    assert one.allocator.used == 0 and one.allocator.split.first_slot == one.tiers.first_slot != before


def test_a_smaller_cache_has_room_for_some_requests():
    """With few pages from ``--max-total-tokens``, the memory is small, but requests' windows still have room."""
    windows = window_slots(CONFIG, BATCH)
    layout = share(GEOMETRY, windows, pages=10, budget_bytes=1 << 30)
    assert layout.pages == 10 and layout.max_requests >= 8
    assert layout.arena.slots_beside(10) >= windows.wanted(8)
    assert describe_windows(layout).startswith(
        f"at most {layout.max_requests} running requests, {layout.whole_windows}"
    )
    few = share(GEOMETRY, windows, pages=10, budget_bytes=1 << 30, wanted=2)
    assert few.slots < layout.slots and few.total_bytes < layout.total_bytes < 1 << 30


@pytest.mark.parametrize(
    ("context", "given", "rows"),
    [(4096, None, 2048), (1 << 14, None, 512), (1 << 20, None, 64), (1 << 20, 512, 512), (4096, 8, 8)],
)
def test_rows_of_long_contexts_are_few_unless_asked_for(monkeypatch, context, given, rows):
    """SGLang's table takes four bytes per token of every row: 8 GB for 2,048 rows of a million tokens."""
    state = runtime.Runtime(CONFIG, GEOMETRY, (0,))
    state.shared, state.budget_bytes = window_slots(CONFIG, BATCH), 1 << 30
    monkeypatch.setattr(runtime, "_current", state)
    args = SimpleNamespace(max_running_requests=given)
    attach(CONFIG, args)
    worker = SimpleNamespace(server_args=args, attn_dp_size=1, model_config=SimpleNamespace(context_len=context))
    pages = ((1 << 30) - shared_reserve(GEOMETRY, state.shared)) // GEOMETRY.shared_page_bytes
    fits = share(GEOMETRY, state.shared, pages=pages, budget_bytes=1 << 30, wanted=given).max_requests
    found = capacity.resolve_max_num_reqs(lambda self, tokens: given or 2048, worker, pages * P)
    assert found == state.layout.max_requests <= rows and state.layout.pages == pages
    assert found == rows or found == fits < rows


def configurator(**args):
    fields = dict(enable_hierarchical_cache=False, disaggregation_mode="null", speculative_algorithm=None)
    return SimpleNamespace(server_args=SimpleNamespace(**{**fields, **args}), model_config=SimpleNamespace())


@pytest.mark.parametrize(
    ("args", "config", "why"),
    [
        ({}, {}, None),
        ({}, {"bf16_budget": 0.2}, "--kv-quant-bf16-budget 0.2 fixes the share of BF16 pages"),
        ({}, {"capture": "f:1:1"}, "cannot be moved in memory with kvq calibrate"),
        ({"enable_hierarchical_cache": True}, {}, None),
        ({"disaggregation_mode": "decode"}, {}, "cannot be moved in memory with --disaggregation-mode"),
        ({"speculative_algorithm": "NGRAM"}, {}, None),
        ({"enable_streaming_session": True}, {}, "cannot be moved in memory with --enable-streaming-session"),
    ],
)
def test_which_servers_share_their_memory(monkeypatch, args, config, why):
    monkeypatch.setattr(capacity.drafts, "keeps_states", lambda model: False)
    monkeypatch.setattr(compat, "resolved", lambda args, field, default=None: getattr(args, field, default))
    found = capacity.why_not_shared(configurator(**args), KVQuantConfig("int2", **config))
    assert found is None if why is None else why in found


def test_models_with_states_and_older_releases_divide_it_once(monkeypatch):
    monkeypatch.setattr(capacity.drafts, "keeps_states", lambda model: True)
    assert "recurrent states" in capacity.why_not_shared(configurator(), KVQuantConfig("int2"))
    monkeypatch.setattr(compat, "sglang_version", lambda: compat.Version("0.5.18"))
    assert "admits requests by their tokens alone" in capacity.why_not_shared(configurator(), KVQuantConfig("int2"))
