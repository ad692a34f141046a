"""Copies between device and host that happen late change no answer; without the waits for them, answers are wrong."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path

import pytest

from benchmarks import crowded
from benchmarks.tiny_server import with_plugin
from sglang_kvq.constants import PAGE_SIZE
from tests.e2e.client import Client, together
from tests.e2e.conftest import ON_GPU, STEADY
from tests.e2e.test_hicache import CACHED, FLAGS, PAGES, at, come_back, files_in, prompt, read, wait_for

pytestmark = pytest.mark.skipif(ON_GPU, reason="on a GPU, SGLANG_TEST_HICACHE_H2D_DELAY_CYCLES makes loads late")
#: Prompts have twice as many different pages as the device; the host has room for all.
PROMPTS, CLIENTS, ROUNDS = 12, 4, 8
#: Prompts with the same beginning, one after the other, and how many tokens they share.
ALIKE, SHARED = 3, 2 * PAGE_SIZE
#: Nats a token by which batches of other sizes may change an answer, because BF16 is rounded.
ROUNDING = 0.015


@pytest.fixture
def start(servers, plugins, tmp_path) -> Callable[[str], Client]:
    """``start(fault)`` returns a client of a server with late copies, in a memory whose boundary moves."""

    def go(fault: str) -> Client:
        path = with_plugin(tmp_path, Path(crowded.__file__), plugins("small_host", "late_copies")["PYTHONPATH"])
        env = {"PYTHONPATH": path, "KVQ_TEST_LATE_FAULT": fault, **STEADY}
        flags = ("--kv-quant", "int4", *FLAGS, *files_in(tmp_path / "pages"), "--max-running-requests", str(CLIENTS))
        return Client(servers(*flags, env=env, model=servers.shallow))

    return go


def shared(index: int) -> list[int]:
    """Returns a prompt that begins like two others."""
    return [*prompt(100 + index // ALIKE)[:SHARED], *prompt(200 + index)[SHARED:]]


def aborted(client: Client, index: int, rid: str) -> None:
    params = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    send = partial(client.post, "/generate", input_ids=shared(index), sampling_params=params, rid=rid)
    together([send, partial(client.post, "/abort_request", rid=rid)])


def traffic(client: Client, seed: int) -> list[tuple[int, dict[str, int], list[float]]]:
    """Returns numbers of prompts, and what ``read`` returns for them while other clients read and abort."""
    numbers, found = random.Random(seed), []
    for count in range(ROUNDS):
        if numbers.random() < 0.4:
            aborted(client, numbers.randrange(PROMPTS), f"{seed}-{count}")
        index = numbers.randrange(PROMPTS)
        found.append((index, *read(client, shared(index))))
    return found


def distance(some: list[float], others: list[float]) -> float:
    """Returns the mean difference in nats; NaN if a log-probability is NaN, which SGLang sends as null."""
    pairs = list(zip(some, others, strict=True))
    return math.nan if None in chain(*pairs) else sum(abs(a - b) for a, b in pairs) / len(pairs)


def written(client: Client) -> int:
    """Returns how many pages have been copied to host memory."""
    return int(client.state()["late"]["written"])


def wrong(client: Client) -> list[tuple[int, dict[str, int], float]]:
    """Returns answers of a traffic that are unlike those of the same prompts alone, with their distances.

    Alone, prompts are read from records. An answer whose pages come from the host is the same. Others may have read
    some pages in BF16, so they are at most as far from it as answers that were computed at once.
    """
    before = written(client)
    cold = [read(client, shared(index)) for index in range(PROMPTS)]
    # A page that waits for its copy to the host keeps its place on the device, and may keep its BF16 page.
    new = PROMPTS * PAGES - (PROMPTS - PROMPTS // ALIKE) * SHARED // PAGE_SIZE
    wait_for(lambda: written(client) == before + new, "pages do not arrive in host memory")
    alone = [read(client, shared(index)) for index in range(PROMPTS)]
    loaded = {**at("host", CACHED - SHARED), "device": SHARED}  # the one before has loaded the shared pages
    assert [place for place, _ in alone] == [loaded if index % ALIKE else at("host") for index in range(PROMPTS)]
    bound = max(distance(one, other) for (_, one), (_, other) in zip(cold, alone))
    answers = chain(*together([partial(traffic, client, seed) for seed in range(CLIENTS)]))
    far = [(index, place, distance(logprobs, alone[index][1])) for index, place, logprobs in answers]
    return [one for one in far if not one[2] <= (ROUNDING if one[1] == at("host") else bound)]


def test_late_copies_change_no_answer(start):
    client = start("")
    come_back(client)
    assert not wrong(client)
    state = client.state()
    assert state["errors"] == state["damaged_pages"] == 0
    assert state["late"]["written"] >= PAGES and state["late"]["loaded"] and state["late"]["moves"], state


@pytest.mark.parametrize("fault", ["moves", "layers"])
def test_answers_without_a_wait_are_wrong(start, fault):
    assert wrong(start(fault))
