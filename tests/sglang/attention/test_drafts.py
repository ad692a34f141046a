"""SGLang's speculative decoding: masks of drafts, memory for draft models, and the settings that are refused."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from sglang_kvq.attention.drafts import chain, from_mask, mask_of
from sglang_kvq.cache.layout import KVGeometry, divide
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.shared.split import WindowSlots
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.sglang import compat, plugin, runtime
from sglang_kvq.sglang.attention import drafts
from sglang_kvq.sglang.attention.drafts import SeenBuffers, among_drafts
from sglang_kvq.sglang.prefix.tree import around_finished
from tests import ngrams

CONFIG = KVQuantConfig("hadamard", recent_tokens=128)
GEOMETRY = KVGeometry(2, (PageFormat(64, 64, 0.96, 0.92),) * 4)


def trees(batch: int, count: int) -> torch.Tensor:
    mask = torch.rand(batch, count, count) < 0.5
    return mask.tril() | torch.eye(count, dtype=torch.bool)


def full_mask(mask: torch.Tensor, lens: list[int]) -> torch.Tensor:
    """Returns the mask that SGLang makes for a GPU: each draft sees all stored tokens, then part of its tree."""
    rows = [torch.cat([torch.ones(len(m), n, dtype=torch.bool), m], 1).flatten() for m, n in zip(mask, lens)]
    return torch.cat(rows)


#: A model with nothing but a KV cache.
PLAIN = SimpleNamespace(is_hybrid_swa=False, model_path="m", hf_config=None)


@pytest.mark.parametrize("count", [2, 5, 12])
def test_masks_over_all_tokens_and_over_drafts_say_the_same(count):
    lens, mask = [1, 70, 200], trees(3, count)
    assert torch.equal(among_drafts(mask.flatten(), torch.tensor(lens), count, False), mask)
    assert torch.equal(among_drafts(full_mask(mask, lens), torch.tensor(lens), count, True), mask)
    # A graph pads the batch but not the mask; SGLang may also allocate a longer mask than it uses.
    padded = torch.tensor([*lens, *[1] * 13])
    assert torch.equal(among_drafts(full_mask(mask, lens), padded, count, True)[:3], mask)
    longer = torch.cat([full_mask(mask, lens), torch.ones(1000, dtype=torch.bool)])
    assert torch.equal(among_drafts(longer, torch.tensor(lens), count, True), mask)


def forward_batch(mask: torch.Tensor, lens: list[int], count: int) -> SimpleNamespace:
    spec = SimpleNamespace(draft_token_num=count, custom_mask=mask)
    return SimpleNamespace(spec_info=spec, seq_lens=torch.tensor(lens))


def test_buffers_keep_their_addresses_and_follow_each_batch():
    buffers = SeenBuffers(8, True, torch.device("cpu"))
    captured = buffers.of(4, 3)
    assert torch.equal(captured, chain(3).expand(4, -1)), "nothing seen yet: chains"
    mask = trees(2, 3)
    for device, given in (("cpu", mask.flatten()), ("cuda", full_mask(mask, [9, 90]))):
        captured.fill_(-1)
        buffers.device = torch.device(device)
        buffers.fill(forward_batch(given, [9, 90, 1, 1], 3))
        assert torch.equal(mask_of(captured[:2]), mask)
    assert buffers.of(2, 3).data_ptr() == captured.data_ptr()
    buffers.device = torch.device("cpu")
    assert torch.equal(buffers.of(8, 2), chain(2).expand(8, -1)), "another number of drafts has its own"
    with pytest.raises(RuntimeError, match="9 requests"):
        buffers.of(9, 3)


def test_chains_bring_no_mask():
    buffers = SeenBuffers(8, False, torch.device("cpu"))
    buffers.fill(forward_batch(None, [9, 90], 3))
    assert torch.equal(buffers.of(2, 3), chain(3).expand(2, -1))
    assert torch.equal(from_mask(torch.ones(3, 3).tril().bool()), chain(3))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (dict(speculative_num_draft_tokens=64), "speculative-num-draft-tokens 64"),
        (dict(speculative_num_draft_tokens=4, enable_streaming_session=True), "enable-streaming-session"),
    ],
)
def test_what_is_refused(flags, text, monkeypatch):
    args = SimpleNamespace(speculative_algorithm="EAGLE3", **flags)
    monkeypatch.setattr(compat, "resolved", lambda sa, field, default=None: getattr(sa, field, default))
    with pytest.raises(KVQuantError, match=text):
        drafts.check_speculation(args, PLAIN)
    drafts.check_speculation(SimpleNamespace(speculative_algorithm=None, **flags), PLAIN)


@pytest.mark.parametrize(("algorithm", "drafts", "written"), [("NGRAM", 4, 4), (None, 4, 1), (None, None, 1)])
def test_a_step_writes_drafts_only_if_there_are_drafts(algorithm, drafts, written, monkeypatch):
    monkeypatch.setattr(compat, "resolved", lambda sa, field, default=None: getattr(sa, field, default))
    args = SimpleNamespace(speculative_algorithm=algorithm, speculative_num_draft_tokens=drafts)
    assert compat.step_tokens(args) == written


@pytest.mark.parametrize("field", drafts.AS_A_CHAIN)
def test_drafts_that_branch_are_not_verified_as_a_chain(field, monkeypatch):
    monkeypatch.setattr(compat, "resolved", lambda sa, field, default=None: getattr(sa, field, default))
    args = SimpleNamespace(speculative_algorithm="NGRAM", speculative_num_draft_tokens=4, device="cpu", **{field: True})
    with pytest.raises(KVQuantError, match=f"--{field.replace('_', '-')}: .* NGRAM branch. Leave it out"):
        drafts.check_speculation(args, PLAIN)
    args.speculative_algorithm = "EAGLE"
    drafts.check_speculation(args, PLAIN)


@pytest.mark.parametrize(("algorithm", "breadth"), [("NGRAM", 2), ("EAGLE", 1), (None, 0)])
def test_recurrent_states_follow_drafts_that_branch(algorithm, breadth, monkeypatch):
    """SGLang's backend for recurrent states learns that n-gram drafts branch; other drafts change nothing."""
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as module

    monkeypatch.setattr(compat, "resolved", lambda sa, field, default=None: getattr(sa, field, default))
    monkeypatch.setattr(runtime, "_current", None)
    args = SimpleNamespace(speculative_algorithm=algorithm)
    backend = SimpleNamespace(topk=breadth and 1)
    drafts.after_states(None, backend, SimpleNamespace(server_args=args))
    assert backend.topk == (breadth and 1), "--kv-quant is off"
    runtime.attach(CONFIG, args)
    drafts.after_states(None, backend, SimpleNamespace(server_args=args))
    assert backend.topk == breadth
    source = inspect.getsource(module.MambaAttnBackendBase)
    assert "self.topk > 1" in source and "retrieve_next_token" in source, "what it is raised for"


