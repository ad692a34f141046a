"""Prefill through FlashAttention 3 or FlashInfer: the plan, the path with stand-ins, and the libraries on a GPU."""

from __future__ import annotations

import random
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sglang_kvq.attention import fa3, prefill_library, ragged
from sglang_kvq.attention.fa3 import FlashAttention3
from sglang_kvq.attention.planning.ragged_calls import in_place_tokens, plan_calls
from sglang_kvq.attention.ragged import RaggedPrefill
from sglang_kvq.attention.triton_ops import TritonOps
from sglang_kvq.constants import PAGE_SIZE
from tests import device_waits
from tests.kernels.scene import HEADS, ON_GPU, check_extend, make_batch, make_scene, prefix_scene, randn
from tests.kernels.test_extend import BATCHES, BOUND
from tests.pairs import each

#: Relative error of rounding to BF16: the root mean square of an error of at most 2^-9.
ROUNDING = 2**-9 / 3**0.5


class Wrapper:
    """FlashInfer's ragged prefill in plain torch, with the part of its interface that we use."""

    def __init__(self, floats: torch.Tensor, layout: str, backend: str) -> None:
        assert layout == "NHD"
        self.backend, self.plans = backend, 0

    def plan(self, qo, kv, q_heads, kv_heads, head_dim, *, causal, sm_scale, q_data_type, kv_data_type):
        assert qo.device.type == kv.device.type == "cpu" and qo.dtype == kv.dtype == torch.int32
        self.plans += 1
        self.qo, self.kv, self.causal, self.scale, self.gqa_group = (
            qo.tolist(),
            kv.tolist(),
            causal,
            sm_scale,
            q_heads // kv_heads,
        )

    def run(self, q, k, v, out=None, return_lse=False):
        assert len(q) == self.qo[-1] and len(k) == len(v) == self.kv[-1]
        out = torch.empty_like(q) if out is None else out
        lse = torch.empty(q.shape[:2])
        for a, b, c, d in zip(self.qo, self.qo[1:], self.kv, self.kv[1:]):
            keys, values = (x[c:d].float().repeat_interleave(self.gqa_group, 1) for x in (k, v))
            x = torch.einsum("qhd,khd->hqk", q[a:b].float(), keys) * self.scale
            if self.causal:
                x = x.masked_fill(~torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a)), float("-inf"))
            out[a:b] = torch.einsum("hqk,khd->qhd", x.softmax(-1), values).to(out.dtype)
            lse[a:b] = (x.logsumexp(-1) / torch.log(torch.tensor(2.0))).T
        return (out, lse) if return_lse else out


def merge_state_in_place(v, s, v_other, s_other):
    top = torch.maximum(s, s_other)
    a, b = torch.exp2(s - top), torch.exp2(s_other - top)
    v.copy_((v * a[..., None] + v_other * b[..., None]) / (a + b)[..., None])
    s.copy_(top + torch.log2(a + b))


STANDIN = SimpleNamespace(BatchPrefillWithRaggedKVCacheWrapper=Wrapper, merge_state_in_place=merge_state_in_place)
LN2 = torch.log(torch.tensor(2.0))


def attend(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *,
    softmax_scale, causal, out=None, return_softmax_lse=False,
):  # fmt: skip
    """Computes FlashAttention 3 in plain torch: its log-sum-exp has heads first and base e."""
    assert cu_seqlens_q.diff().max() <= max_seqlen_q and cu_seqlens_k.diff().max() <= max_seqlen_k
    wrapper = Wrapper(q, "NHD", "")
    heads = (q.shape[1], k.shape[1], q.shape[2])
    how = {"causal": causal, "sm_scale": softmax_scale, "q_data_type": q.dtype, "kv_data_type": k.dtype}
    wrapper.plan(cu_seqlens_q, cu_seqlens_k, *heads, **how)
    keys = int(cu_seqlens_k[-1])  # the workspace of a CUDA graph is longer
    out, lse = wrapper.run(q, k[:keys], v[:keys], out, return_lse=True)
    return (out, lse.T.contiguous() * LN2) if return_softmax_lse else out


