"""Drafts in disaggregated serving: what is sent for them, what a first round begins with, what a retraction keeps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_kvq.cache.layout import KVGeometry
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.sglang import compat, hooks, runtime
from sglang_kvq.sglang.disaggregation import drafts, seam
from sglang_kvq.sglang.disaggregation.handover import Handover
from sglang_kvq.sglang.disaggregation.layout import layout_name
from tests.cache.scheduler_model import Model

pytestmark = pytest.mark.skipif(
    not compat.applies(hooks.TRANSFERS, compat.sglang_version()), reason="this SGLang release sends plain pages only"
)
STEPS = 4
#: Rows of two requests; another request had the second row before.
ROWS = (2, 5)


@pytest.fixture
def spec(monkeypatch):
    """``spec(name)`` sets the algorithm in SGLang's modules and returns it."""
    import sglang.srt.runtime_context as context
    from sglang.srt.speculative import eagle_disaggregation, spec_utils
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    def choose(name: str) -> SpeculativeAlgorithm:
        chosen = SimpleNamespace(
            speculative_algorithm=name,
            speculative_num_draft_tokens=STEPS,
            speculative_eagle_topk=1,
            enable_multi_layer_eagle=False,
            speculative_use_rejection_sampling=False,
        )
        for module in (context, eagle_disaggregation, spec_utils):
            monkeypatch.setattr(module, "get_spec", lambda: chosen)
        monkeypatch.setattr(eagle_disaggregation, "get_dsa_seed_metadata_dim", lambda config: 0)
        return SpeculativeAlgorithm.from_string(name)

    return choose


def future_map(algorithm):
    from sglang.srt.managers.overlap_utils import FutureMap

    return FutureMap(torch.device("cpu"), algorithm, SimpleNamespace(req_to_token=torch.zeros(8, 4)))


def prebuilt(overlap: bool, reqs=()):
    return SimpleNamespace(
        reqs=list(reqs) or [None, None],
        device="cpu",
        enable_overlap=overlap,
        req_pool_indices=torch.tensor(ROWS),
        seq_lens=torch.tensor([70, 130]),
        model_config=SimpleNamespace(hf_config=None, vocab_size=99),
    )


def stock(self, batch, last_tokens, future_map):
    return "SGLang's"


# -- the first guess of a draft model ---------------------------------------------------------------


def computed(room: int) -> SimpleNamespace:
    """Returns a request as SGLang leaves it when its prompt has just been computed."""
    return SimpleNamespace(
        output_ids=[7],
        metadata_buffer_index=room,
        bootstrap_room=room + 100,
        hidden_states_tensor=None,
        output_topk_p=None,
        output_topk_index=None,
        output_dsa_topk_indices=None,
        cached_tokens=0,
        cached_tokens_device=0,
        cached_tokens_host=0,
        cached_tokens_storage=0,
        return_logprob=False,
        return_sampling_mask=False,
        get_mm_token_counts=lambda: (0, 0, 0),
    )


def sent(algorithm, guess) -> list[SimpleNamespace]:
    """Sends two requests through SGLang's own buffers and returns the decode server's view of them."""
    from sglang.srt.disaggregation.utils import MetadataBuffers

    buffers = MetadataBuffers(2, 16, torch.float32, 8)
    buffers.output_topk_index.fill_(55)  # left by the slot's last owner
    reqs = [computed(room) for room in range(2)]
    drafts.before_prefill_result(
        SimpleNamespace(spec_algorithm=algorithm), SimpleNamespace(reqs=reqs), SimpleNamespace(next_draft_input=guess)
    )
    set_buf = getattr(MetadataBuffers.set_buf, "__wrapped__", MetadataBuffers.set_buf)
    for req in reqs:
        drafts.around_metadata(set_buf, buffers, req)
    found = [buffers.get_buf(room) for room in range(2)]
    names = ("output_topk_p", "output_topk_index", "hidden_states_tensor", "output_dsa_topk_indices")
    return [SimpleNamespace(**dict(zip(names, x[9:13]))) for x in found]


