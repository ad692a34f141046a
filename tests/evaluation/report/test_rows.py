"""Rows, calibrations and the frontier; maps of several sources, their plot, and the committed page."""

from __future__ import annotations

import json
import random
import re
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, stdev

import pytest

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.files import read
from sglang_kvq.evaluation.report import plots
from sglang_kvq.evaluation.report.page import page, section
from sglang_kvq.evaluation.report.plots import FAMILIES, REFERENCES, family_of
from sglang_kvq.evaluation.report.results import collect_map
from sglang_kvq.evaluation.report.rows import (
    COLUMNS,
    Point,
    add_reference,
    frontier,
    place,
    points,
    representative,
    rows_of,
)
from sglang_kvq.methods import METHOD_NAMES
from tests.conftest import ROOT
from tests.evaluation.conftest import main

RESULTS = ROOT / "benchmarks" / "results"
MAPS = sorted(RESULTS.glob("precise_*.json"))


def row(method: str, score: float, task: str = "kl", **more) -> dict:
    plain = dict.fromkeys(COLUMNS) | {"task": task, "method": method, "spec": method, "score": score, "score_se": 0.01}
    return {**plain, "allocated_bits": 2.5, "context": 2048, "chunk": 128, **more}


# -- the frontier -----------------------------------------------------------------------------------------


def beaten(point: Point, by: Point, lower: bool) -> bool:
    """Returns whether ``by`` beats the point by definition: nowhere worse and somewhere better."""
    gain = point.score - by.score if lower else by.score - point.score
    return by.bits <= point.bits and gain >= 0 and (by.bits < point.bits or gain > 0)


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_frontier_is_what_nothing_beats(lower, seed):
    draw = random.Random(seed)
    found = [Point(str(i), draw.choice((2, 2.25, 2.5, 3, 4)), draw.randrange(12) / 10, None) for i in range(25)]
    best = frontier(found, lower)
    expected = {(p.bits, p.score) for p in found if not any(beaten(p, other, lower) for other in found)}
    assert [(p.bits, p.score) for p in best] == sorted(expected), "once each, by bits"


# -- calibrations -----------------------------------------------------------------------------------------


def test_calibrations_are_one_point_with_the_error_between_them():
    scores = (0.2, 0.3, 0.7)
    runs = [row("oscar", score, seed=seed, allocated_bits=2.5 + seed / 10) for seed, score in enumerate(scores)]
    (point,) = points(runs)
    assert point.score == pytest.approx(mean(scores)) and point.se == pytest.approx(stdev(scores) / 3**0.5)
    assert (point.calibrations, point.bits) == (3, pytest.approx(2.6))
    (alone,) = points(runs[:1])
    assert (alone.score, alone.se, alone.calibrations) == (0.2, 0.01, 1)


def test_one_calibration_under_two_names_counts_once():
    runs = [
        row("oscar", 0.2, calibration="model", rotations_sha256="a", spec="oscar"),
        row("oscar", 0.2, calibration="mix", seed=0, rotations_sha256="a", spec="oscar@mix0"),
        row("oscar", 0.4, calibration="mix", seed=1, rotations_sha256="b", spec="oscar@mix1"),
        row("kivi", 0.5, calibration="none"),
    ]
    found = [(p.method, p.calibrations, p.score) for p in points(runs)]
    assert found == [("oscar", 2, pytest.approx(0.3)), ("kivi", 1, 0.5)]


def test_a_task_stands_for_itself_where_bf16_can_do_it():
    runs = [
        row(method, score, "needle", context=context, chunk=chunk)
        for method, chunk, context, score in (
            *(("none", 128, 2048, 1.0), ("oscar", 128, 2048, 0.9)),
            *(("none", 128, 4096, 0.6), ("oscar", 128, 4096, 0.5)),
            *(("none", 128, 8192, 0.4), ("oscar", 128, 8192, 0.1)),  # BF16 fails
            *(("none", 8192, 4096, 0.6), ("oscar", 8192, 4096, 0.5)),
            ("none", 128, 6144, 1.0),  # only one method has it
        )
    ]
    assert representative(runs, "needle") == (4096, 128)
    assert representative(runs, "kl") is None
    assert representative([row("none", 0.0, context=n) for n in (2048, 8192)], "kl") == (8192, 128)


