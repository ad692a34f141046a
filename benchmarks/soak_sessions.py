"""Sessions in a pool too small for all of them, with retraction: every answer is compared with a model of its own.

    python benchmarks/soak_sessions.py --minutes 2 --out benchmarks/results/soak_sessions_h200.json
    python benchmarks/soak_sessions.py --device cpu --minutes 1.5 --out FILE

Clients hold conversations with ``--episodic-policy late``, streamed or not, greedy or sampled, some of which they leave
or abort; others ask without a session. The pool holds a few histories, so copies of pages wait, histories are evicted
and computed again, and some conversations with their copies exceed the whole pool. SGLang's own knob retracts requests
as if memory had run out.

After each answer the server says which pages it read. Afterwards transformers reads these, and no others, in float32,
and says how likely the answer's tokens are. By how much the two differ alone is measured first and bounds the rest: an
answer beyond it is wrong, and so is a stream that takes back what it said. An answer that the server ends with an error
is not wrong, but counted. ``wrong_page_seen`` is the share of answers with one other page that the bound finds wrong;
``--fault`` exchanges a page of every tenth answer, and must fail.
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
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import record
from benchmarks.answers import Bound, Difference, token_difference
from benchmarks.tiny_models import MODELS, VOCABULARY
from benchmarks.tiny_server import GPU_FLAGS, IDLE_CHECK, TinyServer, dumps, plugin_path, versions
from launch.server import Server, ServerError
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.server_process import OPENER, ServerFailed
from tests.e2e import word_embeddings

#: The same as in ``soak.py``: of thousands of answers the worst differ more than of the dozens that are measured.
FACTOR, LEAST = 3.0, 0.04
#: Statuses of answers that SGLang or the router gives up under pressure.
GIVEN_UP = (500, 503)


@dataclass(frozen=True)
class Scale:
    """Sizes in tokens.

    Attributes:
        first, longest: of a conversation when it begins, and from which on it is not continued.
        answer: tokens, at least and at most.
        requests: at once; clients: each with a conversation of its own.
        retract: steps between two retractions.
        alone: answers measured alone.
        compared: answers, at most.
    """

    pool: int
    budget: int
    block: int
    first: tuple[int, int]
    longest: int
    answer: tuple[int, int]
    chunk: int
    requests: int
    clients: int
    retract: int
    alone: int
    compared: int


CPU = Scale(2560, 512, 128, (600, 1500), 2300, (8, 40), 256, 3, 4, 25, 6, 200)
GPU = Scale(16384, 1024, 256, (1500, 9000), 15800, (16, 160), 2048, 12, 16, 60, 24, 1500)


@dataclass
class Answer:
    """An answer as a client got it.

    Attributes:
        history, pages: what was chosen from, and what of it was read; 0 and none where the prompt was read whole.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    history: int = 0
    pages: list[int] = field(default_factory=list)


class Reference:
    """The model in transformers, in float32."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(self.device).eval()

    def logprobs(self, answer: Answer) -> list[float]:
        """Computes likelihoods of the answer's tokens, behind the pages that were read and the rest of the prompt."""
        import torch
        from transformers import DynamicCache

        new = torch.tensor([answer.prompt[answer.history :] + answer.tokens], device=self.device)
        positions = answer.history + torch.arange(new.shape[1], device=self.device)[None]
        with torch.no_grad():
            cache = DynamicCache()
            if answer.history:
                kept = torch.cat([torch.arange(p * PAGE_SIZE, (p + 1) * PAGE_SIZE) for p in answer.pages])
                history = torch.tensor([answer.prompt[: answer.history]], device=self.device)
                whole = self.model(history, use_cache=True, logits_to_keep=1).past_key_values
                for i, layer in enumerate(whole.layers):
                    cache.update(layer.keys[:, :, kept], layer.values[:, :, kept], i)
            count = len(answer.tokens)
            found = self.model(new, past_key_values=cache, position_ids=positions, logits_to_keep=count + 1).logits[0]
        scores = torch.log_softmax(found[:-1], -1)
        return scores[torch.arange(count), new[0, -count:]].tolist()

    def difference(self, answer: Answer) -> Difference:
        return token_difference(answer.logprobs, self.logprobs(answer))


