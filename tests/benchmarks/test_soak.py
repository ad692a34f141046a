"""The soak notices every fault that it should; functions replace the server."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import soak, soak_check
from benchmarks.answers import Bound, Difference, Step, greedy_difference
from benchmarks.copy_check import NAMES
from benchmarks.soak_check import LATE_TWICE, LEAST, Way, ways
from benchmarks.soak_traffic import Answer, Prefixes, Talk
from sglang_kvq.constants import PAGE_SIZE

SCALE = replace(soak.CPU, pause=0.4, calibration=12, clients=4, wait=0.01, longest=300)


class FakeServer:
    """A server whose log-probabilities depend only on earlier tokens, so that two agree unless one is wrong."""

    def __init__(self, wrong_every: int = 0, held: tuple[str, ...] = ()) -> None:
        self.wrong_every, self.held, self.count, self.lock = wrong_every, list(held), 0, threading.Lock()
        self.running, self.sessions = True, {}
        self.places: dict[str, int] | None = None  #: tokens per place where prompts were cached
        self.copies: dict[str, dict[str, int]] = {}
        self.moves: int | None = None  #: moves of the boundary of a shared memory
        self.late: dict[str, int] = {}

    def start(self, timeout: float) -> None: ...

    def stop(self) -> None:
        self.running = False

    def drain(self) -> None: ...

    def log(self) -> str:
        return "Retract requests. #retracted_reqs: 2, new_token_ratio"

    log_tail = lambda self, lines=40: self.log()  # noqa: E731

    def info(self) -> dict:
        return {"kv_quant": {"bf16_pages": 30}}

    def states(self) -> list[dict]:
        tiers = {"bf16_tokens": 64 if self.held else 0, "quantized_tokens": 0}
        moves = {} if self.moves is None else {"boundary_moves": self.moves}
        copies = {name: counts for name, counts in (("copies", self.copies), ("late", self.late)) if counts}
        return [{"kv_quant": {"tiers": tiers, **copies, **moves}}]

    def held_when_empty(self) -> list[str]:
        return self.held

    def request(self, path: str, body: dict, timeout: float = 60) -> bytes:
        if path != "/open_session":
            return b""
        with self.lock:
            name = f"session {len(self.sessions)}"
            self.sessions[name] = []
        return json.dumps(name).encode()

    def stream(self, path: str, asked: dict, timeout: float = 60, headers: dict | None = None) -> io.BytesIO:
        return io.BytesIO(b"data: {}\n" * 6)

    @staticmethod
    def logprob(before: list[int], token: int, shift: float) -> float:
        # Depends on every page before it, as attention does.
        return -abs(math.sin(sum(before) * 1e-3 + token)) - shift

    def json(self, path: str, asked: dict | None = None, timeout: float = 60):
        if path == "/v1/loads":
            return {"loads": [{"num_used_tokens": 0}]}
        prompts = asked["input_ids"] if isinstance(asked["input_ids"][0], list) else [asked["input_ids"]]
        time.sleep(0.001)
        replies = [self._reply(ids, asked) for ids in prompts for _ in range(asked["sampling_params"].get("n", 1))]
        return replies if len(replies) > 1 else replies[0]

    def _reply(self, ids: list[int], asked: dict) -> dict:
        with self.lock:
            self.count += 1
            shift = 2.0 if self.wrong_every and self.count > 100 and self.count % self.wrong_every == 0 else 0.0
        session = asked.get("session_params", {}).get("id")
        rng, pairs, context = random.Random(sum(ids)), [], self.sessions.get(session, []) + ids
        for _ in range(asked["sampling_params"]["max_new_tokens"]):
            token = rng.randrange(2, 512)
            pairs.append([self.logprob(context, token, shift), token, None])
            context.append(token)
        if session:
            self.sessions[session] = context
        start = asked.get("logprob_start_len", -1)
        inputs = [[None, 0, None]] + [
            [self.logprob(ids[:at], ids[at], 0.0), ids[at], None] for at in range(start + 1, len(ids))
        ]
        meta = {"id": "1", "cached_tokens": 0, "output_token_logprobs": pairs, "input_token_logprobs": inputs}
        return {"meta_info": {**meta, "cached_tokens_details": self.places}}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def soaked(
        server: FakeServer,
        second: bool = True,
        fault: bool = False,
        hicache: str | None = None,
        late: bool = False,
        shrink: bool = False,
    ) -> tuple[bool, dict]:
        monkeypatch.setattr(soak.sys, "argv", ["soak.py"])
        args = argparse.Namespace(
            out=tmp_path / "soak.json",
            minutes=0.03 if second else 0.05,
            limit=2.0,
            alone=None,
            method="int4",
            layers=None,
            model="qwen3",
            device="cpu",
            reference="second" if second else "same",
            speculation="none",
            seed=1,
            fault=fault,
            hicache=hicache,
            late=late,
            shrink=shrink,
            streaming=False,
            pair=False,
            logs=None,
        )
        run = soak.Soak(args, tmp_path, 1)
        run.scale = SCALE
        run.make = lambda name, gpu, env, own, room=1: server if name == "server" else FakeServer()
        passed = run.run()
        return passed, json.loads(args.out.read_text())["rows"][0]

    return soaked


@pytest.mark.parametrize("second", [True, False])
def test_a_sound_server_passes(run, second):
    passed, row = run(FakeServer(), second)
    assert passed, row
    assert row["compared"] > 20 and row["wrong_answers"] == row["errors"] == row["leaked_tokens"] == 0
    assert row["aborted"] > 0 and row["retractions"] == 2 and row["wrong_page_seen"] > 0.5
    assert set(row["kinds"]) >= {"single", "pair", "conversation", "session", "abort", "disconnect"}


@pytest.mark.parametrize(
    ("place", "compared", "wrong", "passes"),
    [("storage", 9, 0, True), ("device", 9, 0, False), ("storage", 0, 0, False), ("storage", 9, 1, False)],
)
def test_pages_must_come_from_the_host_and_be_as_they_were(run, place, compared, wrong, passes):
    """A soak of HiCache has shown nothing about HiCache if no pages come from the host, or none were compared."""
    server = FakeServer()
    server.places = {"device": 5, place: 64}
    server.copies = {name: {"compared": compared, "wrong": wrong} for name in NAMES}
    passed, row = run(server, hicache="file")
    assert passed is passes and row["cached_tokens"][place] > 0 and row["copies"] == server.copies, row


@pytest.mark.parametrize("wrong", [0, 1])
def test_without_comparisons_the_copied_pages_decide(run, wrong):
    """If windows may shrink, answers differ, but records do not."""
    server = FakeServer(wrong_every=3)
    server.places, server.moves = {"device": 5, "host": 64}, 4
    server.copies = {name: {"compared": 9, "wrong": wrong} for name in NAMES}
    passed, row = run(server, hicache="host", shrink=True)
    assert passed is (not wrong) and row["compared"] == 0 and row["wrong_answers"] is None, row


@pytest.mark.parametrize(("written", "loaded", "passes"), [(9, 7, True), (9, 0, False), (0, 7, False)])
def test_copies_must_be_late_in_both_directions(run, written, loaded, passes):
    server = FakeServer()
    server.places = {"device": 5, "host": 64}
    server.copies = {name: {"compared": 9, "wrong": 0} for name in NAMES}
    server.late = {"written": written, "loaded": loaded, "moves": 0}
    passed, row = run(server, hicache="file", late=True)
    assert passed is passes and row["late"] == server.late, row


@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        (
            ["--late", "--device", "cuda", "--hicache", "file"],
            "set SGLANG_TEST_HICACHE_H2D_DELAY_CYCLES=2000000 instead",
        ),
        (["--late", "--device", "cpu"], "Add --hicache host or --hicache file"),
        (["--pair", "--reference", "same"], "Use --reference second"),
        (["--shrink", "--streaming"], "--shrink: windows shrink only in a shared memory"),
    ],
)
def test_options_that_do_not_fit_are_refused(flags, fix, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(soak.sys, "argv", ["soak.py", "--out", str(tmp_path / "soak.json"), *flags])
    with pytest.raises(SystemExit):
        soak.main()
    assert fix in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "second"), [([], False), (["--pair"], True)])
def test_a_pair_on_a_cpu_has_a_second_server(flags, second, tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(soak.Soak, "run", lambda run: found.append(run.second) or True)
    monkeypatch.setattr(soak.signal, "signal", lambda *_: None)
    monkeypatch.setattr(soak.sys, "argv", ["soak.py", "--out", str(tmp_path / "soak.json"), "--device", "cpu", *flags])
    assert soak.main() == 0 and found == [second]


@pytest.mark.parametrize("late", [True, False])
def test_only_the_server_with_the_traffic_copies_late(late, tmp_path, monkeypatch):
    words = ["soak.py", "--out", str(tmp_path / "soak.json"), "--device", "cpu", "--hicache", "file", "--logs"]
    made: dict[str, set[str]] = {}

    def plugins(run: soak.Soak) -> bool:
        for name in ("server", "reference"):
            path = run.make(name, 0, {}, []).env.get("PYTHONPATH", "").split(os.pathsep)
            made[name] = {Path(place).name for place in path if Path(place).parent.name == "plugins"}
        return True

    monkeypatch.setattr(soak.Soak, "run", plugins)
    monkeypatch.setattr(soak.signal, "signal", lambda *_: None)
    monkeypatch.setattr(soak.sys, "argv", [*words, str(tmp_path), *(["--late"] if late else [])])
    assert soak.main() == 0
    assert made == {"server": {"crowded", "copy_check"} | ({"late_copies"} if late else set()), "reference": set()}


@pytest.mark.parametrize(("moves", "passes"), [(None, True), (3, True), (0, False)])
def test_the_boundary_of_a_shared_memory_must_move(run, moves, passes):
    server = FakeServer()
    server.moves = moves
    passed, row = run(server)
    assert passed is passes and row["boundary_moves"] == moves, row


@pytest.mark.parametrize("second", [True, False])
def test_wrong_answers_are_counted(run, second):
    passed, row = run(FakeServer(wrong_every=10), second)
    assert not passed and 0 < row["wrong_answers"] < row["compared"]


def test_exchanged_pages_are_counted(run):
    passed, row = run(FakeServer(), fault=True)
    assert not passed and 0 < row["wrong_answers"] <= row["compared"] // 10 + 1


def test_what_is_held_when_drained_is_counted(run):
    passed, row = run(FakeServer(held=("worker 0 holds {'bf16_tokens': 64}",)))
    assert not passed and row["leaked_tokens"] >= 64


class Reader(FakeServer):
    """A server that is less exact for a prompt it has read in pieces; a piece counts only if others came after it."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces, self.last = 0, []

    def drain(self) -> None:
        self.pieces, self.last = 0, []

    def json(self, path: str, asked: dict | None = None, timeout: float = 60):
        ids = asked["input_ids"]
        self.pieces += isinstance(ids[0], list)
        reply = super().json(path, asked, timeout)
        for pairs in (reply["meta_info"]["input_token_logprobs"] if "logprob_start_len" in asked else [])[1:]:
            pairs[0] -= 0.3 * self.pieces
        return reply


