"""Method specs and the server flags they stand for."""

from __future__ import annotations

import json

import pytest

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.specs import parse, parse_list


@pytest.mark.parametrize(
    "text, flags",
    [
        ("none", []),
        ("fp8", ["--kv-cache-dtype", "fp8_e4m3"]),
        ("fp8:e5m2", ["--kv-cache-dtype", "fp8_e5m2"]),
        ("oscar", ["--kv-quant", "oscar"]),
        ("oscar:auto:2.5", ["--kv-quant", "oscar", "--kv-quant-bits", "auto:2.5"]),
        ("hadamard --kv-quant-recent 512", ["--kv-quant", "hadamard", "--kv-quant-recent", "512"]),
        ("oscar@org/repo/folder", ["--kv-quant", "oscar", "--kv-quant-rotations", "org/repo/folder"]),
    ],
)
def test_flags(text, flags):
    assert parse(text).flags == flags


def test_rotation_folders(tmp_path):
    folder = tmp_path / "wiki-seed1"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"corpus": "wikitext2", "seed": 1, "sha256": "abc"}))
    spec = parse(f"oscar:2@{folder}")
    assert spec.label == "oscar:2@wiki-seed1" and spec.flags[-1] == str(folder)
    assert spec.calibration() == {"calibration": "wikitext2", "seed": 1}
    before = spec.identity()
    assert str(tmp_path) not in json.dumps(before)
    (folder / "config.json").write_text(json.dumps({"corpus": "wikitext2", "seed": 2, "sha256": "def"}))
    assert parse(f"oscar:2@{folder}").identity() != before


def test_labels_have_different_folder_names():
    slugs = {
        parse(text).slug
        for text in ("oscar:2", "oscar@a/2", "oscar", "oscar --kv-quant-sink 2", "oscar --kv-quant-sink=2")
    }
    assert len(slugs) == 5 and all("/" not in slug and " " not in slug for slug in slugs)


@pytest.mark.parametrize(
    "text, message",
    [
        ("oscra", "no method 'oscra'; there are none, fp8,"),
        ("oscar,,int2", "single commas"),
        ("fp8:e3", "fp8:e5m2"),
        ("none:4", "takes no bits"),
        ("oscar@/no/such", "no folder"),
        ("oscar@missing", "no folder"),
        ("oscar,oscar", "twice"),
        ("oscar 'x", "quotation"),
    ],
)
def test_wrong_specs(text, message):
    with pytest.raises(KVQuantError, match=message):
        parse_list(text)
