"""The sweep of windows: bytes, divergence that larger windows lower, and a run that goes on where it stopped."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import record, windows
from benchmarks.windows import Case, bytes_of, candidates, cases_of, measure_kl, table
from sglang_kvq.cache.layout import KVGeometry
from sglang_kvq.evaluation.report.rows import COLUMNS
from sglang_kvq.formats.page import PageFormat


@pytest.fixture(scope="module")
def model():
    """A tiny random Llama whose heads attend far."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 2048}
    config = transformers.LlamaConfig(**sizes, **heads, initializer_range=0.3)
    return transformers.LlamaForCausalLM(config).eval()


def test_bytes_are_pages_and_bf16_pages() -> None:
    format = PageFormat(128, 128, 0.96, 0.92)
    geometry = KVGeometry(8, (format,) * 36)
    row = bytes_of(Case("oscar", 64, 256), geometry)
    # 64 pages of records; of them 1 sink, 4 recent and the one being filled in BF16.
    assert row["bytes_4k"] == 64 * geometry.page_bytes + 6 * geometry.slot_bytes
    assert row["bytes_4k_share"] == pytest.approx(row["bytes_4k"] / (64 * geometry.slot_bytes), abs=1e-4)
    large = bytes_of(Case("oscar", 128, 2048), geometry)
    assert large["bytes_4k_share"] > 0.6 and large["bytes_128k_share"] < row["bytes_128k_share"] + 0.02
    wider = bytes_of(Case("oscar", 128, 8192), geometry)
    assert wider["bytes_4k"] == 64 * (geometry.page_bytes + geometry.slot_bytes), "no more BF16 pages than pages"


def test_windows_of_the_issue() -> None:
    found = cases_of(windows.METHODS, windows.SINKS, windows.RECENTS)
    assert len(found) == 30 and len({case.name for case in found}) == 30
    assert found[1].spec == "oscar --kv-quant-sink 0 --kv-quant-recent 256"


def test_divergence_falls_with_the_window_and_a_stopped_run_goes_on(model, tmp_path: Path) -> None:
    cases = [Case("int2", 0, recent) for recent in (64, 128, 256)] + [
        Case("int4", 0, recent) for recent in (64, 128, 256)
    ]
    methods = candidates(["int2", "int4"], model, "", [])
    contexts = list(torch.randint(0, 128, (2, 512)))
    saved: list[str] = []

    def run(rows: dict, deadline: float = float("inf")) -> bool:
        saved.clear()
        return measure_kl(model, contexts, 32, cases, methods, rows, saved.extend, deadline)

    whole = {case.name: {"sink": case.sink, "recent": case.recent} for case in cases}
    assert run(whole) and saved == 2 * [case.name for case in cases]
    assert [len(row["kl_contexts"]) for row in whole.values()] == [2] * 6
    int2, int4 = ([whole[case.name]["kl"] for case in cases if case.method == method] for method in ("int2", "int4"))
    assert int2[0] > int2[1] > int2[2] > int4[2] and int4[0] > int4[1]
    assert all(row["kl_se"] > 0 and 0 < row["top1"] <= 1 for row in whole.values())
    # What one context has is measured for the other only, and gives the same.
    part = {
        name: {"sink": row["sink"], "recent": row["recent"], "kl_contexts": row["kl_contexts"][: 1 + (number > 2)]}
        for number, (name, row) in enumerate(whole.items())
    }
    assert run(part) and saved == [case.name for case in cases[:3]]
    assert all(part[name]["kl"] == row["kl"] for name, row in whole.items() if name in saved)
    assert not run({case.name: {} for case in cases}, deadline=0.0) and saved == []


def test_the_command_writes_bytes_first_and_goes_on(model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, text = tmp_path / "x.json", tmp_path / "text.txt"
    text.write_text("held out")
    monkeypatch.setattr(windows, "load_model", lambda path: (model, None))
    monkeypatch.setattr(windows, "tokenize", lambda *_: torch.arange(1200) % 128)
    words = f"windows m --text {text} --methods int4 --sinks 0 --recents 64,128 --length 300 --measured 32 --contexts 2"
    monkeypatch.setattr(sys, "argv", [*words.split(), "--out", str(out), "--minutes", "0"])
    windows.main()
    assert [("bytes_4k" in row, "kl" in row) for row in record.read_rows(out)] == [(True, False)] * 2
    monkeypatch.setattr(sys, "argv", [*words.split(), "--out", str(out)])
    windows.main()
    found = record.read_rows(out)
    assert [(row["case"], len(row["kl_contexts"])) for row in found] == [("int4, 0 + 64", 2), ("int4, 0 + 128", 2)]
    monkeypatch.setattr(sys, "argv", [*words.split(), "--out", str(out), "--skip", "0.5"])
    with pytest.raises(SystemExit):
        windows.main()


def test_scores_of_kvq_eval() -> None:
    case = Case("oscar", 0, 64)
    rows = {case.name: {"case": case.name}}
    found = {"task": "multi_key", "context": 4096, "spec": case.spec, "score": 0.5, "score_se": 0.1}
    other = {**found, "spec": "none", "score": 1.0}
    kl = {**found, "task": "kl", "score": 3.0}
    report = {"name": "precise_x", "rows": [dict.fromkeys(COLUMNS) | one for one in (found, other, kl)]}
    assert windows.add_scores(rows, [case], report) == [case.name]
    assert rows[case.name] == {"case": case.name, "multi_key_4k": 0.5, "multi_key_4k_se": 0.1}


def row(method: str, sink: int, recent: int, **more: object) -> dict:
    case = Case(method, sink, recent)
    sizes = bytes_of(case, KVGeometry(8, (PageFormat(128, 128, 0.96, 0.92),) * 36))
    return {"case": case.name, "method": method, "sink": sink, "recent": recent, **sizes, **more}


def test_table() -> None:
    rows = [
        row("oscar", 64, 256, kl=0.05, kl_se=0.001, top1=0.9, top1_se=0.01, multi_key_4k=0.5, multi_key_4k_se=0.1),
        row("oscar", 0, 64),
    ]
    lines = table(rows).splitlines()
    assert lines[0] == "`oscar`, 2.25 bits per element:"
    heads = "sink + recent | KL, nats | top-1, % | multi_key_4k, % | bytes at 4K, % of BF16 | bytes at 32K, % of BF16"
    assert heads in lines[2]
    assert lines[4].startswith("| 0 + 64 |  |  |  |")
    assert lines[5].startswith("| 64 + 256 | 0.0500 ± 0.0010 | 90.0 ± 1.0 | 50.0 ± 10.0 | 23.4 |")


def test_table_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    record.write(tmp_path / "x.json", windows.NAME, [json.loads(json.dumps(row("oscar", 0, 64)))])
    monkeypatch.setattr(sys, "argv", ["windows", "--table", "--out", str(tmp_path / "x.json")])
    windows.main()
    assert "| 0 + 64 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["m", "--tasks", "kl"], "needs --text"),
        (["m", "--text", "x", "--length", "2048"], "a --length above"),
        (["m", "--tasks", "humaneval"], "Give --eval FOLDER"),
        ([], "MODEL: missing"),
    ],
)
def test_refused(words, message, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(sys, "argv", ["windows", *words, "--out", str(tmp_path / "x.json")])
    with pytest.raises(SystemExit):
        windows.main()
    assert message in capsys.readouterr().err
