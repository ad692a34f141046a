"""Named workloads, as arguments of SGLang's serving benchmark.

A workload is one load, or several at the same time. In a closed loop, a number of clients each send a request, wait for
its answer and send the next one. In an open loop, requests arrive at a rate whatever the server does. Prompts, their
order and their arrivals depend only on the load and its seed, so they are the same for all servers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sglang_kvq.errors import KVQuantError

SEED = 1


@dataclass(frozen=True)
class Load:
    """Requests of one kind. Lengths are in tokens.

    Attributes:
        clients: requests (or conversations) at once.
        requests: number of requests; of conversations if ``turns`` is more than 1.
        prompt: length of a request's prompt, or of a turn's.
        shared: tokens that all conversations of a group begin with.
        group: conversations that share these tokens.
        rate: requests that arrive per second; None for a closed loop of ``clients``.
        least: the least share of a length. Lengths are drawn evenly from this share to the whole, but all answers of a
            conversation have one length. Only for conversations.
    """

    clients: int
    requests: int
    prompt: int
    output: int
    turns: int = 1
    shared: int = 0
    group: int = 1
    rate: float | None = None
    least: float = 1.0

    @property
    def longest(self) -> int:
        """Tokens of the longest request, including its answer."""
        return self.shared + self.turns * (self.prompt + self.output)

    def arguments(self, seed: int) -> list[str]:
        """Returns the arguments of ``sglang.benchmark.serving`` for this load, without the server's."""
        words = ["--seed", str(seed), "--warmup-requests", "0"]
        words += ["--max-concurrency", str(self.clients)] if self.rate is None else ["--request-rate", str(self.rate)]
        if self.turns == 1:
            words += ["--backend", "sglang", "--dataset-name", "random-ids", "--tokenize-prompt"]
            words += ["--random-input-len", str(self.prompt), "--random-output-len", str(self.output)]
            return [*words, "--random-range-ratio", "1", "--num-prompts", str(self.requests)]
        words += ["--backend", "sglang-oai-chat", "--dataset-name", "generated-shared-prefix"]
        words += ["--gsp-num-groups", str(self.requests // self.group), "--gsp-prompts-per-group", str(self.group)]
        words += ["--gsp-system-prompt-len", str(self.shared), "--gsp-question-len", str(self.prompt)]
        words += ["--gsp-output-len", str(self.output), "--gsp-num-turns", str(self.turns)]
        return words if self.least == 1 else [*words, "--gsp-range-ratio", str(self.least)]

    def during(self, seconds: float) -> Load:
        """Returns this load, which has a rate, with the requests that arrive in so many seconds, in whole groups."""
        assert self.rate is not None
        requests = math.ceil(self.rate * seconds / self.group) * self.group
        return replace(self, requests=max(self.group, requests))

    def smaller(self, share: float) -> Load:
        """Returns this load with a share of its clients and requests."""
        group = max(1, round(self.group * share)) if self.turns > 1 else 1
        requests = max(group, round(self.requests * share))
        return replace(
            self, clients=max(1, round(self.clients * share)), requests=requests // group * group, group=group
        )


@dataclass(frozen=True)
class Workload:
    """Loads that run at the same time.

    Attributes:
        title: name in tables.
        seconds: time limit; the measurement ends then, whatever is left.
        ttft, tpot: limits of goodput, in milliseconds.
        repeat: times to measure it, each with other prompts.
    """

    name: str
    title: str
    loads: tuple[Load, ...]
    seconds: float
    ttft: float
    tpot: float = 50.0
    repeat: int = 1

    @property
    def longest(self) -> int:
        return max(load.longest for load in self.loads)

    def rehearsal(self, seconds: float) -> list[list[str]]:
        """Returns the arguments of each load for so many seconds, with as many requests at a rate as come meanwhile."""
        loads = [load if load.rate is None else load.during(seconds) for load in self.loads]
        return replace(self, loads=tuple(loads)).arguments()

    def arguments(self, turn: int = 0) -> list[list[str]]:
        """Returns the arguments of each load; seeds differ, so that no two loads and turns have the same prompts."""
        return [load.arguments(SEED + number + len(self.loads) * turn) for number, load in enumerate(self.loads)]


def _chats(clients: int, least: float = 1.0) -> Load:
    """Returns conversations that end at 12,000 tokens at most: 3,000 shared by four, then six turns of 1,250 + 250."""
    return Load(clients, clients, 1250, 250, turns=6, shared=3000, group=4, least=least)


#: Clients answer in step, so only whole rounds are a fair comparison: a server that computes all prompts first has the
#: fewest tokens when a round is cut.
_SINGLE = {
    "200": Load(1024, 3072, 200, 200),
    "1k": Load(512, 1536, 1024, 256),
    "8k": Load(256, 256, 8192, 512),
    "48k": Load(48, 48, 49152, 512),
}
_PARTS = (*(load.smaller(0.25) for load in _SINGLE.values()), _chats(16))
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("200", "200 + 200 tokens, 1,024 clients", (_SINGLE["200"],), 120, 1000),
        Workload("1k", "1K + 256, 512 clients", (_SINGLE["1k"],), 180, 2000),
        Workload("8k", "8K + 512, 256 clients", (_SINGLE["8k"],), 240, 10_000),
        Workload("48k", "48K + 512, 48 clients", (_SINGLE["48k"],), 240, 30_000),
        Workload("chats", "64 chats to 12K, six rounds", (_chats(64),), 180, 5000),
        Workload("mix", "all of these, a quarter each", _PARTS, 180, 10_000),
        # At a rate, chats whose answers are equally long fall into step: those that one batch began end in one step,
        # and so their next turns come together, too.
        Workload("varied", "64 chats of 6K to 12K", (_chats(64, 0.5),), 180, 5000),
    )
}
#: Small versions for a CPU, which only show that everything works.
_TINY_SINGLE = (Load(4, 6, 40, 12), Load(2, 3, 300, 9))
_TINY_CHATS = Load(2, 2, 70, 9, turns=3, shared=70, group=2)
_TINY_VARIED = replace(_TINY_CHATS, least=0.5)
TINY = {
    workload.name: workload
    for workload in (
        Workload("200", "40 + 12 tokens, 4 clients", _TINY_SINGLE[:1], 60, 60_000, 60_000),
        Workload("1k", "300 + 9, 2 clients", _TINY_SINGLE[1:], 60, 60_000, 60_000),
        Workload("chats", "2 chats, three rounds", (_TINY_CHATS,), 60, 60_000, 60_000),
        Workload("mix", "all of these", (*_TINY_SINGLE, _TINY_CHATS), 60, 60_000, 60_000),
        Workload("varied", "2 chats of varied lengths", (_TINY_VARIED,), 60, 60_000, 60_000),
    )
}


