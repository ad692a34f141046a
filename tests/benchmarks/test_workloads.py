"""Workloads of SGLang's benchmark: the requests, the measurements, and the tables."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record, workloads
from benchmarks.bench_serving import servers, stock
from benchmarks.bench_serving.figure import plot
from benchmarks.bench_serving.rows import measurements, one_after_another, scenario
from benchmarks.bench_serving.sampler import Sampler, parse
from benchmarks.bench_serving.stock import Measured, Request
from benchmarks.bench_serving.tables import bench_rows, line, markdown
from benchmarks.bench_serving.words import write_tokenizer
from benchmarks.bench_serving.workloads import TINY, WORKLOADS, Load, Workload, chosen
from launch.server import Server
from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.specs import parse as parse_method
from sglang_kvq.server_process import ServerProcess, free_port
from sglang_kvq.sglang.observe import QUIET

RESULTS = record.ROOT / "benchmarks" / "results"
LOAD = Load(2, 6, 40, 12)


# -- what is asked for ------------------------------------------------------------------------------------


def test_workloads_are_those_of_the_issue() -> None:
    single = {name: workload.loads[0] for name, workload in WORKLOADS.items() if len(workload.loads) == 1}
    assert {name: (one.prompt, one.output, one.clients) for name, one in single.items() if one.turns == 1} == {
        "200": (200, 200, 1024),
        "1k": (1024, 256, 512),
        "8k": (8192, 512, 256),
        "48k": (49152, 512, 48),
    }
    chats = single["chats"]
    assert (chats.clients, chats.turns, chats.longest) == (64, 6, 12_000)
    parts = WORKLOADS["mix"].loads
    assert [part.clients for part in parts] == [256, 128, 64, 12, 16]
    assert single["varied"] == replace(chats, least=0.5)
    assert all(load.requests % load.group == 0 for load in (*parts, chats))


def test_lengths_of_conversations_vary_where_wanted() -> None:
    (same,), (varied,) = WORKLOADS["chats"].arguments(), WORKLOADS["varied"].arguments()
    assert varied == [*same, "--gsp-range-ratio", "0.5"]
    (workload,) = chosen("varied@1", WORKLOADS, seconds=60)
    assert workload.title == "chats of 6K to 12K, 1 a second"
    assert workloads.settings(workload, setup())["loads"][0]["least"] == 0.5
    assert "least" not in workloads.settings(WORKLOADS["chats"], setup())["loads"][0]


def test_loads_of_a_workload_differ_in_their_seeds_only_by_their_number() -> None:
    words = WORKLOADS["mix"].arguments()
    seeds = [one[one.index("--seed") + 1] for one in words]
    assert len(set(seeds)) == len(words) and words == WORKLOADS["mix"].arguments()


def test_a_rate_is_an_open_loop_for_the_time_of_the_workload() -> None:
    (workload,) = chosen("1k@2.5", WORKLOADS, seconds=10)
    (load,) = workload.loads
    assert (workload.name, load.requests, load.rate) == ("1k@2.5", 25, 2.5)
    (words,) = workload.arguments()
    assert words[words.index("--request-rate") + 1] == "2.5" and "--max-concurrency" not in words
    (workload,) = chosen("chats@0.3", WORKLOADS, seconds=10)
    assert workload.loads[0].requests == 4, "whole groups"
    assert workload.title == "chats to 12K, six rounds, 0.3 a second"
    (words,) = chosen("chats@1.5", WORKLOADS, seconds=60)[0].rehearsal(10)
    assert words[words.index("--gsp-num-groups") + 1] == "4", "a rehearsal does not wait for those who come later"
    assert WORKLOADS["mix"].rehearsal(10) == WORKLOADS["mix"].arguments()
    (workload,) = chosen("200@50", WORKLOADS, seconds=10)
    assert workload.title == "200 + 200 tokens, 50 a second"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("2k", "not a workload. Choose from 200"),
        ("mix@2", "several loads"),
        ("1k@fast", "no rate"),
        ("1k@0", "no rate"),
    ],
)
def test_wrong_workloads(words: str, message: str) -> None:
    with pytest.raises(KVQuantError, match=message):
        chosen(words, WORKLOADS)


def test_text_and_tokens_of_words_mean_the_same(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path, 1000))
    ids = [7, 0, 999, 7, 123]
    assert tokenizer.decode(ids) == "w7 w0 w999 w7 w123" and tokenizer.encode("w7 w0 w999 w7 w123") == ids
    assert tokenizer.vocab_size == len(tokenizer.get_vocab()) == 1000
    messages = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
    assert tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"] == [1, 2, 3]


# -- servers ----------------------------------------------------------------------------------------------


def setup(**changes: object) -> servers.Setup:
    settings = {"layers": None, "shared": (), "plain": ("--attention-backend", "fa3"), "recent_min": None, "cpu": True}
    return servers.Setup(**{"model": workloads.MODEL, **settings, **changes})


def test_flags_of_methods(tmp_path: Path) -> None:
    small = setup(layers=2, recent_min=0)
    assert servers.method_flags(parse_method("none"), small, tmp_path) == ["--attention-backend", "fa3"]
    assert servers.method_flags(parse_method("fp8"), small, tmp_path)[:2] == ["--kv-cache-dtype", "fp8_e4m3"]
    flags = servers.method_flags(parse_method("transform:2.5"), small, tmp_path)
    assert flags[:4] == ["--kv-quant", "transform", "--kv-quant-bits", "2.5"]
    assert flags[-2:] == ["--kv-quant-recent-min", "0"] and (Path(flags[5]) / "config.json").exists()
    assert "--kv-quant-prefill-window" not in flags, "as a user serves it"
    assert "--kv-quant-rotations" not in servers.method_flags(parse_method("hadamard"), small, tmp_path)
    assert servers.label(parse_method("oscar"), small) == "oscar --kv-quant-recent-min 0"
    assert servers.label(parse_method("none"), small) == "none"


def test_a_conversation_fits_with_what_a_chat_template_adds(tmp_path: Path) -> None:
    words = servers.server(parse_method("none"), setup(), tmp_path, 300, tmp_path).command
    assert int(words[words.index("--context-length") + 1]) >= 300 + 256


def test_a_method_has_no_chunk_size_of_its_own() -> None:
    with pytest.raises(KVQuantError, match="Leave out what follows #"):
        servers.specs_of("none,oscar#128")


# -- what is measured -------------------------------------------------------------------------------------


def request(begin: float, ttft: float, latency: float, tokens: int, *, cut: bool = False, error: str = "") -> Request:
    return Request(begin, ttft, latency, tokens, asked=12, prompt=40, cut=cut, error=error)


WORKLOAD = Workload("x", "X, 2 clients", (LOAD,), seconds=10, ttft=1500, tpot=100)


def test_figures_of_whole_requests() -> None:
    # Answers take 0.1 or 0.2 s per token after the first. The second of three is too slow; the third waits too long.
    found = [request(100, 1.0, 2.1, 12), request(101, 1.0, 3.2, 12), request(102, 2.0, 3.1, 12)]
    row = measurements(WORKLOAD, [Measured(found[:2], 0, {}), Measured(found[2:], 0, {})])
    assert row["seconds"] == pytest.approx(5.1) and row["whole"] is True
    assert row["decoding"] == 2, "the second and third, from 104 on; the first had ended"
    assert row["output_tokens_per_s"] == pytest.approx(36 / 5.1, abs=0.01)
    assert (row["ttft_p50_ms"], row["tpot_p50_ms"]) == (1000.0, 100.0)
    assert row["goodput_per_s"] == pytest.approx(1 / 5.1, abs=1e-4) and row["good_share"] == pytest.approx(
        1 / 3, abs=1e-4
    )


def test_requests_that_the_time_cuts_count_with_what_they_have() -> None:
    found = [request(100, 1.0, 2.1, 12), request(100, 1.0, 10.0, 7, cut=True), request(104, 0.0, 6.0, 0, cut=True)]
    row = measurements(WORKLOAD, [Measured(found, 3, {})])
    assert (row["completed"], row["cut"], row["waited"], row["unsent"], row["whole"]) == (1, 2, 1, 3, False)
    assert row["output_tokens"] == 19 and row["seconds"] == 10
    assert row["ttft_p99_ms"] > 5800, "it waits for 6 s at least"
    assert "≥ " in line({"workload": "x", "method": "none", **row})


def test_repetitions_count_as_if_one_followed_the_other() -> None:
    turns = [[Measured([request(100, 1, 2.1, 12), request(101, 2, 3.1, 12)], 1, {})]]
    turns += [[Measured([request(500, 0, 8, 0, cut=True), request(502, 4, 5.1, 12)], 2, {})]]
    row = measurements(WORKLOAD, one_after_another(turns))
    assert row["seconds"] == pytest.approx(4.1 + 8) and row["decoding"] == 1
    assert (row["completed"], row["waited"], row["unsent"]) == (3, 1, 3)
    assert row["ttft_p50_ms"] == 3000, "of 1, 2, 4 and at least 8 s"


def test_repetitions_have_other_prompts() -> None:
    words = [WORKLOADS["mix"].arguments(turn) for turn in range(3)]
    seeds = [one[one.index("--seed") + 1] for turn in words for one in turn]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([request(0, 1, 2, 12), request(0, 0, 1, 0, error="refused")], "1 of 2 requests failed: refused"),
        ([request(0, 1, 2, 11)], "an answer ended after 11 of 12 tokens"),
        ([request(0, 0, 10, 0, cut=True)], "no token in 10 s. Give more time: --seconds"),
    ],
)
def test_a_wrong_answer_has_no_figures(found: list[Request], message: str) -> None:
    with pytest.raises(KVQuantError, match=message):
        measurements(WORKLOAD, [Measured(found, 0, {})])


def test_metrics_are_summed_over_workers() -> None:
    text = '# HELP a\nsglang:num_running_reqs{dp="0"} 3.0\nsglang:num_running_reqs{dp="1"} 4.0\nup 1\n'
    assert parse(text) == {"sglang:num_running_reqs": 7.0, "up": 1.0}


# -- SGLang's benchmark itself ----------------------------------------------------------------------------


@pytest.fixture
def streaming() -> Iterator[str]:
    """Starts a server that needs 20 ms per token."""
    port = free_port()
    script = Path(__file__).with_name("streaming_server.py")
    server = subprocess.Popen([sys.executable, str(script), str(port), "0.02"])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{url}/model_info", timeout=60).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "the stand-in server does not answer"
                time.sleep(0.1)
        yield url
    finally:
        server.kill()
        server.wait()


def test_benchmark_of_several_loads(streaming: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For two loads at once, our figures equal the benchmark's, and prompts have the requested lengths."""
    module, prepared = stock.benchmark(), multiprocessing.get_context("fork").Queue()

    def prompts_of(arguments: Any, *more: Any, make: Any = module.get_dataset) -> Any:
        rows = make(arguments, *more)
        time.sleep(1.0 if arguments.seed == 2 else 0.0)
        prepared.put(time.perf_counter())
        return rows

    monkeypatch.setattr(module, "get_dataset", prompts_of)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", 512)
    loads = [LOAD.arguments(1), Load(2, 2, 30, 5, turns=3, shared=20, group=2).arguments(2)]
    with Sampler(streaming) as sampler:
        plain, chats = stock.run(loads, streaming, tokenizer, 100, tmp_path)
    assert sampler.most == {"running": 2, "queued": 1}
    assert [one.tokens for one in plain.requests] == [12] * 6 and not any(one.cut for one in plain.requests)
    assert {one.prompt for one in plain.requests} == {40}
    row = measurements(WORKLOAD, [plain])
    assert row["whole"] and row["output_tokens"] == plain.summary["total_output_tokens"]
    for ours, theirs in (("ttft_p50_ms", "median_ttft_ms"), ("tpot_p50_ms", "median_tpot_ms")):
        assert row[ours] == pytest.approx(plain.summary[theirs], rel=0.01)
    # Ours are rounded to hundredths; theirs begin before the first request.
    assert -0.005 <= plain.summary["duration"] - row["seconds"] < 5
    # A turn's prompt repeats all before it: 20 shared tokens and 30 of its own, then 5 answered and 30 more.
    if hasattr(stock.benchmark(), "_record_server_prompt_len"):  # older ones report the first turn's length for all
        assert sorted(one.prompt for one in chats.requests) == [50, 50, 85, 85, 120, 120]
    begins = [min(one.begin for one in load.requests) for load in (plain, chats)]
    assert min(begins) >= max(prepared.get(timeout=60) for _ in begins), "a load began before the other was ready"

    # When the time is over, running requests are cut and the rest is not sent; prompts and their order stay the same.
    (cut,) = stock.run([Load(2, 6, 40, 2000).arguments(1)], streaming, tokenizer, 3.0, tmp_path)
    assert [one.cut for one in cut.requests] == [True, True] and cut.unsent == 4
    assert all(5 < one.tokens < 2000 for one in cut.requests)
    assert measurements(WORKLOAD, [cut])["whole"] is False

    with pytest.raises(KVQuantError, match="ended with status"):
        stock.run([["--backend", "unknown"]], streaming, tokenizer, 1.0, tmp_path)


