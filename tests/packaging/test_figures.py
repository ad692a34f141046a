"""Every figure in README and docs/performance.md is a rounded figure of benchmarks/results."""

from __future__ import annotations

import json
import re
import statistics
from typing import Any

import pytest

from benchmarks.bench_serving.tables import first_tokens
from benchmarks.kernel_bench.fp8 import bound_us
from tests.conftest import ROOT

RESULTS = ROOT / "benchmarks" / "results"
README, PERFORMANCE = ((ROOT / name).read_text() for name in ("README.md", "docs/performance.md"))
#: The page without line breaks, to find sentences.
PROSE = " ".join(PERFORMANCE.split())
SMOLLM2, QWEN = "accuracy_smollm2-135m-instruct", "accuracy_qwen2.5-coder-0.5b-instruct"

#: Labels in the serving table, and the file's rows.
SCENARIOS = {
    "tokens that fit": "capacity",
    "output": "output_96x64k (62 contexts)",
    "decode step, 4 streams of 1K": "decode_4x1k",
    "decode step, 4 streams of 8K": "decode_4x8k",
    "decode step, 4 streams of 32K": "decode_4x32k",
    "decode step, 64 streams of 1K": "decode_64x1k",
    "prefill, 32K prompts": "prefill_32k",
    "time to first token": "ttft_8x8k",
    "time per output token": "tpot_8x8k",
}
#: Labels in the table of other models, and the file's rows, with columns of (BF16, ours, ratio) for each model.
OTHERS = {
    "tokens that fit": "tokens",
    "decode step, 4 streams of 1K": "decode_4x1k",
    "4 streams of 8K": "decode_4x8k",
    "4 streams of 32K": "decode_4x32k",
    "64 streams of 1K": "decode_64x1k",
}
OTHER_MODELS = ("qwen3-30b-a3b/{}", "gpt-oss-120b/{}, 12 layers", "qwen3-next-80b-a3b/{}, 24 layers")
#: Names in the table of qualities, and in ``kvq eval``.
METHODS = {"BF16, a second run of it": "none", "SGLang's own FP8": "fp8"}