@pytest.mark.parametrize(("pieces", "wrong"), [(3, 0), (5, 1)])
def test_a_conversation_is_read_turn_by_turn(pieces, wrong):
    """The third turn was computed from pages that were themselves computed from pages, all without BF16 copies."""
    prompt = [5] * 640
    said = [FakeServer.logprob(prompt + [7] * n, 7, 0.3 * pieces) for n in range(3)]
    checker = soak_check.Checker(Reader(), SCALE, False)
    checker.bound = Bound(0.1, 0.2)
    checker.check(Answer("conversation", prompt, [7, 7, 7], said, 576, turns=[128, 320]))
    assert (checker.compared, checker.wrong) == (1, wrong)


def test_an_answer_is_compared_in_the_ways_that_its_client_knows():
    cold = Answer("single", [5] * 640, [7], [-1.0], 0, turns=[128])
    assert list(ways(cold)) == [Way(0), Way(320, (0,))]
    answer = replace(cold, cached=576, turns=[40, 130, 150, 320, 580])
    assert list(ways(answer)) == [
        Way(576),
        Way(0),
        Way(576, beside=True),
        Way(576, (128, 320)),
        Way(576, (128, 320), beside=True),
        Way(576, late=(0,)),
        *(Way(576, (128, 320), late=late) for late in ((0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,))),
    ]


