"""Sessions in a pool too small for all of them, with retraction: every answer is compared with a model of its own.

    python benchmarks/soak_sessions.py --minutes 2 --out benchmarks/results/soak_sessions_h200.json
    python benchmarks/soak_sessions.py --device cpu --minutes 1.5 --out FILE

Clients, each a tenant, hold conversations with ``--episodic-policy retrieve``. They edit what was said, leave, abort
and sometimes ask without a session. Tenants use the same names for sessions. The pool holds a few histories, so copies
of pages wait and histories are evicted and computed again. Some conversations and their copies exceed the whole pool.
SGLang's own knob retracts requests as if memory had run out.

After each answer the server says which pages it read. Afterwards transformers reads these, and no others, in float32,
and says how likely the answer's tokens are. The differences of answers alone are measured first and bound the rest: an
answer beyond the bound is wrong. A stream that takes back what it said is an error. An answer that the server ends with
an error is not wrong, but counted. ``wrong_page_seen`` is the share of answers from chosen pages that the bound finds
wrong with another page. ``--fault`` exchanges a page of every second such answer, and must fail.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import record
from benchmarks.answers import Bound, Difference, token_difference
from benchmarks.soak import LEAST, at_share, retractions
from benchmarks.soak_traffic import Answer, Scale, Traffic, draw_tokens
from benchmarks.tiny_models import MODELS, VOCABULARY
from benchmarks.tiny_server import IDLE_CHECK, TinyServer, body, plugin_path, versions
from launch.server import ServerError
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.server_process import OPENER, ServerFailed
from tests.e2e import word_embeddings

#: A bound is this many times the worst of what was measured. Less than in ``soak.py``: fewer answers are compared.
FACTOR = 2.0
#: Statuses of answers that SGLang or the router gives up under pressure.
GIVEN_UP = (500, 503)
#: Weights with which each kind of turn is drawn.
TURNS = {"ask": 62, "edit": 12, "disconnect": 10, "abort": 8, "plain": 8}


@dataclass(frozen=True)
class SessionScale(Scale):
    """Sizes in tokens.

    Attributes:
        shortest, longest: of a conversation when it begins, and from which on it is not continued.
        retract: steps between two retractions.
        compared: answers, at most; least: answers from chosen pages, or too little happened.
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
    *(1500, 15800, (16, 80), (100, 160), 16384, 2048, 12, 16, 0, 0.5, 0.0, 24),
    budget=1024,
    block=256,
    retract=60,
    compared=1500,
    least=100,
)


@dataclass
class SessionAnswer(Answer):
    """An answer of a session.

    Attributes:
        history, pages: what was chosen from, and what of it was read; 0 and none if the prompt was read whole.
    """

    history: int = 0
    pages: Sequence[int] = ()


