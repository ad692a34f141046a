"""The traffic of ``benchmarks/soak.py``: shared prefixes, conversations, sessions, parallel samples, aborts."""

from __future__ import annotations

import json
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.pair_server import PairServer
from benchmarks.tiny_models import VOCABULARY
from benchmarks.tiny_server import TinyServer, body
from launch.server import ServerError

#: Weights of each kind of job.
KINDS = {
    "single": 34,
    "conversation": 20,
    "pair": 14,
    "parallel": 8,
    "disconnect": 8,
    "abort": 8,
    "session": 4,
    "streaming": 4,
}


@dataclass(frozen=True)
class Scale:
    """Sizes in tokens.

    Attributes:
        longest: longest prompt.
        answer, long_answer: length of usual answers, and of one in ten, so that running requests outgrow the pool.
        wait: most seconds until a request that is to be aborted is aborted.
    """

    shortest: int
    longest: int
    answer: tuple[int, int]
    long_answer: tuple[int, int]
    pool: int
    chunk: int
    requests: int
    clients: int
    prefixes: int
    wait: float
    pause: float
    calibration: int


@dataclass
class Answer:
    """An answer to one request, to be compared with the same tokens forced.

    Attributes:
        turns: lengths of this prompt's beginnings after which another request began: earlier prompts with their
            answers, or the nodes of the tree of prefixes above it.
        asked: lengths of the earlier prompts, without their answers.
        retracted: whether SGLang retracted this request or an earlier one of the same conversation.
    """

    kind: str
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    cached: int
    turns: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    retracted: bool = False


@dataclass(frozen=True)
class Talk:
    """A conversation, or a node of the tree of prefixes: its tokens so far, and its past as in ``Answer``."""

    tokens: tuple[int, ...] = ()
    turns: tuple[int, ...] = ()
    asked: tuple[int, ...] = ()
    retracted: bool = False

    def after(self, prompt: Sequence[int], reply: dict) -> Talk:
        """Returns the conversation after a reply to a prompt that continues it."""
        meta = reply["meta_info"]
        tokens = (*prompt, *(pair[1] for pair in meta["output_token_logprobs"]))
        retracted = self.retracted or bool(meta.get("num_retractions"))
        # The last token's key and value are computed by the next request.
        return Talk(tokens, (*self.turns, len(tokens) - 1), (*self.asked, len(prompt)), retracted)