def test_others_may_take_bf16_copies_after_an_answer_not_before_it():
    """The first prompt was shorter than a page, and its answer filled it; the third page was decoded, too."""
    answer = Answer("session", [5] * 640, [7], [-1.0], 448, turns=[80, 199, 460], asked=[50, 190, 300])
    turns = (64, 128, 192, 256)  # 50 and 460 are no beginnings of whole pages that end before 448
    late = [way.late for way in ways(answer) if way.turns == turns]
    assert late == [(), (), (0, 2, 4), (0, 2), (0, 4), (2, 4), (0,), (2,), (4,)]


def test_a_conversation_keeps_where_its_answers_ended_and_whether_one_was_retracted():
    def reply(count: int, **meta) -> dict:
        return {"meta_info": {"output_token_logprobs": [[-1.0, 7, None]] * count, **meta}}

    node = Talk((5,) * 30, (30,))
    one = node.after([5] * 50, reply(30))
    assert one == Talk((*(5,) * 50, *(7,) * 30), (30, 79), (50,))
    two = one.after([*one.tokens, 5], reply(2, num_retractions=1))
    assert (two.turns, two.asked, two.retracted) == ((30, 79, 82), (50, 81), True)
    assert two.after(two.tokens, reply(1, num_retractions=0)).retracted


def test_with_hicache_answers_after_a_retraction_are_not_compared():
    answer = Answer("single", [5] * 640, [7], [-9.0], 0, retracted=True)
    for hicache, counts in ((False, (1, 1, {})), (True, (0, 0, {"retracted": 1}))):
        checker = soak_check.Checker(FakeServer(), SCALE, False, hicache)
        checker.check(answer)
        assert (checker.compared, checker.wrong, checker.skipped) == counts