class Reference:
    """The model in transformers, in float32."""

    def __init__(self, folder: Path, device: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.device = device
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()

    def difference(self, answer: SessionAnswer) -> Difference:
        return token_difference(answer.logprobs, self.logprobs(answer))

    def logprobs(self, answer: SessionAnswer) -> list[float]:
        """Computes likelihoods of the answer's tokens, behind the pages that were read and the rest of the prompt."""
        import torch
        from transformers import DynamicCache

        new = torch.tensor([answer.prompt[answer.history :] + answer.tokens], device=self.device)
        positions = answer.history + torch.arange(new.shape[1], device=self.device)[None]
        count = len(answer.tokens)
        with torch.no_grad():
            cache = DynamicCache()
            if answer.history:
                kept = torch.cat([torch.arange(p * PAGE_SIZE, (p + 1) * PAGE_SIZE) for p in answer.pages])
                history = torch.tensor([answer.prompt[: answer.history]], device=self.device)
                whole = self.model(history, use_cache=True, logits_to_keep=1).past_key_values
                for i, layer in enumerate(whole.layers):
                    cache.update(layer.keys[:, :, kept], layer.values[:, :, kept], i)
            found = self.model(new, past_key_values=cache, position_ids=positions, logits_to_keep=count + 1).logits[0]
        return torch.log_softmax(found[:-1], -1)[torch.arange(count), new[0, -count:]].tolist()


def another_page(answer: SessionAnswer, rng: random.Random) -> SessionAnswer:
    """The answer as if another page of its history had been read instead of one of those that were."""
    pages, rest = list(answer.pages), set(range(answer.history // PAGE_SIZE)) - set(answer.pages)
    pages[rng.randrange(len(pages))] = rng.choice(sorted(rest))
    return replace(answer, pages=sorted(pages))


class GaveUp(Exception):
    """The server ended the answer with an error that says so."""


class SessionTraffic(Traffic):
    """Conversations of one server. Each thread is a tenant."""

    def __init__(self, server: TinyServer, scale: SessionScale, seed: int, checked: Callable[[Answer], None]) -> None:
        super().__init__(server, scale, seed, checked)
        self.kinds = {"talk": 1}
        #: Sessions whose last request was left or aborted. It may still run, so what the next answer read is not known.
        self.left: set[tuple[str, str]] = set()

    def _talk(self, rng: random.Random, talk: list[int]) -> None:
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
            if kind == "plain" or key not in self.left:
                self.checked(answer)
            self.left -= {key} if kind != "plain" else set()
            said = said + answer.tokens

    @staticmethod
    def headers(tenant: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {tenant}"}

    def ask(self, rng: random.Random, prompt: list[int], tenant: str, name: str | None) -> SessionAnswer:
        """The answer to a prompt, streamed or not, greedy or sampled.

        Raises:
            GaveUp: the server said that it gave up.
            ValueError: the answer contradicts itself.
        """
        count, begin = self._length(rng), time.monotonic()
        sampling = {"temperature": rng.choice((0.0, 1.0))}
        asked = body(prompt, count, return_logprob=True, stream=rng.random() < 0.6, sampling_params=sampling)
        said: list[int] = []
        out: dict = {}
        for out in self._chunks({**asked, **({"session_id": name} if name else {})}, tenant):
            if out["output_ids"][: len(said)] != said:
                raise ValueError(f"a stream took back what it had said: {said} and then {out['output_ids']}")
            said = out["output_ids"]
        pairs = out["meta_info"]["output_token_logprobs"]
        if [pair[1] for pair in pairs] != said or len(said) != count:
            raise ValueError(f"{len(said)} tokens of {count}, log-probabilities of {len(pairs)}")
        if (words := " ".join(map(word, said))) != " ".join(out["text"].split()):
            raise ValueError(f"the text is {out['text']!r}, its tokens' {words!r}")
        with self.counts.lock:
            self.counts.requests += 1
            self.counts.latencies.append(time.monotonic() - begin)
        answer = SessionAnswer("session" if name else "plain", list(prompt), said, [pair[0] for pair in pairs], 0)
        if name:
            asking = urllib.request.Request(f"{self.server.url}/v1/sessions/{name}", headers=self.headers(tenant))
            with OPENER.open(asking, timeout=60) as response:
                read = json.loads(response.read())["read"]
            answer.history, answer.pages = read["of_tokens"], read["pages"]
        return answer

    def _chunks(self, asked: dict, tenant: str) -> Iterator[dict]:
        """Yields what the server says of an answer, until its end.

        Raises:
            GaveUp, ValueError: it ends with an error.
        """
        try:
            with self.server.stream("/generate", asked, timeout=180, headers=self.headers(tenant)) as response:
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
    """A word for each token: sessions decode prompts, to embed them."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({word(token): token for token in range(VOCABULARY)}, unk_token=word(0)))
    words.pre_tokenizer = Whitespace()
    special = {"unk_token": word(0), "bos_token": word(0), "eos_token": word(1)}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def make_server(folder: Path, scale: SessionScale, method: str, cpu: bool) -> TinyServer:
    """A server with ``--episodic-policy retrieve``, which needs a tokenizer."""
    model = MODELS["llama"].write(folder)
    write_tokenizer(model)
    path, embedder = word_embeddings.install(folder / "embedder")
    plugin = plugin_path(folder)
    flags = [
        *("--kv-quant", method, "--kv-quant-recent", "128", "--episodic-policy", "retrieve"),
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
    """Answers of conversations one after the other: the first is read cold, the next behind what was computed."""
    rng, found = random.Random(5), list[SessionAnswer]()
    most = min(scale.longest // 2, scale.pool - scale.budget - 4 * PAGE_SIZE)
    for n in range(scale.calibration // 2):
        said = draw_tokens(rng, scale.shortest, most)
        for _ in range(2):
            found.append(traffic.ask(rng, said, "alone", f"alone-{n}"))
            said = [*said, *found[-1].tokens, *draw_tokens(rng, 20, 20)]
    return found


def compared(
    reference: Reference, measured: list[SessionAnswer], found: list[SessionAnswer], most: int, fault: bool
) -> dict:
    """Fields of the row: answers, or a random choice of them, against the reference."""
    rng = random.Random(9)
    calibrated = [reference.difference(answer) for answer in measured]
    bound = Bound.above(calibrated, FACTOR, LEAST)
    rng.shuffle(found)
    differences, controls, notes = list[Difference](), list[Difference](), list[str]()
    chosen = 0
    for answer in found[:most]:
        if answer.history:
            chosen += 1
            controls.append(reference.difference(another_page(answer, rng)))
            answer = another_page(answer, rng) if fault and chosen % 2 == 0 else answer
        differences.append(reference.difference(answer))
        if not bound.holds(differences[-1]):
            read = f"{len(answer.pages)} pages of {answer.history} tokens"
            notes.append(f"{answer.kind}: {differences[-1]}: prompt of {len(answer.prompt)}, {read}")
    return {
        "answers": len(found),
        "compared": len(differences),
        "chosen_pages": chosen,
        "wrong_answers": len(notes),
        "bound": round(bound.mean, 4),
        "alone_mean": round(max(d.mean for d in calibrated), 4),
        "worst_mean": round(max((d.mean for d in differences), default=0.0), 4),
        "wrong_page_mean": round(statistics.median(d.mean for d in controls), 4) if controls else None,
        "wrong_page_seen": round(statistics.fmean(not bound.holds(d) for d in controls), 3) if controls else None,
        "notes": notes[:6],
    }


def serve(
    server: TinyServer, scale: SessionScale, minutes: float, seed: int
) -> tuple[list[SessionAnswer], list[SessionAnswer], dict]:
    """Answers alone, answers of the traffic, and fields of the row."""
    found: list[SessionAnswer] = []
    measured = alone(SessionTraffic(server, scale, 77, found.append), scale)
    print(f"{len(measured)} answers alone; traffic for {minutes} minutes", flush=True)
    server.drain()
    traffic = SessionTraffic(server, scale, seed, found.append)
    counts, begin = traffic.counts, time.monotonic()
    traffic.start()
    while time.monotonic() < begin + 60 * minutes and server.running:
        time.sleep(5)
        print(f"{len(found)} answers, {counts.errors} errors, {dict(counts.kinds)}", flush=True)
    held = [] if traffic.stop(180) else ["requests were still running after the traffic ended"]
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


def is_right(row: dict, least: int) -> bool:
    """Returns True if nothing is wrong, lost or unexplained, and everything planned happened."""
    happened = row["retractions"] > 0 and row["histories_gone"] > 0 and row["read_whole"] > 0 and row["aborted"] > 0
    seen = row["chosen_pages"] >= least and (row["wrong_page_seen"] or 0) >= 0.5
    return happened and seen and not (row["wrong_answers"] or row["errors"] or row["held"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2, help="of traffic")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--method", default="int4", help="--kv-quant")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--fault", action="store_true", help="exchange a page of every second answer from chosen pages; must fail"
    )
    parser.add_argument("--out", required=True, help="result file")
    args = parser.parse_args()
    cpu = args.device == "cpu"
    scale = CPU if cpu else GPU
    print(versions(), flush=True)
    with tempfile.TemporaryDirectory(prefix="kvq-soak-", ignore_cleanup_errors=True) as folder:
        server = make_server(Path(folder), scale, args.method, cpu)
        server.start(600)
        try:
            measured, found, row = serve(server, scale, args.minutes, args.seed)
        finally:
            server.stop()
            Path(args.out).with_suffix(".log").write_text(server.log())
        reference = Reference(Path(folder) / "llama", args.device)
        checked = compared(reference, measured, found, scale.compared, args.fault)
    row |= {"scenario": "sessions", "model": "llama", "kv_quant": args.method, "pool_tokens": scale.pool}
    row |= {"budget": scale.budget, "fault": args.fault, **checked, "notes": [*row["notes"], *checked["notes"]]}
    record.write(args.out, "soak_sessions", [row])
    print(json.dumps(row, indent=1))
    right = is_right(row, scale.least)
    print("passed" if right else "FAILED: wrong, or too little happened")
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
