"""The sweep of windows: bytes, divergence that falls with larger windows, copies, continued runs, and the page."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks import record
from benchmarks.windows import __main__ as command
from benchmarks.windows import copies
from benchmarks.windows.cases import BF16, METHODS, RECENTS, SINKS, Case, bytes_of, candidates, cases_of
from benchmarks.windows.measure import PAGES, BatchedWindows, batched_log_probs, copy_units, in_turns, kl_units, measure
from benchmarks.windows.table import HEAD, PAGE, RESULTS, page, table
from sglang_kvq.cache.layout import KVGeometry
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.report.rows import COLUMNS
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.rotations.inspection.divergence import FakeQuantAttention, divergences, log_probs
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def model():
    """Returns a tiny random Llama whose heads attend far."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 2048}
    config = transformers.LlamaConfig(**sizes, **heads, initializer_range=0.3)
    return transformers.LlamaForCausalLM(config).eval()


def encode(text: str) -> list[int]:
    """Returns one token per character."""
    return list(text.encode())


def test_bytes_are_pages_and_bf16_pages() -> None:
    format = PageFormat(128, 128, 0.96, 0.92)
    geometry = KVGeometry(8, (format,) * 36)
    row = bytes_of(Case("oscar", 64, 256), geometry)
    # 64 pages of records; 1 sink, 4 recent pages and the page being filled are in BF16.
    assert row["bytes_4k"] == 64 * geometry.page_bytes + 6 * geometry.slot_bytes
    assert row["bytes_4k_share"] == pytest.approx(row["bytes_4k"] / (64 * geometry.slot_bytes), abs=1e-4)
    large = bytes_of(Case("oscar", 128, 2048), geometry)
    assert large["bytes_4k_share"] > 0.6 and large["bytes_128k_share"] < row["bytes_128k_share"] + 0.02
    wider = bytes_of(Case("oscar", 128, 8192), geometry)
    assert wider["bytes_4k"] == 64 * (geometry.page_bytes + geometry.slot_bytes), "no more BF16 pages than pages"


def test_windows_of_the_issue() -> None:
    found = cases_of(METHODS, SINKS, RECENTS)
    assert len(found) == 30 and len({case.name for case in found}) == 30
    assert found[1].spec == "oscar --kv-quant-sink 0 --kv-quant-recent 256"


@pytest.mark.parametrize("pages", [1, PAGES])
def test_a_batch_reads_what_each_window_alone_does(model, pages: int) -> None:
    (candidate,) = candidates(["int2"], model, "", []).values()
    windows, ids = [(0, 64), (64, 128), (128, 320)], torch.randint(0, 128, (500,))
    hook = BatchedWindows(candidate.formats, candidate.rotations, windows, pages)
    found = list(batched_log_probs(model, ids, hook, 400))
    for logp, (sink, recent) in zip(found, windows, strict=True):
        alone = FakeQuantAttention(candidate.formats, candidate.rotations, sink=sink, recent=recent)
        # Another order of sums changes what is rounded to BF16 in the second layer.
        torch.testing.assert_close(logp, log_probs(model, ids, alone, 400), rtol=0, atol=0.02)
    assert all((a - b).abs().max() > 0.5 for a, b in pairwise(found)), "windows differ by far more"


def test_divergence_falls_with_the_window_and_a_stopped_run_goes_on(model) -> None:
    cases = cases_of(["int2", "int4"], [0], [64, 128, 256])
    methods = candidates(["int2", "int4"], model, "", [])
    contexts = list(torch.randint(0, 128, (2, 512), generator=torch.Generator().manual_seed(1)))
    saved: list[int] = []

    def run(rows: dict, **options) -> bool:
        saved.clear()
        units = kl_units(contexts, 32)
        return measure(model, units, cases, methods, rows, lambda: saved.append(1), batch=2, **options)

    whole: dict = {case.name: {} for case in cases}
    assert run(whole) and len(saved) == 8, "two contexts, two groups of each method"
    assert [len(row["kl_contexts"]) for row in whole.values()] == [2] * 6
    int2, int4 = ([whole[case.name]["kl"] for case in cases if case.method == method] for method in ("int2", "int4"))
    assert int2[0] > int2[1] > int2[2] > int4[2] and int4[0] > int4[1]
    assert all(row["kl_se"] > 0 and 0 < row["top1"] <= 1 for row in whole.values())
    alone = FakeQuantAttention(methods["int2"].formats, methods["int2"].rotations, sink=0, recent=64)
    want = divergences(model, contexts, {"it": alone}, first=480)["it"]
    assert whole[cases[0].name]["kl"] == pytest.approx(float(want.kl.mean()), rel=1e-3)
    # The second context is measured only where it is missing, and the results stay the same.
    part = {
        name: {"kl_contexts": row["kl_contexts"][: 1 + (number > 2)]}
        for number, (name, row) in enumerate(whole.items())
    }
    assert run(part) and len(saved) == 2
    assert all(part[name]["kl"] == pytest.approx(row["kl"], rel=1e-4) for name, row in whole.items())
    assert run(whole) and not saved, "nothing is left"
    assert not run({case.name: {} for case in cases}, deadline=0.0) and not saved


