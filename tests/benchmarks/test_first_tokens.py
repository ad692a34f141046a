"""Times to the first token: servers take turns, rounds after an emptied cache do not count, and the table compares."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import first_tokens, record, traces
from benchmarks.bench_serving.tables import first_tokens as table
from tests.benchmarks.test_workloads import Streaming

ROUNDS = 3


def test_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each server is measured in every round; the slower one has the larger times, divided into their stages."""
    out, paces = tmp_path / "first_tokens_x.json", iter((0.01, 0.05))
    monkeypatch.setattr(
        first_tokens.servers, "server", lambda spec, setup, *rest: Streaming(rest[-1] / "log", next(paces))
    )
    for name, value in (("TOKENS", (64,)), ("AT_ONCE", (1, 2)), ("ROUNDS", ROUNDS)):
        monkeypatch.setattr(first_tokens, name, value)
    words = f"first_tokens --cpu --layers 2 --methods none --eager --blocks 2 --out {out}"
    monkeypatch.setattr(sys, "argv", words.split())
    first_tokens.main()
    assert "2 servers: none, none --disable-prefill-cuda-graph" in capsys.readouterr().out
    fast, slow = record.read_rows(out)
    assert [row["scenario"].rpartition("first tokens, ")[2] for row in (fast, slow)] == [
        "none",
        "none --disable-prefill-cuda-graph",
    ]
    assert fast["rounds"] == slow["rounds"] == 2 * (ROUNDS - 1)
    for name in ("ttft_64x1", "ttft_64x2"):
        assert 10 <= fast[f"{name}_ms"] < slow[f"{name}_ms"] < 5000
        low, high = slow["quartiles_ms"][name]
        assert low <= slow[f"{name}_ms"] <= high
        before, forward, after = slow["stages_ms"][name]
        assert forward >= 50 and before > 0 and after > 0  # a token of this server takes 50 ms
        assert before + forward + after == pytest.approx(slow[f"{name}_ms"], rel=0.5)
    monkeypatch.setattr(sys, "argv", ["first_tokens", "--table", "--out", str(out)])
    first_tokens.main()
    assert "| 2 of 64 tokens | " in capsys.readouterr().out
    monkeypatch.setattr(first_tokens, "profile", lambda client, tokens, after: {"busy": tokens, "after": after})
    paces = iter((0.01,))
    words = f"first_tokens --layers 2 --methods none --blocks 1 --profile 64,512 --out {out}"
    monkeypatch.setattr(sys, "argv", words.split())
    first_tokens.main()
    row = record.read_rows(out)[-1]
    assert row["profile_us"] == {"64": {"busy": 64, "after": 0}, "512": {"busy": 512, "after": 0}}


class Recorded:
    """A client whose answers carry a number: how many runs there were since its cache was emptied."""

    uncached = 64

    def __init__(self) -> None:
        self.server, self.since, self.prompts, self.stored = self, 0, set(), None

    def drain(self) -> None:
        self.since, self.stored = 0, None

    def cache(self, prompts: list) -> None:
        (self.stored,) = prompts

    def prompt(self, kind: str, index: int, tokens: int) -> tuple:
        return kind, index, tokens

    def run(self, prompts: list, tokens: int) -> list:
        assert not self.prompts & set(prompts), "a prompt was sent before, so it is cached"
        self.prompts |= set(prompts)
        self.since += 1
        return [Answer(self.since, index) for index in range(len(prompts))]


class Answer:
    cached = 500

    def __init__(self, since: int, ttft: float) -> None:
        self.since, self.ttft = since, ttft


