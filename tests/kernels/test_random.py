"""Attention over random geometries, codes, lengths, windows and learned sinks agrees with float64."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from benchmarks.kernel_bench import oracle
from sglang_kvq.attention.planning.short_extend import ShortExtends
from sglang_kvq.constants import HEAD_DIMS, PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.planes import PlaneCode, PlaneFormat
from sglang_kvq.formats.record import RecordFormat
from sglang_kvq.kernels.extend.extend_attention import NARROW
from tests import pairs
from tests.kernels.scene import DEVICE, Heads, assert_close, check_extend, make_scene, prefix_scene
from tests.kernels.test_formats import KINDS, make_format
from tests.kernels.test_verify import drafts_of, verify

BOUND = 1e-2
SEEDS = range(300 if pairs.everything else 6)


class Draw(random.Random):
    """Draws what a test needs, from a seed."""

    def heads(self) -> Heads:
        d = self.choice(HEAD_DIMS)
        return Heads(d, min(d, 128), self.choice([1, 1, 2, 5]), self.choice([1, 1, *range(2, 17)]))

    def format(self, heads: Heads) -> RecordFormat | None:
        """Returns planes of any widths, codes of any kind, or None for those of ``heads``."""
        kind = self.choice(["planes", "any", "two bits"])
        if kind == "any":
            return make_format(self.choice(list(KINDS)), heads.head_dim)
        return PlaneFormat(heads.head_dim, self.widths(), self.widths()) if kind == "planes" else None

    def widths(self) -> PlaneCode:
        while True:
            try:
                return PlaneCode(tuple(self.randint(0, 6) for _ in range(4)))
            except KVQuantError:  # they do not fill the cells
                pass

    def length(self) -> int:
        pages = self.randint(1, 9) * PAGE_SIZE
        return self.choice([1, pages - 1, pages, pages + 1, self.randint(1, pages)])

    def sinks(self, heads: Heads) -> torch.Tensor | None:
        if self.random() < 0.5:
            return None
        found = torch.randn(heads.q + 64, device=DEVICE) * 4
        found[heads.q :] = math.nan  # must not be read
        return found[: heads.q]

    def scene(self, heads: Heads) -> dict:
        format, recent = self.format(heads), self.choice([64, 128])
        return {"sink": self.choice([0, 64, 192]), "recent": recent, "formats": format and [format] * 2}


@pytest.mark.parametrize("seed", SEEDS)
def test_decode(seed):
    draw = Draw(seed)
    heads, lengths = draw.heads(), [draw.choice([0, draw.length()]) for _ in range(draw.randint(1, 4))]
    scene = make_scene(heads, lengths, **draw.scene(heads), shared=draw.random() < 0.5)
    ops, sinks = scene.ops(max_batch=len(lengths))[0], draw.sinks(heads)
    where = scene.rows, scene.seq_lens, scene.scale, sinks
    q = scene.queries(len(lengths))
    ops.plan_attention(*where[:2])
    assert_close("decode", ops.decode(1, q, *where).double(), oracle.decode(scene.pool, 1, q, *where), BOUND)


@pytest.mark.parametrize("seed", SEEDS)
def test_verify(seed):
    draw = Draw(seed)
    heads, count, lengths = draw.heads(), draw.choice([2, 3, 5, 8, 17]), [draw.length() for _ in range(2)]
    scene = make_scene(heads, [length + count for length in lengths], **draw.scene(heads))
    drafts, sinks = drafts_of(scene, count, tree=draw.random() < 0.5), draw.sinks(heads)
    q = scene.queries(2 * count)
    got = verify(scene.ops()[0], 1, q, drafts, scene.scale, sinks)
    assert_close("verify", got.double(), oracle.verify(scene.pool, 1, q, drafts, scene.scale, sinks), BOUND)


@pytest.mark.parametrize("seed", SEEDS)
def test_extend(seed):
    draw = Draw(seed)
    heads, short = draw.heads(), None
    lens = [(draw.choice([0, draw.length()]), draw.choice([1, 2, 9, 33])) for _ in range(draw.randint(1, 3))]
    if draw.random() < 0.5:
        launch = replace(NARROW, rows=draw.choice([16, 32, 64]), keys=draw.choice([16, 32, 64]))
        short = ShortExtends(costs=None, most_rows_unpacked=1 << 20, least_prefix=0, launch=launch)
    scene, sinks = prefix_scene(heads, lens, **draw.scene(heads)), draw.sinks(heads)
    check_extend(scene, lens, BOUND, layers=[1], sinks=sinks, short=short, slab_tokens=3 * PAGE_SIZE)