@pytest.mark.parametrize("served", [True, False], ids=["kv-quant", "without"])
@pytest.mark.parametrize(("algorithm", "own"), [("NGRAM", True), ("EAGLE", False), (None, False)])
def test_drafts_that_branch_keep_windows_of_their_own(algorithm, own, served, monkeypatch):
    """SGLang's rule for a GPU lets drafts of a chain share convolution windows; the plugin forbids it for n-grams."""
    from sglang.srt import runtime_context
    from sglang.srt.mem_cache import memory_pool

    monkeypatch.setattr(compat, "resolved", lambda sa, field, default=None: getattr(sa, field, default))
    rule = inspect.unwrap(memory_pool.conv_window_dedup_enabled)
    args = SimpleNamespace(speculative_algorithm=algorithm)
    if served:
        runtime.attach(CONFIG, args)
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: args)
    for given in (None, 1):
        assert rule(False, False, given, False), "else nothing is left to do here"
        assert drafts.around_shared_windows(rule, False, False, given, False) == (not own or not served)
    assert not drafts.around_shared_windows(rule, False, False, 4, False), "trees of any algorithm"


def test_n_grams_of_breadth_1_branch(monkeypatch):
    """With breadth 1 n-gram drafts still branch: the longest known suffix continues with 5, a shorter one with 8."""
    for name, value in ngrams.compiler().items():
        monkeypatch.setenv(name, value)
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

    corpus = NgramCorpus(min_bfs_breadth=1, max_bfs_breadth=1, draft_token_num=4)
    corpus.batch_put([[2, 3, 4, 5]])
    corpus.batch_put([[9, 3, 4, 8, 7]])
    corpus.synchronize()
    _, mask = corpus.batch_get(["request"], [[1, 2, 3, 4]], [4])
    seen = torch.from_numpy(mask).view(4, 4)
    assert sorted(seen.sum(-1).tolist()) == [1, 2, 2, 3], "two see the last token alone, one the second of them too"