def test_a_profile_is_of_lone_prompts_of_which_none_is_cached(monkeypatch, capsys):
    """The first prompt comes before the profile; all begin with the cached tokens."""
    log: list[object] = []

    class Client:
        layers, trace = 3, first_tokens.Client.trace
        server = SimpleNamespace(
            drain=lambda: log.append("drain"), request=lambda path, body: log.append((path, body["num_steps"]))
        )

        def prompt(self, kind: str, index: int, tokens: int) -> list[object]:
            return [(kind, index)] * tokens

        def cache(self, prompts: list) -> None:
            log.append(("cache", [len(prompt) for prompt in prompts]))

        def run(self, prompts: list, tokens: int, at_once: int | None = None) -> None:
            log.append((len(prompts), at_once, {len(prompt) for prompt in prompts}))
            ends.extend(prompt[-1] for prompt in prompts)

    ends: list[object] = []
    monkeypatch.setattr(traces, "read_trace", lambda folder, wait: ["events"])
    monkeypatch.setattr(traces, "per_step", lambda *found: found)
    steps = first_tokens.PROFILED
    assert first_tokens.profile(Client(), 5, after=2) == (["events"], steps, 3)
    rest = (steps + 1, 1, {7})
    assert log == ["drain", ("cache", [2]), (1, None, {7}), ("/start_profile", steps), rest]
    assert len(set(ends)) == steps + 2
    log.clear()
    first_tokens.profile(Client(), 5)
    assert log == ["drain", (1, None, {5}), ("/start_profile", steps), (steps + 1, 1, {5})]

    def nothing(folder, wait):
        raise FileNotFoundError(f"{folder}: no trace")

    monkeypatch.setattr(traces, "read_trace", nothing)
    assert first_tokens.profile(Client(), 5) == {}
    assert "no profile of 5 tokens: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--profile 512,x", "--profile 512,x: give numbers of tokens up to 2048"),
        ("--profile 4096", "--profile 4096: give numbers"),
        ("--profile 512 --cpu", "--profile: only a GPU's kernels"),
    ],
)
def test_profiles_that_cannot_be(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words, message):
    monkeypatch.setattr(sys, "argv", ["first_tokens", "--out", "x.json", *words.split()])
    with pytest.raises(SystemExit):
        first_tokens.main()
    assert message in capsys.readouterr().err


def test_no_blocks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["first_tokens", "--blocks", "0", "--out", "x.json"])
    with pytest.raises(SystemExit):
        first_tokens.main()
    assert "--blocks 0: it must be at least 1." in capsys.readouterr().err


@pytest.mark.parametrize("blocks", [1, first_tokens.BLOCKS])
def test_rounds_after_an_emptied_cache_do_not_count(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    monkeypatch.setattr(first_tokens, "ROUNDS", ROUNDS)
    clients = [Recorded(), Recorded()]
    found = dict(first_tokens.rounds(clients, blocks=blocks))
    assert list(found)[:3] == ["ttft_64x1", "ttft_64x8", "ttft_128x1"] and len(found) == 10
    for name, streams in found.items():
        for mine in streams:
            assert len(mine) == blocks * (ROUNDS - 1)
            assert {answer.since for answer in mine} == set(range(2, ROUNDS + 1))
            slowest = int(name.rpartition("x")[2]) - 1
            assert {answer.ttft for answer in mine} == {slowest}


def test_prompts_after_cached_tokens_begin_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_tokens, "ROUNDS", ROUNDS)
    client = Recorded()
    run, began = client.run, []
    monkeypatch.setattr(
        client, "run", lambda prompts, n: began.append((client.stored, [p[:3] for p in prompts])) or run(prompts, n)
    )
    next(first_tokens.rounds([client], 512))
    assert began and all(stored and {*begins} == {stored} for stored, begins in began)
    with pytest.raises(first_tokens.Failed, match="only 500 of 600 tokens"):
        next(first_tokens.rounds([Recorded()], 600))


def test_the_table_compares_with_bf16() -> None:
    rows = [
        {"scenario": "first tokens, oscar", "method": "oscar", "ttft_64x1_ms": 21.0, "ttft_1024x8_ms": 300.0},
        {"scenario": "first tokens, none", "method": "none", "ttft_64x1_ms": 20.0, "ttft_1024x8_ms": 200.0},
    ]
    assert table(rows).splitlines()[2:] == [
        "| prompts at once | BF16 | `oscar` |",
        "| --- | --- | --- |",
        "| 1 of 64 tokens | 20.0 | 21.0 (1.05x) |",
        "| 8 of 1,024 tokens | 200.0 | 300.0 (1.50x) |",
    ]
