"""Learned sinks, one more key with a score and no value, work on every path of attention."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.kernel_bench import oracle
from sglang_kvq.attention import prefill_library, ragged
from sglang_kvq.attention.ragged import RaggedPrefill
from sglang_kvq.attention.reference import ReferenceOps
from sglang_kvq.attention.triton_ops import TritonOps
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.formats.planes import PlaneCode, PlaneFormat
from sglang_kvq.kernels.decode.learned_sinks import scale_by_sinks
from tests.kernels.scene import (
    DEVICE,
    HEADS,
    ON_GPU,
    SOME_HEADS,
    Heads,
    Scene,
    activations,
    assert_close,
    check_extend,
    make_batch,
    make_scene,
    prefix_scene,
    randn,
    rotations,
)
from tests.kernels.test_decode import decode as decode_step
from tests.kernels.test_extend import BOUND as TWO_SOFTMAXES
from tests.kernels.test_formats import make_format
from tests.kernels.test_ragged import ROUNDING, STANDIN, Wrapper
from tests.kernels.test_short_extend import ANY
from tests.kernels.test_verify import drafts_of, scene_of, verify
from tests.pairs import each

BOUND = 5e-3
#: gpt-oss's heads on one of eight workers.
GPT_OSS = Heads(64, 64, 1, 8)
#: Lengths of a decode batch: requests with one item, with several, and padding.
LENGTHS = [1, 65, 64 * 9 + 1, 0, 330]
LENS = [(64 * 5 + 17, 9), (3, 5), (0, 33), (64 * 4 - 1, 2)]


def draw(heads: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns sinks of all kinds: far below the keys, near their log-sum-exp, far above it, and none at all."""
    sinks = torch.randn(heads, device=DEVICE) * 2 + 4
    sinks[0], sinks[-1] = 60.0, -60.0
    if heads > 2:
        sinks[1] = float("-inf")
    return sinks.to(dtype)


