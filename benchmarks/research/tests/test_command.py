"""The whole command runs on a tiny model: rows in the form of results, for every policy and data set."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import record
from benchmarks.research.episodes import __main__ as command
from benchmarks.research.episodes.datasets import DATASETS
from benchmarks.research.episodes.measure import Measured, comparisons, rows
from benchmarks.research.episodes.policies import Outcome
from benchmarks.research.episodes.table import tables
from benchmarks.research.tests import helpers
from sglang_kvq.errors import KVQuantError

COLUMNS = {
    "dataset", "policy", "matching", "compression", "kv_quant", "gain_kept", "gain_kept_se", "evidence_recall",
    "hot_tokens", "total_bytes",
}  # fmt: skip


def arguments(data: Path, *words: str) -> object:
    fixed = ["--model", "tiny", "--embedder", "none", "--data", str(data), "--out", str(data / "out.json")]
    sizes = ["--history-tokens", "1400", "--sample-tokens", "512", "--block", "256", "--limit", "2", "--questions", "3"]
    return command.arguments([*fixed, *sizes, *words])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    letters = "abcdefghijklmnop"
    helpers.write_data(folder, [helpers.record(*(f"{a}{n}" for n in range(3))) for a in letters])
    return folder


def test_rows_of_all_policies(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--datasets", "locomo", "--compressions", "2", "--kv-quant", "none,int4")
    args = arguments(data, *words, "--quant-policies", "full,late,epicache")
    runner = helpers.runner(head_dim=64)
    measured, more = command.run(args, runner, helpers.writer(), helpers.embedder())
    found = command.rounded(rows(measured, {"none": 16.0, "int4": 4.0}))
    assert all(set(row) >= COLUMNS for row in found)
    named = {(row["policy"], row["matching"]) for row in found if row["kv_quant"] == "none"}
    assert {policy for policy, _ in named} == {*args.policies.split(","), "kvzip_heads"}
    assert {("retrieve", "centroid"), ("retrieve", "segments"), ("epicache", "evidence"), ("text", "segments")} <= named
    ends = {row["policy"]: row for row in found if row["compression"] is None and row["kv_quant"] == "none"}
    assert ends["full"]["gain_kept"] == 1 and ends["none"]["gain_kept"] == 0
    assert all(math.isfinite(row["gain_kept"]) and row["conversations"] == 2 for row in found)
    quantized = {row["policy"] for row in found if row["kv_quant"] == "int4"}
    assert quantized == {"full", "retrieve", "epicache"}
    full = next(row for row in found if row["policy"] == "full" and row["kv_quant"] == "int4")
    assert full["gain_kept"] != 1 and full["total_bytes"] == pytest.approx(full["hot_tokens"] * 4)
    compared = comparisons(measured)
    assert any(one["theirs"] == "retrieve by segments without kv_quant" for one in compared)
    same = next(r for r in compared if r["ours"] == "retrieve by segments" and r["theirs"] == "text by segments")
    gains = {row["policy"]: row["gain_kept"] for row in found if row["matching"] == "segments" and
             (row["dataset"], row["kv_quant"]) == (same["dataset"], same["kv_quant"])}  # fmt: skip
    assert same["gain_difference"] == pytest.approx(gains["retrieve"] - gains["text"], abs=1e-3)
    record.write(data / "out.json", "episodes_tiny", found, comparisons=command.rounded(compared), **more)
    assert json.loads((data / "out.json").read_text())["conversations_left_out"] == 0
    assert len(command.table(found).splitlines()) == len(found) + 1
    assert "locomo/talk-1" in capsys.readouterr().out


def test_all_datasets(data: Path) -> None:
    args = arguments(data, "--policies", "window", "--compressions", "2", "--limit", "1")
    measured, _ = command.run(args, helpers.runner(), helpers.writer(), helpers.embedder())
    assert {group[0] for group in measured.outcomes} == set(DATASETS)
    assert all(set(of) <= {("full", None), ("none", None), ("window", None)} for of in measured.outcomes.values())


def test_a_data_set_has_its_own_lengths() -> None:
    """``locomo`` and ``locomo_6k`` cut the same conversations differently."""
    measured = Measured()
    for dataset, length in (("locomo", 1800), ("locomo_6k", 1400)):
        measured.tokens[dataset, "talk"] = length
        for policy in ("full", "none"):
            one = Outcome(policy, None, np.array([-1.0]), np.array([1.0]), None, length, length)
            measured.add((dataset, None, "none"), "talk", iter([one]), torch.device("cpu"))
    found = rows(measured, {"none": 1.0})
    assert {row["dataset"]: row["history_tokens"] for row in found} == {"locomo": 1800, "locomo_6k": 1400}


def test_tables_leave_out_data_sets_without_a_gain(data: Path) -> None:
    ends = {"gain_kept_se": 0.0, "conversations": 2, "questions": 6, "history_tokens": 1400.0, "compression": None}
    found = []
    for dataset, gained in (("talk", 1.0), ("nothing", 0.1)):
        own = {"dataset": dataset, "kv_quant": "none", "matching": None, **ends}
        found += [own | {"policy": "full", "gain_kept": 1.0, "logprob": -1.0}]
        found += [own | {"policy": "none", "gain_kept": 0.0, "logprob": -1.0 - gained}]
        found += [own | {"policy": "late", "matching": "windows", "compression": 4.0, "gain_kept": 0.9, "logprob": -1}]
    lines = list(tables({"model": "tiny", "rows": found}))
    assert "| gained over no history | 1.00 | 0.10 |" in lines
    assert lines[-1] == "| `retrieve` | windows | BF16 | 0.90 ± 0.00 |" and "| policy | by | pages | talk 4x |" in lines


def test_variants_are_measured_at_the_first_compression(data: Path) -> None:
    words = ("--datasets", "locomo", "--policies", "window,epicache_heads", "--compressions", "2,3", "--limit", "1")
    measured, _ = command.run(arguments(data, *words), helpers.runner(), helpers.writer(), helpers.embedder())
    at = {group[1]: {policy for policy, _ in of} for group, of in measured.outcomes.items()}
    assert at == {None: {"full", "none"}, 2: {"window", "epicache_heads"}, 3: {"window"}}


def test_a_limit_of_seconds_stops_between_conversations(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(command.time, "perf_counter", lambda: float(next(clock)))
    words = ("--datasets", "locomo,needles", "--policies", "window", "--compressions", "2")
    # The first conversation begins after one tick of the clock, the second after more.
    args = arguments(data, *words, "--limit-seconds", "1.5")
    measured, more = command.run(args, helpers.runner(), helpers.writer(), helpers.embedder())
    assert more["conversations_left_out"] == 3 and len(measured.tokens) == 1
    with pytest.raises(KVQuantError, match="--limit-seconds 0.5: over before the first conversation"):
        command.run(
            arguments(data, *words, "--limit-seconds", "0.5"), helpers.runner(), helpers.writer(), helpers.embedder()
        )


@pytest.mark.parametrize(
    "words, message",
    [
        (["--policies", "best"], "policy best: choose"),
        (["--datasets", "locomo,x"], "--datasets x: choose"),
        (["--compressions", "1"], "give numbers above 1"),
        (["--compressions", "4,six"], "--compressions 4,six: give numbers above 1"),
        (["--block", "100"], "--block 100: give a multiple of the page"),
        (["--questions", "0"], "--questions 0: give 1 or more"),
        (["--kv-quant", "int4"], "--kv-quant int4: must begin with none"),
        (["--history-tokens", "500"], "histories of 500 tokens"),
    ],
)
def test_bad_arguments_are_refused(data: Path, words: list[str], message: str) -> None:
    with pytest.raises(KVQuantError, match=message):
        command.run(arguments(data, *words), helpers.runner(), helpers.writer(), helpers.embedder())


def test_sensitivities_need_a_text(data: Path, tmp_path: Path) -> None:
    budgets = command.LayerBudgets(helpers.runner(), helpers.writer(), data, 256)
    assert sum(budgets(640, 192)) == 640 * helpers.LAYERS
    with pytest.raises(KVQuantError, match="no text to measure sensitivities on"):
        command.LayerBudgets(helpers.runner(), helpers.writer(), tmp_path, 256)(640, 192)