@pytest.mark.parametrize("beside", ["sliding windows", "recurrent states"])
def test_whole_models_as_drafts_have_nothing_but_a_kv_cache(beside, monkeypatch):
    """A whole model that drafts may keep nothing but a KV cache; only the served model may have windows or states."""
    monkeypatch.setattr(compat, "resolved", lambda sa, field, default=None: getattr(sa, field, default))
    states = SimpleNamespace(is_hybrid_swa=False, model_path="s", hf_config=None)
    windows = SimpleNamespace(is_hybrid_swa=True, model_path="w", hf_config=None)
    found = lambda model: states if model is states else None  # noqa: E731
    monkeypatch.setattr("sglang.srt.configs.hybrid_arch.mambaish_config", found)
    model = states if beside == "recurrent states" else windows
    drafted_by = lambda draft: monkeypatch.setattr(drafts, "draft_model", lambda args, model: draft)  # noqa: E731
    for algorithm in ("NGRAM", "EAGLE", "EAGLE3", "STANDALONE"):
        args = SimpleNamespace(speculative_algorithm=algorithm, speculative_num_draft_tokens=4, device="cpu")
        drafted_by(PLAIN)
        drafts.check_speculation(args, model)
        drafted_by(model)
        if algorithm != "STANDALONE":
            drafts.check_speculation(args, model)
            continue
        with pytest.raises(KVQuantError, match=f"draft-model-path {model.model_path}: .* keeps {beside}"):
            drafts.check_speculation(args, PLAIN)


class Algorithm:
    def __init__(self, eagle: bool) -> None:
        self.is_eagle = lambda: eagle
        self.is_standalone = lambda: False


@pytest.fixture
def configurator(monkeypatch):
    """Returns SGLang's configurator for a target whose draft has one layer of the same heads, and the layers' price."""
    monkeypatch.setattr(compat, "resolved", lambda sa, field, default=None: getattr(sa, field, default))

    def price(kvc, layers: int) -> int:
        return kvc.model_config.heads * 2 * 64 * layers * kvc.kv_cache_dtype.itemsize

    args = SimpleNamespace(speculative_draft_model_path=None, speculative_draft_kv_cache_dtype=None)
    kvc = SimpleNamespace(
        server_args=args,
        spec_algorithm=Algorithm(True),
        spec_aux_config=SimpleNamespace(eagle_draft_num_layers=1),
        model_config=SimpleNamespace(heads=2),
        kv_cache_dtype=torch.bfloat16,
        is_draft_worker=False,
    )
    return kvc, price


def test_a_draft_costs_what_its_own_cache_takes(configurator):
    kvc, price = configurator
    bf16 = 2 * 2 * 64 * 2 * PAGE_SIZE
    assert drafts.draft_page_bytes(kvc, price) == bf16
    kvc.server_args.speculative_draft_kv_cache_dtype = "fp8_e4m3"
    assert drafts.draft_page_bytes(kvc, price) == bf16 // 2
    kvc.spec_aux_config.eagle_draft_num_layers = None
    assert drafts.draft_page_bytes(kvc, price) == bf16 // 2, "Qwen3-Next's own layer, which SGLang does not count"
    kvc.spec_aux_config.eagle_draft_num_layers, kvc.spec_algorithm = 3, Algorithm(False)
    assert drafts.draft_page_bytes(kvc, price) == 0, "n-grams have no model"


def test_sglang_price_of_target_and_draft_is_replaced(configurator, monkeypatch):
    kvc, _ = configurator
    geometry = KVGeometry(GEOMETRY.kv_heads, GEOMETRY.formats, 1 << 15)
    monkeypatch.setattr(runtime, "_current", None)
    runtime.attach(CONFIG, kvc.server_args)
    sizes = SimpleNamespace(_cell_size=1)
    drafts.after_sizes(None, sizes, kvc)
    assert sizes._cell_size == 1, "nothing is sized yet"
    runtime.start(CONFIG, geometry, tuple(range(geometry.layers)))
    kvc.is_draft_worker = True
    drafts.after_sizes(None, sizes, kvc)
    assert sizes._cell_size == 1
    kvc.is_draft_worker = False
    drafts.after_sizes(None, sizes, kvc)
    assert sizes._cell_size == (geometry.page_bytes + (1 << 15)) // PAGE_SIZE
    runtime.current().shared = WindowSlots(whole=6, least=2, spare=9)
    drafts.after_sizes(None, sizes, kvc)
    assert sizes._cell_size == (geometry.shared_page_bytes + (1 << 15)) // PAGE_SIZE


