"""The tiers' invariants, one by one, and failures of earlier systems."""

from __future__ import annotations

import pytest
import torch

from sglang_kvq.cache.integrity import check_integrity
from sglang_kvq.cache.pending import ArrivedRequest
from sglang_kvq.cache.pool import PACKED_TAIL
from sglang_kvq.cache.shared.split import WindowSlots
from sglang_kvq.constants import PAGE_SIZE as P
from tests.cache.scheduler_model import Model


def model(pages=60, slots=24, rows=3, sinks=1, recent=2, **more) -> Model:
    return Model(pages, slots, rows, sinks, recent, **more)


def prefill(m: Model, tokens: list[int], chunks: list[int] | None = None, publish: bool = True):
    request = m.start(tokens)
    assert request is not None
    for n in chunks or [len(tokens) - request.stored]:
        assert m.extend([(request, n)])
        if publish:
            m.publish(request, finished=False)
        m.check()
    assert request.stored == len(tokens)
    return request


def generate(m: Model, request, count: int, padding: int = 0) -> None:
    for _ in range(count):
        request.tokens.append(3)
        assert m.decode([request], padding)


def ranges(m: Model, request) -> tuple[int, int]:
    return int(m.pool.row_sink_end[request.row]), int(m.pool.row_history_end[request.row])


