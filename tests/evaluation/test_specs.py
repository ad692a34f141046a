"""Method specs and the server flags that they stand for."""

from __future__ import annotations

import json

import pytest

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.specs import method_of, parse, parse_list, spec_of

#: The flag that makes prompts read the same pages as answers.
ALIKE = ["--kv-quant-prefill-window", "0"]


@pytest.mark.parametrize(
    "text, flags",
    [
        ("none", []),
        ("fp8", ["--kv-cache-dtype", "fp8_e4m3"]),
        ("fp8:e5m2", ["--kv-cache-dtype", "fp8_e5m2"]),
        ("oscar", ["--kv-quant", "oscar", *ALIKE]),
        ("oscar:auto:2.5", ["--kv-quant", "oscar", "--kv-quant-bits", "auto:2.5", *ALIKE]),
        ("hadamard --kv-quant-recent 512", ["--kv-quant", "hadamard", *ALIKE, "--kv-quant-recent", "512"]),
        (
            "hadamard --kv-quant-prefill-window 64",
            ["--kv-quant", "hadamard", "--kv-quant-prefill-window", "64"],
        ),
        ("hadamard --kv-quant-prefill-window=64", ["--kv-quant", "hadamard", "--kv-quant-prefill-window=64"]),
        ("oscar@org/repo/folder", ["--kv-quant", "oscar", "--kv-quant-rotations", "org/repo/folder", *ALIKE]),
    ],
)
def test_flags(text, flags):
    assert parse(text).flags == flags


def test_rotation_folders(tmp_path):
    folder = tmp_path / "wiki-seed1"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"corpus": "wikitext2", "seed": 1, "sha256": "abc"}))
    spec = parse(f"oscar:2@{folder}")
    assert spec.label == "oscar:2@wiki-seed1" and spec.flags[-3] == str(folder)
    assert spec.calibration() == {"calibration": "wikitext2", "seed": 1}
    assert parse("oscar").calibration() == {"calibration": None, "seed": None}
    before = spec.identity()
    assert str(tmp_path) not in json.dumps(before)
    (folder / "config.json").write_text(json.dumps({"sha256": "abc", "seed": 1, "corpus": "wikitext2"}))
    assert parse(f"oscar:2@{folder}").identity() == before
    (folder / "config.json").write_text(json.dumps({"corpus": "wikitext2", "seed": 2, "sha256": "def"}))
    assert parse(f"oscar:2@{folder}").identity() != before


def test_labels_name_no_folder_of_this_machine():
    assert parse("hadamard --load /data/x --of org/name").label == "hadamard --load x --of org/name"


def test_published_rotations_of_one_size_are_told_apart(tmp_path):
    (tmp_path / "config.json").write_text('{"format_version": 1}')
    (tmp_path / "k_rotation.pt").write_bytes(b"one")
    before = parse(f"oscar@{tmp_path}").identity()
    (tmp_path / "k_rotation.pt").write_bytes(b"two")
    assert parse(f"oscar@{tmp_path}").identity() != before


def test_labels_have_different_folder_names():
    slugs = {
        parse(text).slug
        for text in ("oscar:2", "oscar@a/2", "oscar", "oscar --kv-quant-sink 2", "oscar --kv-quant-sink=2")
    }
    assert len(slugs) == 5 and all("/" not in slug and " " not in slug for slug in slugs)


@pytest.mark.parametrize(
    "text, label, chunk",
    [
        ("oscar", "oscar", 128),
        ("oscar#128", "oscar", 128),
        ("oscar#own", "oscar#own", None),
        ("oscar:auto:2.5@org/repo/wiki#64", "oscar:auto:2.5@wiki#64", 64),
        ("hadamard#own --kv-quant-recent 512", "hadamard#own --kv-quant-recent 512", None),
    ],
)
def test_chunk_sizes(text, label, chunk):
    spec = parse(text)
    assert (spec.label, spec.chunk) == (label, chunk)
    assert spec.chunk_flags(spec.flags) == ([] if chunk is None else ["--chunked-prefill-size", str(chunk)])
    assert spec.flags == parse(text.replace("#own", "").replace("#64", "").replace("#128", "")).flags


def test_a_list_of_chunk_sizes_is_for_specs_that_say_none():
    text = "none,oscar#64,hadamard --chunked-prefill-size 256"
    specs = parse_list(text, (128, None))
    assert [spec.label for spec in specs] == ["none", "none#own", "oscar#64", "hadamard --chunked-prefill-size 256"]
    assert [spec.is_reference for spec in specs] == [True, False, False, False]
    assert specs[-1].chunk_flags(specs[-1].flags) == []
    assert len({spec.slug for spec in specs}) == 4 and specs[0].identity() != specs[1].identity()


@pytest.mark.parametrize(
    "label, spec, method",
    [
        ("oscar:auto:2.6@wiki0#own", "oscar:auto:2.6@wiki0", "oscar:auto:2.6"),
        ("turboquant:3 --kv-quant-seed 1", "turboquant:3 --kv-quant-seed 1", "turboquant:3"),
        ("hadamard#64 --kv-quant-recent 512", "hadamard --kv-quant-recent 512", "hadamard --kv-quant-recent 512"),
        ("kivi --kv-quant-seed=1 --x 2", "kivi --kv-quant-seed=1 --x 2", "kivi --x 2"),
        ("mine", "mine", "mine"),
    ],
)
def test_what_calibrations_of_a_method_share(label, spec, method):
    assert (spec_of(label), method_of(label)) == (spec, method)


@pytest.mark.parametrize(
    "text, message",
    [
        ("oscra", "oscra: unknown. Did you mean oscar?"),
        ("oscar,,int2", "single commas"),
        ("fp8:e3", "fp8:e5m2"),
        ("none:4", "takes no bits"),
        ("oscar@/no/such", "no folder"),
        ("oscar@missing", "no folder"),
        ("oscar,oscar", "twice"),
        ("oscar 'x", "quotation"),
        ("oscar#big", "'big': must be a number of tokens, or own"),
        ("oscar#0", "'0': must be a number"),
        ("oscar#64 --chunked-prefill-size 128", "twice"),
        ("oscar,oscar#128", "twice"),
    ],
)
def test_wrong_specs(text, message):
    with pytest.raises(KVQuantError, match=message):
        parse_list(text)