def test_windows_are_compared_on_the_contexts_that_all_have(model) -> None:
    cases = cases_of(["int4"], [0], [64, 128])
    rows: dict = {
        cases[0].name: {"kl_contexts": [[1.0, 0.5], [3.0, 0.5]]},
        cases[1].name: {"kl_contexts": [[2.0, 1.0]]},
    }
    units = kl_units(torch.randint(0, 128, (2, 300)), 32)
    methods = candidates(["int4"], model, "", [])
    assert measure(model, units[:1], cases, methods, rows, lambda: None), "nothing to do"
    assert "kl" not in rows[cases[0].name]
    assert measure(model, units, cases, methods, rows, lambda: None)
    assert rows[cases[0].name]["kl"] == 2.0 and [row["kl_contexts_used"] for row in rows.values()] == [2, 2]


def test_prompts_ask_for_keys_that_every_case_has_quantized() -> None:
    prompts = [copies.draw(encode, [1], number, length=4000, sink=128, recent=1024) for number in range(4)]
    for prompt in prompts:
        text = bytes(prompt.ids.tolist()[1:]).decode()
        assert 4000 - 120 <= len(prompt.ids) <= 4000 and prompt.values[-1][1] == len(prompt.ids)
        haystack = text.index("}") + 2
        assert len(prompt.values) == len({start for start, _ in prompt.values}) == copies.QUESTIONS
        for start, end in prompt.values:
            value = text[start - 1 : end - 1]
            key = text[: start - 1].rpartition('key "')[2].partition('"')[0]
            assert f'"{key}": "{value}"' in text and len(value) == len(key) == 36
            at = 1 + text.index(f'"{key}"')
            assert at >= 128 and at + 80 <= haystack - PAGE_SIZE - 1024
    assert len({tuple(prompt.ids.tolist()) for prompt in prompts}) == 4
    again = copies.draw(encode, [1], 2, length=4000, sink=128, recent=1024)
    assert torch.equal(again.ids, prompts[2].ids)
    with pytest.raises(KVQuantError, match="fewer than 4; give longer prompts"):
        copies.draw(encode, [], 0, length=1500, sink=128, recent=1024)


def test_a_copy_is_right_to_its_last_token() -> None:
    prompt = copies.Prompt(torch.tensor([3, 1, 2, 0, 2, 1]), ((1, 3), (4, 6)))
    assert prompt.first == 0
    logp = torch.full((6, 4), 0.1).log()
    for row, token in enumerate([1, 2, 3, 2, 1, 3]):  # rows 2 and 5 follow no token of a key
        logp[row, token] = torch.tensor(0.7).log()
    nats = -4 * float(torch.tensor(0.7).log())
    assert copies.judge(prompt, logp) == [2, 2, pytest.approx(nats, abs=1e-3), 4]
    logp[1] = logp[1].roll(1)  # the first key's last token is no longer the likeliest
    assert copies.judge(prompt, logp)[0] == 1
    logp[3] = logp[3].roll(1)
    assert copies.judge(prompt, logp)[0] == 0


