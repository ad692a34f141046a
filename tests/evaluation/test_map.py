"""The accuracy map: which calibrations are one method, the frontier, its rows, its block of Markdown, its plot."""

from __future__ import annotations

import json
import random
import re
from importlib.util import find_spec
from statistics import mean, stdev

import pytest

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation import map_table, plots, precise, report
from sglang_kvq.evaluation.families import FAMILIES, REFERENCES, family_of, reference_of
from sglang_kvq.evaluation.frontier import Point, frontier, points, representative
from sglang_kvq.evaluation.map_rows import COLUMNS, add_reference, rows_of
from sglang_kvq.evaluation.store import read
from sglang_kvq.methods import METHOD_NAMES
from tests.conftest import ROOT
from tests.evaluation.conftest import main

RESULTS = ROOT / "benchmarks" / "results"
MAPS = sorted(RESULTS.glob("precise_*.json"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def row(method: str, score: float, task: str = "kl", **more) -> dict:
    plain = dict.fromkeys(COLUMNS) | {"task": task, "method": method, "spec": method, "score": score, "score_se": 0.01}
    return {**plain, "allocated_bits": 2.5, "context": 2048, "chunk": 128, **more}


# -- the frontier -----------------------------------------------------------------------------------------


def beaten(point: Point, by: Point, lower: bool) -> bool:
    """By definition: nowhere worse and somewhere better."""
    gain = point.score - by.score if lower else by.score - point.score
    return by.bits <= point.bits and gain >= 0 and (by.bits < point.bits or gain > 0)


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_frontier_is_what_nothing_beats(lower, seed):
    draw = random.Random(seed)
    found = [Point(str(i), draw.choice((2, 2.25, 2.5, 3, 4)), draw.randrange(12) / 10, None, 1) for i in range(25)]
    best = frontier(found, lower)
    expected = {(p.bits, p.score) for p in found if not any(beaten(p, other, lower) for other in found)}
    assert [(p.bits, p.score) for p in best] == sorted(expected), "once each, by bits"


def test_frontier_by_hand():
    a, b, c, d = (Point(*words, None, 1) for words in (("a", 2, 0.5), ("b", 2, 0.4), ("c", 3, 0.4), ("d", 4, 0.1)))
    assert frontier([d, c, b, a], True) == [b, d]
    assert frontier([d, c, b, a], False) == [a]
    assert frontier([], True) == []


# -- calibrations -----------------------------------------------------------------------------------------


def test_calibrations_are_one_point_with_the_error_between_them():
    scores = (0.2, 0.3, 0.7)
    runs = [
        row("oscar", score, calibration="wiki", seed=seed, spec=f"oscar@wiki{seed}", allocated_bits=2.5 + seed / 10)
        for seed, score in enumerate(scores)
    ]
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
    assert [(p.method, p.calibrations, p.score) for p in points(runs)] == [
        ("oscar", 2, pytest.approx(0.3)),
        ("kivi", 1, 0.5),
    ]


def test_a_task_stands_for_itself_where_bf16_can_do_it():
    runs = [
        row(method, score, "needle", context=context, chunk=chunk)
        for method, chunk, context, score in (
            *(("none", 128, 2048, 1.0), ("oscar", 128, 2048, 0.9)),
            *(("none", 128, 4096, 0.6), ("oscar", 128, 4096, 0.5)),
            *(("none", 128, 8192, 0.4), ("oscar", 128, 8192, 0.1)),  # BF16 fails
            *(("none", 8192, 4096, 0.6), ("oscar", 8192, 4096, 0.5)),
            ("none", 128, 6144, 1.0),  # of one method only
        )
    ]
    assert representative(runs, "needle") == (4096, 128)
    assert representative(runs, "kl") is None
    assert representative([row("none", 0.0, context=n) for n in (2048, 8192)], "kl") == (8192, 128)


# -- families ---------------------------------------------------------------------------------------------


def test_every_family_has_a_color_and_a_marker_of_its_own():
    found = list(FAMILIES.values())
    for of in (
        [family.color for family in found],
        [family.marker for family in found],
        [family.name for family in found],
    ):
        assert len(set(of)) == len(found)
    styles = [(color, style) for _, color, style in REFERENCES.values()]
    assert len(set(styles)) == len(styles)


@pytest.mark.parametrize("method", [*METHOD_NAMES, "transform"])
def test_every_method_has_a_family(method):
    assert family_of(method) in FAMILIES.values() and family_of(method) is not FAMILIES["other"]


@pytest.mark.parametrize(
    "method, family",
    [
        ("int4", "fixed"),
        ("hadamard --kv-quant-recent 512", "fixed"),
        ("turboquant:2.5", "turboquant"),
        ("oscar:3", "oscar"),
        ("oscar:auto:2.6", "oscar auto"),
        ("oscar-lloyd-max:auto:2.6", "oscar-lloyd-max auto"),
        ("transform:2.25", "transform"),
        ("mine", "other"),
        ("none", None),
        ("fp8:e5m2", None),
        ("none --kv-cache-dtype bfloat16", None),
    ],
)
def test_families(method, family):
    assert family_of(method) is (FAMILIES[family] if family else None)
    assert (reference_of(method) is None) == (family is not None), "a point or a line"


# -- rows -------------------------------------------------------------------------------------------------

KL = {"texts": [], "skip": 0.0, "contexts": [[2048, 8]], "first": 640, "top": 64}
HEADER = {
    "name": "accuracy_fake",
    "command": "kvq eval --model fake",
    "commit": "a" * 40,
    "dirty": False,
    "device": "NVIDIA H200",
    "date": "2026-01-02",
    "versions": {"sglang": "0.5.23"},
    "model": "fake",
}


def measured(method: str, kl: float, needle: float, bits: float = 2.5, chunk: int = 128, **more) -> dict:
    length = {"kl": kl, "kl_se": 0.01, "top1_agreement": 0.9, "top1_agreement_se": 0.02}
    return {
        **{"method": method, "allocated_bits": bits, "calibration": None, "seed": None, "humaneval": None},
        **{"gsm8k": None, "kl_by_length": {"2048": length}, "needle_2k": needle, "needle_2k_se": 0.1},
        "needle_4k": None,
        "server": {"chunk": chunk, "kv_quant": {"rotations_sha256": None}},
        **more,
    }


def accuracy(*rows: dict, **more) -> dict:
    settings = {"kl": KL, "needle": {"lengths": [2048, 4096], "trials": 5}}
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
    assert one == dict(
        zip(COLUMNS, ("kl", 2048, "oscar", 2.5, 128, 0.07, 0.01, 0.001, 128, "oscar@wiki1", "wiki", 1, None))
    )
    assert {r["task"] for r in found} == {"kl", "top1", "needle"} and {r["context"] for r in found} == {2048}
    assert {r["seed"] for r in found if r["method"] == "turboquant:3"} == {4}


def test_the_likelihood_of_exact_keys_has_rows_of_its_own():
    more = {"exact_keys_2k": 0.1, "exact_keys_2k_se": 0.05, "exact_keys_2k_nats": 1.25, "exact_keys_2k_nats_se": 0.5}
    report_ = accuracy(measured("kivi", 0.1, 1.0, **more), settings={"exact_keys": {"lengths": [2048]}})
    found = {r["task"]: (r["score"], r["score_se"]) for r in rows_of(report_) if r["task"].startswith("exact")}
    assert found == {"exact_keys": (0.1, 0.05), "exact_keys_nats": (1.25, 0.5)}


def test_bf16_is_of_the_same_chunks_or_else_of_the_nearest():
    runs = [
        *(row("none", 0.9, "needle", chunk=chunk) for chunk in (128, 8192)),
        *(row("oscar", 0.5, "needle", chunk=chunk) for chunk in (128, 8192, 4096, 64)),
        row("oscar", 0.5, "gsm8k"),
    ]
    assert [r["bf16_chunk"] for r in add_reference(runs)[2:]] == [128, 8192, 8192, 128, None]
    assert add_reference(runs)[-1]["bf16_score"] is None


def test_a_map_of_several_sources(content, tmp_path, capsys):
    own = accuracy(
        measured("oscar@wiki0#own", 9.0, 0.95, chunk=8192, kl_by_length=None, calibration="wiki", seed=0),
        measured("hadamard", 77.0, 0.0),
        settings={"needle": {"lengths": [2048], "trials": 5}},
        commit="b" * 40,
        dirty=True,
        command="kvq eval --model fake --chunked-prefill-size own",
    )
    sources = [write(tmp_path / "a.json", content), write(tmp_path / "b.json", own)]
    out = tmp_path / "precise_fake.json"
    assert main(["--map", *sources, "--out", str(out)]) == 0
    made = read(out)
    assert (made["name"], made["model"], made["device"], made["dirty"]) == (
        "precise_fake",
        "fake",
        "NVIDIA H200",
        True,
    )
    assert made["commit"] == f"{'a' * 40}, {'b' * 40}" and made["versions"] == {"sglang": "0.5.23"}
    commands = [HEADER["command"], own["command"], "kvq eval --map a.json b.json --out precise_fake.json"]
    assert made["command"] == "; ".join(commands)
    (apart,) = (r for r in made["rows"] if r["chunk"] == 8192)
    assert (apart["method"], apart["score"], apart["bf16_score"], apart["bf16_chunk"]) == ("oscar", 0.95, 1.0, 128)
    (first,) = (r for r in made["rows"] if (r["method"], r["task"]) == ("hadamard", "kl"))
    assert first["score"] == 0.5, "the first source counts"
    # A map is a source too, and gives itself again.
    again = precise.collect([out], "fake", [])
    assert again["rows"] == made["rows"] and "chunks of 8192" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model": "other"}, "for other, but --out names fake; write precise_other.json"),
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


def test_other_lengths_belong_together(content, tmp_path):
    longer = accuracy(measured("none", 0.001, 1.0, 16.0), settings={"kl": {**KL, "contexts": [[8192, 2]]}})
    longer["rows"][0]["kl_by_length"] = {"8192": content["rows"][0]["kl_by_length"]["2048"]}
    sources = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, one in zip(sources, (content, longer)):
        write(path, one)
    made = precise.collect(sources, "fake", [])
    assert made["settings"]["kl"]["contexts"] == [[2048, 8], [8192, 2]]
    assert {r["context"] for r in made["rows"] if r["task"] == "kl"} == {2048, 8192}


@pytest.mark.parametrize("out", ["precise_.json", "fake.json", "precise_fake.md"])
def test_the_file_of_a_map_names_its_model(content, tmp_path, out):
    source = write(tmp_path / "a.json", content)
    with pytest.raises(KVQuantError, match=r"precise_MODEL\.json"):
        main(["--map", source, "--out", str(tmp_path / out)])


# -- Markdown and plots -----------------------------------------------------------------------------------

TABLE = """\
| method | bits | KL 2k, nats | top-1 2k, % | needle 2k, % |
|---|---|---|---|---|
| `none` | 16.00 | 0.0010 ± 0.0100 | 90.0 ± 2.0 | 100.0 ± 10.0 |
| `fp8` | 8.00 | 0.0100 ± 0.0100 | 90.0 ± 2.0 | 100.0 ± 10.0 |
| `turboquant:3` | 3.25 | 0.2000 ± 0.0100 | 90.0 ± 2.0 | 70.0 ± 10.0 |
| `oscar` | 2.50 | **0.0600** ± 0.0100 (2) | **90.0** ± 0.0 (2) | **85.0** ± 5.0 (2) |
| `hadamard` | 2.50 | 0.5000 ± 0.0100 | **90.0** ± 2.0 | 40.0 ± 10.0 |
| `int2` | 2.50 | 1.5000 ± 0.0100 | **90.0** ± 2.0 | 40.0 ± 10.0 |
"""


@pytest.fixture
def mapped(content, tmp_path):
    """The map's path."""
    path = tmp_path / "precise_fake.json"
    write(path, precise.collect([_written(tmp_path / "accuracy_fake.json", content)], "fake", []))
    return path


def _written(path, content):
    write(path, content)
    return path


def test_table(mapped):
    text = report.page([mapped], _written_page(mapped.with_name("page.md")))
    assert TABLE in text and "commit aaaaaaaaaa." in text
    assert "kvq eval --report benchmarks/results/precise_fake.json --out page.md" in text


def _written_page(path):
    path.write_text(f"# Before\n\n{map_table.begin('precise_fake')}\nold\n{map_table.END}\n\nAfter.\n")
    return path


def test_a_map_alone_replaces_its_block_only(mapped):
    target = _written_page(mapped.with_name("page.md"))
    assert main(["--report", str(mapped), "--out", str(target)]) == 0
    text = target.read_text()
    assert text.startswith("# Before\n\n<!-- map") and text.endswith("-->\n\nAfter.\n") and "\nold\n" not in text
    assert main(["--report", str(mapped), "--out", str(target)]) == 0 and target.read_text() == text
    target.write_text("# No place\n")
    with pytest.raises(KVQuantError, match="no place for precise_fake: put the lines <!-- map: precise_fake -->"):
        main(["--report", str(mapped), "--out", str(target)])


def test_a_map_heads_its_models_section(mapped, tmp_path):
    other = _written(tmp_path / "accuracy_other.json", accuracy(measured("none", 0.1, 1.0, 16.0), model="other"))
    for row_of in (paths := [mapped.with_name("accuracy_fake.json"), other]):
        content = read(row_of)
        for one in content["rows"]:
            one |= {"top1_agreement": 0.9, "perplexity": 9.0}
        content["settings"] = {}
        write(row_of, content)
    text = report.page([*paths, mapped], tmp_path / "page.md")
    first, second = text.split("## other")
    assert (
        first.index("## fake\n\n<!-- map: precise_fake -->") < first.index(map_table.END) < first.index("| KL, nats p")
    )
    assert "<!-- map" not in second


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


# -- what is committed ------------------------------------------------------------------------------------


def test_committed_maps_have_the_agreed_form():
    assert MAPS
    for path in MAPS:
        content = read(path)
        assert {"name", "command", "commit", "dirty", "device", "date", "versions", "rows"} <= content.keys()
        assert content["dirty"] is False and content["name"] == path.stem
        keys = [tuple(row[name] for name in ("task", "context", "spec", "chunk")) for row in content["rows"]]
        assert len(set(keys)) == len(keys) and all(tuple(row) == COLUMNS for row in content["rows"])


def test_pages_have_the_committed_maps():
    shown = {(page, name): text for page in PAGES for name, text in map_table.blocks(page.read_text()).items()}
    assert {name for page, name in shown if page.name == "accuracy.md"} == {path.stem for path in MAPS}
    for (page, name), text in shown.items():
        assert report._block(RESULTS / f"{name}.json", read(RESULTS / f"{name}.json"), page) == text, page


@pytest.mark.parametrize("path", MAPS, ids=lambda path: path.stem)
def test_every_figure_of_a_page_is_in_the_json(path):
    """Without the code that wrote it: a mean over rows of the column's task and context, rounded as it is written."""
    text = map_table.blocks((ROOT / "docs" / "accuracy.md").read_text())[path.stem]
    head, _, *lines = re.search(r"^\| method .*\n(?:\|.*\n)+", text, re.MULTILINE)[0].splitlines()
    titles = [cell.strip() for cell in head.strip("|").split("|")][2:]
    names = {"KL": "kl", "top-1": "top1", "HumanEval": "humaneval", "GSM8K": "gsm8k"}
    (said,) = re.findall(r"^Bold: .*$", text, re.MULTILINE)
    chunks = [int(n) for n in re.findall(r"chunks of (\d+)", said)]
    chunks = chunks * len(titles) if len(chunks) == 1 else chunks
    compared = 0
    for line in lines:
        method, bits, *cells = (cell.strip(" `") for cell in line.strip("|").split("|"))
        for title, chunk, cell in zip(titles, chunks, cells, strict=True):
            if not cell:
                continue
            (word, _, where), nats = title.partition(",")[0].partition(" "), title.endswith("nats")
            task = names.get(word, f"{word}_nats" if nats else word)
            context = int(where[:-1]) * 1024 if where.endswith("k") else int(where) if where else None
            chosen = [
                one
                for one in read(path)["rows"]
                if (one["task"], one["method"], one["context"], one["chunk"]) == (task, method, context, chunk)
            ]
            of = {one["rotations_sha256"] or one["spec"]: one for one in reversed(chosen)}.values()
            written = cell.replace("*", "").split()[0]
            places = len(written.partition(".")[2])
            value = mean(one["score"] for one in of) * (1 if nats else 100)
            assert abs(float(written) - value) <= 0.5000001 * 10**-places, (line, title)
            assert abs(float(bits) - mean(one["allocated_bits"] for one in of)) < 0.006
            assert (f"({len(of)})" in cell) == (len(of) > 1)
            compared += 1
    assert compared > 20
