"""Rotation, alone and fused with the store."""

import pytest
import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.kernels.quantize.rotate import Store, rotate, split_rotation
from tests import pairs
from tests.kernels.scene import (
    DEVICE,
    HEADS,
    LAYERS,
    ON_GPU,
    Heads,
    activations,
    assert_close,
    int64,
    make_scene,
    randn,
)
from tests.kernels.scene import rotations as orthogonal_rotations

KINDS = ["shared", "per-head", "balanced", "keys-only", "identity", "transform"]
ROTATE_HEADS = [HEADS[0], HEADS[1], HEADS[2], HEADS[7]]
# Every kind with one geometry, and every geometry with the most general kind.
CASES = [(HEADS[0], kind) for kind in KINDS] + [(heads, "per-head") for heads in ROTATE_HEADS[1:]]
each_case = pytest.mark.parametrize(("heads", "kind"), CASES, ids=str)


def rotations(kind: str, heads: Heads) -> LayerRotations:
    """Returns rotations; those of ``transform`` have a mean and orthogonal matrices for neither keys nor values."""
    if kind != "transform":
        return orthogonal_rotations(kind, heads)
    shape = (LAYERS, heads.kv, heads.head_dim, heads.head_dim)
    u, w = (torch.linalg.qr(torch.randn(shape, device=DEVICE)).Q for _ in range(2))
    scale = torch.logspace(-1, 1, heads.head_dim, device=DEVICE)
    return LayerRotations(u * scale, w / scale, u / scale, w * scale, torch.randn(shape[:3], device=DEVICE))


@pytest.mark.parametrize("tokens", [1, 67, 3000] if ON_GPU else [67])
@each_case
def test_rotate_agrees_with_float32(heads, kind, tokens):
    ops, reference = make_scene(heads, [64]).ops(rotations(kind, heads))
    q, k, v = activations(heads, tokens)
    for name, got, want in zip("qkv", ops.rotate(1, q, k, v), reference.rotate(1, q, k, v)):
        assert_close(f"{name} rotated", got, want, 1e-3)
    o = randn(tokens, heads.q, heads.head_dim)
    assert_close("output", ops.rotate_output(1, o), reference.rotate_output(1, o), 1e-3)