class Prefixes:
    """A tree of random prefixes, whose nodes are replaced while requests use them."""

    def __init__(self, scale: Scale, rng: random.Random) -> None:
        self.scale, self.rng, self.lock = scale, rng, threading.Lock()
        self.nodes = [Talk()]

    def draw(self, rng: random.Random) -> Talk:
        """Returns one node; sometimes adds a node first."""
        with self.lock:
            if len(self.nodes) < self.scale.prefixes or self.rng.random() < 0.1:
                parent = self.rng.choice(self.nodes)
                if len(parent.tokens) < self.scale.longest // 2:
                    if len(self.nodes) >= self.scale.prefixes:
                        self.nodes.pop(self.rng.randrange(1, len(self.nodes)))
                    more = draw_tokens(self.rng, self.scale.shortest, self.scale.longest // 8)
                    tokens = (*parent.tokens, *more)
                    self.nodes.append(Talk(tokens, (*parent.turns, len(tokens))))
            return rng.choice(self.nodes)


def draw_tokens(rng: random.Random, least: int, most: int) -> list[int]:
    """Draws random tokens; the logarithm of their number is uniform."""
    count = int(math.exp(rng.uniform(math.log(max(least, 1)), math.log(max(most, least, 1) + 1))))
    return [rng.randrange(2, VOCABULARY) for _ in range(max(count, 1))]


@dataclass
class Counts:
    """Counts of events so far; ``lock`` guards all of them."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    kinds: Counter = field(default_factory=Counter)
    places: Counter = field(default_factory=Counter)  # cached tokens of prompts: device, host, storage
    requests: int = 0
    aborted: int = 0
    errors: int = 0
    retractions: int = 0
    incomplete: int = 0  # complete answers that lack a log-probability
    tokens: int = 0
    messages: list[str] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    def error(self, message: str) -> None:
        with self.lock:
            self.errors += 1
            if len(self.messages) < 8:
                self.messages.append(message[:2000])
                print(f"error: {message[:400]}", flush=True)


class Traffic:
    """Clients of one server, which run until ``stop``.

    Args:
        checked: function that is called with each answer.
        without: kinds of jobs that the server does not support.
    """

    def __init__(
        self,
        server: TinyServer | PairServer,
        scale: Scale,
        seed: int,
        checked: Callable[[Answer], None],
        without: Sequence[str] = (),
    ) -> None:
        self.server, self.scale, self.seed, self.checked = server, scale, seed, checked
        self.kinds = {kind: weight for kind, weight in KINDS.items() if kind not in without}
        self.counts, self.stopping, self.open = Counts(), threading.Event(), threading.Event()
        self.prefixes = Prefixes(scale, random.Random(seed))
        self.busy, self.idle = 0, threading.Condition()
        self.threads = [threading.Thread(target=self._client, args=(n,), daemon=True) for n in range(scale.clients)]

    def start(self) -> None:
        self.open.set()
        for thread in self.threads:
            thread.start()

    def pause(self, seconds: float) -> bool:
        """Prevents jobs from beginning; returns True once none runs."""
        self.open.clear()
        with self.idle:
            return self.idle.wait_for(lambda: self.busy == 0, seconds)

    def resume(self) -> None:
        self.open.set()

    def stop(self, seconds: float) -> bool:
        self.stopping.set()
        return self.pause(seconds)

    def _client(self, number: int) -> None:
        rng, talk = random.Random(f"{self.seed} {number}"), Talk()
        names, weights = list(self.kinds), list(self.kinds.values())
        while not self.stopping.is_set():
            if not self.open.wait(0.2):
                continue
            with self.idle:
                self.busy += 1
            kind = rng.choices(names, weights)[0]
            try:
                # A pause may have begun between the wait and the count.
                if self.open.is_set():
                    talk = getattr(self, f"_{kind}")(rng, talk) or talk
            except (ServerError, OSError, ValueError, KeyError) as error:
                self.counts.error(f"{kind}: {type(error).__name__}: {error}")
                talk = Talk()
                time.sleep(0.2)
            finally:
                with self.idle:
                    self.busy -= 1
                    self.idle.notify_all()

    # -- one request ------------------------------------------------------------------------------------------

    def _length(self, rng: random.Random) -> int:
        return rng.randint(*(self.scale.long_answer if rng.random() < 0.1 else self.scale.answer))

    def _ask(
        self, rng: random.Random, kind: str, prompt: list, tokens: int, sampling: dict | None = None, **options
    ) -> list[dict]:
        """Returns replies. Tokens are sampled, so that answers vary like prompts, and each one may be checked."""
        sampling = {"temperature": 1.0, **(sampling or {})}
        asked = body(prompt, tokens, return_logprob=True, sampling_params=sampling, **options)
        begin = time.monotonic()
        replies = self.server.json("/generate", asked, timeout=180)
        passed = time.monotonic() - begin
        replies = replies if isinstance(replies, list) else [replies]
        retracted = 0
        for reply in replies:
            pairs, meta = reply["meta_info"]["output_token_logprobs"], reply["meta_info"]
            whole = len(pairs) == tokens and all(pair[0] is not None and math.isfinite(pair[0]) for pair in pairs)
            # SGLang 0.5.16 sometimes omits one log-probability of a retracted request, though it returns all tokens.
            reply["comparable"] = whole
            if not whole and not (meta.get("num_retractions") and len(reply.get("output_ids") or ()) == tokens):
                given = len(reply.get("output_ids") or ())
                raise ValueError(
                    f"{len(pairs)} log-probabilities of {tokens} tokens, {given} tokens given, "
                    f"retracted {meta.get('num_retractions')} times: {meta.get('finish_reason')}"
                )
            retracted += not whole
        with self.counts.lock:
            self.counts.incomplete += retracted
            self.counts.kinds[kind] += 1
            self.counts.requests += len(replies)
            self.counts.tokens += tokens * len(replies)
            self.counts.latencies.append(passed)
            self.counts.retractions += sum(reply["meta_info"].get("num_retractions") or 0 for reply in replies)
            for reply in replies:
                places = reply["meta_info"].get("cached_tokens_details") or {}
                self.counts.places.update({name: n for name, n in places.items() if isinstance(n, int)})
        return replies

    def _offer(self, kind: str, prompt: list[int], reply: dict, past: Talk = Talk()) -> Talk:
        """Offers an answer for comparison, if it is comparable; returns the conversation after it."""
        after, pairs = past.after(prompt, reply), reply["meta_info"]["output_token_logprobs"]
        if reply["comparable"]:
            said, logprobs = [p[1] for p in pairs], [p[0] for p in pairs]
            cached, turns = reply["meta_info"].get("cached_tokens") or 0, list(past.turns)
            self.checked(Answer(kind, prompt, said, logprobs, cached, turns, list(past.asked), after.retracted))
        return after

    def _prompt(self, rng: random.Random) -> tuple[list[int], Talk]:
        """Returns a prompt that begins with a node of the tree, and the node."""
        node = self.prefixes.draw(rng)
        prompt = [*node.tokens, *draw_tokens(rng, self.scale.shortest, self.scale.longest // 2)]
        return prompt[: self.scale.longest], node

    # -- kinds of jobs ----------------------------------------------------------------------------------------

    def _single(self, rng: random.Random, talk: Talk) -> None:
        prompt, node = self._prompt(rng)
        self._offer("single", prompt, self._ask(rng, "single", prompt, self._length(rng))[0], node)

    def _conversation(self, rng: random.Random, talk: Talk) -> Talk:
        begin = talk if talk.tokens else self.prefixes.draw(rng)
        prompt = [*begin.tokens, *draw_tokens(rng, self.scale.shortest, self.scale.longest // 16)]
        if len(prompt) >= self.scale.longest:
            prompt, begin = self._prompt(rng)
        reply = self._ask(rng, "conversation", prompt, self._length(rng))[0]
        return self._offer("conversation", prompt, reply, begin)  # a shorter conversation is fine, too

    def _pair(self, rng: random.Random, talk: Talk) -> None:
        """Sends two cold requests at once that share a new prefix and differ in length."""
        shared = draw_tokens(rng, 64, self.scale.longest // 8)
        prompts = [shared + draw_tokens(rng, 8, 64), shared + draw_tokens(rng, 64, self.scale.longest // 8)]
        for prompt, reply in zip(prompts, self._ask(rng, "pair", prompts, rng.randint(*self.scale.answer))):
            self._offer("pair", prompt, reply)

    def _parallel(self, rng: random.Random, talk: Talk) -> None:
        prompt, node = self._prompt(rng)
        replies = self._ask(rng, "parallel", prompt, self._length(rng), {"n": rng.randint(2, 4)})
        self._offer("parallel", prompt, rng.choice(replies), node)

    def _disconnect(self, rng: random.Random, talk: Talk) -> None:
        self._leave(rng, body(self._prompt(rng)[0], self._length(rng), stream=True))

    def _leave(self, rng: random.Random, asked: dict, headers: Mapping[str, str] | None = None) -> None:
        """Disconnects the client: while queued, during prefill, or while tokens arrive."""
        events = rng.choice((0, 0, 1, 5))
        with self.server.stream("/generate", asked, headers=headers) as response:
            if events == 0:
                time.sleep(rng.uniform(0, self.scale.wait))
            for _ in range(events):
                response.readline()
        self._given_up("disconnect")

    def _abort(self, rng: random.Random, talk: Talk) -> None:
        self._cancel(rng, body(self._prompt(rng)[0], self._length(rng), stream=True))

    def _cancel(self, rng: random.Random, asked: dict, headers: Mapping[str, str] | None = None) -> None:
        """Aborts a streaming request by its id after a while."""
        rid = f"soak-{rng.getrandbits(64):x}"

        def cancel() -> None:
            try:
                self.server.request("/abort_request", {"rid": rid}, timeout=60)
            except ServerError as error:
                self.counts.error(f"abort_request: {error}")

        timer = threading.Timer(rng.uniform(0, self.scale.wait), cancel)
        timer.start()
        with self.server.stream("/generate", {**asked, "rid": rid}, headers=headers) as response:
            while response.readline():
                pass
        timer.join()
        self._given_up("abort")

    def _given_up(self, kind: str) -> None:
        with self.counts.lock:
            self.counts.kinds[kind] += 1
            self.counts.aborted += 1

    def _session(self, rng: random.Random, talk: Talk, streaming: bool = False) -> None:
        kind = "streaming" if streaming else "session"
        opened = {"capacity_of_str_len": 1 << 24, **({"streaming": True} if streaming else {})}
        session = json.loads(self.server.request("/open_session", opened, timeout=60))
        past, rid = Talk(), None
        try:
            for _ in range(rng.randint(2, 3)):
                ids = draw_tokens(rng, self.scale.shortest, self.scale.longest // 8)
                params = {"id": session} if streaming else {"id": session, "rid": rid}
                reply = self._ask(rng, kind, ids, rng.randint(*self.scale.answer), session_params=params)[0]
                prompt, rid = [*past.tokens, *ids], reply["meta_info"]["id"]
                past = self._offer(kind, prompt, reply, past)
        finally:
            self.server.request("/close_session", {"session_id": session}, timeout=60)

    def _streaming(self, rng: random.Random, talk: Talk) -> None:
        self._session(rng, talk, streaming=True)