# -- families ---------------------------------------------------------------------------------------------


def test_every_family_has_a_color_and_a_marker_of_its_own():
    for field in ("color", "marker", "name"):
        assert len({getattr(family, field) for family in FAMILIES.values()}) == len(FAMILIES)
    assert len({style[1:] for style in REFERENCES.values()}) == len(REFERENCES)


def test_families():
    of = {"int4": "fixed", "hadamard --kv-quant-recent 512": "fixed", "turboquant:2.5": "turboquant", "mine": "other"}
    of |= {"oscar:3": "oscar", "oscar:auto:2.6": "oscar auto", "oscar-lloyd-max:auto:2": "oscar-lloyd-max auto"}
    assert {method: family_of(method) for method in of} == {method: FAMILIES[name] for method, name in of.items()}
    assert all(Point(method, 2, 0.5, None).quantized for method in of)
    assert all(family_of(method) is not FAMILIES["other"] for method in METHOD_NAMES)
    assert not any(Point(name, 8, 0.5, None).quantized for name in ("none", "fp8:e5m2", "none --kv-cache-dtype x"))


# -- rows -------------------------------------------------------------------------------------------------

KL = {"texts": [], "skip": 0.0, "contexts": [[2048, 8]], "first": 640, "top": 64}
HEADER = {
    **{"name": "accuracy_fake", "command": "kvq eval --model fake", "commit": "a" * 40, "dirty": False},
    **{"device": "NVIDIA H200", "date": "2026-01-02", "versions": {"sglang": "0.5.23"}, "model": "fake"},
}


def measured(method: str, kl: float, needle: float, bits: float = 2.5, chunk: int = 128, **more) -> dict:
    length = {"kl": kl, "kl_se": 0.01, "top1_agreement": 0.9, "top1_agreement_se": 0.02}
    length |= {"perplexity": 9.0, "perplexity_se": 1.0}
    return {
        **{"method": method, "allocated_bits": bits, "calibration": None, "seed": None, "humaneval": None},
        **{"gsm8k": None, "kl_by_length": {"2048": length}, "needle_2k": needle, "needle_2k_se": 0.1},
        "needle_4k": None,
        "server": {"chunk": chunk, "kv_quant": {"rotations_sha256": None}},
        **more,
    }


def accuracy(*rows: dict, **more) -> dict:
    settings = {"kl": KL, "needle": {"lengths": [2048, 4096], "trials": 5, "depths": [0]}}
    return {**HEADER, "settings": settings, "rows": list(rows), **more}


@pytest.fixture
def content() -> dict:
    return accuracy(
        measured("none", 0.001, 1.0, 16.0),
        measured("fp8", 0.01, 1.0, 8.0),
        measured("oscar@wiki0", 0.05, 0.8, calibration="wiki", seed=0),
        measured("oscar@wiki1", 0.07, 0.9, calibration="wiki", seed=1),
        measured("hadamard", 0.5, 0.4),
        measured("int2", 1.5, 0.4),
        measured("turboquant:3", 0.2, 0.7, 3.25, calibration="random, seed 4"),
    )


def write(path, content) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def test_rows_of_a_report(content):
    found = rows_of(content)
    assert all(tuple(one) == COLUMNS for one in found)
    (one,) = (r for r in found if (r["spec"], r["task"]) == ("oscar@wiki1", "kl"))
    expected = ("kl", 2048, "oscar", 2.5, 128, 0.07, 0.01, 0.001, 128, "oscar@wiki1", "wiki", 1, None, None, None)
    assert tuple(one.values()) == expected + 6 * (None,), "it generates nothing, so it has no lengths"
    assert {(r["task"], r["context"]) for r in found} == {(t, 2048) for t in ("kl", "top1", "perplexity", "needle")}
    assert {r["seed"] for r in found if r["method"] == "turboquant:3"} == {4}
    seeded = accuracy(measured("turboquant:3", 0.2, 0.7, calibration="random, seed 4", seed=0))
    assert {r["seed"] for r in rows_of(seeded)} == {0}