def test_with_hicache_long_conversations_are_not_compared():
    answer = Answer("conversation", [5] * 640, [7], [-9.0], 576, turns=[64, 128, 192, 256, 300, 320])
    for hicache, counts in ((False, (1, 1, {})), (True, (0, 0, {"too_many_turns": 1}))):
        checker = soak_check.Checker(FakeServer(), SCALE, False, hicache)
        checker.check(answer)
        assert (checker.compared, checker.wrong, checker.skipped) == counts
    late = [way.late for way in ways(answer) if way.turns and way.late]
    assert late == [(0, 1, 2, 3, 4, 5)]


class Forgetful(FakeServer):
    """A server that is less exact, the more of a prompt's beginnings others followed, counted in whole pages."""

    def __init__(self) -> None:
        super().__init__()
        self.drain()

    def drain(self) -> None:
        self.asked: list[list[int]] = []
        self.late: set[int] = set()

    def json(self, path: str, asked: dict | None = None, timeout: float = 60):
        ids = asked["input_ids"]
        if isinstance(ids[0], list):
            self.late.add(max((len(one) for one in self.asked), default=0) // PAGE_SIZE)
            return []
        cached = max((len(one) for one in self.asked if ids[: len(one)] == one), default=0)
        cached = min(cached, len(ids) - 1) // PAGE_SIZE * PAGE_SIZE
        self.asked.append(ids)
        reply = super().json(path, asked, timeout)
        meta = reply["meta_info"]
        for pair in (*meta["output_token_logprobs"], *meta["input_token_logprobs"][1:]):
            pair[0] -= 0.3 * len(self.late - {0}) * (cached > 0)
        meta["cached_tokens"] = cached
        return reply


def test_late_requests_do_not_widen_the_bound():
    """The reference reads late pages late too, so a bound above that error would only hide exchanged pages."""
    checker = soak_check.Checker(Forgetful(), replace(SCALE, shortest=150), False, hicache=True)
    checker.calibrate(Forgetful(), time.monotonic() + 60)
    assert LATE_TWICE in checker.kinds and len(checker.calibrated) == 4 * SCALE.calibration
    assert checker.bound.mean == LEAST and checker.copies == 30
    assert checker.seen() > 0.9


def test_a_shared_memory_has_as_many_bf16_pages_as_fit_beside_the_prompts_that_take_them():
    shared = {"bf16_pages": None, "shared_memory": True, "memory_bytes": 64 * 400 * 10}
    server = FakeServer()
    server.info = lambda: {"kv_quant": {**shared, "token_bytes": 100, "bf16_token_bytes": 300}}
    assert soak_check.bf16_pages(server) == [11]
    server.info = lambda: {"kv_quant": {}}
    assert soak_check.bf16_pages(server) == []


def test_an_exchanged_page_is_looked_for_in_every_way():
    """An answer of the traffic passes if one way is within the bound, so a control must not take fewer ways."""
    checker = soak_check.Checker(FakeServer(), SCALE, False)
    tried: list[Way] = []
    checker.difference = lambda answer, way: tried.append(way) or Difference(0.1, 1.0, 3)
    answer = Answer("single", [5] * 640, [7], [-1.0], 576, turns=[128])
    assert checker.nearest(answer, Bound(0.05, 2.0)).mean == 0.1
    assert tried == list(ways(answer))
    assert checker.nearest(answer, Bound(0.15, 2.0)).mean == 0.1 and tried[len(list(ways(answer))) :] == [Way(576)]


def test_prefixes_know_the_nodes_above_them():
    rng = random.Random(3)
    prefixes = Prefixes(SCALE, rng)
    drawn, known = [], set()
    for _ in range(200):
        drawn.append(prefixes.draw(rng))
        known |= {node.tokens for node in prefixes.nodes}
    assert max(len(node.turns) for node in drawn) > 1
    for node in drawn:
        assert list(node.turns) == sorted(node.turns) and (not node.turns or node.turns[-1] == len(node.tokens))
        assert all(node.tokens[:turn] in known for turn in node.turns)


def test_greedy_answers_are_compared_up_to_a_near_tie():
    bound = Bound(0.05, 0.2)
    first = [Step(3, -1.0, {3: -1.0, 4: -1.1}), Step(5, -0.5, {5: -0.5})]
    near = [Step(4, -1.02, {4: -1.02, 3: -1.05}), Step(9, -0.1, {9: -0.1})]
    assert bound.holds(greedy_difference(first, first))
    assert bound.holds(Difference.of([greedy_difference(first, near).max / 2]))
    far = [Step(4, -0.1, {4: -0.1, 3: -4.0}), Step(9, -0.1, {9: -0.1})]
    assert not bound.holds(greedy_difference(first, far))
    unlisted = [Step(7, -0.1, {7: -0.1})]
    assert greedy_difference(first, unlisted).max == 99.0
    assert not bound.holds(greedy_difference([], []))
