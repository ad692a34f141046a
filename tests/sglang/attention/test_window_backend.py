"""A sliding-window layer and a full-attention layer over SGLang's two pools agree with plain attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.releases import OLD_TREE
from sglang_kvq.sglang import compat
from tests.sglang.prefix.test_hybrid_tree import served
from tests.sglang.prefix.window_tree_model import WINDOW, WindowTreeModel

__all__ = ["served"]
HEADS, D, TOKENS = 4, 64, 5 * P + 20


@pytest.fixture
def model(served):
    """Returns a model whose BF16 window holds the whole request, so that nothing is quantized."""
    return WindowTreeModel(20, 20, 2, sink_pages=1, recent_pages=12)


@pytest.fixture
def backend(model):
    from sglang_kvq.sglang.attention.backend import KVQuantBackend
    from sglang_kvq.sglang.attention.window_backend import WindowedBackend, create_window_backend

    ours = KVQuantBackend(model.ops, model.tiers, (1,))
    ours.token_to_kv_pool, ours.req_to_token_pool = model.both.full_kv_pool, model.request_rows
    runner = SimpleNamespace(device="cpu", token_to_kv_pool=model.both, req_to_token_pool=model.request_rows)
    return WindowedBackend(ours, create_window_backend(runner))


def layer(layer_id: int):
    from sglang.srt.layers.radix_attention import RadixAttention

    window = WINDOW if layer_id == 0 else -1
    return RadixAttention(HEADS, D, D**-0.5, num_kv_heads=1, layer_id=layer_id, sliding_window_size=window)


def plain(q, k, v, window: int | None, sinks) -> torch.Tensor:
    """Returns causal attention of all tokens in float64, ``[tokens, HEADS * D]``."""
    q, k, v = q.double().view(-1, HEADS, D).transpose(0, 1), k.double(), v.double()
    behind = torch.arange(len(k))[:, None] - torch.arange(len(k))
    x = (q @ k.T * D**-0.5).masked_fill((behind < 0) | (behind > (window or len(k))), float("-inf"))
    if sinks is not None:
        x = torch.cat([x, sinks.double()[:, None, None].expand(-1, len(k), 1)], dim=2)
    return (x.softmax(-1)[..., : len(k)] @ v).transpose(0, 1).flatten(1)


def batch_of(model, row: int, prefix: int, new: int):
    """Returns a batch as SGLang hands it to a backend: a chunk, or a decode step if ``new`` is 0."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    length = prefix + (new or 1)
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND if new else ForwardMode.DECODE,
        req_pool_indices=torch.tensor([row]),
        seq_lens=torch.tensor([length]),
        seq_lens_cpu=torch.tensor([length]),
        extend_prefix_lens_cpu=[prefix],
        extend_seq_lens_cpu=[new],
        out_cache_loc=model.pool.req_to_token[row, prefix:length].long(),
    )


@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
def test_both_layers_in_chunks_and_a_step(model, backend, with_sinks):
    torch.manual_seed(0)
    row, sinks = 1, torch.tensor([-1.0, 2.0, 5.0, 9.0]).bfloat16() if with_sinks else None
    model.write_row(row, 0, model.take_pages(6))
    given = {i: [torch.randn(TOKENS, n * D).bfloat16() for n in (HEADS, 1, 1)] for i in (0, 1)}
    for prefix, new in ((0, 200), (200, TOKENS - 201), (TOKENS - 1, 0)):
        if prefix == TOKENS - 1:  # frees the tokens that no window reaches any more
            model.allocator.free_swa(model.pool.req_to_token[row, : 2 * P].long())
        batch = batch_of(model, row, prefix, new)
        backend.init_forward_metadata(batch)
        mine = slice(prefix, prefix + (new or 1))
        for i, (q, k, v) in given.items():
            forward = backend.forward_extend if new else backend.forward_decode
            got = forward(q[mine], k[mine], v[mine], layer(i), batch, sinks=sinks)
            want = plain(q[: mine.stop], k[: mine.stop], v[: mine.stop], WINDOW if i == 0 else None, sinks)[mine]
            torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=1e-2)


