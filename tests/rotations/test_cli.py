"""Arguments of ``kvq calibrate`` that are refused before anything is loaded."""

import pytest
from typer.testing import CliRunner

from sglang_kvq.cli import _engine, app
from sglang_kvq.errors import KVQuantError


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--engine", "vllm"], "--engine vllm: unknown"),
        (["--tp", "2"], "--tp and --engine-arg belong to --engine sglang"),
        (["--engine", "sglang", "--engine-arg", "x"], "--engine-arg x: must be KEY=VALUE"),
        (["--clips", "best"], "--clips best: unknown"),
        (["--text-share", "2"], "--text-share 2"),
        (["--context", "100"], "--context 100: must be at least 448"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_refused(tmp_path, arguments, message):
    (tmp_path / "t.txt").write_text("text")
    fixed = ["calibrate", "no/model", "--text", str(tmp_path / "t.txt"), "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*fixed, *arguments])
    with pytest.raises(KVQuantError, match=message):
        raise result.exception
    assert [p.name for p in tmp_path.iterdir()] == ["t.txt"]


def test_an_unknown_model_with_no_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "t.txt").write_text("text")
    fixed = ["calibrate", "no-such-org/no-model", "--text", str(tmp_path / "t.txt"), "--output", str(tmp_path / "out")]
    for engine in (["--device", "cpu"], ["--engine", "sglang"]):
        result = CliRunner().invoke(app, [*fixed, *engine])
        with pytest.raises(KVQuantError, match="no-such-org/no-model: transformers cannot .*folder"):
            raise result.exception


def test_engine_keywords():
    assert _engine("transformers", 1, []) is None
    assert _engine("sglang", 4, ["mem_fraction_static=0.8", "dtype=bfloat16", "trust_remote_code=true"]) == {
        "tp_size": 4, "mem_fraction_static": 0.8, "dtype": "bfloat16", "trust_remote_code": True,
    }  # fmt: skip