def leaves_lone_calls_out(*args, **kwargs):
    """Attends, but leaves ``out`` alone in calls that ask for no log-sum-exp."""
    return attend(*args, **kwargs if kwargs.get("return_softmax_lse") else {**kwargs, "out": None})


def merge_state(v_a, s_a, v_b, s_b, v_merged, s_merged):
    """Merges as SGLang does, in base e; overwriting a log-sum-exp that it reads would be wrong on a GPU."""
    assert s_merged.data_ptr() not in (s_a.data_ptr(), s_b.data_ptr()) and s_a.is_contiguous() and s_b.is_contiguous()
    top = torch.maximum(s_a, s_b)
    a, b = torch.exp(s_a - top), torch.exp(s_b - top)
    v_merged.copy_((v_a * a[..., None] + v_b * b[..., None]) / (a + b)[..., None])
    s_merged.copy_(top + torch.log(a + b))


FA3_STANDIN = FlashAttention3(attend, merge_state)


@pytest.mark.parametrize("seed", range(40))
def test_every_query_meets_every_key_once(seed):
    """Calls are in order and fit the workspace; each of its rows is written once, as the call's bounds say."""
    draw = random.Random(seed)
    in_place = draw.choice([1, 200, 512])
    capacity = PAGE_SIZE * draw.choice([1, 2, 3, 16])
    lens = [
        (draw.choice([0, 1, 64, 127, draw.randrange(9000)]), draw.randint(1, 300)) for _ in range(draw.randint(1, 9))
    ]
    check_calls(lens, capacity, draw.choice([1, 2, 5, 100]), in_place)


def test_pages_that_are_not_whole_may_exceed_the_workspace():
    """Streaming sessions continue within a page: here the whole pages leave room for the new tokens, but no more."""
    check_calls([(5 * PAGE_SIZE + 63, 5)] * 6 + [(4 * PAGE_SIZE + 63, 5)] * 8, 64 * PAGE_SIZE, 100, 1)


def check_calls(lens, capacity, least_tiles, in_place):
    prefix, new = zip(*lens)
    seen: list[list] = [[] for _ in range(sum(new))]
    starts = [sum(new[:i]) for i in range(len(new))]
    for call in plan_calls(list(prefix), list(new), capacity, least_tiles, in_place):
        begin, end = call.q
        size = sum(call.kv_lens)
        assert sum(call.q_lens) == end - begin
        assert not call.gathers or size <= capacity
        assert call.first == call.causal == (not seen[begin]) and (not call.alone or call.first)
        rows: list = [None] * size
        if call.gathers:
            for request, index, at, count in call.pages.tolist():
                for t in range(count):
                    assert rows[at + t] is None
                    rows[at + t] = (request, index * PAGE_SIZE + t)
        owners = [i for i, s in enumerate(starts) if begin <= s < end]
        queries = [(i, prefix[i] + t) for i in owners for t in range(new[i])]
        if call.causal:
            positions = range(size) if call.positions is None else call.positions.tolist()
            for position, query in zip(positions, queries, strict=True):
                assert rows[position] is None
                rows[position] = query
        assert None not in rows
        at = 0
        for i, q_len, kv_len in zip(owners, call.q_lens, call.kv_lens, strict=True):
            keys = rows[at : at + kv_len]
            at += kv_len
            for t in range(q_len):
                visible = keys[: kv_len - q_len + t + 1] if call.causal else keys
                seen[starts[i] + t] += visible
    for i, s in enumerate(starts):
        for t in range(new[i]):
            assert sorted(seen[s + t]) == [(i, position) for position in range(prefix[i] + t + 1)]


