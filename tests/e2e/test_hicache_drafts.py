"""Speculative decoding over pages from the host and from storage answers as over pages that stayed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import ngrams
from tests.e2e.client import Client
from tests.e2e.conftest import ON_GPU
from tests.e2e.test_hicache import CACHED, FLAGS, MORE, PLACES, at, files_in, wait_for
from tests.e2e.test_speculation import NGRAM, assert_same_but_for_ties, repetitive

ANSWER = 24
CHAIN = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")


@pytest.fixture(scope="module")
def storage(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("storage")


@pytest.fixture
def start(servers, plugins, storage) -> Callable[..., Client]:
    """``start(*flags)`` returns a client of a server that drafts."""

    def go(*flags: str) -> Client:
        env = plugins("small_host", *([] if ON_GPU else ["drafting_on_cpu"]))
        if not ON_GPU:
            env |= ngrams.on_cpu(env["PYTHONPATH"]) if "NGRAM" in flags else {"TORCHDYNAMO_DISABLE": "1"}
            env["PYTHONPATH"] = os.pathsep.join((str(ngrams.STANDINS), env["PYTHONPATH"]))
        return Client(servers("--kv-quant", "int4", *FLAGS, *files_in(storage), *flags, env=env, model=servers.shallow))

    return go


def ask(client: Client, index: int) -> tuple[dict[str, int], list[int], dict]:
    """Returns where a prompt's tokens were cached, the answer, and ``meta_info``."""
    reply = client.generate(repetitive(index, CACHED + MORE), ANSWER, return_logprob=True, top_logprobs_num=2)
    found = reply["meta_info"].get("cached_tokens_details") or {}
    return {place: found.get(place) or 0 for place in PLACES}, reply["output_ids"], reply["meta_info"]


@pytest.mark.parametrize("way", ["NGRAM", "STANDALONE"])
def test_answers_and_drafts_after_host_and_storage(start, servers, storage, way):
    """The draft model has its own pages; if they were lost, fewer of its drafts would be right."""
    draft = ("--speculative-algorithm", way, "--speculative-draft-model-path", str(servers.shallow), *CHAIN)
    client = start(*(NGRAM if way == "NGRAM" else draft))
    client.flush()
    for index in (1, 2, 3):
        place, *_ = ask(client, index)
        assert place == at("device", 0), "nothing is cached yet"
    place, want, meta = ask(client, 1)
    assert place == at("device")
    for place in ("host", "storage"):
        if place == "storage":
            client.flush()
        else:
            for index in range(10, 15):
                ask(client, index)
        found, got, again = ask(client, 1)
        print(place, found, got == want, meta["spec_verify_ct"], again["spec_verify_ct"])
        assert found == at(place)
        assert assert_same_but_for_ties(got, want, meta) > 4
        assert 0 < again["spec_verify_ct"] < ANSWER - 4, "almost no draft was accepted"
        if way == "STANDALONE":  # n-grams know the answer, and forget it when the cache is flushed
            assert again["spec_verify_ct"] == meta["spec_verify_ct"]
    assert client.state()["errors"] == 0 and client.state()["damaged_pages"] == 0
    if way == "STANDALONE":
        stored = lambda: [file for file in storage.glob("*.bin") if "draft" in file.name]  # noqa: E731
        wait_for(lambda: bool(stored()), "no draft pages are stored")
        damage(stored())
        client.flush()
        found, got, again = ask(client, 1)
        assert found == at("storage")
        assert assert_same_but_for_ties(got, want, meta) > 4
        assert again["spec_verify_ct"] > meta["spec_verify_ct"], "the damaged pages were not read"
        assert client.state()["errors"] == 0 and client.state()["damaged_pages"] == 0


def damage(files: list[Path]) -> None:
    """Writes NaN to pages of a draft model, which have no checksum."""
    for file in files:
        file.write_bytes(b"\xff" * file.stat().st_size)
