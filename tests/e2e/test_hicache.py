"""Quantized pages go to host memory and to storage, and come back as they were."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from tests.e2e.client import Client

#: 64 pages on the device and BF16 copies for one request: a few prompts of 700 tokens take the BF16 copies of the
#: first, a few more evict it.
FLAGS = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "3", "--hicache-storage-backend", "file"),
    *("--hicache-storage-prefetch-policy", "wait_complete", "--max-running-requests", "1"),
    *("--enable-cache-report", "--enable-metrics", "--decode-log-interval", "1"),
)
#: A prompt's whole pages.
CACHED = 640


def prompt(index: int) -> list[int]:
    numbers = random.Random(index)
    return [numbers.randrange(100, 40000) for _ in range(700)]


def ask(client: Client, index: int) -> tuple[dict[str, int], list[float]]:
    """Returns where a prompt's tokens were cached, and the answer's log-probabilities."""
    meta = client.generate(prompt(index), 4, return_logprob=True)["meta_info"]
    found = meta.get("cached_tokens_details") or {}
    return {place: found.get(place, 0) for place in ("device", "host", "storage")}, [
        entry[0] for entry in meta["output_token_logprobs"]
    ]


def at(place: str, tokens: int = CACHED) -> dict[str, int]:
    return {"device": 0, "host": 0, "storage": 0, place: tokens}


@pytest.fixture
def start(servers, plugins, tmp_path) -> Callable[..., tuple[Client, Path]]:
    """``start(*flags)``: a client of a server with an empty storage, and the storage's folder."""

    def go(*flags: str) -> tuple[Client, Path]:
        env = {**plugins("small_host"), "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / "storage")}
        return Client(servers(*flags, *FLAGS, env=env)), tmp_path / "storage"

    return go


@pytest.mark.parametrize("method", ["int2", "hadamard"])
def test_pages_come_back_from_host_and_storage(start, method):
    client, storage = start("--kv-quant", method)
    print(ask(client, 0))
    print(ask(client, 0))
    for index in (1, 2):
        print(ask(client, index))
    place, stayed = ask(client, 0)
    print(place, stayed, client.state()["tiers"])
    for index in range(3, 10):
        ask(client, index)
    print(ask(client, 0))
    client.flush()
    print(ask(client, 0))
    print(len(list(storage.iterdir())), next(storage.iterdir()).name, client.state())
    assert 0