@pytest.mark.parametrize(
    ("lens", "groups"),
    [
        ([(64, 136), *[(0, 200)] * 31, (0, 64)], [(1, True), (32, False)]),  # a chunk continues, the last one begins
        ([(64, 100), (0, 200), (0, 200), (128, 100)], [(4, True)]),  # copying so few tokens is faster than a call
        ([(0, 300), (0, 300), (64, 9), (128, 9), (0, 700)], [(2, False), (2, True), (1, False)]),
        ([(64, 9), (0, 999), (64, 9)], [(3, True)]),  # in the middle, a run adds two calls
        ([(64, 9), (0, 500), (0, 500), (64, 9)], [(1, True), (2, False), (1, True)]),
        ([(0, 200)] * 40, [(40, False)]),
        ([(64, 300), (0, 600)] * 4, [(7, True), (1, False)]),
        ([(64, 300), (0, 600)] * 8, [(16, True)]),  # too many calls
    ],
)
def test_long_runs_without_a_prefix_attend_in_place(lens, groups):
    prefix, new = map(list, zip(*lens))
    calls = plan_calls(prefix, new, 1 << 16, 1, 500)
    assert [(len(call.q_lens), call.gathers) for call in calls] == groups


def test_the_fewer_heads_a_token_has_the_longer_is_a_run_in_place():
    assert in_place_tokens(8, 128) == 2560 and in_place_tokens(1, 128) == 8 * 2560


def compare(heads, lens, capacity, library, device, choose=lambda call: "auto"):
    prefill = RaggedPrefill(library, heads.q, heads.kv, heads.head_dim, torch.device(device), capacity, choose)

    def bound(ops: TritonOps) -> float:
        """Returns the bound: each call's result is merged into the BF16 output so far and rounded again."""
        calls = ops._extend_plans.calls
        assert ops._extend_plans.slabs is None and calls, "our own kernel was used"
        return BOUND + ROUNDING * len(calls) ** 0.5

    check_extend(prefix_scene(heads, lens), lens, bound, prefill=prefill, short=None)


@pytest.fixture
def any_length(monkeypatch):
    monkeypatch.setattr(ragged, "LEAST_TOKENS", 0)
    monkeypatch.setattr(ragged, "LEAST_PER_REQUEST", 0)


@pytest.mark.skipif(ON_GPU, reason="the stand-in computes on a CPU; FlashInfer itself is tested instead")
@each(lens=BATCHES, capacity=[64, 192, 32768])
def test_extend_over_a_standin_agrees_with_the_reference(any_length, lens, capacity):
    compare(HEADS[1], lens, capacity, STANDIN, "cpu")


@pytest.mark.skipif(ON_GPU, reason="the stand-in computes on a CPU; the libraries are tested instead")
@pytest.mark.parametrize("library", [STANDIN, FA3_STANDIN], ids=["FlashInfer", "FlashAttention 3"])
def test_runs_in_place_agree_with_the_reference(any_length, monkeypatch, library):
    monkeypatch.setattr(ragged, "in_place_tokens", lambda kv_heads, head_dim: 50)
    compare(HEADS[1], [(130, 70), (0, 60), (0, 70), (64, 65)], 32768, library, "cpu")


@pytest.mark.skipif(ON_GPU, reason="the stand-in computes on a CPU; the libraries are tested instead")
@pytest.mark.parametrize("library", [STANDIN, FA3_STANDIN], ids=["FlashInfer", "FlashAttention 3"])
def test_a_prefix_of_many_workspaces(any_length, library):
    """Another request takes part in only some of the calls, and one has no prefix."""
    compare(HEADS[0], [(64 * 5, 20), (0, 3), (64 * 2 + 5, 20)], 64, library, "cpu")


@pytest.mark.skipif(ON_GPU, reason="the stand-in computes on a CPU; the libraries are tested instead")
@pytest.mark.parametrize("lens", [[(0, 70), (0, 9)], [(64 * 3, 20), (130, 33)]], ids=["new", "cached"])
def test_extend_over_flash_attention_3_agrees_with_the_reference(any_length, lens):
    compare(HEADS[1], lens, 32768, FA3_STANDIN, "cpu")