@pytest.mark.skipif(compat.applies(OLD_TREE, compat.sglang_version()), reason="pages never come from the host")
def test_both_layers_wait_for_pages_from_the_host(model, backend):
    """SGLang's pool of both kinds makes each layer wait for its own pages, by the model's layer ids."""
    waited = []
    model.both.register_layer_transfer_counter(SimpleNamespace(wait_until=waited.append))
    model.write_row(1, 0, model.take_pages(6))
    batch = batch_of(model, 1, 0, 100)
    backend.init_forward_metadata(batch)
    assert not waited
    for i in (1, 0):
        backend.forward_extend(*draw(100), layer(i), batch)
        assert set(waited) == {i}
        waited.clear()


def draw(tokens: int) -> list[torch.Tensor]:
    """Returns random q, k and v."""
    return [torch.randn(tokens, n * D).bfloat16() for n in (HEADS, 1, 1)]


def verify_batch(model, stored: dict[int, int], count: int, masks: torch.Tensor | None):
    """Returns a batch that verifies ``count`` drafts of each row, after its stored tokens."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    lens = torch.tensor(list(stored.values()))
    loc = [model.pool.req_to_token[row, n : n + count].long() for row, n in stored.items()]
    return SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        spec_info=SimpleNamespace(draft_token_num=count, custom_mask=masks),
        req_pool_indices=torch.tensor(list(stored)),
        seq_lens=lens,
        seq_lens_cpu=None,
        out_cache_loc=torch.cat(loc),
    )


@pytest.mark.parametrize("masked", [False, True], ids=["chains", "masks"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
def test_both_layers_verify_drafts(model, backend, with_sinks, masked):
    """Drafts of two requests, one shorter than a window, give what plain attention gives in both layers.

    Drafts cross a page, some are rejected and written over, and tokens that no window reaches are freed. With masks,
    the last draft is another guess for the token after the first draft.
    """
    torch.manual_seed(1)
    count, sinks = 5, torch.tensor([-1.0, 2.0, 5.0, 9.0]).bfloat16() if with_sinks else None
    backend.full.seen.branching = masked
    stored = {1: 3 * P + 60, 2: 40}
    pages = {row: model.take_pages(6) for row in stored}
    given = {}  # by row and layer: q, k, v of all tokens
    for row, length in stored.items():
        model.write_row(row, 0, pages[row])
        given[row] = {i: draw(length) for i in (0, 1)}
        batch = batch_of(model, row, 0, length)
        backend.init_forward_metadata(batch)
        for i, (q, k, v) in given[row].items():
            backend.forward_extend(q, k, v, layer(i), batch, sinks=sinks)
    mask = torch.ones(count, count).tril().bool()
    if masked:
        mask[-1, 1:-1] = False
    for accepted in (2, 4, 1, 3):
        first = max(0, stored[1] - WINDOW) // P * P
        model.allocator.free_swa(model.pool.req_to_token[1, :first].long())
        batch = verify_batch(model, stored, count, mask.repeat(2, 1, 1).flatten() if masked else None)
        backend.init_forward_metadata(batch)
        new = {row: {i: draw(count) for i in (0, 1)} for row in stored}
        for i in (0, 1):
            q, k, v = (torch.cat([new[row][i][part] for row in stored]) for part in range(3))
            got = backend.forward_extend(q, k, v, layer(i), batch, sinks=sinks).double().split(count)
            for row, mine in zip(stored, got):
                all_of = [torch.cat(pair) for pair in zip(given[row][i], new[row][i])]
                want = plain(*all_of, WINDOW if i == 0 else None, sinks)[-count:]
                seen = count - masked  # drafts that form a chain
                torch.testing.assert_close(mine[:seen], want[:seen], rtol=2e-2, atol=1e-2)
                if masked:
                    other = [torch.cat([x[: 1 - count], x[-1:]]) for x in all_of]
                    want = plain(*other, WINDOW if i == 0 else None, sinks)[-1]
                    if i == 1 or stored[row] < WINDOW:  # a window is measured from the place where its token is stored
                        torch.testing.assert_close(mine[-1], want, rtol=2e-2, atol=1e-2)
        for row in stored:
            stored[row] += accepted
            for i in (0, 1):
                given[row][i] = [torch.cat([a, b[:accepted]]) for a, b in zip(given[row][i], new[row][i])]


def test_what_sglang_asks_of_it(model, backend):
    assert backend.token_to_kv_pool is model.both and backend.req_to_token_pool is model.request_rows
    assert backend.get_cuda_graph_seq_len_fill_value() == backend.get_cpu_graph_seq_len_fill_value() == 1
    backend.init_cuda_graph_state(4, 4)
    backend.on_after_cuda_graph_warmup()
    seen = []
    for part in backend.attn_backend_list:
        part.init_forward_metadata_out_graph = lambda batch, in_capture=False: seen.append(in_capture)
    backend.init_forward_metadata_out_graph(None, in_capture=True)
    assert seen == [True, True]


def test_what_speculation_asks_of_it(backend):
    """Host lengths are needed if either backend needs them; masks are stored where SGLang's backend wants them."""
    from sglang_kvq.sglang.attention.window_backend import WindowedBackend

    class Windows:
        token_to_kv_pool = None
        needs_cpu_seq_lens = False
        verify_mask = "its mask"

        def get_verify_buffers_to_fill_after_draft(self):
            return ["its mask", None]

    assert WindowedBackend(backend.full, backend.windows).needs_cpu_seq_lens
    found = WindowedBackend(backend.full, Windows())
    assert not found.needs_cpu_seq_lens and found.max_context_len == backend.full.max_context_len > 0
    assert found.verify_mask == "its mask" and found.get_verify_buffers_to_fill_after_draft() == ["its mask", None]
    filled = []
    for part in found.attn_backend_list:
        part.update_verify_buffers_to_fill_after_draft = lambda *words: filled.append(words)
    found.update_verify_buffers_to_fill_after_draft("drafts", 4)
    assert filled == [("drafts", 4)] * 2