def results(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def by(name: str, field: str) -> dict[str, dict[str, Any]]:
    return {row[field]: row for row in results(name)}


def tables(text: str, heading: str = "") -> list[list[str]]:
    """Returns the cells of all tables below a heading, without the tables' heads."""
    part = text[text.index(heading) :]
    part = part[: part.find("\n## ", 1)] if "\n## " in part[1:] else part
    found = re.findall(r"^\|.*\n\|[-| ]+\n((?:\|.*\n)+)", part, re.MULTILINE)
    return [
        [cell.strip() for cell in line.strip().strip("|").split("|")] for table in found for line in table.splitlines()
    ]


def number(text: str) -> tuple[float, int]:
    """Returns the first number, and how many digits it has after the point."""
    digits = re.search(r"[-+]?[\d,]*\.?\d+", text)
    assert digits, text
    plain = digits[0].replace(",", "")
    return float(plain), len(plain.partition(".")[2])


def agrees(written: str, measured: float) -> bool:
    """Returns True if a number is the measured one, rounded to as many places; a tie may be rounded either way."""
    value, places = number(written)
    return abs(value - measured) <= 0.5000001 * 10**-places


def check_serving(cells: list[str], scenarios: dict[str, str] = SCENARIOS, model: str = "{}") -> None:
    label, none, ours, ratio = cells
    (scenario,) = (name for start, name in scenarios.items() if label.startswith(start))
    row = by("serving_h200", "scenario")[model.format(scenario)]
    assert agrees(none, row["none"]) and agrees(ours, row["oscar"]) and agrees(ratio, row["ratio"]), cells


@pytest.mark.parametrize("cells", tables(PERFORMANCE, "## Serving\n"), ids=lambda cells: f"{cells[0]}-{len(cells)}")
def test_serving(cells: list[str]) -> None:
    label, *figures = cells
    if label.startswith("with SGLang"):
        file = "serving_h200" if label.endswith("0.5.16") else "serving_tp_h200"
        row = by(file, "scenario")["capacity transform 1.6"]
        assert all(
            agrees(cell, row[field]) for cell, field in zip(figures, ("none", "transform", "ratio"), strict=True)
        )
    elif len(figures) == 3:
        check_serving(cells)
    else:
        assert len(figures) == 3 * len(OTHER_MODELS), cells
        for n, model in enumerate(OTHER_MODELS):
            check_serving([label, *figures[3 * n : 3 * n + 3]], OTHERS, model)


@pytest.mark.parametrize("cells", tables(PERFORMANCE, "## Two GPUs\n"), ids=lambda cells: cells[0])
def test_two_gpus(cells: list[str]) -> None:
    label, *figures = cells
    streams = re.search(r"(\d+) streams of (\d+)K", label)
    scenario = f"decode_{streams[1]}x{streams[2]}k" if streams else "tokens"
    rows = by("serving_tp_h200", "scenario")
    for name, found in ((scenario, figures[:3]), (f"{scenario}, 2 GPUs", figures[3:])):
        assert all(
            agrees(cell, rows[name][field]) for cell, field in zip(found, ("none", "oscar", "ratio"), strict=True)
        )


@pytest.mark.parametrize("cells", tables(PERFORMANCE, "## Speculation\n"), ids=lambda cells: cells[0])
def test_speculation(cells: list[str]) -> None:
    row = by("serving_h200", "scenario")[f"spec_4x{cells[0].lower()}_4"]
    assert row["simulated"] == 2.5 and row["drafts"] == row["streams"] == 4
    assert all(agrees(cell, row[field]) for cell, field in zip(cells[1:], ("none", "oscar", "ratio"), strict=True))


def shown(title: str, workload: str, method: str, field: str = "output_tokens_per_s") -> float:
    """Returns a figure of a workload on an H100, after checking that a table calls the workload by its title."""
    row = by("serving_all_h100", "scenario")[f"bench {workload}, {method}"]
    assert not title or row["title"] == title
    return float(row[field])


@pytest.mark.parametrize(
    ("cells", "workload"),
    list(zip(tables(PERFORMANCE, "## Workloads\n"), ("200", "1k", "8k", "48k", "chats", "mix"), strict=True)),
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_workloads(cells: list[str], workload: str) -> None:
    title, none, *others = cells
    plain = shown(title, workload, "none")
    assert agrees(none, plain)
    for method, ours, ratio in zip(("oscar", "transform:2.5"), others[::2], others[1::2], strict=True):
        assert agrees(ours, shown(title, workload, method)), cells
        assert agrees(ratio, shown(title, workload, method) / plain), cells


def test_workloads_in_the_readme() -> None:
    rates = (("1k", "output_tokens_per_s"), ("8k", "output_tokens_per_s"), ("chats", "output_tokens_per_s"))
    found = tables(README)[5:9]
    for (_, none, ours, ratio), (workload, field) in zip(found, (*rates, ("chats", "ttft_p50_ms")), strict=True):
        plain, quantized = (shown("", workload, method, field) for method in ("none", "oscar"))
        gain = plain / quantized if field.endswith("_ms") else quantized / plain
        assert agrees(none, plain) and agrees(ours, quantized) and agrees(ratio, gain), workload


def test_first_tokens_of_short_prompts() -> None:
    found = results("first_tokens_h100")
    page = (ROOT / "docs" / "notes" / "prefill-graphs.md").read_text()
    for rows in (found, results("first_tokens_h200"), results("first_tokens_after_h200")):
        assert first_tokens(rows).partition("\n\n")[2] in page
    rows = {row["method"]: row for row in found}
    plain = rows.pop("none")
    ratios = [row[name] / plain[name] for row in rows.values() for name in row if name.startswith("ttft_")]
    sentence = f"at most {max(ratios):.2f} times as long as plain SGLang's, and usually comes sooner"
    assert sentence in " ".join(README.split())
    assert sum(ratio < 1 for ratio in ratios) > len(ratios) / 2


def test_contexts_at_once() -> None:
    row = by("serving_h200", "scenario")["output_96x64k (62 contexts)"]
    fits = (row["none_fits"], row["oscar_fits"], row["oscar_resident"])
    assert "BF16 holds {} contexts of 64K and `oscar` holds {}. The run had time to cache {}".format(*fits) in PROSE


def fp8_bound(row: dict[str, Any]) -> float:
    """Returns the microseconds in which a copy's bandwidth reads a byte per element of all keys and values."""
    if row.get("fp8_bound_us"):
        return float(row["fp8_bound_us"])
    lengths = [row["context"]] * row["batch"]
    if row["kernel"] == "decode (ragged)":
        lengths = [int(1024 * 128 ** (i / 63)) for i in range(64)]
    bandwidth = 1e3 * row["gb_per_s"] / row["bandwidth_fraction"]
    return bound_us(lengths, row["kv_heads"], row["head_dim"], bandwidth)


def decode_row(file: str, shape: str) -> dict[str, Any]:
    """Returns the row of decoding by its first cell: a batch and a context, or the lengths of the ragged batch."""
    if shape == "64 from 1,024 to 131,072":
        (row,) = (row for row in results(file) if row["kernel"] == "decode (ragged)")
        return row
    size = tuple(int(word.replace(",", "")) for word in re.findall(r"[\d,]+", shape))
    (row,) = (row for row in results(file) if row["kernel"] == "decode" and (row["batch"], row["context"]) == size)
    return row


@pytest.mark.parametrize("cells", tables(PERFORMANCE, "## Decode attention\n"), ids=lambda cells: cells[0])
def test_decode(cells: list[str]) -> None:
    row = decode_row("kernels_h200", cells[0])
    bound = fp8_bound(row)
    fields = ("flashinfer_bf16_us", "flashinfer_fp8_us", "bound", "ours_us", "ratio", "ratio_fp8", "over", "percent")
    row |= {"bound": bound, "over": bound / row["ours_us"], "percent": 100 * row["bandwidth_fraction"]}
    assert all(agrees(cell, row[field]) for cell, field in zip(cells[1:], fields, strict=True)), (cells, row)


@pytest.mark.parametrize("cells", tables(PERFORMANCE, "## Decode attention on an H100\n"), ids=lambda cells: cells[0])
def test_decode_on_an_h100(cells: list[str]) -> None:
    row = decode_row("kernels_h100", cells[0])
    fields = ("flashinfer_bf16_us", "fp8_best_us", "fp8_bound_us", "ours_us")
    fields += ("ratio", "ratio_fp8_best", "ratio_fp8_bound", "percent")
    row |= {"percent": 100 * row["bandwidth_fraction"]}
    assert all(agrees(cell, row[field]) for cell, field in zip(cells[1:], fields, strict=True)), (cells, row)


@pytest.mark.parametrize("cells", tables(PERFORMANCE, "## Other geometries"), ids=lambda cells: cells[0])
def test_other_geometries(cells: list[str]) -> None:
    name = "decode ({} over {} heads of {})".format(*re.findall(r"\d+", cells[0]))
    (row,) = (row for row in results("kernels_geometries_h100") if row["kernel"] == name and row["batch"] == 32)
    fields = ("flashinfer_bf16_us", "fp8_best_us", "fp8_bound_us", "ours_us")
    fields += ("ratio", "ratio_fp8_best", "ratio_fp8_bound", "percent")
    row |= {"percent": 100 * row["bandwidth_fraction"]}
    assert (row["context"], row["fp8_best"]) == (16384, "flashinfer")
    assert all(agrees(cell, row[field]) for cell, field in zip(cells[1:], fields, strict=True)), (cells, row)


FLASH = "## FlashAttention 3 over FP8\n"


@pytest.mark.parametrize("cells", tables(PERFORMANCE, FLASH), ids=lambda cells: cells[0])
def test_flash_attention_on_an_h100(cells: list[str]) -> None:
    row = decode_row("kernels_fa3_h100", cells[0])
    fields = ("fp8_fa3_us", "fp8_bound_us", "ours_us", "ratio_fp8_best", "ratio_fp8_bound")
    assert row["fp8_best"] == "fa3"
    assert all(agrees(cell, row[field]) for cell, field in zip(cells[1:], fields, strict=True)), (cells, row)


def test_flash_attention_and_the_bound() -> None:
    least, most = re.search(r"an FP8 cache takes ([\d.]+) to ([\d.]+) times the bound", PROSE).groups()
    rows = [row for row in results("kernels_fa3_h100") if row["kernel"].startswith("decode")]
    found = [row["fp8_fa3_us"] / row["fp8_bound_us"] for row in rows]
    assert agrees(least, min(found)) and agrees(most, max(found))


def test_decoding_over_a_shared_memory() -> None:
    least, most, shapes = re.search(r"costs a decode step ([\d.]+) to ([\d.]+)% in (\w+) shapes", PROSE).groups()
    rows = results("kernels_shared_h100")
    found = [100 * (row["ours_us"] / row["separate_us"] - 1) for row in rows]
    assert agrees(least, min(found)) and agrees(most, max(found)) and (shapes, len(rows)) == ("seven", 7)


def test_quantizing() -> None:
    (row,) = (row for row in results("kernels_h200") if row["kernel"] == "quantize_tokens")
    tokens, time = re.search(r"Quantizing ([\d,]+) new tokens of one layer takes (\d+) µs", PROSE).groups()
    assert number(tokens)[0] == row["context"] and agrees(time, row["ours_us"])


def extends(new: int | None, prefix: int) -> list[float]:
    """Returns our time over FlashInfer's, for all numbers of requests."""
    rows = [row for row in results("kernels_h200") if row["kernel"] == "extend (grid)"]
    rows = [row for row in rows if new in (None, row["new_tokens"]) and row["context"] - row["new_tokens"] == prefix]
    found = [row["ours_us"] / row["flashinfer_bf16_us"] for row in rows]
    assert found
    return found


@pytest.mark.parametrize("cells", tables(PERFORMANCE, "## Prefill\n"), ids=lambda cells: cells[0])
def test_prefill(cells: list[str]) -> None:
    for cell, prefix in zip(cells[1:], (8192, 32768, 131072)):
        least, most = re.findall(r"[\d.]+", cell)
        found = extends(int(cells[0]), prefix)
        assert agrees(least, min(found)) and agrees(most, max(found)), (cells, prefix)


def test_prefill_after_short_prefixes() -> None:
    least, most = re.search(r"After only 2K, the same ratios lie between (\S+) and (\d\.\d+)", PROSE).groups()
    assert agrees(least, min(extends(None, 2048))) and agrees(most, max(extends(None, 2048)))


@pytest.mark.parametrize("cells", tables(PERFORMANCE, "## Quality and size\n"), ids=lambda cells: cells[0])
def test_quality(cells: list[str]) -> None:
    name = METHODS.get(cells[0]) or ":".join(word.strip(" `") for word in cells[0].split(","))
    small, qwen = by(SMOLLM2, "method")[name], by(QWEN, "method")[name]
    bits = cells[1].split(", ")
    assert agrees(bits[0], small["allocated_bits"]) and agrees(bits[-1], qwen["allocated_bits"])
    assert agrees(cells[2], small["kl"]) and agrees(cells[3], qwen["kl"])
    score = qwen["humaneval"] if name == "none" else qwen["humaneval_vs_none"]
    assert agrees(cells[4], 100 * score), cells
    assert [number(cell)[0] for cell in cells[5].split(", ")] == [
        100 * qwen["needle_16k"],
        100 * (qwen["needle_32k"] if qwen["needle_32k"] is not None else qwen["needle_32000"]),
    ]


def test_figures_of_the_readme() -> None:
    capacity, *scores = tables(README)[:5]
    row = by("serving_tp_h200", "scenario")["capacity transform 1.6"]
    assert all(
        agrees(cell, row[field]) for cell, field in zip(capacity[1:], ("none", "transform", "ratio"), strict=True)
    )
    rows = {
        (row["task"], row["context"], row["method"]): row
        for row in results("precise_qwen2.5-coder-1.5b-instruct")
        if row["chunk"] == 8192
    }
    errors = []
    tasks = (("needle", 32000), ("exact_keys", 4096), ("humaneval", None), ("gsm8k", None))
    for cells, task in zip(scores, tasks, strict=True):
        row = rows[(*task, "transform:1.6")]
        assert agrees(cells[1], 100 * row["bf16_score"]) and agrees(cells[2], 100 * row["score"]), cells
        assert not cells[3] or agrees(cells[3], 100 * row["difference"])
        errors.append(f"{100 * row['score_se']:.0f}")
    assert f"last three rows are {errors[1]}, {errors[2]} and {errors[3]} points" in " ".join(README.split())
    keys = rows["exact_keys", 4096, "transform:2.5"]  # "With 2.5 bits as many keys are copied as in BF16."
    assert errors[0] == "0" and keys["score"] == keys["bf16_score"]


def test_the_table_of_the_model_with_heads_of_128() -> None:
    page = (ROOT / "docs" / "accuracy.md").read_text()
    section = page.split("## What Qwen2.5-Coder-1.5B-Instruct shows\n")[1].split("\n## ")[0]
    rows: dict[tuple[str, int | None, str], list[dict[str, Any]]] = {}
    for row in results("precise_qwen2.5-coder-1.5b-instruct"):
        rows.setdefault((row["task"], row["context"], row["method"]), []).append(row)

    def mean(method: str, task: str, context: int | None = None, field: str = "score") -> float:
        some = rows[task, context, method]
        return sum(row[field] for row in some) / len(some)

    found = [cells for cells in tables(section) if cells[0].startswith("`")]
    assert len(found) == 5
    for name, kl, top1, keys, needle, *scores in found:
        method = name.split("`")[1]
        method += {"transform": f":{name.split()[-1]}"}.get(method, "")
        assert agrees(kl, mean(method, "kl", 8192)) and agrees(top1, 100 * mean(method, "top1", 8192)), name
        for cell, context in zip(keys.split(", "), (4096, 8192, 16384), strict=True):
            assert agrees(cell, 100 * mean(method, "exact_keys", context)), name
        assert agrees(needle, 100 * mean(method, "needle", 32000)), name
        for cell, task in zip(scores, ("humaneval", "gsm8k", "math"), strict=True):
            words = re.findall(r"[+-]?\d+\.\d+", cell)
            fields = ("score", "cut") if task == "math" else ("score", "difference", "difference_se")
            for word, field in zip(words, fields):
                assert agrees(word, 100 * mean(method, task, field=field)), (name, task, field)
            assert len(words) == len(fields) or method == "none"


def test_the_table_of_chunks_of_128() -> None:
    page = (ROOT / "docs" / "accuracy.md").read_text()
    section = page.split("## What it copies in chunks of 128 tokens\n")[1].split("\n## ")[0]
    rows = [row for row in results("precise_qwen2.5-coder-1.5b-instruct_chunks") if row["chunk"] == 128]
    found = tables(section)
    assert len(found) == 7
    for name, *cells in found:
        method = name.split("`")[1] if "`" in name else "none"
        method += {"transform": f":{name.split()[-1]}"}.get(method, "")
        for cell, task in zip(cells, ("exact_keys", "multi_key", "multi_value", "tracking", "tool_call"), strict=True):
            parts = [row for row in rows if row["task"] == task and row["method"] == method]
            assert sorted(row["context"] for row in parts) == [4096, 8192, 16384]
            mean = sum(row["score"] for row in parts) / 3
            # Of 16 cases in each context; the variance of all 48 is that within contexts and that between them.
            spread = sum(16 * 15 * row["score_se"] ** 2 + 16 * (row["score"] - mean) ** 2 for row in parts)
            error = (spread / 47 / 48) ** 0.5
            words = cell.split(" ± ")
            assert agrees(words[0], 100 * mean) and agrees(words[1], 100 * error), (name, task)


def test_the_table_of_triton_releases() -> None:
    page = (ROOT / "docs" / "notes" / "kernels.md").read_text()
    times = [
        {
            (row["kernel"], row["batch"], row["context"]): row["ours_us"]
            for row in results(f"kernels_triton{release}_h200")
        }
        for release in (36, 38)
    ]
    ratios = {key: times[1][key] / us for key, us in times[0].items()}
    assert times[0].keys() == times[1].keys() and len(ratios) == 70 and "70 rows each" in page
    *named, (words, found) = [cells for cells in tables(page, "## Triton's releases\n") if len(cells) == 2]
    for name, ratio in named:
        kernel = re.sub(r"decode, (.*)", r"decode (\1)", name.replace("`", ""))
        some = [key for key in ratios if key[0] == kernel]
        assert len(some) == 2 and all(agrees(ratio, ratios.pop(key)) for key in some), name
    low, high, middle = re.findall(r"\d\.\d+", found)
    assert words == f"the other {len(ratios)} rows"
    assert agrees(low, min(ratios.values())) and agrees(high, max(ratios.values()))
    assert agrees(middle, statistics.median(ratios.values()))


def test_sessions() -> None:
    (row,) = (row for row in results("episodic_h200") if row["scenario"] == "decode_step")
    row = {re.sub("^late", "retrieve", key): value for key, value in row.items()}  # its former name was ``late``
    found = [cells for cells in tables(README, "## Long conversations\n") if len(cells) == 3]
    assert f"{row['history_tokens']:,}-token sessions" in README
    fields = (("bf16_sessions", "bf16"), ("retrieve_sessions", "oscar"), ("retrieve_sessions", "retrieve"))
    for (_, sessions, time), names in zip(found, fields, strict=True):
        assert agrees(sessions, row[names[0]]) and agrees(time, row[names[1]]), (found, row)


@pytest.mark.parametrize(("name", "text"), [("README.md", README), ("docs/performance.md", PERFORMANCE)])
def test_no_figure_stands_outside_what_is_checked(name: str, text: str) -> None:
    """Prose has no other time, throughput, ratio or percentage than the tables and sentences checked above."""
    prose = " ".join(line.strip() for line in text.splitlines() if not line.startswith("|"))
    known_ones = (
        r"Quantizing [\d,]+ new tokens of one layer takes \d+ µs",
        r"lie between \S+ and \d\.\d+",
        r"rows are 10, 4 and 4 points",
        r"costs a decode step \S+ to \S+% in \w+ shapes",
    )
    for known in known_ones:
        prose = re.sub(known, "", prose)
    assert re.findall(r"\d[\d.,]*(?:x\b| ?%| (?:µs|ms|tokens/s|points|TFLOP/s|GB/s)\b)", prose) == []


@pytest.mark.parametrize("text", [README, PERFORMANCE], ids=["README.md", "docs/performance.md"])
def test_sources_are_named(text: str) -> None:
    """Each file of results names its command, and the pages link to existing files."""
    linked = re.findall(r"\(((?:\.\./)?benchmarks/results/[\w.-]+\.json)\)", text)
    assert linked
    for link in linked:
        content = json.loads((ROOT / link.removeprefix("../")).read_text())
        assert content["command"] and content["commit"] and content["dirty"] is False