@pytest.mark.parametrize("length", [1, 63, 64, 65, 192, 193, 255, 256, 257, 700])
def test_window_after_prefill_and_through_two_pages_of_decoding(length):
    m = model()
    request = prefill(m, list(range(length)))
    assert m.tiers.counts().pages_lost == 0
    generate(m, request, 2 * P)
    total = length + 2 * P
    sink_end, history_end = ranges(m, request)
    assert sink_end == P
    assert history_end == max((total // P - 2) * P, P)
    m.leave(request, publish=True)
    m.check_empty()


@pytest.mark.parametrize("chunk", [1, 7, 63, 64, 65, 100, 129, 300])
def test_chunked_prefill_may_wrap_the_window_any_number_of_times(chunk):
    m = model()
    tokens = [i % 97 for i in range(500)]
    chunks = [min(chunk, 500 - at) for at in range(0, 500, chunk)]
    request = prefill(m, tokens, chunks)
    generate(m, request, 70)
    m.leave(request, publish=True)
    m.check_empty()


def test_codes_are_the_same_whichever_path_wrote_them():
    """One prefill, odd chunks, decoding, and a new prefill after retraction leave identical records."""
    tokens = [i % 89 for i in range(8 * P)]
    records = []
    for way in ("whole", "chunks", "decode", "retracted"):
        m = model()
        if way == "whole":
            request = prefill(m, tokens)
        elif way == "chunks":
            request = prefill(m, tokens, [100, 33, 64, 200, 115])
        elif way == "decode":
            request = prefill(m, tokens[:10])
            for token in tokens[10:]:
                request.tokens.append(token)
                m.decode([request])
        else:
            request = prefill(m, tokens[: 5 * P + 9])
            generate(m, request, 5)
            m.leave(request, publish=False)
            request = prefill(m, tokens)
        request.tokens.append(1)
        m.decode([request])
        sink_end, history_end = ranges(m, request)
        assert (sink_end, history_end) == (P, 6 * P)
        pages = m.row_pages(request, history_end)[1:]
        records.append(m.pool.records[0][pages, 0])
    for other in records[1:]:
        assert torch.equal(records[0], other)


def test_a_prefill_reads_bf16_as_far_back_as_bf16_pages_are_left():
    m = model(prefill_pages=4)
    request = prefill(m, list(range(10 * P)), [P] * 10)
    prefix = 9 * P  # prefix of the last chunk, whose window begins at page 7
    assert ranges(m, request) == (P, prefix - (2 + 4) * P)
    assert m.tiers.counts().pages_lost == 0
    generate(m, request, 1)
    assert ranges(m, request) == (P, 8 * P), "decoding reads records"
    request.tokens += [5, 6, 7]
    assert m.extend([(request, 1)])
    assert ranges(m, request) == (P, 8 * P), "a request that decodes in a prefill's batch, too"
    assert m.extend([(request, 2)])
    assert ranges(m, request) == (P, (8 - 4) * P)
    other = prefill(m, list(range(1000, 1000 + 21 * P)), [P] * 21)  # takes the least recently used BF16 pages
    request.tokens += [8, 9]
    assert m.extend([(request, 2)])
    assert ranges(m, request) == (P, 8 * P)
    for done in (request, other):
        m.leave(done, publish=True)
    m.check_empty()


def test_a_prefill_reads_records_up_to_the_last_bf16_page_that_was_lost():
    m = model(prefill_pages=50)
    request = prefill(m, list(range(4 * P)), [2 * P, 2 * P])
    request.tokens += list(range(500, 500 + 6 * P))
    assert m.extend([(request, 6 * P)])  # pages 4 to 7 are quantized directly and never have BF16 copies
    request.tokens += [1, 2]
    assert m.extend([(request, 2)])
    assert ranges(m, request) == (P, 8 * P)


def test_next_turn_finds_the_window_still_in_bf16():
    m = model()
    first = prefill(m, [i % 50 for i in range(500)])
    generate(m, first, 12)
    m.leave(first, publish=True)
    second = m.start(first.tokens[:512] + [7] * 100)
    assert second.stored == 512  # includes the answer
    assert m.extend([(second, 100)])
    assert ranges(m, second) == (P, (512 // P - 2) * P)


def test_a_window_taken_by_others_is_read_as_history_and_loses_nothing():
    m = model(slots=8, rows=2)
    first = prefill(m, [i % 50 for i in range(500)])
    m.leave(first, publish=True)
    for kind in range(2):  # two running requests pin every BF16 copy that there is room for
        prefill(m, [(i * 3 + kind + 100) % 250 for i in range(400)])
    m.leave(m.running[0], publish=False)
    again = m.start(first.tokens + [1] * 10)
    assert m.extend([(again, len(again.tokens) - again.stored)])
    sink_end, history_end = ranges(m, again)
    assert history_end == again.protected and sink_end in (0, P)


def test_two_requests_computing_the_same_prompt_keep_one_copy_and_their_windows():
    """A request that is repointed to the tree's pages transfers its BF16 copies to them."""
    m = model(slots=24)
    tokens = [i % 70 for i in range(450)]
    one, two = m.start(tokens), m.start(tokens)
    for request in (one, two):
        assert m.extend([(request, 450)])
    m.publish(one, finished=False)
    m.publish(two, finished=False)
    m.check()
    for request in (one, two):
        request.tokens.append(1)
    assert m.decode([one, two])  # checks that both windows are complete
    m.check()


@pytest.mark.parametrize("what", ["decode", "prefill"])
def test_a_row_repointed_while_a_batch_runs_changes_nothing_that_it_reads(what):
    """Two cold prompts of one prefill batch share a prefix; their results are processed while the next batch runs."""
    m = model(pages=100, slots=40)
    m.overlap = True
    shared = [i % 70 for i in range(576)]
    one, two = m.start(shared + [1] * 24), m.start(shared + [2] * 1000)
    assert m.extend([(one, 600), (two, 1000)])
    if what == "decode":
        assert m.extend([(two, 576)])
        lengths = {one: 600, two: 1576}
        for request in (one, two):
            request.tokens.append(1)
        assert m.decode([one, two])
    else:  # the second chunk reads what the first one stored
        lengths = {one: 600, two: 1000}
        assert m.extend([(two, 576)])
    for request, length in lengths.items():
        m.publish(request, finished=False, length=length)
    assert m.row_pages(one, 576) == m.row_pages(two, 576), "the setting: one row was repointed"
    m.land()
    m.check()


def test_whatever_leaves_while_a_batch_runs_stays_readable_until_it_ends():
    m = model(pages=40, slots=24)
    m.overlap = True
    requests = [m.start([i * k % 97 for i in range(500)]) for k in (1, 3)]
    assert m.extend([(r, 500) for r in requests])
    for request in requests:
        request.tokens.append(1)
    assert m.decode(requests)
    m.leave(requests[0], publish=False)  # retracted
    m.leave(requests[1], publish=True, length=500)  # finished
    m.evict(40)
    m.flush()
    m.land()
    again = m.start([i % 97 for i in range(500)])
    assert again.stored == 0 and m.extend([(again, 500)])
    m.leave(again, publish=False)
    m.check_empty()


def test_bf16_pages_move_when_the_tree_kept_pages_without_them():
    m = model(slots=8, rows=2)
    tokens = [i % 70 for i in range(450)]
    one = prefill(m, tokens)
    m.leave(one, publish=True)
    for kind in range(2):
        prefill(m, [(i * 3 + kind + 100) % 250 for i in range(400)])
        if kind == 0:
            m.leave(m.running[0], publish=False)
    m.tiers.apply_pending()
    kept = [m.tree[tuple(tokens[: (i + 1) * P])] for i in range(7)]
    assert (m.pool.page_slot[kept[5:]] < 0).all(), "the setting: the tree's pages lost their BF16 copies"
    # A request that computed the same tokens without hitting the tree, as when both were admitted at once.
    twin = m.start([0])
    m.running.remove(twin)
    twin.tokens, twin.indices = list(tokens), []
    m.running.append(twin)
    assert m.extend([(twin, 450)])
    m.publish(twin, finished=False)
    twin.tokens.append(1)
    assert m.decode([twin])
    assert ranges(m, twin)[1] == (451 // P - 2) * P


@pytest.mark.parametrize("what", ["boundary", "arrival"])
def test_a_window_whose_move_to_the_trees_pages_is_not_applied_yet_stays(what):
    """The row already names the tree's pages, but the BF16 copies are still those of the request's own pages."""
    shared = {"pages": 0, "slots": 40, "shared": WindowSlots(4, 4, 6)} if what == "boundary" else {"slots": 8}
    m = model(**shared)
    tokens = [i % 70 for i in range(450)]
    one, twin = m.start(tokens + [1] * 1000), m.start(tokens)
    assert m.extend([(one, 1450), (twin, 450)])
    m.leave(one, publish=True)
    for kind in (100, 101, 102):  # their sinks are kept rather than what was recent
        m.leave(prefill(m, [kind] * P), publish=True)
    if what == "boundary":
        first = int(m.pool.page_slot[m.place(m.row_pages(twin, 450)[-1])]) + 1
        m.tiers.pending.move_boundary(first)
    else:
        arrive(m, 130)
    m.publish(twin, finished=False)
    m.tiers.apply_pending()
    kept = [m.place(page) for page in m.row_pages(twin, 450)]
    assert (m.pool.page_slot[[kept[0], *kept[5:]]] > 0).all() and int(m.tiers.errors) == 0


def test_a_window_that_moves_stays_though_a_longer_request_moves_first_without_these_bf16_pages():
    m = model(slots=12, rows=3)
    tokens = [i % 70 for i in range(450)]
    one, longer, twin = m.start(tokens + [1] * 1000), m.start(tokens + [1] * 1000), m.start(tokens)
    assert m.extend([(one, 1450), (longer, 1450), (twin, 450)])
    m.leave(one, publish=True)
    for kind in (100, 101, 102):  # their sinks are kept rather than what was recent
        m.leave(prefill(m, [kind] * P), publish=True)
    shared = m.row_pages(longer, 7 * P)[5:] + m.row_pages(one, 7 * P)[5:]
    assert (m.pool.page_slot[shared] < 0).all(), "the setting: only twin has BF16 copies of its recent pages"
    arrive(m, 130)
    for request in (longer, twin):
        m.publish(request, finished=False)
    m.tiers.apply_pending()
    for request in (longer, twin):
        pages = [m.place(page) for page in m.row_pages(request, request.stored)]
        assert (m.pool.page_slot[[pages[0], *pages[-3:]]] > 0).all() and int(m.tiers.errors) == 0


def test_an_arrival_takes_no_second_bf16_pages_beside_those_of_the_trees_pages():
    """SGLang replaces its pages by equal ones of the tree before the next plan; these still have their BF16 copies."""
    m = model(slots=4 + 1, rows=1)  # one window, and a page that a prefill resumes
    tokens = [i % 70 for i in range(500)]
    m.leave(prefill(m, tokens), publish=True)
    tree, copies = list(m.tree.values()), m.pool.page_slot.clone()
    arrive(m, len(tokens), window=[0, 5, 6, 7])
    own = (m.pool.req_to_token[1, :500:P].long() // P).tolist()
    m.tiers.pending.fill_move(m.tiers.pending.reserve_move(), torch.tensor(own[:7]), torch.tensor(tree))
    m.write_row(1, 0, tree)
    m.release(own[:7])
    m.tiers.apply_pending()
    assert int(m.tiers.errors) == 0
    assert torch.equal(m.pool.page_slot[tree], copies[tree]), "a window page lost its BF16 copy"
    assert int(m.pool.page_slot[own[7]]) > 0, "the page being filled has no BF16 page"


def arrive(m: Model, tokens: int, window: list[int] | None = None) -> None:
    """Records the arrival of a request from another server, with a whole window: all pages, or these."""
    row, pages = m.free_rows.pop(0), m.take_pages(-(-tokens // P))
    m.write_row(row, 0, pages)
    source = torch.zeros(2, len(pages), m.pool.packed_elements, dtype=torch.bfloat16)
    source[:, :, -PACKED_TAIL] = 1
    ids, places = torch.tensor(pages), torch.arange(len(pages))[slice(None) if window is None else window]
    m.tiers.pending.arrive(
        ArrivedRequest(
            torch.tensor([row]), torch.tensor([tokens]), ids[: tokens // P], ids[places], places, places, source, list
        )
    )


def test_many_distinct_prompts_cannot_exhaust_the_sinks():
    m = model(pages=60, slots=10, rows=1)
    for kind in range(40):
        request = prefill(m, [(i + kind * 7) % 251 for i in range(70)])
        m.leave(request, publish=True)
    assert m.tiers.counts().slots_used <= 10
    assert not m.tiers.counts().errors


def test_reads_of_prefixes_and_lost_windows_are_counted():
    m = model(slots=7, rows=1)
    tokens = [i % 50 for i in range(400)]
    first = prefill(m, tokens)
    generate(m, first, 1)
    counts = m.tiers.counts()
    assert (counts.pages_lost, counts.prefix_bf16, counts.prefix_quantized) == (0, 0, 0), "it had no prefix"
    m.leave(first, publish=True)
    for kind in (100, 150):  # take every BF16 page
        m.leave(prefill(m, [(i * 3 + kind) % 250 for i in range(400)]), publish=True)
    again = m.start([*tokens, 7, 8])
    cached = again.stored
    assert cached and m.extend([(again, len(again.tokens) - cached)])
    generate(m, again, 1)
    counts, (sink_end, history_end) = m.tiers.counts(), ranges(m, again)
    window = len(again.tokens) // P - 2
    assert counts.pages_lost == (P - sink_end) // P + max(history_end // P - window, 0) > 0
    assert counts.prefix_bf16 + counts.prefix_quantized == cached and counts.prefix_quantized > cached / 2
    m.leave(again, publish=True)
    m.tiers.apply_pending()
    assert m.tiers.counts().pages_lost == 0, "nothing runs"


def test_windows_are_taken_before_sinks():
    m = model(slots=7, rows=1)
    first = prefill(m, [i % 50 for i in range(400)])
    m.leave(first, publish=True)  # its sink and window stay in the tree
    m.tiers.apply_pending()
    sink = m.tree[tuple(first.tokens[:P])]
    prefill(m, [(i * 3 + 100) % 250 for i in range(400)])  # needs 4 of the 7 BF16 pages
    assert m.pool.page_slot[sink] > 0


def test_padding_writes_only_to_the_reserved_page():
    m = model()
    request = prefill(m, list(range(100)))
    m.pool.bf16_pages[:, 0] = 0
    generate(m, request, 80, padding=3)  # padding rows write 99.0
    live = m.pool.bf16_pages[0, 1:]
    assert not (live == 99.0).any()
    assert (m.pool.bf16_pages[0, 0] == 99.0).any()
    assert int(m.pool.page_slot[0]) == 0 and int(m.tiers.row_len[0]) == 0


def test_a_freed_page_gives_its_slot_back_before_its_next_owner_asks():
    m = model(pages=12, slots=8, rows=2)
    for kind in range(12):
        request = prefill(m, [(i * 5 + kind) % 251 for i in range(300)])
        generate(m, request, 30)
        m.leave(request, publish=kind % 2 == 0)
        m.check()
    m.check_empty()


def test_freed_twice_in_one_group_or_across_a_tier_boundary_is_one_slot():
    """Earlier systems freed a page twice when a flush straddled INT2 and BF16."""
    m = model()
    request = prefill(m, list(range(300)), publish=False)
    pages = m.row_pages(request, 300)
    m.leave(request, publish=False)
    m.tiers.pending.free_pages(torch.tensor(pages))  # freed a second time
    m.check()
    assert m.tiers.counts().slots_used == 0


def test_a_decode_step_between_page_boundaries_needs_no_plan():
    m = model()
    request = prefill(m, list(range(300)))
    generate(m, request, 1)
    lens = torch.tensor([302, 1])
    assert m.tiers.decode_needs_plan(lens), "another row, if only of padding"
    for length in range(303, 400):
        needed = m.tiers.decode_needs_plan(torch.tensor([length, 1]))
        assert needed == (length % P in (0, 1)), length
    assert m.tiers.decode_needs_plan(torch.tensor([401, 1])) and m.tiers.decode_needs_plan(torch.tensor([401, 1]))
    m.tiers.pending.free_rows([2])
    assert m.tiers.decode_needs_plan(torch.tensor([402, 1]))


def decode_plan(m: Model, requests: dict) -> bool:
    """Plans a batch if it needs a plan, given rows and lengths by request id. Returns whether it did."""
    lens = torch.tensor([length for _, length in requests.values()])
    m.tiers.requests = tuple(requests)
    if needed := m.tiers.decode_needs_plan(lens):
        m.tiers.plan_decode(torch.tensor([row for row, _ in requests.values()]), lens, int(lens.max()))
    return needed


@pytest.mark.parametrize("later", [0, 1, 2])
def test_decode_batches_that_take_turns_are_planned_one_by_one(later):
    """With pipeline stages, lengths of one batch may continue those of another, whose pages were never looked up."""
    m = model()
    rows = [prefill(m, list(range(300))).row, prefill(m, list(range(500, 800 + later))).row]
    for step in range(1, 5):
        for n, (row, length) in enumerate(zip(rows, (300, 300 + later))):
            assert decode_plan(m, {f"request {n}": (row, length + step)}) == (step == 1), (n, step)
    m.tiers.pending.free_rows([3])
    assert decode_plan(m, {"request 0": (rows[0], 305)})
    assert decode_plan(m, {"request 1": (rows[1], 305 + later)}), "the event was applied, but not for this batch"


def test_decode_batches_that_take_turns_are_planned_again_where_windows_shrink():
    m = model(kept_pages=1)
    rows = [prefill(m, list(range(300))).row, prefill(m, list(range(500, 800))).row]
    for step in range(1, 4):
        for n, row in enumerate(rows):
            assert decode_plan(m, {f"request {n}": (row, 300 + step)}), "the other's plan may have taken its pages"
    assert not decode_plan(m, {"request 1": (rows[1], 304)}), "alone it goes on"


def test_flush_empties_both_pools():
    m = model()
    m.leave(prefill(m, list(range(300))), publish=True)
    m.flush()
    m.check_empty()


def corrupt_shared_slot(m):
    m.pool.page_slot[m.free[0]] = m.pool.page_slot[m.row_pages(m.running[0], 1)[0]]


def corrupt_leaked_slot(m):
    m.tiers.slot_page[int((m.tiers.slot_page == 0).nonzero()[1])] = m.free[0]


def corrupt_freed_slot(m):
    slot = int((m.tiers.slot_page == 0).nonzero()[1])
    m.tiers.slot_page[slot], m.pool.page_slot[m.free[0]] = m.free[0], slot


def corrupt_freed_page(m):
    m.tiers.page_valid[m.free[0]] = True


def corrupt_free_list(m):
    m.free.append(m.free[0])


def corrupt_reserved_slot(m):
    m.tiers.slot_page[0] = m.free[0]


def corrupt_reserved_page(m):
    m.pool.page_slot[0] = -1


def corrupt_padding(m):
    m.pool.row_pages[0, 2] = 5


def corrupt_padding_row(m):
    m.tiers.row_len[0] = 1


def corrupt_row(m):
    m.pool.req_to_token[m.running[0].row, P] = m.free[3] * P


def count_an_error(m):
    m.tiers.errors += 1


def lose_a_page(m):
    m.leave(m.running[0], publish=True)
    m.tiers.apply_pending()
    m.tiers.page_valid[m.tree[tuple(range(2 * P))]] = False


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (corrupt_shared_slot, "a page points at a BF16 slot that belongs to another"),
        (corrupt_leaked_slot, "5 BF16 slots are used but 4 pages have one"),
        (corrupt_freed_slot, "a free page still has a BF16 slot"),
        (corrupt_freed_page, "a free page still counts as quantized"),
        (corrupt_free_list, "a page is in the free list twice"),
        (corrupt_reserved_slot, "page 0 or slot 0 is not reserved"),
        (corrupt_reserved_page, "page 0 or slot 0 is not reserved"),
        (corrupt_padding, "row 0, which is for padding, holds tokens"),
        (corrupt_padding_row, "row 0, which is for padding, holds tokens"),
        (corrupt_row, "row 1, which is in use, has a page that is free"),
        (count_an_error, "1 impossible operations were recorded"),
        (lose_a_page, "of 1 is neither free nor in a record nor in BF16"),
    ],
)
def test_the_integrity_check_sees(damage, said):
    m = model()
    prefill(m, list(range(300)))
    m.check()
    damage(m)
    with pytest.raises(RuntimeError, match=f"KV cache integrity: .*{said}"):
        check_integrity(m.tiers, torch.tensor(m.free), idle=not m.running)


def give_a_free_id_a_page(m, ids):
    m.pool.places[m.free[0]] = 1


def take_an_ids_page(m, ids):
    m.pool.places[ids[0]] = 0


def give_a_page_beyond_the_boundary(m, ids):
    m.pool.places[ids[0]] = m.tiers.last_page + 1


def swap_owners(m, ids):
    pages = m.pool.places[ids[:2]].long()
    m.tiers.places.ids[pages] = m.tiers.places.ids[pages].flip(0)


def keep_a_page(m, ids):
    m.tiers.places.ids[int(m.tiers.places.stack[0])] = m.free[0]


def lose_a_free_page(m, ids):
    m.tiers.places.count -= 1


def put_a_bf16_page_among_the_pages(m, ids):
    page = m.pool.places[ids[0]].long()
    m.tiers.slot_page[m.pool.page_slot[page].long()] = 0
    m.tiers.slot_page[m.tiers.first_slot - 1], m.pool.page_slot[page] = page, m.tiers.first_slot - 1


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (give_a_free_id_a_page, "an id that is free has a page"),
        (take_an_ids_page, "an id in use has no page"),
        (give_a_page_beyond_the_boundary, "a page lies among the BF16 pages"),
        (swap_owners, "a page belongs to another id than its own"),
        (keep_a_page, "a page belongs to an id that does not have it"),
        (lose_a_free_page, "the stack of free pages is not what no id has"),
        (put_a_bf16_page_among_the_pages, "a BF16 page lies among the pages"),
    ],
)
def test_the_integrity_check_sees_the_tables_of_a_shared_memory(damage, said):
    m = model(pages=0, slots=40, shared=WindowSlots(4, 4, 6))
    request = prefill(m, list(range(300)))
    m.check()
    damage(m, m.row_pages(request, 300))
    with pytest.raises(RuntimeError, match=f"KV cache integrity: {said}"):
        check_integrity(m.tiers, torch.tensor(m.free))
