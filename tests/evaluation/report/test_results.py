"""Reports of an output folder: their JSON, their exact text, their plots."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation import provenance
from sglang_kvq.evaluation.report import plots
from sglang_kvq.evaluation.report.page import page, section
from sglang_kvq.evaluation.report.results import COLUMNS, collect, collect_map, write
from sglang_kvq.evaluation.store import Store, differences
from sglang_kvq.evaluation.tasks.base import Outcome
from tests.evaluation.conftest import main

KL = {
    "texts": [{"file": "held.txt", "sha256": "0" * 64}],
    "skip": 0.8,
    "contexts": [[2048, 8]],
    "first": 640,
    "top": 64,
}


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "out")
    source = {"commit": "c" * 40, "dirty": False}
    for label, bits, kl, items in (("none", 16.0, 0.0001, [1, 1, 0, 1]), ("oscar@wiki", 2.5, 0.05, [1, 0, 0, 1])):
        calibration, seed = ("wikitext2", 1) if "oscar" in label else (None, None)
        server = {"label": label, "allocated_bits": bits, "pool_bits": bits, "calibration": calibration, "seed": seed}
        store.save_server(label, {**server, "device_name": "NVIDIA H200", "version": "0.5.16", "chunk": 128})
        row = {"kl": kl, "kl_se": kl / 10, "top1_agreement": 0.9, "top1_agreement_se": 0.01}
        row |= {"perplexity": 20.0, "perplexity_se": 1.0}
        outcome = Outcome(kl, kl / 10, 8, {**row, "kl_by_length": {"2048": row}})
        store.save(label, "kl", {"task": KL}, outcome, source)
        score = {"gsm8k": sum(items) / 4, "gsm8k_se": 0.25, "gsm8k_n": 4}
        tokens = [100, 120, 140, 400] if label == "none" else [100, 130, 150, 400]
        score |= {"gsm8k_tokens": sum(tokens) / 4, "gsm8k_tokens_se": 70.0, "gsm8k_cut": 0.25, "gsm8k_cut_se": 0.25}
        outcome = Outcome(0.5, 0.2, 4, score, {"items": items, "tokens": tokens})
        store.save(label, "gsm8k", {"task": {"shots": 5}}, outcome, source)
        grid = {"lengths": [2048, 16384], "depths": [0, 100], "passed": [[1, 0.5], [1, 0]]}
        needle = {"needle_16k": 0.25, "needle_16k_se": 0.1, "needle_2k": 1.0, "needle_2k_se": 0.0, "needle_4k": None}
        needle |= {"needle": 0.6, "needle_grid": grid}
        outcome = Outcome(0.6, 0.1, 4, needle, {}, ["no haystack of 4096 tokens: longer than the server takes"])
        settings = {"depths": [0, 100], "trials": 1, "lengths": [2048, 4096, 16384]}
        store.save(label, "needle", {"task": settings}, outcome, source)
    store.save_server("int2", {"label": "int2"})
    store.save_error("int2", "server", "the server ended with code 1: out of memory", "many\nlines")
    return store


def test_differences_are_from_bf16_in_the_same_chunks(tmp_path):
    store = Store(tmp_path / "out")
    for label, items in (("none", [1, 1]), ("none#64", [0, 1]), ("oscar#64", [0, 1]), ("oscar#64 --flag x", [0, 1])):
        slug = label.replace(" ", "_")
        store.save_server(slug, {"label": label, "allocated_bits": 2.5})
        outcome = Outcome(0.5, 0.2, 2, {"gsm8k": 0.5}, {"items": items})
        store.save(slug, "gsm8k", {"task": {"shots": 5}}, outcome, {"commit": "c" * 40, "dirty": False})
    found = {row["method"]: row.get("gsm8k_vs_none") for row in collect(store, "m")["rows"]}
    assert found["oscar#64"] == found["oscar#64 --flag x"] == 0


SECTION = """\
| method | bits | KL 2k, nats | top-1 2k, % | perplexity 2k | needle 2k, % | GSM8K, % |
| --- | --- | --- | --- | --- | --- | --- |
| `none` | 16.00 | 0.0001 ± 0.0000 | 90.0 ± 1.0 | 20.00 ± 1.00 | 100.0 ± 0.0 | 75.0 ± 25.0 |
| `oscar@wiki` | 2.50 | **0.0500** ± 0.0050 | **90.0** ± 1.0 | **20.00** ± 1.00 | **100.0** ± 0.0 | \
**50.0** ± 25.0 (-25.0 ± 25.0) |

