"""A session's history that has left the device comes back from host or storage, and is not computed again."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from sglang_kvq.constants import PAGE_SIZE as P
from tests.e2e import word_embeddings
from tests.e2e.client import held_out_text
from tests.e2e.conftest import ON_GPU
from tests.e2e.test_hicache import files_in, wait_for
from tests.e2e.test_sessions import BUDGET, FLAGS, QUESTION, Sessions, assert_read

#: Nats a token that answers may be from transformers'. On a CPU, 0.02 were measured with the first layers, and 0.12 to
#: 0.22 for the other pages; with all layers 0.11, and 1.1 to 2.3 for the other pages.
CLOSE = 0.2 if ON_GPU else 0.05
#: Room for a history of 24 pages, its copies and one more prompt.
POOL = 48
HICACHE = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-storage-backend", "file"),
    *("--hicache-storage-prefetch-policy", "wait_complete", "--enable-cache-report"),
    *("--max-total-tokens", str(POOL * P), "--max-running-requests", "2"),
)


@pytest.fixture(scope="module")
def storage(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("storage")


@pytest.fixture
def client(servers, plugins, storage, tmp_path) -> Sessions:
    path, folder = word_embeddings.install(tmp_path)
    env = plugins("small_host")
    env["PYTHONPATH"] = os.pathsep.join((path, env["PYTHONPATH"]))
    flags = (*FLAGS, *HICACHE, *files_in(storage), "--episodic-embedder", folder)
    return Sessions(servers(*flags, env=env, model=servers.shallow))


@pytest.fixture
def prompt(model) -> list[int]:
    """Returns 1,500 tokens of prose, and a question."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [*tokenizer(held_out_text()).input_ids[:1500], *tokenizer(QUESTION).input_ids]


def push_out(client: Sessions) -> None:
    """Fills the device with other prompts' pages."""
    for index in range(4):
        numbers = random.Random(index)
        client.turn([numbers.randrange(100, 500) for _ in range(14 * P)], None, 1)


def test_a_history_comes_back(client, servers, prompt, storage):
    """A history from host memory, then from files, is read in chosen pages with a right answer; little is computed."""

    def read(answer: dict) -> dict:
        return assert_read(client, servers.shallow, "long", prompt, answer, control=True, close=CLOSE)

    client.flush()
    first = client.turn(prompt, "long", 6)
    chosen = read(first)["read"]
    client.wait_computed("long", chosen["of_tokens"])
    wait_for(lambda: len(list(storage.glob("*.bin"))) >= chosen["of_tokens"] // P, "pages do not arrive in storage")
    rebuilt = 0
    for place in ("host", "storage"):
        push_out(client)
        if place == "storage":
            client.flush()
        before = client.computed_tokens()
        answer = client.turn(prompt, "long", 6)
        spent = client.computed_tokens() - before
        assert spent < BUDGET, f"{spent} tokens computed although the history is in the {place}"
        session = read(answer)
        assert session["rebuilt"] > rebuilt, "the setting: the history had left the device"
        rebuilt = session["rebuilt"]
    assert client.state()["errors"] == 0 and client.state()["damaged_pages"] == 0