@pytest.mark.parametrize("shared", [False, True], ids=["mean per head", "one mean"])
@pytest.mark.parametrize("stored", [False, True], ids=["rotate", "rotate_and_store"])
def test_the_mean_is_taken_off_before_the_one_rounding(stored, shared):
    """Compares integers bit for bit, because no order of sums can change their products."""
    heads = HEADS[1]
    scene = make_scene(heads, [70])
    r = torch.randint(-8, 9, (heads.kv, heads.head_dim, heads.head_dim), device=DEVICE).float()
    x = [torch.randint(-8, 9, (70, n, heads.head_dim), device=DEVICE).bfloat16() for n in (heads.q, heads.kv, heads.kv)]
    mean = torch.randn(1 if shared else heads.kv, heads.head_dim, device=DEVICE) * 100
    exact = torch.einsum("thd,hde->the", x[1].double(), r.double()).float()
    want, twice = (exact - mean).bfloat16(), (exact.bfloat16().float() - mean).bfloat16()
    assert not torch.equal(want, twice), "the test tells one rounding from two"
    matrices = tuple(split_rotation(y) for y in (r, r, r))
    loc = scene.pool.req_to_token[1, :70].long()
    # Both pages get slots, whatever the scene gave them.
    scene.pool.page_slot[loc[::PAGE_SIZE] // PAGE_SIZE] = torch.tensor([1, 2], dtype=torch.int32, device=DEVICE)
    bf16_pages = scene.pool.bf16_pages[1]
    store = Store(bf16_pages, bf16_pages.stride(0), scene.pool.places, scene.pool.page_slot, loc) if stored else None
    plain = rotate(x, matrices)
    q, k, v = rotate(x, matrices, store, mean=mean)
    if stored:
        slot = scene.pool.page_slot[loc // PAGE_SIZE].long()
        k, v = bf16_pages[slot, 0, :, loc % PAGE_SIZE], bf16_pages[slot, 1, :, loc % PAGE_SIZE]
    assert torch.equal(k, want)
    assert torch.equal(q, plain[0]) and torch.equal(v, plain[2]), "only keys have a mean"


def test_a_mean_of_keys_that_are_not_rotated_is_refused():
    x = activations(HEADS[1], 3)
    with pytest.raises(ValueError, match="subtracted from rotated keys only"):
        rotate(x, (None, None, None), mean=torch.zeros(HEADS[1].kv, HEADS[1].head_dim, device=DEVICE))


@pytest.mark.parametrize("heads", ROTATE_HEADS[:2], ids=str)
def test_a_tokens_rotation_does_not_depend_on_its_batch(heads):
    ops, _ = make_scene(heads, [64]).ops(rotations("shared", heads))
    q, k, v = activations(heads, 260)  # many tokens are rotated in blocks of another width
    whole, part = ops.rotate(0, q, k, v), ops.rotate(0, q[77:208], k[77:208], v[77:208])
    for x, y in zip(whole, part):
        if ON_GPU:
            assert torch.equal(x[77:208], y)
        else:  # the interpreter multiplies with a BLAS library, whose last bits may depend on a block's width
            assert_close("rotated", x[77:208], y, 1e-4)


@each_case
def test_rotate_and_store_is_rotate_then_store(heads, kind):
    scene = make_scene(heads, [130, 70, 64])
    ops, _ = scene.ops(rotations(kind, heads))
    pool = scene.pool
    loc = torch.stack([pool.req_to_token[1, 129], pool.req_to_token[2, 3], pool.req_to_token[3, 63]]).long()
    loc = torch.cat([loc, int64(0, 5)])  # padding
    q, k, v = activations(heads, len(loc))
    before = pool.bf16_pages.clone()
    rotated = ops.rotate(1, q, k, v)
    ops.store_tokens(1, loc, *rotated[1:])
    want = pool.bf16_pages.clone()
    pool.bf16_pages.copy_(before)
    assert torch.equal(ops.rotate_and_store(1, loc, q, k, v), rotated[0])
    assert torch.equal(pool.bf16_pages.view(torch.int16), want.view(torch.int16))


@each_case
def test_rotate_and_keep_is_rotate_then_store(heads, kind):
    """Tokens of pages without a BF16 copy are not stored: a prefill quantizes them from the returned tensors."""
    scene = make_scene(heads, [130, 70, 64])
    ops, reference = scene.ops(rotations(kind, heads))
    pool = scene.pool
    pool.page_slot[pool.req_to_token[1, 64] // PAGE_SIZE] = -1
    loc = torch.cat([pool.req_to_token[1, :130], pool.req_to_token[2, 3:70], pool.req_to_token[0, :2]]).long()
    if not pairs.everything and kind != "transform":
        loc = loc[::3].contiguous()  # two tiles of tokens instead of four
    copied = pool.page_slot[loc // PAGE_SIZE] > 0
    assert 0 < copied.sum() < len(copied)
    given = activations(heads, len(loc))
    before, rotated = pool.bf16_pages.clone(), ops.rotate(1, *given)
    ops.store_tokens(1, loc[copied], *(x[copied] for x in rotated[1:]))
    want = pool.bf16_pages.clone()
    for backend in (ops, reference):
        pool.bf16_pages.copy_(before)
        for name, x, y in zip("qkv", backend.rotate_and_keep(1, loc, *given), backend.rotate(1, *given)):
            assert torch.equal(x, y), f"{name} differs"
        if backend is ops:
            assert torch.equal(pool.bf16_pages.view(torch.int16), want.view(torch.int16))
        pool.bf16_pages.copy_(before)
        for name, x, y in zip("kv", backend.keep_tokens(1, loc, *given[1:]), backend.rotate(1, *given)[1:]):
            assert torch.equal(x, y), f"{name} without queries differs"
        if backend is ops:
            assert torch.equal(pool.bf16_pages.view(torch.int16), want.view(torch.int16))


def test_a_callers_keys_are_no_space_for_queries():
    """Layers of a short batch write to the same buffers; keys without queries pass their own tensor as unrotated."""
    scene = make_scene(HEADS[2], [70])  # as many query heads as KV heads
    ops, loc = scene.ops(rotations("per-head", HEADS[2]))[0], scene.pool.req_to_token[1, :4].long()
    q, k, v = (x.contiguous() for x in activations(HEADS[2], 4))
    before = k.clone()
    ops.keep_tokens(0, loc, k, v)
    ops.rotate_and_keep(1, loc, q, k, v)
    assert torch.equal(k, before)


@pytest.mark.parametrize("heads", HEADS[:3], ids=str)
def test_store_tokens_is_the_references(heads):
    scene = make_scene(heads, [130, 200])
    ops, reference = scene.ops()
    pool = scene.pool
    pool.page_slot[pool.req_to_token[2, 0] // PAGE_SIZE] = -1  # must land in slot 0
    loc = torch.cat([pool.req_to_token[1, 60:130].long(), pool.req_to_token[2, :1].long(), int64(7)])
    _, k, v = activations(heads, len(loc))
    before = pool.bf16_pages.clone()
    reference.store_tokens(1, loc, k, v)
    want = pool.bf16_pages.clone()
    pool.bf16_pages.copy_(before)
    ops.store_tokens(1, loc, k, v)
    assert torch.equal(pool.bf16_pages.view(torch.int16), want.view(torch.int16))


def test_store_of_no_tokens():
    scene = make_scene(HEADS[1], [64])
    ops, _ = scene.ops(rotations("shared", HEADS[1]))
    q, k, v = activations(HEADS[1], 0)
    ops.store_tokens(0, int64(), k, v)
    assert ops.rotate(0, q, k, v)[0].shape == q.shape