def test_the_likelihood_of_exact_keys_has_rows_of_its_own():
    more = {"exact_keys_2k": 0.1, "exact_keys_2k_se": 0.05, "exact_keys_2k_nats": 1.25, "exact_keys_2k_nats_se": 0.5}
    report_ = accuracy(measured("kivi", 0.1, 1.0, **more), settings={"exact_keys": {"lengths": [2048]}})
    found = {r["task"]: (r["score"], r["score_se"]) for r in rows_of(report_) if r["task"].startswith("exact")}
    assert found == {"exact_keys": (0.1, 0.05), "exact_keys_nats": (1.25, 0.5)}


def test_bf16_is_of_the_same_chunks_or_else_of_the_nearest():
    runs = [
        *(row("none", 0.9, "needle", chunk=chunk) for chunk in (128, 8192)),
        *(row("oscar", 0.5, "needle", chunk=chunk) for chunk in (128, 8192, 4096, 64, None)),
        row("oscar", 0.5, "gsm8k"),
    ]
    assert [r["bf16_chunk"] for r in add_reference(runs)[2:]] == [128, 8192, 8192, 128, 8192, None]
    assert add_reference(runs)[-1]["bf16_score"] is None
    known = row("oscar", 0.5, "needle", bf16_score=0.7, bf16_chunk=32)
    assert add_reference([*runs, known])[-1] == known


def test_rows_come_by_task_chunk_context_and_bits():
    ordered = [
        *(("kl", 128, 2048, bits) for bits in (16.0, 2.5)),
        *(("kl", chunk, context, 16.0) for chunk, context in ((128, 8192), (8192, 2048), (None, 512))),
        *(("gsm8k", 128, None, bits) for bits in (16.0, 2.5)),
    ]
    rows = [row("m", 0.5, task, chunk=a, context=b, allocated_bits=bits) for task, a, b, bits in ordered]
    rows.reverse()
    assert [(r["task"], r["chunk"], r["context"], r["allocated_bits"]) for r in sorted(rows, key=place)] == ordered


def test_a_map_of_several_sources(content, tmp_path, capsys):
    own = accuracy(
        measured("oscar@wiki0#own", 9.0, 0.95, chunk=8192, kl_by_length=None, calibration="wiki", seed=0),
        measured("hadamard", 77.0, 0.0),
        settings={"needle": {"lengths": [2048], "trials": 5, "depths": [0]}},
        commit="b" * 40,
        dirty=True,
        command="kvq eval --model fake --chunked-prefill-size own",
        date="2026-01-01",
    )
    sources = [write(tmp_path / "a.json", content), write(tmp_path / "b.json", own)]
    out = tmp_path / "precise_fake.json"
    assert main(["--map", *sources, "--out", str(out)]) == 0
    made = read(out)
    header = {"name": "precise_fake", "model": "fake", "device": "NVIDIA H200", "dirty": True, "date": "2026-01-02"}
    assert {name: made[name] for name in header} == header
    assert made["commit"] == f"{'a' * 40}, {'b' * 40}" and made["versions"] == {"sglang": "0.5.23"}
    commands = [HEADER["command"], own["command"], "kvq eval --map a.json b.json --out precise_fake.json"]
    assert made["command"] == "; ".join(commands)
    (apart,) = (r for r in made["rows"] if r["chunk"] == 8192)
    assert (apart["method"], apart["score"], apart["bf16_score"], apart["bf16_chunk"]) == ("oscar", 0.95, 1.0, 128)
    (first,) = (r for r in made["rows"] if (r["method"], r["task"]) == ("hadamard", "kl"))
    assert first["score"] == 0.5, "the first source counts"
    # A map is a source too, and reproduces itself.
    again = collect_map([out], "fake", [])
    assert again["rows"] == made["rows"] and "chunks of 8192" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model": "other"}, "for other, but --out names fake. Write precise_other.json"),
        ({"settings": {"kl": {**KL, "first": 1}}}, r"kl was measured with other settings.*first: 640, now 1"),
        ({"settings": {"kl": {**KL, "contexts": [[2048, 4]]}}}, r"kl was measured with other settings"),
        ({"settings": None}, None),
    ],
)
def test_sources_that_do_not_belong_together(content, tmp_path, change, message):
    other = {**content, **change}
    if change["settings" if "settings" in change else "model"] is None:
        del other["settings"]
        message = "neither a folder of results nor"
    sources = [write(tmp_path / "a.json", content), write(tmp_path / "b.json", other)]
    with pytest.raises(KVQuantError, match=message):
        main(["--map", *sources, "--out", str(tmp_path / "precise_fake.json")])


