"""A decode step keeps its promises to a CUDA graph: fixed addresses, lengths read on the device, no waiting."""

import pytest
import torch

from benchmarks.kernel_bench import oracle
from sglang_kvq.attention.base import ExtendBatch
from sglang_kvq.attention.drafts import DraftBatch, chain
from sglang_kvq.constants import PAGE_SIZE
from tests import device_waits
from tests.kernels.scene import HEADS, Scene, assert_close, int64, make_scene, randn, rotations
from tests.kernels.test_decode import BOUND, exact

pytestmark = pytest.mark.gpu
LENGTHS = [1500, 64, 900, 0, 3000, 1, 130, 0]


class Step:
    """A decode step over static inputs: plan_attention, rotate_and_store, then decode."""

    def __init__(self, scene: Scene) -> None:
        heads, batch = scene.heads, len(scene.rows)
        self.scene, (self.ops, self.reference) = scene, scene.ops(rotations("per-head", scene.heads), batch)
        self.rows, self.lens = scene.rows.clone(), scene.seq_lens.clone()
        self.loc = torch.zeros(batch, dtype=torch.int64, device="cuda")
        self.q, self.k, self.v = (randn(batch, n, heads.head_dim) for n in (heads.q, heads.kv, heads.kv))

    def locate(self) -> None:
        """Sets ``loc`` to each request's last token."""
        self.loc.copy_(self.scene.pool.req_to_token[self.rows, self.lens - 1])

    def run(self) -> torch.Tensor:
        self.ops.plan_attention(self.rows, self.lens)
        q = self.ops.rotate_and_store(1, self.loc, self.q, self.k, self.v)
        return self.ops.rotate_output(1, self.ops.decode(1, q, self.rows, self.lens, self.scene.scale))


def warmed(step: Step) -> Step:
    step.locate()
    step.run()
    torch.cuda.synchronize()
    return step


@pytest.mark.parametrize("heads", [HEADS[0], HEADS[1], HEADS[7]], ids=str)
def test_replay_follows_changed_lengths_and_rows(heads):
    step = warmed(Step(make_scene(heads, LENGTHS)))
    scene = step.scene
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step.run()
    order = torch.randperm(len(LENGTHS), device="cuda")
    for shorter, chosen in [(0, slice(None)), (13, order), (0, order)]:
        step.rows.copy_(scene.rows[chosen])
        step.lens.copy_((scene.seq_lens[chosen] - shorter).clamp(min=1))
        step.q.normal_()
        step.k.normal_()
        step.locate()
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        live = step.rows > 0
        now = Scene(heads, scene.pool, step.rows[live], step.lens[live])
        q, _, _ = step.reference.rotate(1, step.q, step.k, step.v)
        want = step.reference.rotate_output(1, exact(now, 1, q[live]).bfloat16())
        assert_close("replayed", out[live], want, 2 * BOUND)
        assert not out.isnan().any()


class Verification(Step):
    """A verification: plan_drafts, rotate_and_store of all drafts, then verify; ``lens`` exclude the drafts."""

    def __init__(self, scene: Scene, count: int) -> None:
        super().__init__(scene)
        heads, batch = scene.heads, len(scene.rows)
        self.count, self.loc = count, torch.zeros(batch * count, dtype=torch.int64, device="cuda")
        self.q, self.k, self.v = (randn(batch * count, n, heads.head_dim) for n in (heads.q, heads.kv, heads.kv))
        self.seen = chain(count, "cuda").expand(batch, -1).contiguous()
        self.lens.copy_((self.lens - count).clamp(min=1))

    def locate(self) -> None:
        """Sets ``loc`` to each request's drafts."""
        at = self.lens[:, None] + torch.arange(self.count, device="cuda")
        self.loc.copy_(self.scene.pool.req_to_token[self.rows[:, None], at].flatten())

    def run(self) -> torch.Tensor:
        drafts = DraftBatch(self.rows, self.lens + self.count, self.seen)
        self.ops.plan_drafts(drafts)
        q = self.ops.rotate_and_store(1, self.loc, self.q, self.k, self.v)
        return self.ops.rotate_output(1, self.ops.verify(1, q, drafts, self.scene.scale))


@pytest.mark.parametrize(("heads", "count"), [(HEADS[1], 4), (HEADS[5], 4), (HEADS[7], 3)], ids=str)
def test_replay_verifies_other_requests_and_trees(heads, count):
    step = warmed(Verification(make_scene(heads, [n and n + count for n in LENGTHS]), count))
    scene = step.scene
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step.run()
    stored = step.lens.clone()
    order = torch.randperm(len(LENGTHS), device="cuda")
    for shorter, chosen, tree in [(0, slice(None), False), (5, order, True), (0, order, False)]:
        step.rows.copy_(scene.rows[chosen])
        step.lens.copy_((stored[chosen] - shorter).clamp(min=1))
        step.seen.copy_(chain(count, "cuda"))
        if tree:
            step.seen[:, -1] = 1 | 1 << count - 1  # the last draft sees only the first and itself
        step.q.normal_()
        step.k.normal_()
        step.locate()
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        live = step.rows > 0
        drafts = DraftBatch(step.rows[live], step.lens[live] + count, step.seen[live])
        q, _, _ = step.reference.rotate(1, step.q, step.k, step.v)
        want = oracle.verify(scene.pool, 1, q.view(-1, count, *q.shape[1:])[live].flatten(0, 1), drafts, scene.scale)
        want = step.reference.rotate_output(1, want.bfloat16())
        got = out.view(-1, count, *out.shape[1:])[live].flatten(0, 1)
        assert_close("replayed", got, want, 2 * BOUND)
        assert not out.isnan().any()


def test_verifying_waits_for_nothing():
    step = warmed(Verification(make_scene(HEADS[1], [1500, 900]), 4))
    with device_waits.refused():
        step.run()


def test_padding_rows_write_only_to_page_zero():
    step = warmed(Step(make_scene(HEADS[1], [700, 0, 0])))
    before = step.scene.pool.bf16_pages.clone()
    step.k.normal_()
    step.run()
    changed = (step.scene.pool.bf16_pages != before) & ~before.isnan()
    layer, slot = changed.flatten(2).any(-1).nonzero().unbind(1)
    page = step.loc[0] // PAGE_SIZE
    assert set(layer.tolist()) == {1} and set(slot.tolist()) <= {0, int(step.scene.pool.page_slot[page])}


def test_nothing_waits_for_the_device():
    scene = make_scene(HEADS[1], [1500, 900])
    step = warmed(Step(scene))
    heads, ops = scene.heads, step.ops
    new = [70, 200]
    q, k, v = (randn(sum(new), n, heads.head_dim) for n in (heads.q, heads.kv, heads.kv))
    rows, loc = int64(1, 2), int64(*range(sum(new)))
    slots, pages, count, first = int64(1), int64(scene.pool.pages), int64(1), int64(3)

    def everything() -> None:
        step.run()
        ops.quantize_slots(slots, pages, count)
        ops.quantize_tokens(0, first, pages, k, v)
        ops.extend(0, q, k, v, ExtendBatch(rows, [1500, 900], new, loc, first), scene.scale)

    everything()  # compiles the kernels
    with device_waits.refused():
        everything()