def test_copies_of_a_model(model) -> None:
    """BF16 gets a row of its own for copies, units alternate, and cases read their keys from records."""
    prompts = [copies.draw(encode, [], number, length=1500, sink=64, recent=128) for number in range(2)]
    units = in_turns(kl_units(torch.randint(0, 128, (1, 300)), 32), copy_units(prompts, "copies_1500_prompts"))
    assert [(unit.field, unit.number) for unit in units] == [
        ("kl_contexts", 0),
        ("copies_1500_prompts", 0),
        ("copies_1500_prompts", 1),
    ]
    cases = cases_of(["int2"], [64], [64, 128])
    rows: dict = {name: {} for name in (*(case.name for case in cases), BF16)}
    methods = candidates(["int2"], model, "", [])
    assert measure(model, units, cases, methods, rows, lambda: None)
    assert "kl" not in rows[BF16]
    found = [rows[name] for name in (cases[0].name, cases[1].name, BF16)]
    assert all(row["copies_1500_prompts_used"] == 2 and 0 <= row["copies_1500"] <= 1 for row in found)
    assert len({row["copies_1500_nats"] for row in found}) == 3
    exact = -log_probs(model, prompts[0].ids, FakeQuantAttention(None), 0)
    nats = sum(exact[at - 1, prompts[0].ids[at]].item() for ends in prompts[0].values for at in range(*ends))
    assert rows[BF16]["copies_1500_prompts"][0][2] == pytest.approx(nats, rel=1e-3)


def test_the_command_writes_bytes_first_and_goes_on(model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, text, other = tmp_path / "x.json", tmp_path / "text.txt", tmp_path / "other.txt"
    text.write_text("held out")
    other.write_text("other")
    loaded: list[dict] = []
    monkeypatch.setattr(command, "load_model", lambda path, **given: loaded.append(given) or (model, Tokenizer()))
    monkeypatch.setattr(command, "tokenize", lambda _, text, rows: torch.arange(1600) % (100 + len(text)))
    sizes = "--methods int4 --sinks 0 --recents 64,128 --length 1100 --measured 32 --contexts 2 --prompts 1"
    words = f"windows m --text {text} {other} --tasks kl,copies {sizes} --out {out}".split()
    monkeypatch.setattr(sys, "argv", [*words, "--minutes", "0"])
    command.main()
    assert [("bytes_4k" in row, "kl" in row) for row in record.read_rows(out)] == [(True, False)] * 2 + [(False, False)]
    monkeypatch.setattr(sys, "argv", words)
    command.main()
    assert loaded[0] == {"device": "cpu", "dtype": "float32"}, "a GPU's default would be the model's own BF16"
    found = record.read_rows(out)
    kl = [len(row.get("kl_contexts", [])) for row in found]
    assert [row["case"] for row in found] == ["int4, 0 + 64", "int4, 0 + 128", BF16] and kl == [2, 2, 0]
    assert all(row["copies_1100_prompts_used"] == 1 for row in found)
    written = out.read_text()
    command.main()
    assert out.read_text() == written, "nothing measured, nothing written"
    monkeypatch.setattr(sys, "argv", [*words, "--skip", "0.5"])
    with pytest.raises(SystemExit):
        command.main()


class Tokenizer:
    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": encode(text)}


def test_texts_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model) -> None:
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for number, path in enumerate(texts):
        path.write_text(str(number))
    monkeypatch.setattr(command, "tokenize", lambda _, text, rows: torch.arange(100) + 1000 * int(text))
    found = command.contexts_of(None, model, texts, 0.0, 5, 20)
    assert [int(ids[0]) for ids in found] == [0, 1000, 40, 1080, 80]
    with pytest.raises(KVQuantError, match="but 3 contexts need 120"):
        command.contexts_of(None, model, texts, 0.0, 5, 40)


def test_scores_of_kvq_eval() -> None:
    case = Case("oscar", 0, 64)
    rows = {case.name: {"case": case.name}}
    found = {"task": "multi_key", "context": 4096, "spec": case.spec, "score": 0.5, "score_se": 0.1}
    other = {**found, "spec": "none", "score": 1.0}
    kl = {**found, "task": "kl", "score": 3.0}
    report = {"name": "precise_x", "rows": [dict.fromkeys(COLUMNS) | one for one in (found, other, kl)]}
    assert command.add_scores(rows, [case], report) == [case.name]
    assert rows[case.name] == {"case": case.name, "multi_key_4k": 0.5, "multi_key_4k_se": 0.1}


def row(method: str, sink: int, recent: int, **more: object) -> dict:
    case = Case(method, sink, recent)
    sizes = bytes_of(case, KVGeometry(8, (PageFormat(128, 128, 0.96, 0.92),) * 36))
    return {"case": case.name, "method": method, "sink": sink, "recent": recent, **sizes, **more}


COPIES = {"copies_4k": 0.5, "copies_4k_se": 0.1, "copies_4k_nats": 0.25, "copies_4k_nats_se": 0.05}