def another_page(answer: Answer, rng: random.Random) -> Answer:
    """The answer as if another page of its history, or other tokens of its prompt, had been read."""
    rest = sorted(set(range(answer.history // PAGE_SIZE)) - set(answer.pages))
    if rest:
        pages = list(answer.pages)
        pages[rng.randrange(len(pages))] = rng.choice(rest)
        return replace(answer, pages=sorted(pages))
    begin = rng.randrange(max(len(answer.prompt) - PAGE_SIZE, 1))
    other = [rng.randrange(2, VOCABULARY) for _ in range(min(PAGE_SIZE, len(answer.prompt)))]
    return replace(answer, prompt=[*answer.prompt[:begin], *other, *answer.prompt[begin + len(other) :]])


class GaveUp(Exception):
    """The server ended the answer with an error that says so."""


class Clients:
    """Conversations of one server, until ``stop``."""

    def __init__(self, server: TinyServer, scale: Scale, seed: int) -> None:
        self.server, self.scale, self.seed = server, scale, seed
        self.counts: Counter[str] = Counter()
        self.answers: list[Answer] = []
        self.problems: list[str] = []
        self.lock, self.stopping = threading.Lock(), threading.Event()
        self.threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(scale.clients)]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def stop(self, seconds: float) -> bool:
        """Let no request begin; True once all have ended."""
        self.stopping.set()
        end = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(end - time.monotonic(), 0.1))
        return not any(thread.is_alive() for thread in self.threads)

    def tokens(self, rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(2, VOCABULARY) for _ in range(count)]

    def _run(self, number: int) -> None:
        rng, talks = random.Random(1000 * self.seed + number), 0
        said, name = list[int](), ""
        while not self.stopping.is_set():
            if not said or len(said) > self.scale.longest or rng.random() < 0.1:
                said, talks = self.tokens(rng, rng.randint(*self.scale.first)), talks + 1
                name = f"client-{number}-{talks}"
            said += self.tokens(rng, rng.randint(8, 60))
            kind = rng.choices(("ask", "leave", "abort", "plain"), (80, 7, 7, 6))[0]
            try:
                answer = self.ask(rng, said, None if kind == "plain" else name, kind)
            except GaveUp as error:
                self._count("given_up", str(error))
            except (OSError, ValueError, KeyError, ServerError) as error:
                if not self.stopping.is_set():
                    self._problem(f"{type(error).__name__}: {error}")
                said = []
            else:
                self._count(kind)
                if answer is not None:
                    said = said + answer.tokens
                    with self.lock:
                        self.answers.append(answer)

    def _count(self, kind: str, why: str = "") -> None:
        with self.lock:
            self.counts[kind] += 1
            if why:
                self.counts[f"given_up: {why[:70]}"] += 1

    def _problem(self, text: str) -> None:
        with self.lock:
            self.counts["errors"] += 1
            if len(self.problems) < 8:
                self.problems.append(text[:600])

    def ask(self, rng: random.Random, prompt: list[int], name: str | None, kind: str = "ask") -> Answer | None:
        """The answer to a prompt; None if it was left or aborted.

        Raises:
            GaveUp: the server said that it gave up; send the request again.
            ValueError: the answer contradicts itself.
        """
        count, stream = rng.randint(*self.scale.answer), kind in ("leave", "abort") or rng.random() < 0.6
        temperature, rid = rng.choice((0.0, 1.0)), f"{name}-{rng.getrandbits(60)}"
        asked = {
            "input_ids": prompt,
            "rid": rid,
            "stream": stream,
            "return_logprob": True,
            "sampling_params": {"temperature": temperature, "max_new_tokens": count, "ignore_eos": True},
            **({} if name is None else {"session_id": name}),
        }
        said: list[int] = []
        out: dict = {}
        stop_at = rng.randrange(count) if kind in ("leave", "abort") else count
        for out in self._chunks(asked):
            reason = out["meta_info"]["finish_reason"]
            if isinstance(reason, dict) and reason["type"] == "abort":
                if reason.get("status_code") in GIVEN_UP:
                    raise GaveUp(reason["message"])
                if kind == "abort":
                    return None
                raise ValueError(f"aborted: {reason}")
            if out["output_ids"][: len(said)] != said:
                raise ValueError(f"a stream took back what it had said: {said} and then {out['output_ids']}")
            said = out["output_ids"]
            if len(said) > stop_at and kind == "leave":
                return None
            if len(said) > stop_at and kind == "abort":
                self.server.request("/abort_request", {"rid": rid}, timeout=60)
                stop_at = count
        pairs = out["meta_info"]["output_token_logprobs"]
        if [pair[1] for pair in pairs] != said or (len(said) != count and kind != "abort"):
            raise ValueError(f"{len(said)} tokens of {count}, log-probabilities of {len(pairs)}")
        if not (words := " ".join(map(word, said))) == " ".join(out["text"].split()):
            raise ValueError(f"the text is {out['text']!r}, its tokens' {words!r}")
        answer = Answer(list(prompt), said, [pair[0] for pair in pairs])
        if name is not None:
            read = self.server.json(f"/v1/sessions/{name}", timeout=60)["read"]
            answer.history, answer.pages = read["of_tokens"], read["pages"]
        return answer

    def _chunks(self, asked: dict) -> Iterator[dict]:
        request = urllib.request.Request(
            f"{self.server.url}/generate", dumps(asked), {"Content-Type": "application/json"}
        )
        try:
            with OPENER.open(request, timeout=180) as response:
                if not asked["stream"]:
                    yield json.loads(response.read())
                    return
                for line in response:
                    if line.startswith(b"data: {"):
                        out = json.loads(line[6:])
                        if "error" in out:
                            raise ValueError(str(out["error"]))
                        yield out
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            if error.code in GIVEN_UP:
                raise GaveUp(text) from None
            raise ValueError(f"{error.code} {text}") from None


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


class SessionServer(TinyServer):
    """A server with ``--episodic-policy late``, which needs a tokenizer."""

    def __init__(self, model: Path, scale: Scale, folder: Path, method: str, cpu: bool) -> None:
        path, embedder = word_embeddings.install(folder / "embedder")
        plugin = plugin_path(folder)
        paths = [path, *filter(None, [plugin.get("PYTHONPATH")])]
        flags = [
            *("--kv-quant", method, "--kv-quant-recent", "128", "--episodic-policy", "late"),
            *("--episodic-budget", str(scale.budget), "--episodic-block", str(scale.block)),
            *("--episodic-embedder", embedder, "--max-total-tokens", str(scale.pool)),
            *("--context-length", str(scale.longest + 1000), "--max-running-requests", str(scale.requests)),
            *("--chunked-prefill-size", str(scale.chunk), "--schedule-conservativeness", "0.05"),
            *("--random-seed", "0", "--skip-server-warmup"),
        ]
        env = {
            IDLE_CHECK: "1",
            "SGLANG_TEST_RETRACT": "1",
            "SGLANG_TEST_RETRACT_INTERVAL": str(scale.retract),
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            "PYTHONPATH": ":".join(paths),
        }
        self.cpu = cpu
        graphs = ["--cuda-graph-max-bs-decode", str(scale.requests)]
        log = folder / "server.log"
        Server.__init__(self, model, *([] if cpu else [*GPU_FLAGS, *graphs]), *flags, cpu=cpu, env=env, log_path=log)


def soak(args: argparse.Namespace, folder: Path) -> dict:
    """Serve, compare, and the row of what was found."""
    cpu = args.device == "cpu"
    scale = CPU if cpu else GPU
    model = MODELS["llama"].write(folder)
    write_tokenizer(model)
    server = SessionServer(model, scale, folder, args.method, cpu)
    say(versions())
    server.start(600)
    try:
        alone = measured(Clients(server, scale, 77), scale)
        say(f"{len(alone)} answers alone; traffic for {args.minutes} minutes")
        server.drain()
        clients = Clients(server, scale, args.seed)
        begin = time.monotonic()
        clients.start()
        while time.monotonic() < begin + 60 * args.minutes and server.running:
            time.sleep(10 if not cpu else 5)
            say(f"{len(clients.answers)} answers, {dict(clients.counts)}")
        ended = clients.stop(120)
        seconds = time.monotonic() - begin
        held = [] if ended else ["requests were still running after the traffic ended"]
        held += server.held_when_empty()
    except (ServerError, ServerFailed, OSError) as error:
        held = [f"{error}\n{server.log_tail(25)}"[:3000]]
        seconds = time.monotonic() - begin
    finally:
        server.stop()
    return compared(args, scale, Reference(model), alone, clients, seconds, held, server.log())


def measured(clients: Clients, scale: Scale) -> list[Answer]:
    """Answers of conversations one after the other; their first is read cold, the next behind what was computed."""
    rng, found = random.Random(5), []
    for n in range(scale.alone // 2):
        most = min(scale.first[1], scale.pool - scale.budget - 4 * PAGE_SIZE)
        said = clients.tokens(rng, rng.randint(scale.first[0], most))
        for _ in range(2):
            if (answer := clients.ask(rng, said, f"alone-{n}")) is not None:
                found.append(answer)
                said = [*said, *answer.tokens, *clients.tokens(rng, 20)]
    return found


def compared(
    args: argparse.Namespace,
    scale: Scale,
    reference: Reference,
    alone: list[Answer],
    clients: Clients,
    seconds: float,
    held: list[str],
    log: str,
) -> dict:
    """The result's row: every answer, or a random choice of them, against the reference."""
    rng = random.Random(9)
    calibrated = [reference.difference(answer) for answer in alone]
    bound = Bound.above(calibrated, FACTOR, LEAST)
    answers = clients.answers
    rng.shuffle(answers)
    worst, wrong, examples, controls = Difference(0.0, 0.0, 0), 0, [], []
    for n, answer in enumerate(answers[: scale.compared]):
        if args.fault and n % 10 == 9:
            answer = another_page(answer, rng)
        difference = reference.difference(answer)
        worst = max(worst, difference, key=lambda d: d.mean)
        if not bound.holds(difference):
            wrong += 1
            examples.append(
                f"{difference}: prompt of {len(answer.prompt)}, history {answer.history}, pages {answer.pages}"
            )
        if n % 5 == 0:
            controls.append(reference.difference(another_page(answer, rng)))
    counts = clients.counts
    return {
        "scenario": "sessions",
        "seconds": round(seconds, 1),
        "model": "llama",
        "kv_quant": args.method,
        "pool_tokens": scale.pool,
        "budget": scale.budget,
        "answers": len(answers),
        "compared": min(len(answers), scale.compared),
        "chosen_pages": sum(bool(answer.history) for answer in answers),
        "wrong_answers": wrong,
        "errors": counts["errors"],
        "given_up": counts["given_up"],
        "left": counts["leave"],
        "aborted": counts["abort"],
        "retractions": sum(map(int, re.findall(r"#retracted_reqs: (\d+)", log))),
        "histories_gone": len(re.findall(r"are no longer cached", log)),
        "read_whole": len(re.findall(r"is read whole", log)),
        "bound": round(bound.mean, 4),
        "alone_mean": round(max(d.mean for d in calibrated), 4),
        "worst_mean": round(worst.mean, 4),
        "wrong_page_mean": round(statistics.median(d.mean for d in controls), 4) if controls else None,
        "wrong_page_seen": round(statistics.fmean(not bound.holds(d) for d in controls), 3) if controls else None,
        "fault": args.fault,
        "notes": [*held, *examples[:6], *clients.problems, *(k for k in counts if k.startswith("given_up: "))],
        "held": len(held),
    }


def is_right(row: dict, least: int) -> bool:
    """Returns True if nothing is wrong, lost or unexplained, and everything planned happened."""
    happened = row["compared"] >= least and row["retractions"] > 0 and row["histories_gone"] + row["read_whole"] > 0
    return happened and not (row["wrong_answers"] or row["errors"] or row["held"])


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2, help="of traffic")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--method", default="int4", help="--kv-quant")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fault", action="store_true", help="exchange a page of every tenth answer; must fail")
    parser.add_argument("--out", required=True, help="result file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvq-soak-", ignore_cleanup_errors=True) as folder:
        row = soak(args, Path(folder))
        with suppress(OSError):
            say(f"the server's log: {Path(args.out).with_suffix('.log')}")
            Path(args.out).with_suffix(".log").write_text(Path(folder, "server.log").read_text())
    record.write(args.out, "soak_sessions", [row])
    say(json.dumps(row, indent=1))
    least = 20 if args.device == "cpu" else 100
    right = is_right(row, least)
    say("right" if right else "WRONG, or too little happened")
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
