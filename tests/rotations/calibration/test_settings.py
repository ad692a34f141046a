"""Settings of a calibration, and the positions that follow from them."""

from dataclasses import replace

import pytest

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.calibration.settings import CalibrationSettings, first_positions, positions_of


def test_contexts_spread_over_the_positions_served(llama):
    settings = CalibrationSettings(tokens=4096, context=512)
    assert first_positions(settings, 8, llama.config)[:2] == [0, round(512 * (2 ** (1 / 7) - 1))]
    assert first_positions(settings, 8, llama.config)[-1] == 1024 - 512  # the model's own
    assert first_positions(replace(settings, positions=8192), 8, llama.config)[-1] == 8192 - 512
    assert first_positions(settings, 1, llama.config) == [0]
    with pytest.raises(KVQuantError, match="--positions 100: must be at least one --context, 512"):
        replace(settings, positions=100)


def test_positions_end_where_rope_changes():
    from transformers import LlamaConfig

    long = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 4096, "rope_theta": 1e4}
    assert positions_of(LlamaConfig(max_position_embeddings=8192)) == 8192
    assert positions_of(LlamaConfig(max_position_embeddings=100_000)) == 32768
    assert positions_of(LlamaConfig(max_position_embeddings=16384, rope_parameters=long)) == 4096


@pytest.mark.parametrize(
    "wrong", [dict(granularity="per-token"), dict(composition="x"), dict(context=256), dict(tokens=100)], ids=str
)
def test_settings_are_checked(wrong):
    with pytest.raises(KVQuantError, match=f"--{next(iter(wrong))}"):
        CalibrationSettings(**wrong)