def test_a_map_of_nothing_is_refused(tmp_path):
    with pytest.raises(KVQuantError, match=r"a.json: nothing measured in it"):
        main(["--map", write(tmp_path / "a.json", accuracy()), "--out", str(tmp_path / "precise_fake.json")])


def test_other_lengths_belong_together(content, tmp_path):
    longer = accuracy(measured("none", 0.001, 1.0, 16.0), settings={"kl": {**KL, "contexts": [[8192, 2]]}})
    longer["rows"][0]["kl_by_length"] = {"8192": content["rows"][0]["kl_by_length"]["2048"]}
    sources = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, one in zip(sources, (content, longer)):
        write(path, one)
    made = collect_map(sources, "fake", [])
    assert made["settings"]["kl"]["contexts"] == [[2048, 8], [8192, 2]]
    assert {r["context"] for r in made["rows"] if r["task"] == "kl"} == {2048, 8192}


@pytest.mark.parametrize("out", ["precise_.json", "fake.json", "precise_fake.md"])
def test_the_file_of_a_map_names_its_model(content, tmp_path, out):
    source = write(tmp_path / "a.json", content)
    with pytest.raises(KVQuantError, match=r"precise_MODEL\.json"):
        main(["--map", source, "--out", str(tmp_path / out)])


# -- Markdown and plots -----------------------------------------------------------------------------------

TABLE = """\
| method | bits | KL 2k, nats | top-1 2k, % | perplexity 2k | needle 2k, % |
| --- | --- | --- | --- | --- | --- |
| `none` | 16.00 | 0.0010 ± 0.0100 | 90.0 ± 2.0 | 9.00 ± 1.00 | 100.0 ± 10.0 |
| `fp8` | 8.00 | 0.0100 ± 0.0100 | 90.0 ± 2.0 | 9.00 ± 1.00 | 100.0 ± 10.0 |
| `turboquant:3` | 3.25 | 0.2000 ± 0.0100 | 90.0 ± 2.0 | 9.00 ± 1.00 | 70.0 ± 10.0 |
| `oscar` | 2.50 | **0.0600** ± 0.0100 (2) | **90.0** ± 0.0 (2) | **9.00** ± 0.00 (2) | **85.0** ± 5.0 (2) |
| `hadamard` | 2.50 | 0.5000 ± 0.0100 | **90.0** ± 2.0 | **9.00** ± 1.00 | 40.0 ± 10.0 |
| `int2` | 2.50 | 1.5000 ± 0.0100 | **90.0** ± 2.0 | **9.00** ± 1.00 | 40.0 ± 10.0 |
"""


@pytest.fixture
def mapped(content, tmp_path) -> Path:
    """Writes a map and returns its path."""
    path = tmp_path / "precise_fake.json"
    source = write(tmp_path / "accuracy_fake.json", content)
    write(path, collect_map([Path(source)], "fake", []))
    return path


def test_table(mapped):
    text = section(read(mapped))
    assert TABLE in text and "commit aaaaaaaaaa." in text


def test_a_map_heads_its_models_section(mapped, content, tmp_path):
    other = Path(write(tmp_path / "accuracy_other.json", {**content, "model": "other"}))
    text = page([mapped.with_name("accuracy_fake.json"), other, mapped], tmp_path / "page.md")
    headings = [line for line in text.splitlines() if line.startswith("##")]
    names = ("precise_fake", "accuracy_fake", "accuracy_other")
    of_map, of_report, of_other = (f"### [{name}]({name}.json), NVIDIA H200" for name in names)
    assert headings == ["## fake", of_map, of_report, "## other", of_other]


def test_panels_show_tasks_of_quantized_methods_without_top1(content):
    rows = rows_of(content)
    assert plots.panels(rows) == [("kl", (2048, 128)), ("needle", (2048, 128))]
    assert plots.panels([one for one in rows if one["method"] in ("none", "fp8")]) == []