Tokens of an answer (difference from `none`), and the share that the limit cut off:

| method | GSM8K |
| --- | --- |
| `none` | 190.0 ± 70.0, 25.0% cut |
| `oscar@wiki` | 195.0 ± 70.0 (+5.0 ± 2.9), 25.0% cut |

KL, top-1 agreement and perplexity: 8 contexts of 2048 tokens from held.txt after its first 80%, from token 640 on. \
GSM8K: 4 problems, 5 worked examples, greedy. Needle: 2 depths, 1 per cell. Chunks of 128. \
NVIDIA H200, SGLang 0.5.16, 2026-01-02, commit cccccccccc.

- `none`: needle: no haystack of 4096 tokens: longer than the server takes
- `oscar@wiki`: needle: no haystack of 4096 tokens: longer than the server takes
- `int2`: **not measured**: server: the server ended with code 1: out of memory

<details><summary>Other contexts and chunk sizes (1 tasks)</summary>

**needle, %**

| method | bits | 16k, chunks of 128 |
| --- | --- | --- |
| `none` | 16.00 | 25.0 ± 10.0 |
| `oscar@wiki` | 2.50 | **25.0** ± 10.0 |

</details>

<details><summary>Commands and rotations</summary>

    kvq eval --model m

- `oscar@wiki`: rotations: wikitext2, seed 1

