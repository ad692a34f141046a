"""Contexts, caches after which a model continues, and the rows of outcomes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.research.families import __main__ as command
from benchmarks.research.families.base import RECENT, SINK, History, Stored
from benchmarks.research.families.cases import draw
from benchmarks.research.families.h2o import H2O
from benchmarks.research.families.judge import Judge, rows
from benchmarks.research.families.model import continue_behind, prefill, store
from benchmarks.research.tests import helpers

TOKENS = torch.tensor(helpers.tokens(600))


@pytest.fixture(scope="module")
def model() -> object:
    return helpers.tiny_llama(head_dim=64)


def test_continuing_is_reading_on(model: object) -> None:
    """The result does not depend on which part was read before, and is close to the model's exact result."""
    late, early = prefill(model, TOKENS[:590]), prefill(model, TOKENS[:560])
    found = continue_behind(model, TOKENS[590:], 590, store(late, None)[0], 10)
    torch.testing.assert_close(
        found, continue_behind(model, TOKENS[560:], 560, store(early, None)[0], 10), atol=0.02, rtol=0.02
    )
    joined = prefill(model, TOKENS[560:590], early)
    for x, y in zip((joined.k, joined.v, joined.mass), (late.k, late.v, late.mass)):
        torch.testing.assert_close(x, y, atol=0.05, rtol=0.02)
    with torch.inference_mode():
        own = model(TOKENS[None]).logits[0, -10:].log_softmax(-1)
    assert (own.exp() - found.exp()).abs().max() < 0.05


def test_attention_of_all_queries_and_of_the_last(model: object) -> None:
    found = prefill(model, TOKENS)
    group = helpers.HEADS // helpers.KV_HEADS
    torch.testing.assert_close(found.mass.sum(-1), torch.full(found.mass.shape[:2], 600.0 * group))
    torch.testing.assert_close(found.observed.sum(-1), torch.full(found.mass.shape[:2], 32.0 * group))
    assert (found.observed <= found.mass + 1e-5).all()


def test_only_the_history_is_compressed(model: object) -> None:
    found = prefill(model, TOKENS)
    assert found.history_end == (600 - RECENT) // 64 * 64 == 320
    seen: list[History] = []

    def zeros(layer: int, history: History) -> Stored:
        seen.append(history)
        return Stored(history.k * 0, history.v * 0, 3.0 * history.elements, torch.full(history.k.shape[:2], 2.0))

    caches, bits = store(found, zeros)
    assert bits == 3.0 and seen[0].positions.tolist() == list(range(SINK, 320))
    for layer, cache in enumerate(caches):
        assert torch.equal(cache.k[:, :SINK], found.k[layer, :, :SINK].float())
        assert torch.equal(cache.v[:, 320:], found.v[layer, :, 320:].float())
        assert (
            not cache.k[:, SINK:320].any() and cache.bias[:, SINK:320].eq(2).all() and cache.bias.sum() == 2 * 2 * 256
        )


def test_a_bias_counts(model: object) -> None:
    """A token without attention has the effect of an absent token."""
    found = prefill(model, TOKENS)

    def hidden(layer: int, history: History) -> Stored:
        return Stored(history.k, history.v, 0.0, torch.full(history.k.shape[:2], -1e9))

    def absent(layer: int, history: History) -> Stored:
        return Stored(history.k[:, :0], history.v[:, :0], 0.0)

    a, b = (continue_behind(model, TOKENS[:5], 600, store(found, one)[0], 5) for one in (hidden, absent))
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def cases(count: int = 2) -> list:
    writer = helpers.writer().tokenizer
    text = torch.tensor(writer(" ".join(f"word{n}" for n in range(1500)))["input_ids"])
    encode = lambda s: writer(s)["input_ids"]  # noqa: E731 a function of one line
    return list(draw(encode, writer.decode, [text], count, 900, 8))


def test_what_is_asked_is_history() -> None:
    writer = helpers.writer().tokenizer
    for case in cases():
        assert len(case.ids) == 900 and len(case.following) == 8
        read = writer.decode(case.ids[: (900 - RECENT) // 64 * 64].tolist())
        for task, question in case.questions.items():
            answer = writer.decode(question.answer.tolist()).strip()
            assert answer in read[SINK:], task
            assert answer not in writer.decode(question.ids.tolist())
    assert cases()[0].questions["needle"].answer.tolist() != cases()[1].questions["needle"].answer.tolist()


def keep_all(layer: int, history: History) -> Stored:
    return Stored(history.k, history.v, 16.0 * history.elements)


def test_an_exact_cache_diverges_by_nothing(model: object) -> None:
    judge = Judge(model, cases(1)[0])
    assert judge.outcome(None)["kl"] == 0 and judge.outcome(None)["bits"] == 16
    lossy = judge.outcome(H2O(2.0))
    assert lossy["kl"] > 0.01 and 1.9 < lossy["bits"] <= 2
    asked, exact = judge.asked(keep_all), judge.outcome(None)
    for task in ("exact_keys", "needle"):  # everything is kept, so the question's place changes nothing
        assert asked[f"{task}_asked"]["nats"] == pytest.approx(exact[task]["nats"], rel=1e-3)


def test_rows() -> None:
    def outcome(case: str, method: str, budget: float, kl: float, copied: bool) -> dict:
        answer = {"nats": 3.0, "tokens": 6, "likeliest": 5 + copied, "copied": copied}
        return {"model": "m", "case": case, "budget": budget, "method": method, "setting": "s", "bits": budget,
                "tokens": 4, "kl": kl, "agree": 3.0, "exact_keys": answer, "needle": answer}  # fmt: skip

    found = list(rows([outcome("0", "none", 16, 0.0, True), outcome("1", "none", 16, 0.0, False),
                       outcome("0", "h2o", 2, 0.4, True), outcome("1", "h2o", 2, 0.8, False)]))  # fmt: skip
    (kl,) = (row for row in found if (row["task"], row["method"]) == ("kl", "h2o"))
    assert kl["score"] == pytest.approx(0.15) and kl["score_se"] == pytest.approx(0.05) and kl["cases"] == 2
    (keys,) = (row for row in found if (row["task"], row["method"]) == ("exact_keys", "h2o"))
    assert keys["score"] == keys["bf16_score"] == 0.5 and keys["nats"] == 0.5


def test_a_run_continues_and_is_reported(
    model: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = helpers.writer().tokenizer
    monkeypatch.setattr(command, "load_model", lambda *a, **k: (model, writer))
    monkeypatch.setattr(command, "catalog", lambda *a: iter(entries))
    monkeypatch.setattr(command, "calibrated", lambda *a: None)
    entries = [command.Entry(16.0, "none", "bf16", None)]
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"word{n}" for n in range(1500)))
    words = ["x", "folder/Tiny", "--text", str(text), "--calibration", str(text), "--cases", "2", "--length", "900",
             "--following", "4", "--work", str(tmp_path / "work")]  # fmt: skip
    monkeypatch.setattr("sys.argv", words)
    command.main()
    entries.append(command.Entry(2.0, "h2o", "", H2O(2.0), choosing=True))
    command.main()
    log = (tmp_path / "work" / "tiny.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in log] == ["16/none", "16/none", "2/h2o", "2/h2o"]
    out = tmp_path / "families.json"
    monkeypatch.setattr("sys.argv", ["x", "--report", "--work", str(tmp_path / "work"), "--out", str(out)])
    command.main()
    found = json.loads(out.read_text())["rows"]
    assert {row["task"] for row in found if row["method"] == "h2o"} == {
        "kl", "exact_keys", "exact_keys_asked", "needle", "needle_asked"}  # fmt: skip
