"""Stored pages become BF16 again: uniform 2-bit records bit for bit, and the inline assembly that unpacks them.

Records of other kinds: tests/kernels/test_formats.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.formats.pack import unpack_codes
from sglang_kvq.kernels.decode.decode_attention import is_two_bit
from sglang_kvq.kernels.extend import gather_two_bits
from sglang_kvq.kernels.extend.gather_pages import PageRead, gather_pages
from tests.kernels.scene import HEADS, Heads, Scene, int64, make_scene
from tests.kernels.test_unpack import OPERATIONS, execute, words

#: Lengths of the requests whose pages ``check_pages`` reads.
GATHERED = [64 * 6 + 5, 64 * 5]


def check_pages(scene: Scene) -> None:
    """Checks reads of records and BF16 pages, whole and in part, in any order; other rows stay untouched."""
    pool, heads = scene.pool, scene.heads
    plan = [PageRead(*x) for x in ((1, 2, 64, 64), (0, 3, 0, 64), (0, 0, 140, 20), (0, 2, 160, 33), (1, 1, 193, 1))]
    out = torch.full((2, 256, heads.kv, heads.head_dim), 7.0, dtype=torch.bfloat16, device=scene.rows.device)
    stored = scene.ops()[0]._stored(0)
    gather_pages(*out, int64(1, 2), torch.tensor(plan, dtype=torch.int32, device=out.device), *stored)
    want = torch.full_like(out, 7.0)
    for request, index, at, count in plan:
        page = int(pool.req_to_token[request + 1, index * PAGE_SIZE]) // PAGE_SIZE
        if index == 0:
            kv = pool.bf16_pages[0, int(pool.page_slot[page])]
        else:
            kv = torch.stack(pool.formats[0].dequantize_pages(pool.records[0][page])).bfloat16()
        want[:, at : at + count] = kv.transpose(1, 2)[:, :count]
    assert torch.equal(out.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("heads", [HEADS[0], HEADS[1], HEADS[2], HEADS[7], Heads(128, 32, 2, 1)], ids=str)
def test_pages_are_what_they_hold(heads):
    scene = make_scene(heads, GATHERED)
    record = scene.ops()[0]._records[0]
    assert is_two_bit(record, heads.head_dim) == (heads.group == min(heads.head_dim, 128))
    check_pages(scene)


@pytest.mark.parametrize("heads", [HEADS[1], HEADS[3]], ids=str)
def test_keys_alone(heads):
    scene = make_scene(heads, [64 * 4])
    plan = torch.tensor([[0, 0, 0, 64], [0, 1, 64, 64]], dtype=torch.int32, device=scene.rows.device)
    k, v, alone = torch.full((3, 128, heads.kv, heads.head_dim), 7.0, dtype=torch.bfloat16, device=scene.rows.device)
    gather_pages(k, v, int64(1), plan, *scene.ops()[0]._stored(0))
    gather_pages(alone, None, int64(1), plan, *scene.ops()[0]._stored(0))
    assert torch.equal(alone, k) and not (k == 7).all()


def test_the_assembly_picks_a_value_for_each_code(monkeypatch):
    monkeypatch.setitem(OPERATIONS, "mad.lo.u32", lambda a, b, c: a * b + c)
    count = 3000
    packed = [words(count, seed) for seed in (1, 2)]
    values = np.random.default_rng(3).integers(0, 2**16, (count, 4)).astype(np.uint16)
    codes = [
        unpack_codes(torch.from_numpy(x.astype(np.uint32).view(np.uint8)), count, 16, 2).view(count, 4, 4)
        for x in packed
    ]
    tables = values.view(np.uint32).astype(np.uint64)
    for plane in range(4):
        got = execute(gather_two_bits._expand_ptx.fn(plane), 4, [*packed, tables[:, 0], tables[:, 1]])
        got = np.concatenate([x.view(np.uint16) for x in got], 1)
        picked = torch.cat([x[:, plane] for x in codes], 1).long().numpy()
        assert np.array_equal(got, np.take_along_axis(values, picked, 1))


def test_the_assembly_transposes_bytes():
    rows = [words(1000, seed) for seed in range(4)]
    got = execute(gather_two_bits._TRANSPOSE_PTX.value, 4, rows)
    want = np.stack([x.astype(np.uint32).view(np.uint8).reshape(-1, 4) for x in rows], 2)  # [n, byte, word]
    assert np.array_equal(np.stack(got, 1).view(np.uint8), want)
