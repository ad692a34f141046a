"""The report's exact words from known results."""

from __future__ import annotations

import json
import sys

import pytest

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation import plots, provenance, report
from sglang_kvq.evaluation.base import Outcome
from sglang_kvq.evaluation.store import Store, differences
from tests.conftest import ROOT
from tests.evaluation.conftest import main

KL = {
    "texts": [{"file": "held.txt", "sha256": "0" * 64}],
    "skip": 0.8,
    "contexts": [[2048, 8]],
    "first": 640,
    "top": 64,
}
GSM8K = {"shots": 5}


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "out")
    source = {"commit": "c" * 40, "dirty": False}
    for label, bits, kl, items in (("none", 16.0, 0.0001, [1, 1, 0, 1]), ("oscar@wiki", 2.5, 0.05, [1, 0, 0, 1])):
        origin = {"calibration": "wikitext2", "seed": 1} if "oscar" in label else {"calibration": None, "seed": None}
        server = {
            "label": label,
            "allocated_bits": bits,
            "pool_bits": bits,
            "device_name": "NVIDIA H200",
            "version": "0.5.16",
        }
        store.save_server(label, {**server, **origin})
        row = {"kl": kl, "kl_se": kl / 10, "top1_agreement": 0.9, "perplexity": 20.0, "perplexity_se": 1.0}
        store.save(label, "kl", {"task": KL}, Outcome(kl, kl / 10, 8, row), source)
        score = {"gsm8k": sum(items) / 4, "gsm8k_se": 0.25, "gsm8k_n": 4}
        store.save(label, "gsm8k", {"task": GSM8K}, Outcome(0.5, 0.2, 4, score, {"items": items}), source)
        grid = {"lengths": [2048, 16384], "depths": [0, 100], "passed": [[1, 0.5], [1, 0]]}
        needle = {"needle_16k": 0.25, "needle_2k": 1.0, "needle_4k": None, "needle": 0.6, "needle_grid": grid}
        outcome = Outcome(0.6, 0.1, 4, needle, {}, ["no haystack of 4096 tokens: longer than the server takes"])
        store.save(label, "needle", {"task": {"depths": [0, 100], "trials": 1}}, outcome, source)
    store.save_server("int2", {"label": "int2"})
    store.save_error("int2", "server", "the server ended with code 1: out of memory", "many\nlines")
    return store


TABLE = """\
| method | bits | KL, nats per token | top-1 | perplexity | GSM8K, % | needle 2k, % | needle 16k, % |
|---|---|---|---|---|---|---|---|
| `none` | 16.00 | 0.0001 ± 0.0000 | 90.0% | 20.00 ± 1.00 | 75.0 ± 25.0 | 100% | 25% |
| `oscar@wiki` | 2.50 | 0.0500 ± 0.0050 | 90.0% | 20.00 ± 1.00 | 50.0 ± 25.0 (-25.0 ± 25.0) | 100% | 25% |
| `int2` |  |  |  |  |  | – | – |

KL, top-1 agreement and perplexity: 8 contexts of 2048 tokens from held.txt after its first 80%, from token 640 on. \
GSM8K: 4 problems, 5 worked examples, greedy. Needle: 2 depths, 1 per cell. \
NVIDIA H200, SGLang 0.5.16, 2026-01-02, commit cccccccccc.

- `none`: needle: no haystack of 4096 tokens: longer than the server takes
- `oscar@wiki`: needle: no haystack of 4096 tokens: longer than the server takes
- `int2`: **not measured**: server: the server ended with code 1: out of memory

<details><summary>Commands and rotations</summary>

    kvq eval --model m

- `oscar@wiki`: rotations: wikitext2, seed 1

</details>
"""  # noqa: RUF001  (dashes in a table)


def test_table(store):
    content = report.collect(store, "fake", ["kvq", "eval", "--model", "/data/models/m"])
    content["date"] = "2026-01-02"
    assert report.section(content) == TABLE


