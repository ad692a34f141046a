"""Sessions in a pool too small for all of them, with retraction; every answer is compared with a reference model.

    python benchmarks/soak_sessions.py --minutes 2 --out benchmarks/results/soak_sessions_h200.json
    python benchmarks/soak_sessions.py --device cpu --minutes 1.5 --out FILE
    python benchmarks/soak_sessions.py --device cpu --judge ANSWERS --out FILE

Clients, each a tenant, hold conversations with ``--episodic-policy retrieve``. They edit earlier messages, disconnect,
abort, and sometimes ask without a session. Tenants use the same names for sessions. The pool holds a few histories, so
copies of pages wait, and histories are evicted and computed again. Some conversations with their copies exceed the
whole pool. A test setting of SGLang retracts requests as if memory had run out.

With each answer the server reports which pages it read. Afterwards transformers reads these pages and no others
(``benchmarks/session_reference.py``). An answer is wrong if it lacks more than half of a page that it reports, or if it
is farther from all readings of these pages than they are from each other. ``alone_missing`` and ``alone_distance`` are
the worst values of answers that ran alone, which must be right too. A stream that contradicts its earlier part is an
error. Two kinds of answers are not wrong, but counted: those that the server ends with an error, and those that lack a
log-probability (``incomplete``), which SGLang 0.5.16 sometimes omits after a retraction. ``wrong_page_seen`` is the
share of answers from chosen pages that are found wrong if a page is exchanged. ``--fault`` exchanges a page of every
second such answer, and must fail. FILE's ``.answers.gz`` has all answers for ``--judge``, which needs no server.

``--minutes`` counts traffic only. The traffic continues, at most five times as long, until enough answers came from
chosen pages.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import statistics
import sys
import tempfile
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import record
from benchmarks.session_reference import TOP, Readings, Reference, SessionAnswer, another_page
from benchmarks.soak import at_share, retractions
from benchmarks.soak_traffic import Answer, Scale, Talk, Traffic, draw_tokens
from benchmarks.tiny_models import MODELS, VOCABULARY
from benchmarks.tiny_server import IDLE_CHECK, TinyServer, body, plugin_path, versions
from launch.server import ServerError
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.evaluation import provenance
from sglang_kvq.server_process import ServerFailed
from tests.e2e import word_embeddings

#: Largest share of a page that a right answer may seem to lack: the value is 0 if the page was read, and 1 if not.
LACKING = 0.5
#: Largest distance of an answer from the nearer end, relative to the distance between the ends.
BOUND = 1.0
RECENT = 128  #: ``--kv-quant-recent``
PATIENCE = 600  #: Seconds until an answer counts as lost: other work may share the CPU.
LONGER = 5.0  #: Limit of the traffic's time, in multiples, if too few answers came from chosen pages.
#: Statuses with which SGLang or the router gives up an answer under pressure.
GIVEN_UP = (500, 503)
#: Weights of each kind of turn.
TURNS = {"ask": 62, "edit": 12, "disconnect": 10, "abort": 8, "plain": 8}


@dataclass(frozen=True)
class SessionScale(Scale):
    """Sizes in tokens.

    Attributes:
        shortest, longest: length at which a conversation begins, and length from which it is not continued.
        retract: steps between two retractions.
        compared, least: most answers to compare, and least answers from chosen pages for a valid run.
    """

    budget: int
    block: int
    retract: int
    compared: int
    least: int


CPU = SessionScale(
    *(600, 2800, (8, 24), (30, 60), 3200, 256, 3, 4, 0, 3.0, 0.0, 8),
    budget=512,
    block=128,
    retract=25,
    compared=200,
    least=8,
)
GPU = SessionScale(
    *(1500, 15000, (16, 80), (100, 160), 16384, 2048, 4, 5, 0, 0.5, 0.0, 24),
    budget=1024,
    block=256,
    retract=60,
    compared=300,
    least=60,
)


class GaveUp(Exception):
    """The server ended the answer with an error that says so."""


class SessionTraffic(Traffic):
    """Conversations on one server. Each thread is a tenant."""

    def __init__(self, server: TinyServer, scale: SessionScale, seed: int, checked: Callable[[Answer], None]) -> None:
        super().__init__(server, scale, seed, checked)
        self.kinds = {"talk": 1}
        #: Sessions whose last request was abandoned or aborted. It may still run, so the pages of the next answer are
        #: not known.
        self.left: set[tuple[str, str]] = set()

    def _talk(self, rng: random.Random, talk: Talk) -> None:
        key = tenant, name = threading.current_thread().name, f"talk-{rng.randrange(3)}"
        said = draw_tokens(rng, self.scale.shortest, self.scale.longest)
        while len(said) < self.scale.longest and not self.stopping.is_set() and rng.random() < 0.9:
            kind = rng.choices(list(TURNS), list(TURNS.values()))[0]
            if kind == "edit":
                said = said[: rng.randrange(self.scale.shortest // 2, len(said))]
            said = said + draw_tokens(rng, 8, 60)
            if kind in ("disconnect", "abort"):
                end = self._leave if kind == "disconnect" else self._cancel
                end(rng, body(said, self._length(rng), stream=True, session_id=name), self.headers(tenant))
                self.left.add(key)
                continue
            try:
                answer = self.ask(rng, said, tenant, None if kind == "plain" else name)
            except GaveUp as error:
                with self.counts.lock:
                    self.counts.kinds["given_up"] += 1
                    self.counts.kinds[f"given_up: {str(error)[:70]}"] += 1
                continue
            with self.counts.lock:
                self.counts.kinds[kind] += 1
            if answer.top and (kind == "plain" or key not in self.left):
                self.checked(answer)
            self.left -= {key} if kind != "plain" else set()
            said = said + answer.tokens

    @staticmethod
    def headers(tenant: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {tenant}"}

    def ask(self, rng: random.Random, prompt: list[int], tenant: str, name: str | None) -> SessionAnswer:
        """Returns the answer to a prompt, streamed or not, greedy or sampled.

        Raises:
            GaveUp: the server reports that it gave up.
            ValueError: the answer contradicts itself.
        """
        count, begin = self._length(rng), time.monotonic()
        # Two words of the vocabulary are special tokens, which would be missing in the text.
        sampling = {"temperature": rng.choice((0.0, 1.0)), "skip_special_tokens": False}
        logprobs = {"return_logprob": True, "top_logprobs_num": TOP}
        asked = body(prompt, count, stream=rng.random() < 0.6, sampling_params=sampling, **logprobs)
        said: list[int] = []
        out: dict = {}
        for out in self._chunks({**asked, **({"session_id": name} if name else {})}, tenant):
            if out["output_ids"][: len(said)] != said:
                raise ValueError(f"a stream took back what it had said: {said} and then {out['output_ids']}")
            said = out["output_ids"]
        pairs = out["meta_info"]["output_token_logprobs"]
        top = [{pair[1]: pair[0] for pair in likely} for likely in out["meta_info"]["output_top_logprobs"]]
        retracted = out["meta_info"].get("num_retractions") or 0
        if [pair[1] for pair in pairs] != said or len(said) != count or list(map(len, top)) != [TOP] * count:
            if not retracted or len(said) != count:
                raise ValueError(
                    f"{len(said)} tokens of {count}, log-probabilities of {len(pairs)} and of {len(top)} steps, "
                    f"retracted {retracted} times"
                )
            # SGLang 0.5.16 sometimes omits one log-probability of a retracted request, though it returns all tokens.
            pairs, top = [], []
        if (words := " ".join(map(word, said))) != " ".join(out["text"].split()):
            raise ValueError(f"the text is {out['text']!r}, its tokens' {words!r}")
        with self.counts.lock:
            self.counts.requests += 1
            self.counts.incomplete += not top
            self.counts.latencies.append(time.monotonic() - begin)
        kind = "session" if name else "plain"
        own = [pair[0] for pair in pairs]
        answer = SessionAnswer(kind, list(prompt), said, own, 0, top=top, retracted=retracted)
        if name:
            with self.server.stream(f"/v1/sessions/{name}", None, timeout=60, headers=self.headers(tenant)) as response:
                read = json.loads(response.read())["read"]
            answer.history, answer.pages = read["of_tokens"], read["pages"]
        return answer

    def _chunks(self, asked: dict, tenant: str) -> Iterator[dict]:
        """Yields the parts of an answer that the server sends, until its end.

        Raises:
            GaveUp, ValueError: the answer ends with an error.
        """
        try:
            with self.server.stream("/generate", asked, timeout=PATIENCE, headers=self.headers(tenant)) as response:
                for line in response:
                    text = line.removeprefix(b"data: ").strip()
                    if not text.startswith(b"{"):
                        continue
                    out = json.loads(text)
                    reason = out["meta_info"]["finish_reason"] if "error" not in out else out["error"]
                    if isinstance(reason, dict) and reason["type"] != "length":
                        raise (GaveUp if reason.get("status_code") in GIVEN_UP else ValueError)(str(reason))
                    yield out
        except urllib.error.HTTPError as error:
            text = f"{error.code} {error.read().decode(errors='replace')}"
            raise (GaveUp if error.code in GIVEN_UP else ValueError)(text) from None


def word(token: int) -> str:
    return f"w{token}"


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer with one word per token; sessions need it to decode prompts and embed them."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({word(token): token for token in range(VOCABULARY)}, unk_token=word(0)))
    words.pre_tokenizer = Whitespace()
    special = {"unk_token": word(0), "bos_token": word(0), "eos_token": word(1)}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def make_server(folder: Path, scale: SessionScale, method: str, cpu: bool) -> TinyServer:
    """Returns a server with ``--episodic-policy retrieve``, which needs a tokenizer."""
    model = MODELS["llama"].write(folder)
    write_tokenizer(model)
    path, embedder = word_embeddings.install(folder / "embedder")
    plugin = plugin_path(folder)
    flags = [
        *("--kv-quant", method, "--kv-quant-recent", str(RECENT), "--episodic-policy", "retrieve"),
        *("--episodic-budget", str(scale.budget), "--episodic-block", str(scale.block)),
        *("--episodic-embedder", embedder, "--max-total-tokens", str(scale.pool)),
        *("--context-length", str(scale.longest + 1000), "--max-running-requests", str(scale.requests)),
        *("--chunked-prefill-size", str(scale.chunk), "--schedule-conservativeness", "0.05"),
        *([] if cpu else ["--cuda-graph-max-bs-decode", str(scale.requests)]),
    ]
    env = {
        IDLE_CHECK: "1",
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": str(scale.retract),
        "PYTHONPATH": ":".join([path, *filter(None, [plugin.get("PYTHONPATH")])]),
    }
    return TinyServer(model, flags, cpu=cpu, log=folder / "server.log", env=env, tokenizer=True)


def alone(traffic: SessionTraffic, scale: SessionScale) -> list[SessionAnswer]:
    """Returns answers of conversations one after the other; only each first turn is read cold."""
    rng, found = random.Random(5), list[SessionAnswer]()
    most = min(scale.longest // 2, scale.pool - scale.budget - 4 * PAGE_SIZE)
    for n in range(scale.calibration // 2):
        said = draw_tokens(rng, scale.shortest, most)
        for _ in range(2):
            found.append(traffic.ask(rng, said, "alone", f"alone-{n}"))
            said = [*said, *found[-1].tokens, *draw_tokens(rng, 20, 20)]
    return found


def is_wrong(found: Readings) -> bool:
    """Returns whether the answer did not read the pages that it reports."""
    return found.most_missing > LACKING or found.distance > BOUND


def compared(
    reference: Reference, measured: list[SessionAnswer], found: list[SessionAnswer], most: int, fault: bool
) -> dict:
    """Returns fields of the row: a comparison of answers, or of a random choice of them, with the reference."""
    rng = random.Random(9)
    alone = [reference.several([answer])[0] for answer in measured]
    rng.shuffle(found)
    readings, controls, notes = list[Readings](), list[Readings](), list[str]()
    for number, answer in enumerate(found[:most]):
        if number % 50 == 0:
            print(f"{number} of {min(most, len(found))} compared", flush=True)
        others = [another_page(answer, rng)] if answer.history else []
        own, *other = reference.several([answer, *others])
        controls += other
        readings.append(other[0] if fault and other and len(controls) % 2 == 0 else own)
        if is_wrong(readings[-1]):
            read = f"{len(answer.pages)} pages of {answer.history} tokens, retracted {answer.retracted} times"
            notes.append(f"{answer.kind}: {readings[-1]}: prompt of {len(answer.prompt)}, {read}")

    def worst(of: list[Readings], field: str) -> float:
        return round(max((getattr(one, field) for one in of), default=0.0), 3)

    missing = [control.most_missing for control in controls]
    return {
        "answers": len(found),
        "compared": len(readings),
        "chosen_pages": len(controls),
        "wrong_answers": len(notes),
        "bounds": {"missing": LACKING, "distance": BOUND},
        "alone_missing": worst(alone, "most_missing"),
        "alone_distance": worst(alone, "distance"),
        "worst_missing": worst(readings, "most_missing"),
        "worst_distance": worst(readings, "distance"),
        "wrong_page_missing": round(statistics.median(missing), 3) if missing else None,
        "wrong_page_least": round(min(missing), 3) if missing else None,
        "wrong_page_seen": round(statistics.fmean(map(is_wrong, controls)), 3) if controls else None,
        "notes": notes[:6],
    }


def write_answers(path: Path, measured: list[SessionAnswer], found: list[SessionAnswer], row: dict) -> None:
    """Writes everything that ``--judge`` needs."""
    answers = [[asdict(answer) for answer in some] for some in (measured, found)]
    with gzip.open(path, "wt") as file:
        json.dump({"measured": answers[0], "found": answers[1], "row": row}, file)


def read_answers(path: Path) -> tuple[list[SessionAnswer], list[SessionAnswer], dict]:
    """Reads answers that ran alone, answers of the traffic, and fields of the row."""
    with gzip.open(path, "rt") as file:
        content = json.load(file)

    def answers(some: list[dict]) -> list[SessionAnswer]:
        tops = [[{int(token): value for token, value in step.items()} for step in one["top"]] for one in some]
        return [SessionAnswer(**{**one, "top": top}) for one, top in zip(some, tops)]

    return answers(content["measured"]), answers(content["found"]), content["row"]


def serve(
    server: TinyServer, scale: SessionScale, minutes: float, seed: int
) -> tuple[list[SessionAnswer], list[SessionAnswer], dict]:
    """Returns answers that ran alone, answers of the traffic, and fields of the row."""
    found: list[SessionAnswer] = []
    measured = alone(SessionTraffic(server, scale, 77, found.append), scale)
    print(f"{len(measured)} answers alone; traffic for {minutes} minutes", flush=True)
    server.drain()
    traffic = SessionTraffic(server, scale, seed, found.append)
    counts, begin = traffic.counts, time.monotonic()
    traffic.start()
    while server.running and not is_enough(found, scale, (time.monotonic() - begin) / (60 * minutes)):
        time.sleep(min(5, 30 * minutes))
        print(f"{len(found)} answers, {from_chosen_pages(found)} from chosen pages, {counts.errors} errors", flush=True)
    held = [] if traffic.stop(PATIENCE) else ["requests were still running after the traffic ended"]
    seconds = time.monotonic() - begin
    try:
        held += server.held_when_empty()
    except (ServerError, ServerFailed, OSError) as error:
        held.append(f"{error}\n{server.log_tail(25)}"[:3000])
    log, latencies = server.log(), sorted(counts.latencies)
    return (
        measured,
        found,
        {
            "seconds": round(seconds, 1),
            "requests": counts.requests,
            "errors": counts.errors,
            "incomplete": counts.incomplete,
            "aborted": counts.aborted,
            "retractions": retractions(log),
            "leaked_tokens": sum(int(n) for line in held for n in re.findall(r"(\d+) tokens? leaked", line)),
            "held": len(held),
            "p50_ms": at_share(latencies, 0.5),
            "p99_ms": at_share(latencies, 0.99),
            "histories_gone": len(re.findall(r"are no longer cached", log)),
            "read_whole": len(re.findall(r"is read whole", log)),
            "kinds": dict(counts.kinds),
            "notes": [*held, *counts.messages],
        },
    )


def from_chosen_pages(found: list[SessionAnswer]) -> int:
    """Counts the answers that read chosen pages; clients may add answers meanwhile."""
    return sum(bool(answer.history) for answer in list(found))


def is_enough(found: list[SessionAnswer], scale: SessionScale, share: float) -> bool:
    """Returns whether the traffic may end after this share of its time; slow machines get more time."""
    return share >= (1 if from_chosen_pages(found) >= scale.least else LONGER)


def is_right(row: dict, least: int) -> bool:
    """Returns whether nothing is wrong, lost or unexplained, and everything planned happened."""
    happened = row["retractions"] > 0 and row["histories_gone"] > 0 and row["read_whole"] > 0 and row["aborted"] > 0
    seen = row["chosen_pages"] >= least and (row["wrong_page_seen"] or 0) >= 0.5
    alone = row["alone_missing"] <= LACKING and row["alone_distance"] <= BOUND
    return happened and seen and alone and not (row["wrong_answers"] or row["errors"] or row["held"])


def answer(
    server: TinyServer, scale: SessionScale, args: argparse.Namespace
) -> tuple[list[SessionAnswer], list[SessionAnswer], dict]:
    """Runs ``serve`` on a server that it starts; the row also records the source of its answers."""
    server.start(600)
    try:
        measured, found, row = serve(server, scale, args.minutes, args.seed)
    finally:
        server.stop()
        args.out.with_suffix(".log").write_text(server.log())
    row |= {"scenario": "sessions", "model": "llama", "kv_quant": args.method, "seed": args.seed}
    row |= {"pool_tokens": scale.pool, "budget": scale.budget, "least": scale.least}
    source = provenance.header("", record.command(), record.device_name())
    row |= {f"answers_{field}": source[field] for field in ("command", "commit", "device")}
    return measured, found, row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2, help="minutes of traffic")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--method", default="int4", help="--kv-quant")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--fault", action="store_true", help="exchange a page of every second answer from chosen pages; must fail"
    )
    parser.add_argument("--compared", type=int, help="answers to compare, at most")
    parser.add_argument("--judge", type=Path, metavar="ANSWERS", help="judge the answers of an earlier run")
    parser.add_argument("--out", required=True, type=Path, help="result file")
    args = parser.parse_args()
    cpu = args.device == "cpu"
    scale = CPU if cpu else GPU
    print(versions(), flush=True)
    with tempfile.TemporaryDirectory(prefix="kvq-soak-", ignore_cleanup_errors=True) as folder:
        if args.judge:
            measured, found, row = read_answers(args.judge)
        else:
            measured, found, row = answer(make_server(Path(folder), scale, args.method, cpu), scale, args)
            write_answers(args.out.with_suffix(".answers.gz"), measured, found, row)
        model = MODELS["llama"].write(Path(folder) / "read")
        reference = Reference(model, args.device, KVQuantConfig(args.method, recent_tokens=RECENT))
        checked = compared(reference, measured, found, args.compared or scale.compared, args.fault)
    row |= {"fault": args.fault, **checked, "notes": [*row["notes"], *checked["notes"]]}
    record.write(args.out, "soak_sessions", [row])
    print(json.dumps(row, indent=1))
    right = is_right(row, row["least"])
    print("passed" if right else "FAILED: wrong, or too little happened")
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