def test_the_later_end_of_shared_reads_counts(backend):
    backend.full.shared_read_ends = lambda mode: SimpleNamespace(value=2)
    backend.windows.shared_read_ends = lambda mode: SimpleNamespace(value=4)
    assert backend.shared_read_ends(None).value == 4


def test_models_do_not_store_themselves(backend, monkeypatch):
    """SGLang fuses no writes into the pool of both kinds of layers, although that pool says bfloat16."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.models import utils

    monkeypatch.setattr(utils, "_is_cuda", True)
    for name in ("is_prefill_context_parallel_enabled", "is_cp_active"):
        monkeypatch.setattr(utils, name, lambda *args: False, raising=False)
    assert backend.token_to_kv_pool.dtype == torch.bfloat16
    with forward_context(ForwardContext(attn_backend=backend)):
        assert utils.enable_fused_set_kv_buffer(SimpleNamespace()) is False


def test_any_layer_of_the_pool_may_be_looked_at(model):
    """SGLang's Triton backend looks at the pool's first layer; if that is ours, it gets a windowed layer's buffer."""
    from sglang_kvq.sglang.attention.window_backend import windows_only

    with pytest.raises(NotImplementedError, match="keeps no plain K and V buffers"):
        model.both.get_value_buffer(1)
    seen = windows_only(model.both)
    assert seen.get_value_buffer(1).shape[-1] == seen.get_value_buffer(0).shape[-1] == D
    assert model.both.layers_mapping == {1: (0, False), 0: (0, True)}, "the pool itself is as it was"


def test_sizes_of_both_pools_add_up(model):
    k, v = model.both.get_kv_size_bytes()
    windows = 2 * (model.window_pages + 1) * P * D * 2
    assert k + v == windows + model.both.full_kv_pool.layout.total_bytes