def at_rate(workload: Workload, rate: float) -> Workload:
    """Returns a workload of one load as an open loop: requests arrive at a rate, for as long as it is measured."""
    (load,) = workload.loads
    # Titles begin with the number of chats, or end with that of other clients; at a rate there is no such number.
    kind = workload.title.removeprefix(f"{load.clients} ").removesuffix(f", {load.clients:,} clients")
    title = f"{kind}, {rate:g} a second"
    loads = (replace(load, rate=rate).during(workload.seconds),)
    return replace(workload, name=f"{workload.name}@{rate:g}", title=title, loads=loads)


def chosen(words: str, known: dict[str, Workload], seconds: float | None = None) -> list[Workload]:
    """Parses ``--workloads``: names, each optionally with ``@RATE`` for arrivals at a rate.

    Args:
        seconds: time limit of each workload; None for its own.

    Raises:
        KVQuantError: a name or a rate is invalid.
    """
    found = []
    for word in words.split(","):
        name, at, rate = word.partition("@")
        if name not in known:
            raise KVQuantError(f"--workloads {word}: not a workload. Choose from {', '.join(known)}.")
        workload = known[name] if seconds is None else replace(known[name], seconds=seconds)
        if at:
            if len(workload.loads) > 1:
                raise KVQuantError(f"--workloads {word}: {name} has several loads. Give a rate to one of the others.")
            try:
                number = float(rate)
            except ValueError:
                number = 0.0
            if not 0 < number < math.inf:
                raise KVQuantError(
                    f"--workloads {word}: {rate!r} is no rate. Give requests a second, such as {name}@2."
                )
            workload = at_rate(workload, number)
        found.append(workload)
    return found