def by_lse(scene: Scene, layer: int, q: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Computes the definition in float64: plain attention times sigmoid(lse - sink)."""
    out = oracle.decode(scene.pool, layer, q, scene.rows, scene.seq_lens, scene.scale)
    for i, (row, length) in enumerate(zip(scene.rows.tolist(), scene.seq_lens.tolist())):
        keys, _ = oracle.stored(scene.pool, layer, row, length)
        keys = keys.repeat_interleave(scene.heads.gqa_group, 0)
        lse = torch.einsum("hd,hnd->hn", q[i].double(), keys).mul(scene.scale).logsumexp(-1)
        out[i] *= torch.sigmoid(lse - sinks.double())[:, None]
    return out


def test_the_oracle_is_the_definition():
    scene = make_scene(HEADS[1], [700, 90, 1])
    q, sinks = scene.queries(3), draw(HEADS[1].q)
    got = oracle.decode(scene.pool, 0, q, scene.rows, scene.seq_lens, scene.scale, sinks)
    torch.testing.assert_close(got, by_lse(scene, 0, q, sinks), rtol=1e-9, atol=1e-9)
    nothing = oracle.decode(scene.pool, 0, q, scene.rows, scene.seq_lens, scene.scale, sinks.fill_(float("-inf")))
    assert torch.equal(nothing, oracle.decode(scene.pool, 0, q, scene.rows, scene.seq_lens, scene.scale))


def test_the_oracle_extends_as_it_decodes():
    """The last of a request's new tokens gets the result of a decode step over the same stored tokens."""
    heads = HEADS[1]
    scene = make_scene(heads, [64 * 5 + 3], recent=64 * 4)
    pool, sinks, q = scene.pool, draw(heads.q), scene.queries(3)
    wanted = oracle.decode(pool, 0, q[2:], scene.rows, scene.seq_lens, scene.scale, sinks)
    k, v = (x.transpose(0, 1)[-3:] for x in oracle.stored(pool, 0, 1, 64 * 5 + 3))
    got = oracle.extend_row(pool, 0, 1, 64 * 5, q, k, v, scene.scale, sinks)
    torch.testing.assert_close(got[2:], wanted)


@each(heads=SOME_HEADS, dtype=[torch.float32, torch.bfloat16])
def test_the_reference(heads, dtype):
    scene = make_scene(heads, [prefix or 70 for prefix, _ in LENS])
    reference, sinks = scene.ops()[1], draw(heads.q, dtype)
    q = scene.queries(len(LENS))
    got = reference.decode(0, q, scene.rows, scene.seq_lens, scene.scale, sinks)
    assert_close("decode", got.double(), oracle.decode(scene.pool, 0, q, *at(scene), sinks), BOUND)
    batch = make_batch(scene.rows, LENS)
    q, k, v = activations(heads, sum(batch.new_lens))
    got = reference.extend(0, q, k, v, batch, scene.scale, sinks)
    assert_close("extend", got.double(), oracle.extend(scene.pool, 0, q, k, v, batch, scene.scale, sinks), BOUND)


def at(scene: Scene) -> tuple[torch.Tensor, torch.Tensor, float]:
    return scene.rows, scene.seq_lens, scene.scale


FORMATS = {
    "two-bits": None,
    "general": lambda heads: make_format("centred-4", heads.head_dim),
    "planes": lambda heads: PlaneFormat(heads.head_dim, PlaneCode((4, 3, 1, 0)), PlaneCode((3, 2, 2, 1))),
}


@each(heads=[GPT_OSS, HEADS[1], HEADS[7]], kind=FORMATS.keys(), dtype=[torch.float32, torch.bfloat16])
def test_decode(heads, dtype, kind):
    formats = FORMATS[kind] and [FORMATS[kind](heads)]
    scene = make_scene(heads, LENGTHS, formats=formats)
    ops, _ = scene.ops(max_batch=len(LENGTHS))
    q, sinks = scene.queries(len(LENGTHS)), draw(heads.q, dtype)
    ops.plan_attention(scene.rows, scene.seq_lens)
    got = ops.decode(0, q, *at(scene), sinks)
    assert_close("decode", got.double(), oracle.decode(scene.pool, 0, q, *at(scene), sinks), BOUND)


@each(
    kind=FORMATS.keys(),
    heads=[GPT_OSS, HEADS[1]],
    dtype=[torch.bfloat16, torch.float32],
    tree={"chain": False, "tree": True},
)
def test_drafts(heads, dtype, kind, tree):
    """Sinks apply to every draft; 7 drafts with 8 heads per KV head span several chunks of columns."""
    formats, count = FORMATS[kind] and [FORMATS[kind](heads)], 7
    scene = scene_of(heads, count, [1, 62, 700], formats=formats)
    ops, reference = scene.ops(max_batch=len(scene.rows))
    drafts, q = drafts_of(scene, count, tree), scene.queries(len(scene.rows) * count)
    sinks = draw(heads.q, dtype)
    wanted = oracle.verify(scene.pool, 0, q, drafts, scene.scale, sinks)
    got = verify(ops, 0, q, drafts, scene.scale, sinks)
    assert_close("verify", got.double(), wanted, BOUND)
    assert_close("reference", reference.verify(0, q, drafts, scene.scale, sinks).double(), wanted, BOUND)
    # The first draft of each request equals a decode step.
    alone = oracle.decode(scene.pool, 0, q[::count], scene.rows, scene.seq_lens - count + 1, scene.scale, sinks)
    torch.testing.assert_close(wanted[::count], alone)


def test_drafts_of_a_worker_with_one_head():
    """Its only sink, repeated for every draft, must lie in memory once for each."""
    heads, count = Heads(64, 64, 1, 1), 5
    scene = scene_of(heads, count, [62, 200])
    drafts, q = drafts_of(scene, count), scene.queries(2 * count)
    sinks = torch.tensor([3.0, math.nan, math.nan, math.nan, math.nan], device=DEVICE)[:1]
    got = verify(scene.ops()[0], 0, q, drafts, scene.scale, sinks)
    assert_close("verify", got.double(), oracle.verify(scene.pool, 0, q, drafts, scene.scale, sinks), BOUND)


def test_layers_with_sinks_and_without_share_a_step():
    scene = make_scene(HEADS[1], [700, 90])
    ops, _ = scene.ops()
    q, sinks = scene.queries(2), draw(HEADS[1].q)
    without = decode_step(ops, 0, q, scene)
    ops.decode(1, q, *at(scene), sinks)
    assert torch.equal(ops.decode(0, q, *at(scene)), without)
    assert torch.equal(ops.decode(0, q, *at(scene), torch.full_like(sinks, float("-inf"))), without)


@each(kind=FORMATS.keys(), heads=[GPT_OSS, HEADS[1]], parts={"whole rows": False, "rows in parts": True})
def test_pages_read_directly(heads, parts, kind):
    """A row of one item applies its sinks in the kernel; a row in parts applies them when the parts are merged."""
    formats = FORMATS[kind] and [FORMATS[kind](heads)]
    # Rows stay whole if there are more of them than a GPU has multiprocessors.
    lens = [(64 * 9 + 5, 2), (3, 1)] if parts else [(64 * 3 + 5, 3)] * (140 if ON_GPU else 7)
    short = replace(ANY, launch=replace(ANY.launch, programs_per_sm=1)) if not parts else ANY
    scene = prefix_scene(heads, lens, formats=formats)
    ops = check_extend(scene, lens, BOUND, layers=[0], sinks=draw(heads.q), short=short)
    assert (ops._extend_plans.short.partials > 0) == parts


@each(slab_tokens=[64, 32768], heads=[GPT_OSS, HEADS[1]], dtype=[torch.float32, torch.bfloat16])
def test_prefixes_dequantized_first(heads, slab_tokens, dtype):
    ops = compare(heads, TWO_SOFTMAXES, dtype, slab_tokens=slab_tokens)
    assert len(ops._extend_plans.slabs) == (1 if slab_tokens == 32768 else 11)


def compare(heads: Heads, bound: float, dtype: torch.dtype, **more) -> TritonOps:
    scene = prefix_scene(heads, LENS)
    return check_extend(scene, LENS, bound, layers=[0], sinks=draw(heads.q, dtype), short=None, **more)


@each(capacity=[64, 192, 32768], heads=[GPT_OSS, HEADS[1]], dtype=[torch.float32, torch.bfloat16])
def test_through_flashinfer(heads, capacity, dtype, monkeypatch):
    """Some calls are the only ones for their queries, others share them; on a CPU a stand-in replaces FlashInfer."""
    library = pytest.importorskip("flashinfer") if ON_GPU else STANDIN
    monkeypatch.setattr(ragged, "LEAST_TOKENS", 0)
    monkeypatch.setattr(ragged, "LEAST_PER_REQUEST", 0)
    prefill = RaggedPrefill(library, heads.q, heads.kv, heads.head_dim, torch.device(DEVICE), capacity)
    ops = compare(heads, TWO_SOFTMAXES + ROUNDING * 12**0.5, dtype, prefill=prefill)
    calls = [planned.call for planned in ops._extend_plans.calls]
    assert any(call.alone for call in calls) and (capacity > 192) == all(call.alone for call in calls)


def test_a_group_whose_last_request_has_no_prefix(monkeypatch):
    """If the group's last request has no prefix, the first call has all queries and the merged calls have fewer."""
    if ON_GPU:
        pytest.skip("the stand-in computes on a CPU")
    heads, lens = HEADS[1], [(64 * 9, 20), (0, 3)]
    prefill = RaggedPrefill(STANDIN, heads.q, heads.kv, heads.head_dim, torch.device(DEVICE), 512)
    prefill._least_tiles = 9
    monkeypatch.setattr(prefill, "suits", lambda new_lens: True)
    for sinks in (None, draw(heads.q)):
        scene = prefix_scene(heads, lens)
        ops = check_extend(scene, lens, TWO_SOFTMAXES, layers=[0], sinks=sinks, prefill=prefill, short=None)
    calls = [planned.call for planned in ops._extend_plans.calls]
    assert [call.q for call in calls] == [(0, 23), (0, 20)] and [call.last for call in calls] == [False, True]


@pytest.mark.parametrize("shape", [(1, 1, 64), (7, 3, 96), (70, 8, 128), (3, 5, 256)], ids=str)
def test_scaling_what_is_finished(shape):
    out, lse, sinks = randn(*shape), torch.randn(shape[:2], device=DEVICE) * 9, draw(shape[1])
    sinks[sinks == 60] = 90.0
    padded = torch.cat([out.flatten(), torch.full((999,), float("nan"), device=DEVICE).bfloat16()])
    mine = padded[: out.numel()].view(shape)
    scale_by_sinks(mine, lse, sinks)
    wanted = out.double() * torch.sigmoid(lse.double() * math.log(2) - sinks.double())[..., None]
    assert_close("scaled", mine.double(), wanted, BOUND)
    assert padded[out.numel() :].isnan().all()


class Natural(Wrapper):
    """A stand-in for FlashInfer whose log-sum-exp has base e."""

    def run(self, *args, return_lse=False, **kwargs):
        out, lse = super().run(*args, return_lse=True, **kwargs)
        return (out, lse * math.log(2)) if return_lse else out


@pytest.mark.skipif(ON_GPU, reason="the stand-in computes on a CPU")
def test_a_library_with_another_log_sum_exp_is_not_used():
    make = lambda library: RaggedPrefill(library, 4, 2, 64, torch.device("cpu"), 4096)  # noqa: E731
    prefill_library._try(make(STANDIN))
    other = type(STANDIN)(**{**vars(STANDIN), "BatchPrefillWithRaggedKVCacheWrapper": Natural})
    with pytest.raises(RuntimeError, match="differs from the reference by"):
        prefill_library._try(make(other))


def test_sinks_do_not_care_for_rotations():
    """After rotating back, the answer of a rotated request with all tokens in BF16 equals the plain model's."""
    heads = HEADS[1]
    scene = make_scene(heads, [PAGE_SIZE * 2], recent=4096)
    pool = scene.pool
    r = rotations("per-head", heads)
    ops = ReferenceOps(pool, r) if not ON_GPU else TritonOps(pool, r, heads.q, 1)
    sinks, tokens = draw(heads.q), PAGE_SIZE * 2
    q, k, v = (randn(tokens, n, heads.head_dim) for n in (heads.q, heads.kv, heads.kv))
    loc = pool.req_to_token[1, :tokens].long()
    plain = []
    for backend in (ReferenceOps(pool, replace(r, k=None, v=None)), ops):
        x = backend.rotate_and_store(0, loc, q, k, v)
        if isinstance(backend, TritonOps):
            backend.plan_attention(scene.rows, scene.seq_lens)
        plain.append(backend.rotate_output(0, backend.decode(0, x[-1:], *at(scene), sinks)))
    assert_close("rotated", plain[1], plain[0], 2e-2)
