"""The launches of a decode step overlap in the planned order."""

from __future__ import annotations

from sglang_kvq.attention.drafts import DraftBatch, chain
from sglang_kvq.attention.planning.step_order import StepOrder
from sglang_kvq.kernels.device.common import NO_OVERLAP, Overlap
from tests.kernels.scene import DEVICE, HEADS, make_scene

BOTH = Overlap(early=True, lets_next=True)


def test_a_step_of_three_layers():
    """The first launch after the plan does not start early; all later ones do."""
    order = StepOrder(possible=True)
    order.plan()
    assert order.rotate() == Overlap(early=False, lets_next=True)
    for _ in range(2):
        assert order.attend() == BOTH
        assert order.merge() == Overlap(early=True)
        assert order.rotate() == BOTH


def test_every_step_begins_anew():
    order = StepOrder(possible=True)
    for _ in range(2):
        order.plan()
        assert not order.rotate().early
        assert order.attend().early


def test_attention_waits_for_whatever_is_not_a_rotation():
    order = StepOrder(possible=True)
    assert not order.attend().early, "nothing is known of what was launched before"
    order.plan()
    assert not order.attend().early, "behind the plan"
    order.merge()
    assert not order.attend().early, "behind another layer"
    order.rotate()
    order.plan()
    assert not order.attend().early, "a rotation of the step before"


def test_both_kinds_of_steps_begin_with_their_plan():
    scene = make_scene(HEADS[0], [70])
    ops, drafts = scene.ops()[0], DraftBatch(scene.rows, scene.seq_lens, chain(2, DEVICE)[None])
    ops.order = StepOrder(possible=True)
    for plan in (lambda: ops.plan_attention(scene.rows, scene.seq_lens), lambda: ops.plan_drafts(drafts)):
        ops.order.rotate()
        plan()
        assert not ops.order.rotate().early


def test_nothing_overlaps_where_the_device_cannot():
    order = StepOrder(possible=False)
    order.plan()
    for _ in range(2):
        assert [order.rotate(), order.attend(), order.merge()] == [NO_OVERLAP] * 3