def test_bf16_is_compared_with_the_same_draft():
    with_draft = KVGeometry(GEOMETRY.kv_heads, GEOMETRY.formats, GEOMETRY.slot_bytes // 4)
    plain, layout = (divide(CONFIG, g, pages=1000, slots=40, wanted=4) for g in (GEOMETRY, with_draft))
    assert layout.slots >= plain.slots, "the share of the budget is of all that a page takes"
    draft = with_draft.draft_page_bytes
    together = layout.total_bytes + layout.pages * draft
    assert layout.bf16_tokens == together * PAGE_SIZE // (GEOMETRY.slot_bytes + draft) < layout.tokens
    assert layout.tokens / layout.bf16_tokens < plain.tokens / plain.bf16_tokens


def test_a_draft_model_keeps_sglangs_attention(monkeypatch):
    """``_install_backend`` checks whose runner it gets, because the draft's backend is built in the same process."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from sglang_kvq.sglang.hooks import TABLE, Kind

    (hook,) = (h for h in TABLE if h.kind is Kind.BACKEND and h.path.endswith("torch_native"))
    monkeypatch.setitem(ATTENTION_BACKENDS, "torch_native", lambda runner: "SGLang's")
    monkeypatch.setattr(plugin, "_call", lambda hook: lambda runner: "ours")
    create = plugin._install_backend(hook)
    monkeypatch.setattr(plugin, "_config", CONFIG)
    assert create(SimpleNamespace(is_draft_worker=False)) == "ours"
    assert create(SimpleNamespace(is_draft_worker=True)) == "SGLang's"
    monkeypatch.setattr(plugin, "_config", None)
    assert create(SimpleNamespace(is_draft_worker=False)) == "SGLang's"


def test_accepted_drafts_move_between_bf16_pages():
    table = torch.zeros(1, 4 * PAGE_SIZE, dtype=torch.int32)
    pool = PagePool.allocate(GEOMETRY.formats, kv_heads=2, pages=3, slots=3, req_to_token=table)
    pool.page_slot[1:] = torch.tensor([2, 3, 1])
    pool.bf16_pages.copy_(torch.randn(pool.bf16_pages.shape))
    before = pool.bf16_pages.clone()
    source = torch.tensor([PAGE_SIZE + 63, 2 * PAGE_SIZE + 1, 2 * PAGE_SIZE + 2, 0])
    target = torch.tensor([PAGE_SIZE + 63, 2 * PAGE_SIZE, 2 * PAGE_SIZE + 1, 0])
    pool.move_tokens(target, source)
    want = before.clone()
    want[:, 3, :, :, 0], want[:, 3, :, :, 1] = before[:, 3, :, :, 1], before[:, 3, :, :, 2]
    assert torch.equal(pool.bf16_pages, want)


@pytest.mark.parametrize(("is_eagle", "moved"), [(False, [0, 1, 2]), (True, [0, 1])])
def test_a_tree_of_pairs_has_one_token_less(is_eagle, moved, monkeypatch):
    """EAGLE's tree holds pairs of tokens: 192 tokens fill only two pages there, and the window moves to those two."""
    row = (torch.arange(10, 20)[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()[None].int()
    kept = torch.arange(50 * PAGE_SIZE, 50 * PAGE_SIZE + 192 - is_eagle * PAGE_SIZE)
    pending = SimpleNamespace(reserve_move=lambda: 0, fill_move=lambda ticket, own, kept: found.append((own, kept)))
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    monkeypatch.setattr(
        runtime, "tiers", lambda: SimpleNamespace(sink_pages=1, recent_pages=4, pending=pending), raising=True
    )
    cache = SimpleNamespace(
        disable=False,
        disable_finished_insert=False,
        is_eagle=is_eagle,
        supports_mamba=lambda: False,
        req_to_token_pool=SimpleNamespace(req_to_token=row),
        match_prefix=lambda params: SimpleNamespace(device_indices=kept),
    )
    req = SimpleNamespace(
        origin_input_ids=[1] * 150, output_ids=[2] * 60, req_pool_idx=0, extra_key=None, cache_salt=None
    )
    around_finished(lambda *a, **k: None, cache, req, kv_len_to_handle=192)
    ((own, to),) = found
    assert own.tolist() == [10 + n for n in moved] and to.tolist() == [50 + n for n in moved]