def test_table() -> None:
    kl = {"kl": 0.05, "kl_se": 0.001, "top1": 0.9, "top1_se": 0.01}
    rows = [
        {"case": BF16, "method": "none", **COPIES, "copies_4k": 0.75},
        row("oscar", 64, 256, **kl, **COPIES, kl_contexts=[[0.04, 1.0], [0.06, 1.0], [9.0, 1.0]], kl_contexts_used=2),
        row("oscar", 64, 512, **kl, kl_contexts=[[0.03, 1.0], [0.03, 1.0]], kl_contexts_used=2),
        row("oscar", 0, 64),
    ]
    lines = table(rows).splitlines()
    assert lines[0] == "`oscar`, 2.25 bits per element:"
    heads = (
        "sink + recent | KL, nats | less default | top-1, % | copies_4k, % | copies_4k, nats | bytes at 4K, % of BF16"
    )
    assert heads in lines[2]
    assert lines[4].startswith("| 0 + 64 |  |  |  |  |")
    assert lines[5].startswith("| 64 + 256 | 0.0500 ± 0.0010 |  | 90.0 ± 1.0 | 50.0 ± 10.0 | 0.2500 ± 0.0500 | 23.4 |")
    assert lines[6].startswith("| 64 + 512 | 0.0500 ± 0.0010 | -0.0200 ± 0.0100 | 90.0")
    assert lines[-1] == "BF16: copies_4k, % 75.0 ± 10.0; copies_4k, nats 0.2500 ± 0.0500."
    assert "BF16:" not in table([{"case": BF16, "method": "none"}, row("oscar", 0, 64)])


def test_table_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    record.write(tmp_path / "x.json", command.NAME, [json.loads(json.dumps(row("oscar", 0, 64)))])
    monkeypatch.setattr(sys, "argv", ["windows", "--table", "--out", str(tmp_path / "x.json")])
    command.main()
    assert "| 0 + 64 |" in capsys.readouterr().out


def test_page(tmp_path: Path) -> None:
    settings = {"length": 4096, "measured": 512, "texts": [{"file": "a.txt"}, {"file": "b.txt"}]}
    one = row("oscar", 0, 64, kl=0.05, kl_se=None, settings=settings, kl_contexts=[[0.05, 1.0]], kl_contexts_used=1)
    one |= {"copies_4k_prompts": [[1, 4, 3.0, 99], [2, 4, 3.0, 99]], "copies_4k_prompts_used": 1}
    record.write(tmp_path / "windows_m.json", command.NAME, [one])
    found = page([tmp_path / "windows_m.json"])
    assert found.startswith(HEAD) and "\n## m\n" in found and table([one]) in found
    assert "1 contexts of 4,096 tokens, of which the last 512 count; a.txt and b.txt. 4 keys in 1 prompts." in found
    assert "(../../benchmarks/results/windows_m.json)" in found


def test_the_page_is_that_of_the_results() -> None:
    """The page exists if there are results, both are complete, and the other pages link to it."""
    files = sorted(RESULTS.glob("windows_*.json"))
    assert PAGE.exists() == bool(files), "run `python -m benchmarks.windows --page`"
    linked = [
        name for name in ("README.md", "accuracy.md") if "(results/windows.md)" in (ROOT / "docs" / name).read_text()
    ]
    assert linked == (["README.md", "accuracy.md"] if files else [])
    if files:
        assert PAGE.read_text() == page(files), "run `python -m benchmarks.windows --page`"
    expected = {case.name for case in cases_of(METHODS, SINKS, RECENTS)}
    for file in files:
        found = json.loads(file.read_text())
        rows = [one for one in found["rows"] if one["case"] != BF16]
        assert not found["dirty"] and not any(one.get("dirty") for one in rows), file.name
        assert {one["case"] for one in rows} == expected, file.name
        assert len({(one["kl_contexts_used"], one["copies_4k_prompts_used"]) for one in rows}) == 1, file.name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["m", "--tasks", "kl"], "needs --text"),
        (["m", "--text", "x", "--length", "2048"], "must be above --measured"),
        (["m", "--tasks", "copies", "--length", "2048"], "must be above --measured"),
        (["m", "--tasks", "humaneval"], "Give --eval FOLDER"),
        ([], "MODEL: missing"),
    ],
)
def test_refused(words, message, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(sys, "argv", ["windows", *words, "--out", str(tmp_path / "x.json")])
    with pytest.raises(SystemExit):
        command.main()
    assert message in capsys.readouterr().err