GUESS = SimpleNamespace(topk_p=torch.tensor([[0.5], [0.25]]), topk_index=torch.tensor([[11], [22]]))


@pytest.mark.parametrize("overlap", [False, True])
def test_the_first_guess_of_a_whole_model_arrives(spec, overlap):
    algorithm = spec("STANDALONE")
    batch, relay = prebuilt(overlap, sent(algorithm, GUESS)), future_map(algorithm)
    first = drafts.around_first_round(stock, algorithm, batch, torch.tensor([7, 8]), relay)
    assert first.topk_index.tolist() == [[11], [22]] and first.topk_p.tolist() == [[0.5], [0.25]]
    assert first.bonus_tokens.tolist() == [7, 8] and first.hidden_states is None
    assert first.capture_hidden_mode.name == "NULL"
    if overlap:
        assert relay.topk_index_buf[list(ROWS)].tolist() == [[11], [22]]
        assert relay.output_tokens_buf[list(ROWS)].tolist() == [7, 8]
        assert relay.new_seq_lens_buf[list(ROWS)].tolist() == [70, 130] and relay.hidden_states_buf is None


@pytest.mark.parametrize("name", ["EAGLE", "NGRAM"])
def test_others_send_what_sglang_sends(spec, name):
    found = sent(spec(name), GUESS)
    assert all(x.output_topk_index.tolist() == [55] * 16 for x in found), "SGLang fills this for EAGLE itself"


def test_eagle_begins_as_sglang_begins_it(spec):
    algorithm = spec("EAGLE")
    assert drafts.around_first_round(stock, algorithm, prebuilt(True), None, None) == "SGLang's"


@pytest.mark.parametrize("name", ["STANDALONE", "NGRAM"])
def test_sglang_itself_begins_with_nothing(spec, name):
    """SGLang's own function starts without any draft.

    If a release changes that, review what the plugin does instead.
    """
    from sglang.srt.managers.overlap_utils import RelayPayload

    algorithm = spec(name)
    stock = type(algorithm).build_disagg_draft_input
    stock = getattr(stock, "__wrapped__", stock)
    assert stock(algorithm, prebuilt(True), torch.tensor([7, 8]), None) is None
    if name == "NGRAM":
        with pytest.raises(AttributeError):
            future_map(algorithm).stash(torch.tensor(ROWS), RelayPayload(bonus_tokens=torch.tensor([7, 8])))


# -- n-grams ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_n_grams_begin_with_nothing_accepted(spec, overlap):
    from sglang.srt.managers.overlap_utils import RelayPayload

    algorithm = spec("NGRAM")
    relay = future_map(algorithm)
    left = torch.full((1, STEPS), 9, dtype=torch.int32)
    payload = RelayPayload(None, accept_tokens=left, accept_lens=torch.tensor([3], dtype=torch.int32))
    relay.stash(torch.tensor([ROWS[1]]), payload)  # left by the row's last owner
    batch = prebuilt(overlap)
    first = drafts.around_first_round(stock, algorithm, batch, torch.tensor([7, 8]), relay)
    assert first.accept_lens.tolist() == [0, 0] and first.new_seq_lens.tolist() == [70, 130]
    if not overlap:
        first.filter_batch(torch.tensor([1]))
        assert first.accept_tokens.tolist() == [0] * STEPS
        return
    assert relay.accept_lens_buf[list(ROWS)].tolist() == [0, 0], "tokens of another request would be this one's"
    assert relay.new_seq_lens_buf[list(ROWS)].tolist() == [70, 130]
    first.filter_batch(torch.tensor([1]))
    assert first.future_indices.tolist() == [ROWS[1]]


# -- a draft model's pages --------------------------------------------------------------------------


def draft_pool(pages: int, layers: int = 1, heads: int = 2, dtype=torch.bfloat16):
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool(pages * P, P, dtype, heads, 16, layers, "cpu", False)


