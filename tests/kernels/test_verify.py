"""Attention of drafts, in chains and trees, agrees with float64 on the same codes."""

import pytest
import torch

from benchmarks.kernel_bench import oracle
from sglang_kvq.attention.drafts import MOST_DRAFTS, DraftBatch, chain, check_count, from_mask, mask_of
from sglang_kvq.attention.triton_ops import TritonOps
from sglang_kvq.attention.verification import MOST_COLUMNS, Verification, drafts_of_chunk
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.planes import PlaneCode, PlaneFormat
from tests.kernels.scene import DEVICE, HEADS, ON_GPU, SOME_HEADS, Heads, Scene, assert_close, make_scene
from tests.kernels.test_decode import BOUND
from tests.kernels.test_formats import make_format
from tests.pairs import few

#: Tokens stored before the drafts; a request may have only its first token, or its drafts may begin a page.
PREFIXES = [1, 60, 64, 127, 200, 640, 700]
if ON_GPU:
    PREFIXES += [20_000, 100_001]


def drafts_of(scene: Scene, count: int, tree: bool = False) -> DraftBatch:
    seen = chain(count, DEVICE).expand(len(scene.rows), -1)
    if tree:  # one tree per request
        seen = torch.stack([random_tree(count) for _ in scene.rows]).to(DEVICE)
    return DraftBatch(scene.rows, scene.seq_lens, seen)


def random_tree(count: int) -> torch.Tensor:
    """Returns a tree: each draft but the first sees itself and all that its parent, an earlier draft, sees."""
    mask = torch.eye(count, dtype=torch.bool)
    for draft in range(1, count):
        mask[draft] |= mask[int(torch.randint(0, draft, ()))]
    return from_mask(mask)


def scene_of(heads: Heads, count: int, prefixes: list[int] = PREFIXES, **more) -> Scene:
    return make_scene(heads, [n + count for n in prefixes], **more)


