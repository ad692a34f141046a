"""Moments at other positions: foreseen by RoPE's turn, against the model run there."""

import pytest
import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.calibration.hf_attention import attention_hook, positions
from sglang_kvq.rotations.calibration.rope_check import check_turn
from sglang_kvq.rotations.calibration.settings import CalibrationSettings, first_positions
from sglang_kvq.rotations.maths.moments import MomentSums
from sglang_kvq.rotations.maths.rope import mean_over_positions, turn_of

pytestmark = pytest.mark.usefixtures("one_thread")


def activations(model, ids, position):
    """q and k of every layer for these tokens from ``position`` on."""
    held = []
    with torch.inference_mode(), attention_hook(model, lambda layer, q, k, v, scale: held.append((q, k))):
        model.base_model(ids[None], position_ids=positions(ids, position))
    return held


def test_a_contexts_position_turns_keys_and_leaves_scores(llama, ids):
    near, far = (activations(llama, ids[:200], position) for position in (0, 300))
    for (q, k), (turned_q, turned_k) in zip(near, far):
        assert (k - turned_k).norm() > 0.1 * k.norm()
        torch.testing.assert_close(q[:2] @ k[:1].mT, turned_q[:2] @ turned_k[:1].mT, rtol=1e-3, atol=1e-3)


def test_moments_are_those_of_contexts_at_every_position(llama, ids):
    """The model itself, run at each position, against one run at 0 and ``mean_over_positions``."""
    spread = first_positions(CalibrationSettings(tokens=1024, context=512), 5, llama.config)
    means = []
    for position in spread:
        sums = MomentSums(64)
        for layer, (q, k) in enumerate(activations(llama, ids[:300], position)):
            sums.add(layer, q, k, k)
        means.append(sums.mean(2, 1, shared=False))
    turn = turn_of(llama.config, 64)
    for i in range(2):  # queries, keys
        there = torch.stack([mean[i] for mean in means]).mean(0)
        torch.testing.assert_close(mean_over_positions(means[0][i], turn, spread), there, rtol=1e-3, atol=1e-3)
        assert (there - means[0][i]).norm() > 0.05 * there.norm()


def test_a_model_that_turns_keys_otherwise_is_refused(llama, ids):
    check_turn(llama, ids[:64], turn_of(llama.config, 64), 512)
    with pytest.raises(KVQuantError, match="layer 0: at position 512 .* --positions equal to --context"):
        check_turn(llama, ids[:64], lambda distance: torch.eye(64, dtype=torch.float64), 512)