def test_plot(mapped):
    drawn = plots.draw(read(mapped), mapped)
    if find_spec("matplotlib") is None:
        assert drawn is None
        return
    (plot,) = drawn
    assert plot.name == "precise_fake.png"
    data = plot.read_bytes()
    width = int.from_bytes(data[16:20], "big")
    assert data[:4] == b"\x89PNG" and 800 <= width <= 1700


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="draws")
@pytest.mark.parametrize(
    "task, scores",
    [("kl", [0.05]), ("kl", [0.05, 0.0501]), ("gsm8k", [0.4]), ("gsm8k", [0.0, 0.001]), ("gsm8k", [1.0])],
)
def test_axes_of_few_values_are_no_magnifying_glass(task, scores):
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    plots.panel(axes, [row(f"oscar:{n}", score, task, score_se=None) for n, score in enumerate(scores)], task)
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    pyplot.close(figure)
    assert right - left >= plots.LEAST_BITS and left < 2.5 < right
    if task == "kl":
        assert high / low > 0.99 * plots.LEAST_FACTOR and low < scores[0] < high
    else:
        assert plots.LEAST_PERCENT <= high - low < 30 and low <= 100 * scores[0] <= high and -3 < low < high < 103


# -- what is committed ------------------------------------------------------------------------------------


def test_the_committed_page_is_what_the_committed_results_make():
    target = ROOT / "docs" / "results" / "accuracy.md"
    assert page([*sorted(RESULTS.glob("accuracy_*.json")), *MAPS], target) == target.read_text()


def test_committed_maps_have_the_agreed_form():
    assert MAPS
    for path in MAPS:
        content = read(path)
        assert {"name", "command", "commit", "dirty", "device", "date", "versions", "rows"} <= content.keys()
        assert content["dirty"] is False and content["name"] == path.stem
        keys = [tuple(row[name] for name in ("task", "context", "spec", "chunk")) for row in content["rows"]]
        assert len(set(keys)) == len(keys) and all(set(row) <= set(COLUMNS) for row in content["rows"])


@pytest.mark.parametrize("path", MAPS, ids=lambda path: path.stem)
def test_every_figure_of_a_page_is_in_the_json(path):
    """Figures agree with the JSON independently of the code that wrote them: each is a rounded mean over its rows."""
    text = (ROOT / "docs" / "results" / "accuracy.md").read_text().partition(f"### [{path.stem}]")[2]
    head, _, *lines = re.search(r"^\| method .*\n(?:\|.*\n)+", text, re.MULTILINE)[0].splitlines()
    titles = [cell.strip() for cell in head.strip("|").split("|")][2:]
    names = {"KL": "kl", "top-1": "top1", "HumanEval": "humaneval", "GSM8K": "gsm8k", "MATH": "math"}
    said = re.findall(r"Chunks of (\d+)(?:: ([^.]*))?\.", text.partition("<details>")[0])
    chunks = {task: int(size) for size, tasks in said for task in tasks.split(", ")}  # "" if all have the same size
    compared = 0
    for line in lines:
        method, bits, *cells = (cell.strip(" `") for cell in line.strip("|").split("|"))
        for title, cell in zip(titles, cells, strict=True):
            if not cell:
                continue
            (word, _, where), nats = title.partition(",")[0].partition(" "), title.endswith("nats")
            task = names.get(word, f"{word}_nats" if nats else word)
            context = int(where[:-1]) * 1024 if where.endswith("k") else int(where) if where else None
            chosen = [
                one
                for one in read(path)["rows"]
                if (one["task"], one["method"], one["context"], one["chunk"])
                == (task, method, context, chunks.get("") or chunks[task])
            ]
            of = {one["rotations_sha256"] or one["spec"]: one for one in reversed(chosen)}.values()
            written = cell.replace("*", "").split()[0]
            places = len(written.partition(".")[2])
            value = mean(one["score"] for one in of) * (1 if nats or task == "perplexity" else 100)
            assert abs(float(written) - value) <= 0.5000001 * 10**-places, (line, title)
            assert abs(float(bits) - mean(one["allocated_bits"] for one in of)) < 0.006
            assert (f"({len(of)})" in cell) == (len(of) > 1)
            compared += 1
    assert compared > 20