def test_other_calibrations_are_folded_away(store):
    store.save_server("oscar", {"label": "oscar", "allocated_bits": 2.5})
    shown, folded, _ = report.section(report.collect(store, "fake", ["kvq"])).split("<details>")
    assert "| `oscar` |" in shown and "| `oscar@wiki` |" not in shown
    assert "| `oscar@wiki` | 2.50 |" in folded and folded.count("| method |") == 1


def test_no_two_headings_are_alike(store, tmp_path):
    content = report.collect(store, "fake", ["kvq"])
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, device in zip(paths, ("NVIDIA H200", "CPU")):
        path.write_text(json.dumps({**content, "device": device}))
    headings = [line for line in report.page(paths, tmp_path / "page.md").splitlines() if line.startswith("## ")]
    assert headings == ["## fake, NVIDIA H200", "## fake, CPU"]


def test_the_committed_page_is_what_the_committed_results_make():
    target = ROOT / "docs" / "accuracy.md"
    results = ROOT / "benchmarks" / "results"
    models = [*sorted(results.glob("accuracy_*.json")), *sorted(results.glob("precise_*.json"))]
    assert report.page(models, target) == target.read_text()


def test_json_has_the_agreed_fields(store):
    content = report.collect(store, "fake", ["kvq", "eval"])
    assert {"name", "command", "commit", "dirty", "device", "date", "versions", "rows"} <= content.keys()
    assert (content["name"], content["commit"], content["device"]) == ("accuracy_fake", "c" * 40, "NVIDIA H200")
    for row in content["rows"]:
        assert set(report.COLUMNS) <= row.keys()
    oscar = content["rows"][1]
    assert (oscar["seed"], oscar["needle_16k"], oscar["needle_32k"], oscar["humaneval"]) == (1, 0.25, None, None)
    assert (oscar["gsm8k_vs_none"], oscar["gsm8k_vs_none_se"]) == (-0.25, 0.25)


def test_page_is_generated_with_links_to_plots(store, tmp_path):
    path = report.write(tmp_path / "results", report.collect(store, "fake", ["kvq"]))
    path.with_suffix(".png").write_bytes(b"x")
    target = tmp_path / "docs" / "accuracy.md"
    text = report.page([path], target)
    assert "## fake" in text and "(../results/accuracy_fake.png)" in text and "_needle.png" not in text
    if not _matplotlib():
        assert main(["--report", str(path), "--out", str(target)]) == 0
        assert target.read_text() == text


def test_plots(store, tmp_path):
    path = report.write(tmp_path, report.collect(store, "fake", ["kvq"]))
    drawn = plots.draw(json.loads(path.read_text()), path)
    if not _matplotlib():
        assert drawn is None
    else:
        assert [plot.name for plot in drawn] == ["accuracy_fake.png", "accuracy_fake_needle.png"]
        assert all(plot.read_bytes()[:4] == b"\x89PNG" for plot in drawn)


def test_on_a_host_without_matplotlib(store, tmp_path, monkeypatch, capsys):
    path = report.write(tmp_path, report.collect(store, "fake", ["kvq"]))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["--report", str(path), "--out", str(tmp_path / "page.md")]) == 0
    assert plots.MISSING in capsys.readouterr().err and "`oscar@wiki`" in (tmp_path / "page.md").read_text()


def _matplotlib() -> bool:
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def test_columns_of_different_settings_are_refused(store):
    path = store.runs("oscar@wiki") / "kl.json"
    content = json.loads(path.read_text())
    content["identity"]["task"]["first"] = 1
    path.write_text(json.dumps(content))
    with pytest.raises(KVQuantError, match="oscar@wiki/kl.json was measured with other settings"):
        report.collect(store, "fake", [])


def test_damaged_and_foreign_files(tmp_path, store):
    (store.runs("none") / "kl.json").write_text("{")
    with pytest.raises(KVQuantError, match="kl.json: not a readable JSON"):
        report.collect(store, "fake", [])
    (tmp_path / "other.json").write_text('{"rows": []}')
    with pytest.raises(KVQuantError, match="other.json: not a report"):
        report.page([tmp_path / "other.json"], tmp_path / "x.md")


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