@pytest.mark.parametrize(
    "prefix,new",
    [([70_000] * 8, [1000] * 8), ([540_000], [2000]), ([4_000_000], [8192]), (range(0, 70_000, 500), [64] * 140)],
    ids=lambda x: f"{len(x)}x{max(x)}",
)
def test_any_number_of_calls_takes_few_plans(prefix, new):
    prefill = RaggedPrefill(STANDIN, 8, 2, 64, torch.device("cpu"), 32768)
    batch = make_batch(torch.arange(len(new)), list(zip(prefix, new)))
    calls = prefill.plan(batch, 1.0)
    wrappers = {id(call.wrapper): call.wrapper for call in calls}
    assert len(calls) > 16 and len(wrappers) <= 20 and all(wrapper.plans == 1 for wrapper in wrappers.values())
    assert len(calls) <= 1.2 * (sum(prefix) + sum(new)) / 32768 + 3
    count = sum(len(x) for x in prefill.wrappers.values())
    prefill.plan(batch, 1.0)
    assert sum(len(x) for x in prefill.wrappers.values()) == count, "wrappers that were free were not used"


def test_calls_of_both_backends():
    prefill = RaggedPrefill(STANDIN, 8, 2, 64, torch.device("cpu"), 4096, lambda call: "auto" if call.causal else "fa2")
    calls = prefill.plan(make_batch(torch.arange(1), [(10_000, 100)]), 1.0)
    assert [call.wrapper.backend for call in calls] == ["auto", "fa2", "fa2"]


def test_short_chunks_go_to_our_own_kernel():
    prefill = RaggedPrefill(STANDIN, 8, 2, 64, torch.device("cpu"), 64)
    assert prefill.suits([8192]) and prefill.suits([100, 40]) and prefill.suits([64])
    assert not prefill.suits([63]) and not prefill.suits([1200] + [1] * 20) and not prefill.suits([5000, 0])


def test_what_is_used_is_said():
    prefill, used = prefill_library.load(8, 2, 96, torch.device("cuda"), 32768)
    assert prefill is None and used.startswith("triton (") and "96" in used


@pytest.fixture
def host(monkeypatch):
    """Returns a function that simulates a host with a GPU and libraries, and returns the log line about them."""

    def make(capability: tuple[int, int], **libraries: ModuleType) -> str:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        for name in ("sgl_kernel", "sgl_kernel.flash_attn", "flashinfer"):
            monkeypatch.setitem(sys.modules, name, libraries.get(name.replace(".", "_")))  # None: import fails
        make_prefill = RaggedPrefill
        monkeypatch.setattr(
            prefill_library,
            "RaggedPrefill",
            lambda library, *heads, float_workspace: make_prefill(library, *heads[:3], torch.device("cpu"), heads[4]),
        )
        prefill, used = prefill_library.load(4, 2, 64, torch.device("cuda"), 4096)
        monkeypatch.setattr(prefill_library, "RaggedPrefill", make_prefill)
        assert (prefill is None) == used.startswith("triton")
        return used

    return make


def module(name: str, **members: object) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    return made