def verify(
    ops: TritonOps,
    layer: int,
    q: torch.Tensor,
    drafts: DraftBatch,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs one step of one layer; buffers are poisoned, because leftovers of an earlier step must not matter."""
    ops.reserve_drafts(len(drafts.rows), drafts.count)
    space = ops._verifications[drafts.count]
    for buffer in (space.partial, space.lse):
        buffer.fill_(float("nan"))
    ops.plan_drafts(drafts)
    return ops.verify(layer, q, drafts, scale, sinks)


def test_batches_that_grow_one_by_one_keep_little_memory():
    """Buffers that a CUDA graph may hold are kept, but growing must not keep those of every size."""
    ops, _ = scene_of(HEADS[0], 4).ops(max_batch=2)
    for batch in range(1, 40):
        rows = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
        ops.plan_drafts(DraftBatch(rows, rows + 4, chain(4, DEVICE).expand(batch, -1)))
    kept = sum(old.batch for old in ops._outgrown)
    assert len(ops._outgrown) < 7 and kept < ops._verifications[4].batch, [old.batch for old in ops._outgrown]


def assert_verified(scene: Scene, count: int, tree: bool) -> None:
    ops, reference = scene.ops(max_batch=len(scene.rows))
    drafts, q = drafts_of(scene, count, tree), scene.queries(len(scene.rows) * count)
    want = oracle.verify(scene.pool, 1, q, drafts, scene.scale)
    got = verify(ops, 1, q, drafts, scene.scale)
    assert got.dtype == torch.bfloat16
    assert_close("kernel", got.double(), want, BOUND)
    assert_close("reference", reference.verify(1, q, drafts, scene.scale).double(), want, BOUND)


@pytest.mark.parametrize(
    ("heads", "count", "tree"),
    few(
        [(HEADS[0], 4, False), (HEADS[1], 7, True), (HEADS[1], 2, False), (HEADS[5], 4, False), (HEADS[5], 4, True)], 2
    ),
    ids=str,
)
def test_drafts_agree_with_float64(heads, count, tree):
    assert_verified(scene_of(heads, count), count, tree)


@pytest.mark.parametrize("heads", SOME_HEADS, ids=str)
def test_all_geometries(heads):
    assert_verified(scene_of(heads, 3, [1, 62, 700]), 3, True)


@pytest.mark.parametrize("kind", ["oscar-lloyd-max", "channel-2", "centred-4"])
def test_other_codes(kind):
    scene = scene_of(HEADS[1], 4, [62, 700], formats=[make_format(kind, 128)] * 2)
    assert_verified(scene, 4, False)


def test_planes():
    format = PlaneFormat(128, PlaneCode((4, 3, 1, 0)), PlaneCode((3, 2, 2, 1)))
    assert_verified(scene_of(HEADS[1], 4, [62, 700], formats=[format] * 2), 4, False)


def test_most_drafts():
    assert_verified(scene_of(HEADS[2], MOST_DRAFTS, [500, 64]), MOST_DRAFTS, True)


def test_a_plan_of_the_programs_that_an_sm_holds():
    scene = scene_of(HEADS[1], 3)
    ops, _ = scene.ops()
    drafts, q = drafts_of(scene, 3), scene.queries(len(scene.rows) * 3)
    ops.plan_drafts(drafts)
    assert ops.fit_programs([100 << 10] * 2, drafts=3) and not ops.fit_programs([100 << 10] * 2, drafts=3)
    ops.reserve_drafts(ops._verifications[3].batch + 1, 3)
    assert {launch.programs_per_sm for launch in ops._verifications[3].launches} == {2}
    want = oracle.verify(scene.pool, 1, q, drafts, scene.scale)
    assert_close("kernel", verify(ops, 1, q, drafts, scene.scale).double(), want, BOUND)


def test_one_draft_is_a_decode_step():
    scene = scene_of(HEADS[1], 1)
    ops, reference = scene.ops()
    drafts, q = drafts_of(scene, 1), scene.queries(len(scene.rows))
    ops.plan_attention(scene.rows, scene.seq_lens)
    want = ops.decode(0, q, scene.rows, scene.seq_lens, scene.scale)
    assert torch.equal(verify(ops, 0, q, drafts, scene.scale), want)
    want = reference.decode(0, q, scene.rows, scene.seq_lens, scene.scale)
    assert torch.equal(reference.verify(0, q, drafts, scene.scale), want)


@pytest.mark.parametrize("attend", ["kernel", "reference"])
def test_a_draft_does_not_see_what_follows_it(attend):
    """Changing the last draft changes its own result and no other's."""
    count = 4
    scene = scene_of(HEADS[1], count, [62, 700])
    ops, reference = scene.ops()
    drafts, q = drafts_of(scene, count), scene.queries(2 * count)

    def run() -> torch.Tensor:
        if attend == "reference":
            return reference.verify(0, q, drafts, scene.scale)
        return verify(ops, 0, q, drafts, scene.scale)

    before = run()
    last = scene.pool.req_to_token[scene.rows, scene.seq_lens - 1].long()
    slot = scene.pool.page_slot[last // 64].long()
    for one_slot, token in zip(slot, last % 64):
        scene.pool.bf16_pages[0, one_slot, :, :, token] += 3
    changed = (run() != before).flatten(1).any(1).view(2, count)
    assert changed[:, -1].all() and not changed[:, :-1].any()


def test_padding_is_verified_too():
    """Rows that pad a batch to a graph's size hold one token, and drafts in page 0; they give no NaN."""
    scene = make_scene(HEADS[1], [300, 0, 0])
    ops, _ = scene.ops()
    lens = torch.where(scene.rows > 0, scene.seq_lens, 1 + 4)
    drafts = DraftBatch(scene.rows, lens, chain(4, DEVICE).expand(3, -1))
    q = scene.queries(12)
    got = verify(ops, 0, q, drafts, scene.scale)
    assert not got.isnan().any()
    one = DraftBatch(scene.rows[:1], lens[:1], drafts.seen[:1])
    assert_close("live", got[:4].double(), oracle.verify(scene.pool, 0, q[:4], one, scene.scale), BOUND)


def test_chunks_are_as_even_as_they_can_be():
    for group in range(1, 17):
        for count in range(1, MOST_DRAFTS + 1):
            of_chunk = drafts_of_chunk(count, group)
            chunks = -(-count // of_chunk)
            assert of_chunk * group <= MOST_COLUMNS and (chunks - 1) * of_chunk < count <= chunks * of_chunk
            assert chunks == -(-count // (MOST_COLUMNS // group)), "no more chunks than needed"


@pytest.mark.parametrize(("count", "heads"), [(5, HEADS[1]), (3, HEADS[5]), (6, HEADS[2])], ids=str)
def test_columns_and_back(count, heads):
    scene = scene_of(heads, count, [70, 3])
    space = Verification(scene.pool, scene.ops()[0]._records, heads.q, 2, count, 2)
    q = scene.queries(2 * count)
    x = space.to_columns(q)
    first = x[0].view(heads.kv, space.of_chunk, heads.gqa_group, -1)
    assert torch.equal(first[-1, 1], q[1].view(heads.kv, heads.gqa_group, -1)[-1])
    merged = x.view(2, space.chunks * x.shape[1], -1)
    assert torch.equal(space.from_columns(merged), q)


def test_masks_become_bits_and_back():
    assert chain(3).tolist() == [0b1, 0b11, 0b111]
    assert torch.equal(mask_of(chain(MOST_DRAFTS)), torch.ones(MOST_DRAFTS, MOST_DRAFTS).tril().bool())
    mask = torch.rand(5, 9, 9) < 0.5
    assert torch.equal(mask_of(from_mask(mask)), mask)


@pytest.mark.parametrize("count", [0, 65, 64])
def test_counts_that_are_refused(count):
    """A window of any size holds 63 drafts, so a larger one is no fix."""
    with pytest.raises(KVQuantError, match=f"speculative-num-draft-tokens {count}: must be 1 to 63 with --kv-quant"):
        check_count(count)
    check_count(4)
    check_count(63)
    assert KVQuantConfig("int4", recent_tokens=PAGE_SIZE).recent_tokens > 63
    with pytest.raises(KVQuantError, match="--kv-quant-recent"):
        KVQuantConfig("int4", recent_tokens=0)