</details>
"""


def test_section(store):
    content = collect(store, "fake", ["kvq", "eval", "--model", "/data/models/m"])
    content["date"] = "2026-01-02"
    assert section(content) == SECTION


def test_calibrations_of_a_report_have_rows_of_their_own(store):
    content = collect(store, "fake", ["kvq"])
    twin = {**content["rows"][1], "method": "oscar@code"}
    text = section({**content, "rows": [*content["rows"], twin]})
    assert "| `oscar@wiki` | 2.50" in text and "| `oscar@code` | 2.50" in text


def test_calibrations_of_a_map_have_their_mean_length(store, tmp_path):
    path = write(tmp_path, collect(store, "fake", ["kvq"]))
    found = collect_map([path], "fake", ["kvq"])
    (row,) = (row for row in found["rows"] if (row["task"], row["spec"]) == ("gsm8k", "oscar@wiki"))
    assert (row["tokens"], row["cut"], row["tokens_difference"]) == (195, 0.25, 5)
    twin = {**row, "spec": "oscar@code", "calibration": "code", "tokens": 205.0, "cut": 0.75}
    assert "| `oscar` | 200.0, 50.0% cut |" in section({**found, "rows": [*found["rows"], twin]})
    old = [{name: value for name, value in row.items() if "tokens" not in name} for row in found["rows"]]
    assert "Tokens of an answer" not in section({**found, "rows": old})


def test_json_has_the_agreed_fields(store):
    content = collect(store, "fake", ["kvq", "eval"])
    assert {"name", "command", "commit", "dirty", "device", "date", "versions", "rows"} <= content.keys()
    assert (content["name"], content["commit"], content["device"]) == ("accuracy_fake", "c" * 40, "NVIDIA H200")
    assert all(set(COLUMNS) <= row.keys() for row in content["rows"])
    oscar = content["rows"][1]
    assert (oscar["seed"], oscar["needle_16k"], oscar["needle_32k"], oscar["humaneval"]) == (1, 0.25, None, None)
    assert (oscar["gsm8k_vs_none"], oscar["gsm8k_vs_none_se"]) == (-0.25, 0.25)


def test_plots_and_the_page_that_links_to_them(store, tmp_path, monkeypatch, capsys):
    path, target = write(tmp_path / "results", collect(store, "fake", ["kvq"])), tmp_path / "docs" / "page.md"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["--report", str(path), "--out", str(target)]) == 0
    assert plots.MISSING in capsys.readouterr().err
    assert "## fake" in target.read_text() and ".png" not in target.read_text()
    monkeypatch.undo()
    if find_spec("matplotlib"):
        assert main(["--report", str(path), "--out", str(target), "--json"]) == 0
        for name in ("accuracy_fake.png", "accuracy_fake_needle.png"):
            assert f"(../results/{name})" in target.read_text()
            assert path.with_name(name).read_bytes()[:4] == b"\x89PNG"


def test_columns_of_different_settings_are_refused(store):
    path = store.runs("oscar@wiki") / "kl.json"
    content = json.loads(path.read_text())
    content["identity"]["task"]["first"] = 1
    path.write_text(json.dumps(content))
    with pytest.raises(KVQuantError, match="oscar@wiki/kl.json was measured with other settings"):
        collect(store, "fake", [])


def test_damaged_and_foreign_files(tmp_path, store):
    (store.runs("none") / "kl.json").write_text("{")
    with pytest.raises(KVQuantError, match="kl.json: not a readable JSON"):
        collect(store, "fake", [])
    (tmp_path / "other.json").write_text('{"rows": []}')
    with pytest.raises(KVQuantError, match="other.json: not a report"):
        page([tmp_path / "other.json"], tmp_path / "x.md")


def test_differences_are_named():
    old, new = {"a": {"b": 1, "c": "0" * 64}, "d": 2}, {"a": {"b": 1, "c": "1" * 64}, "d": 2}
    assert differences(old, new) == f'a.c: "{"0" * 12}…", now "{"1" * 12}…"'


@pytest.mark.parametrize(
    "text, shown",
    [
        ("/data/models/m", "m"),
        ("--x=/data/m", "--x=m"),
        ("http://127.0.0.1:30000/v1", "http://127.0.0.1:30000/v1"),
        ("benchmarks/results/a.json", "benchmarks/results/a.json"),
        ("failed: /srv/x/y.py, line 3", "failed: y.py, line 3"),
        ("org/name", "org/name"),
        ("~/models/m", "m"),
    ],
)
def test_paths_are_cut_to_their_names(text, shown):
    assert provenance.without_paths(text) == shown


def test_a_result_names_its_commit(tmp_path, monkeypatch):
    def git(*words):
        named = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        subprocess.run(["git", *named, *words], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.delenv("KVQ_COMMIT", raising=False)
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.commit() == ("unknown", False)
    git("init")
    assert provenance.commit() == ("unknown", False)
    (tmp_path / "tracked").write_text("1")
    git("add", ".")
    git("commit", "-m", "one")
    sha, dirty = provenance.commit()
    assert len(sha) == 40 and not dirty
    (tmp_path / "untracked").touch()
    assert provenance.commit() == (sha, False)
    (tmp_path / "tracked").write_text("2")
    assert provenance.commit() == (sha, True)
    monkeypatch.setenv("KVQ_COMMIT", "abc")
    assert provenance.commit() == ("abc", False)


def test_a_result_names_its_device(monkeypatch):
    listed = SimpleNamespace(stdout="NVIDIA H200\nNVIDIA H200\n")
    monkeypatch.setattr("subprocess.run", lambda *words, **options: listed)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert [provenance.device_name(one) for one in ("cuda", "cpu", "xpu")] == ["cuda", "CPU", "xpu"]
    monkeypatch.setattr("shutil.which", lambda name: name)
    assert [provenance.device_name(one) for one in ("cuda", "cpu")] == ["NVIDIA H200", "CPU"]
    listed.stdout = ""
    assert provenance.device_name("cuda") == "cuda"