@pytest.mark.skipif(ON_GPU, reason="the stand-ins compute on a CPU")
def test_the_fastest_library_that_works_is_used(host):
    """The fastest working library is used; the log line says why the ones tried before it are not."""
    sgl = {
        "sgl_kernel": module("sgl_kernel", __version__="0.4.10", merge_state_v2=merge_state),
        "sgl_kernel_flash_attn": module("sgl_kernel.flash_attn", flash_attn_varlen_func=attend),
    }
    infer = {"flashinfer": module("flashinfer", __version__="0.7.2", **vars(STANDIN))}
    used = host((9, 0), **sgl, **infer)
    assert used.startswith("FlashAttention 3 of sgl_kernel 0.4.10 for chunks of 64 tokens") and "FlashInfer" not in used
    used = host((8, 0), **sgl, **infer)
    assert used.startswith("FlashInfer 0.7.2 for chunks") and used.endswith("FlashAttention 3: for Hopper GPUs only")
    wrong = module("sgl_kernel.flash_attn", flash_attn_varlen_func=lambda *a, **k: attend(*a, **{**k, "causal": False}))
    used = host((9, 0), **{**sgl, "sgl_kernel_flash_attn": wrong}, **infer)
    assert (
        used.startswith("FlashInfer 0.7.2") and "FlashAttention 3: its attention differs from the reference by" in used
    )
    lazy = module("sgl_kernel.flash_attn", flash_attn_varlen_func=leaves_lone_calls_out)
    used = host((9, 0), **{**sgl, "sgl_kernel_flash_attn": lazy}, **infer)
    assert (
        used.startswith("FlashInfer 0.7.2") and "FlashAttention 3: its attention differs" in used and "by inf" in used
    )
    used = host((9, 0), **infer)
    assert used.startswith("FlashInfer 0.7.2") and "FlashAttention 3: sgl_kernel has none" in used
    used = host((9, 0))
    assert (
        used.startswith("triton (FlashAttention 3: sgl_kernel has none") and "FlashInfer: import of flashinfer" in used
    )


def test_heads_of_flash_attention_3(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(RuntimeError, match="no kernels for heads of 112"):
        fa3.load(torch.device("cuda"), 112)


def library_on_this_gpu(name: str):
    """Returns a library; skips the test without it."""
    if name == "FlashInfer":
        return pytest.importorskip("flashinfer")
    try:
        return fa3.load(torch.device("cuda"), 128)[0]
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.mark.gpu
def test_flash_attention_3_agrees_with_the_reference(any_length):
    """FlashAttention 3 agrees for heads of 128, which every Hopper GPU supports, with prefixes of any length."""
    library = library_on_this_gpu("FlashAttention 3")
    for lens in BATCHES.values():
        for capacity in (192, 32768):
            compare(HEADS[1], lens, capacity, library, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [192, 32768])
@pytest.mark.parametrize("lens", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("heads", [HEADS[0], HEADS[1], HEADS[7]], ids=str)
def test_flashinfer_agrees_with_the_reference(any_length, heads, lens, capacity):
    library = pytest.importorskip("flashinfer")
    compare(heads, lens, capacity, library, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "fa2"])
def test_flashinfer_over_many_calls(any_length, backend):
    """One request takes part in few of the calls, and one in none."""
    library = pytest.importorskip("flashinfer")
    for lens in ([(64 * 40, 70), (0, 3), (64 * 9 + 5, 20)], [(5000, 40)] * 3):
        compare(HEADS[1], lens, 192, library, "cuda", lambda call: backend)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["FlashInfer", "FlashAttention 3"])
def test_planning_and_running_never_wait_for_the_device(any_length, name):
    library = library_on_this_gpu(name)
    heads = HEADS[1]
    scene = make_scene(heads, [500, 64, 0])
    rows = torch.arange(1, 4, device="cuda")
    prefill = RaggedPrefill(library, heads.q, heads.kv, heads.head_dim, torch.device("cuda"), 256)
    ops = TritonOps(scene.pool, scene.ops()[0].rotations, heads.q, 1, prefill=prefill, short=None)
    q, k, v = (randn(300, n, heads.head_dim) for n in (heads.q, heads.kv, heads.kv))
    lens = [(500, 100), (64, 100), (0, 100)]
    ops.extend(0, q, k, v, make_batch(rows, lens), scene.scale)
    batch = make_batch(rows, lens)
    with device_waits.refused():
        ops.extend(0, q, k, v, batch, scene.scale)


def test_a_workspace_is_of_a_size_whatever_the_heads():
    for kv_heads, head_dim, tokens in (
        (8, 128, 65536),
        (4, 128, 1 << 17),
        (1, 64, 1 << 17),
        (32, 96, 21824),
        (32, 256, 8192),
    ):
        assert ragged.workspace_tokens(kv_heads, head_dim) == tokens
        assert tokens % PAGE_SIZE == 0 and tokens * kv_heads * head_dim * 4 <= ragged.WORKSPACE_BYTES