class Streaming(Server):
    """The stand-in server, with the interface that the script expects."""

    def __init__(self, log: Path, pace: float) -> None:
        port = free_port()
        script = Path(__file__).with_name("streaming_server.py")
        ServerProcess.__init__(self, [sys.executable, str(script), str(port), str(pace)], log, port, {})


def run_script(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["workloads", *words.split()])
    monkeypatch.setattr(workloads, "FAILED", [])
    workloads.main()


def test_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The script measures, resumes where it was stopped, and keeps no row of a server with another cache."""
    out, started = tmp_path / "serving_x.json", []

    def server(spec, setup, tokenizer, context, folder):
        started.append(spec.label)
        return Streaming(folder / "log", 0.01)

    monkeypatch.setattr(workloads.servers, "server", server)
    asked = f"--cpu --tiny --layers 2 --out {out} --methods none"
    run_script(f"{asked} --workloads 200 --minutes 9", monkeypatch)
    assert [row["scenario"] for row in record.read_rows(out)] == ["bench 200, none"]
    run_script(f"{asked} --workloads 200,1k,mix --minutes 0.1", monkeypatch)
    shown = capsys.readouterr().out
    assert (
        started == ["none"]
        and "bench 200, none: kept" in shown
        and "left, for the same command again: 1k of none" in shown
    )
    run_script(f"{asked} --workloads 200,mix --minutes 9 --rehearse 5", monkeypatch)
    assert "none: rehearsed after" in capsys.readouterr().out
    found = {row["workload"]: row for row in record.read_rows(out)}
    assert list(found) == ["200", "mix"] and started == ["none", "none"]
    assert found["200"]["output_tokens"] == 72 and found["mix"]["output_tokens"] == 72 + 27 + 54
    assert found["mix"]["cache_tokens"] == 1000 and found["mix"]["allocated_bits"] == 16
    assert (tmp_path / "serving_x_workloads.png").exists()
    run_script(f"--table --out {out}", monkeypatch)
    assert "| 40 + 12 tokens, 4 clients |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="FAILED: int4: --methods int4: the server's cache is none"):
        run_script(f"--cpu --tiny --layers 2 --out {out} --methods int4 --workloads 200", monkeypatch)
    assert len(record.read_rows(out)) == 2


class Idle:
    """A server that runs nothing, but whose tiers hold pages for some seconds."""

    def __init__(self, seconds: float, monkeypatch) -> None:
        self.now, self.end = 0.0, seconds
        monkeypatch.setattr(servers.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(servers.time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def drain(self) -> None: ...

    def json(self, path: str, body: dict) -> None: ...

    def info(self) -> dict:
        return {"internal_states": [{"kv_quant": {"tiers": {"bf16_tokens": 64 * (self.now < self.end)}}}]}


def test_an_idle_server_has_time_to_give_its_pages_back(monkeypatch) -> None:
    assert servers.held(Idle(QUIET + 1, monkeypatch)) == {}
    assert servers.held(Idle(100, monkeypatch)) == {"bf16_tokens": 64}


# -- result files -----------------------------------------------------------------------------------------


def rows() -> list[dict]:
    found = []
    for method, rate in (("none", 100.0), ("transform:2.5", 150.0), ("oscar", 125.0)):
        given = [request(100, 1.0, 2.1, 12), request(101, 1.0, 1.0 + 1200 / rate, 12, cut=method == "none")]
        found.append(
            {
                "scenario": scenario("x", method),
                "workload": "x",
                "title": "X, 2 clients",
                "method": method,
                **measurements(WORKLOAD, [Measured(given, 0, {})]),
                "output_tokens_per_s": rate,
                "decoding": 2,
                **({"lost_window_pages": 5.0} if method == "oscar" else {}),
            }
        )
    return found


def test_tables_and_figure(tmp_path: Path) -> None:
    text = markdown([{"scenario": "decode_4x1k", "unit": "ms"}, *rows()])
    assert "| workload | BF16 | `oscar` | `transform 2.5` |" in text
    assert "| X, 2 clients | 100 | 125 (1.25x) | 150 (1.50x) |" in text
    assert "| X, 2 clients | 2 | 2 (5 pages) | 2 |" in text
    assert markdown([{"scenario": "decode_4x1k"}]) == ""
    flagged = [{**row, "method": f"{row['method']} --flag 1"} for row in rows()]
    assert "| workload | BF16 `--flag 1` | `oscar --flag 1` | `transform 2.5 --flag 1` |" in markdown(flagged)
    out = tmp_path / "serving_x.json"
    record.write(out, "serving", rows())
    target = plot(out)
    assert target == tmp_path / "serving_x_workloads.png" and target.stat().st_size > 10_000


def test_what_the_file_has_is_kept_unless_its_settings_differ(tmp_path: Path) -> None:
    out, spec, tiny = tmp_path / "x.json", parse_method("oscar"), chosen("200,1k", TINY)
    row = {"scenario": scenario("200", "oscar"), "settings": workloads.settings(tiny[0], setup())}
    record.write(out, "serving", [json.loads(json.dumps(row))])
    assert workloads.missing(out, spec, tiny, setup(), again=False) == tiny[1:]
    assert workloads.missing(out, spec, tiny, setup(), again=True) == tiny
    with pytest.raises(KVQuantError, match=r"'bench 200, oscar' has other settings. Give --again"):
        workloads.missing(out, spec, tiny, setup(shared=("--tp-size", "2")), again=False)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("serving_*.json")), ids=lambda path: path.stem)
def test_page_has_the_tables_of_each_file(path: Path) -> None:
    """The page holds the tables that ``python benchmarks/workloads.py --table --out FILE`` writes."""
    page = (record.ROOT / "docs" / "results" / "serving.md").read_text()
    found = json.loads(path.read_text())["rows"]
    assert markdown(found) in page
    if bench_rows(found):
        assert f"results/{path.stem}_workloads.png" in page


def test_page_has_no_other_tables() -> None:
    files = (json.loads(path.read_text())["rows"] for path in sorted(RESULTS.glob("serving_*.json")))
    made = [line for rows in files for line in markdown(rows).splitlines() if line.startswith("|")]
    page = (record.ROOT / "docs" / "results" / "serving.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("|")] == made
