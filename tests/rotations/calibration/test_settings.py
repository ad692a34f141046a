"""Settings of a calibration: its text, the parts of the text that are used, and the resulting positions."""

from dataclasses import replace

import pytest
import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.calibration.settings import (
    CalibrationSettings,
    draw_contexts,
    first_positions,
    positions_of,
    read_corpus,
)

IDS = torch.arange(10_000)


def drawn(seed, tokens=2048):
    return draw_contexts(IDS, CalibrationSettings(tokens=tokens, context=512, seed=seed))


def test_seed_0_spreads_contexts_evenly():
    assert drawn(0)[:, 0].tolist() == [0, 3162, 6325, 9488]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("tokens", [512, 2048, 9728])
def test_other_seeds_draw_without_overlap(seed, tokens):
    contexts = drawn(seed, tokens)
    assert len(contexts) == tokens // 512 and (contexts[:, 1:] == contexts[:, :-1] + 1).all()
    assert (contexts[1:, 0] - contexts[:-1, 0] >= 512).all() and torch.equal(contexts, drawn(seed, tokens))


@pytest.mark.parametrize("count", [2, 9765])
def test_long_corpora_are_spread_exactly(count):
    """A float32 holds no odd number above 2^24: contexts would overlap, and the last would end after the text."""
    ids = torch.arange(20_000_003)
    settings = CalibrationSettings(tokens=count * 2048, sensitivity_contexts=0)
    starts = draw_contexts(ids, settings)[:, 0]
    assert starts[0] == 0 and starts[-1] == len(ids) - 2048 and starts.diff().min() >= 2048


def test_seeds_differ():
    assert len({tuple(drawn(seed)[:, 0].tolist()) for seed in range(5)}) == 5


def test_seeds_reach_the_whole_corpus():
    starts = torch.cat([drawn(seed)[:, 0] for seed in range(1, 200)])
    assert starts.min() < 100 and starts.max() > 10_000 - 512 - 100


def test_negative_seed():
    with pytest.raises(KVQuantError, match="--seed -1"):
        CalibrationSettings(seed=-1)


def test_files_and_folders(tmp_path):
    (tmp_path / "code" / "sub").mkdir(parents=True)
    (tmp_path / "code" / "b.py").write_text("bb")
    (tmp_path / "code" / "sub" / "a.txt").write_text("aa")
    (tmp_path / "code" / "skip.bin").write_bytes(b"\xff\xfe")
    (tmp_path / "c.txt").write_text("cccc")
    text, name = read_corpus([tmp_path / "code", tmp_path / "c.txt"])
    assert text == "bb\n\naa\n\ncccc" and name.endswith("/code, " + f"{tmp_path.name}/c.txt")
    text, name = read_corpus([tmp_path / "c.txt"], 0.5)
    assert text == "cc" and name.endswith("first 50% of its characters")


def test_bad_texts(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00")
    for path, message in (
        (tmp_path / "x.txt", "UTF-8"),
        (tmp_path / "no", "No such file"),
        (tmp_path / "e", "no .txt"),
    ):
        if path.name == "e":
            path.mkdir()
        with pytest.raises(KVQuantError, match=message):
            read_corpus([path])
    with pytest.raises(KVQuantError, match="--text-share 0"):
        read_corpus([tmp_path / "x.txt"], 0.0)


def test_contexts_spread_over_the_positions_served(llama):
    settings = CalibrationSettings(tokens=4096, context=512)
    assert first_positions(settings, 8, llama.config)[:2] == [0, round(512 * (2 ** (1 / 7) - 1))]
    assert first_positions(settings, 8, llama.config)[-1] == 1024 - 512  # the model's own last position
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
