"""Sums of tensor-parallel workers are joined into one model's: heads split, replicated, or in pipeline stages."""

import pytest
import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.calibration.worker_files import Worker, read_samples, read_sums, write_sample, write_sums
from sglang_kvq.rotations.maths.moments import MOMENTS, MomentSums

KV_HEADS, GROUP, DIM, SKIP = 2, 4, 64, 16


@pytest.fixture
def activations():
    """Returns q, k, v of one context per layer."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(KV_HEADS * GROUP, 128, DIM), (KV_HEADS, 128, DIM), (KV_HEADS, 128, DIM)]
    return [[torch.randn(shape, generator=generator).bfloat16() for shape in shapes] for _ in range(2)]


def workers(folder, activations, size, stages=((0, 1),), contexts=1):
    """Writes the files of ``size`` ranks; with more ranks than KV heads, several ranks hold each head."""
    for stage in stages:
        for rank in range(size):
            sums = MomentSums(SKIP)
            for layer in stage:
                q, k, v = activations[layer]
                head = slice(rank * KV_HEADS // size, max((rank + 1) * KV_HEADS // size, rank * KV_HEADS // size + 1))
                part = q.chunk(size)[rank], k[head], v[head]
                sums.add(layer, *part)
                write_sample(folder, rank, layer, *part, 0.1 + layer)
            write_sums(folder, sums, contexts, Worker(rank, size, KV_HEADS, len(stage), stage[0]))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("stages", [((0, 1),), ((0,), (1,))], ids=["one stage", "two stages"])
def test_ranks_join_to_the_whole(tmp_path, activations, size, stages):
    workers(tmp_path, activations, size, stages)
    whole = MomentSums(SKIP)
    for layer, (q, k, v) in enumerate(activations):
        whole.add(layer, q, k, v)
    joined = read_sums(tmp_path, 1, SKIP).mean(2, 1, shared=False)
    for name, found, expected in zip(MOMENTS, joined, whole.mean(2, 1, shared=False)):
        if name == "vv" and size > KV_HEADS:  # each replica weighs with its own queries
            assert (found - expected).norm() < 0.2 * expected.norm()
        else:
            torch.testing.assert_close(found, expected)
    for layer, *parts, scale in read_samples(tmp_path, 2, KV_HEADS):
        assert scale == 0.1 + layer  # models may scale scores by another factor than 1 / sqrt(D)
        for found, expected in zip(parts, activations[layer]):
            assert torch.equal(found, expected)


def test_a_context_that_was_split_is_told(tmp_path, activations):
    workers(tmp_path, activations, 2)
    with pytest.raises(KVQuantError, match="has seen 1 of 3 contexts whole.*chunk"):
        read_sums(tmp_path, 3, SKIP)


def test_missing_workers_are_told(tmp_path, activations):
    with pytest.raises(KVQuantError, match="captured nothing"):
        read_sums(tmp_path, 1, SKIP)
    workers(tmp_path, activations, 2)
    (tmp_path / "rank1.stage0.safetensors").unlink()
    with pytest.raises(KVQuantError, match=r"ranks \[1\] of 2 wrote nothing"):
        read_sums(tmp_path, 1, SKIP)
    (tmp_path / "rank0.layer1.sample.safetensors").unlink()
    (tmp_path / "rank1.layer1.sample.safetensors").unlink()
    with pytest.raises(KVQuantError, match="no activations of layer 1"):
        list(read_samples(tmp_path, 2, KV_HEADS))