@pytest.fixture
def worker(monkeypatch, spec):
    """``worker(pool, name)`` returns what a worker with this draft pool registers, its handover and its cache."""
    import sglang.srt.runtime_context as context
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.utils import setup_state_kv_args

    monkeypatch.setattr(context, "get_parallel", lambda: SimpleNamespace(attn_tp_size=1))
    setup = getattr(setup_state_kv_args, "__wrapped__", setup_state_kv_args)

    def begin(pool, name: str = "STANDALONE", aux=(64, 128)):
        spec(name)
        model = Model(20, 12, 4, 1, 2)
        state = runtime.Runtime(KVQuantConfig("int2", recent_tokens=128), KVGeometry(1, model.pool.formats), (0,))
        state.pages, state.tiers = model.pool, model.tiers
        monkeypatch.setattr(runtime, "_current", state)
        state.handover = Handover(model.pool, decode=True, sink_pages=1, recent_pages=2, entries=3)
        args = KVArgs()
        args.aux_item_lens = list(aux)
        setup(args, SimpleNamespace())
        seam.after_state(None, args, SimpleNamespace(), pool, total_kv_layers=1)
        return args, state.handover, model

    return begin


def test_entries_of_both_servers_are_paired_one_to_one(worker):
    """SGLang halves the list of entries: our records, one more to make them even, then a draft's keys and values."""
    from sglang.srt.disaggregation.common.conn import CommonKVManager

    entries = []
    for _ in range(2):
        pool = draft_pool(20, layers=3)
        _, handover, _ = worker(pool)
        ours, theirs = handover.buffers(), pool.get_contiguous_buf_infos()
        entries.append(list(zip([*ours[0], *theirs[0]], [*ours[2], *theirs[2]])))
    assert len(entries[0]) == 2 + 2 * 3
    manager = SimpleNamespace(kv_args=SimpleNamespace(prefill_start_layer=0))
    k, v, their_k, their_v, count = CommonKVManager.get_mha_kv_ptrs_with_pp(manager, *entries)
    pairs = list(zip([*k, *v], [*their_k, *their_v]))
    assert count == 4 and pairs == list(zip(*entries))
    assert all(one[1] == other[1] for one, other in pairs), "a page would be sent to a place of another size"


def test_the_name_tells_draft_models_and_first_tokens_apart(worker):
    names = [
        worker(*given)[0].kv_cache_dtype_str
        for given in (
            (None,),
            (draft_pool(20),),
            (draft_pool(20, layers=2),),
            (draft_pool(20, heads=1),),
            (draft_pool(20, dtype=torch.float8_e4m3fn),),
            (draft_pool(20), "EAGLE"),
            (draft_pool(20), "EAGLE", (64, 256)),
        )
    ]
    assert len(set(names)) == len(names)
    assert names[0] == layout_name(runtime.current(), 1)
    assert names[1] == f"{names[0]}-draft:STANDALONE-1x2x16-bfloat16-first:192"
    assert worker(draft_pool(30))[0].kv_cache_dtype_str == names[1], "sizes of pools may differ"
    assert worker(None, "NGRAM")[0].kv_cache_dtype_str == names[0], "n-grams need nothing of a prefill server"


def test_a_retracted_request_comes_back_with_its_drafts(worker):
    pool = draft_pool(20, layers=2)
    _, handover, model = worker(pool)
    buffers = [*pool.k_buffer, *pool.v_buffer]
    for n, buffer in enumerate(buffers):
        buffer.copy_(torch.arange(len(buffer))[:, None, None] % 251 + n)
    request = model.start(list(range(70)))
    assert model.extend([(request, 70)])
    places = model.pool.req_to_token[request.row, :70].long()
    want = [buffer[places].clone() for buffer in buffers]
    saved = handover.save(places, model.tiers)
    for buffer in buffers:
        buffer.zero_()
    others = torch.arange(10 * P, 10 * P + 70)
    handover.restore(saved, others, 3)
    assert all(torch.equal(buffer[others], kept) for buffer, kept in zip(buffers, want))
    assert all(int(buffer.count_nonzero()) == int(kept.count_nonzero()) for buffer, kept in zip(buffers, want))
