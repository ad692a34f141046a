"""Requests that begin with chosen pages of a prefix compute what a model computes with those keys alone."""

from __future__ import annotations

import functools
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, DynamicCache

from benchmarks.session_reference import Readings, Reference, SessionAnswer
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.sessions.messages import SELECTION, Selection
from tests.e2e.client import Client, held_out_text, together

FLAGS = ("--kv-quant", "int4")
ENVIRONMENT = {"KVQ_PAGE_SELECTION": "1"}
PAGES, TAIL = 14, 90
#: Largest mean difference of log-probabilities, for 4-bit histories on this model; a wrong page or position gives 0.5
#: and more.
CLOSE = 0.15


@pytest.fixture(scope="module")
def text(model) -> list[int]:
    return AutoTokenizer.from_pretrained(model)(held_out_text()).input_ids[: PAGES * P + TAIL]


def ask(client: Client, selection: Selection, tail: list[int], tokens: int = 6, name: str | None = None) -> dict:
    """Asks for an answer after the selection; sends an evicted history again, as sessions do."""
    body = {
        "input_ids": selection.tokens.tolist() + tail,
        "extra_key": name or selection.name,
        "return_logprob": True,
        "logprob_start_len": len(selection.tokens),
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": tokens,
            "ignore_eos": True,
            "custom_params": {SELECTION: selection.encode()},
        },
    }
    response = client.post("/generate", **body)
    for _ in range(3):
        if "no longer cached" not in response.text:
            break
        client.generate(selection.history.tolist())
        response = client.post("/generate", **body)
    assert response.status_code == 200, response.text
    return response.json()["meta_info"]


def logprobs(meta: dict) -> list[float]:
    """Returns log-probabilities of the tail's tokens after its first, and of the generated tokens."""
    return [entry[0] for entry in meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]]


@functools.lru_cache(maxsize=1)
def both_ends(model) -> Reference:
    """Returns the model with nothing quantized, and with everything stored quantized."""
    return Reference(model, "cpu", KVQuantConfig("int4"), PAGES * P)


@functools.lru_cache(maxsize=1)
def computed(model, history: tuple[int, ...]) -> DynamicCache:
    """Returns the model's own cache of a history."""
    return both_ends(model).model(torch.tensor([history]), use_cache=True, logits_to_keep=1).past_key_values


def expected(model, selection: Selection, tail: list[int], answer: list[int]) -> list[float]:
    """Returns the same log-probabilities from the model's own cache, reduced to the history's chosen pages."""
    network = both_ends(model).model
    kept = torch.cat([torch.arange(page * P, (page + 1) * P) for page in selection.pages])
    new = torch.tensor([tail + answer])
    with torch.no_grad():
        whole = computed(model, tuple(selection.history.tolist()))
        cache = DynamicCache()
        for i, layer in enumerate(whole.layers):
            cache.update(layer.keys[:, :, kept], layer.values[:, :, kept], i)
        positions = len(selection.history) + torch.arange(new.shape[1])[None]
        logits = network(new, past_key_values=cache, position_ids=positions).logits[0]
    scores = torch.log_softmax(logits.float(), -1)[:-1]
    return scores[torch.arange(len(scores)), new[0, 1:]].tolist()


def answer_of(meta: dict) -> list[int]:
    return [entry[1] for entry in meta["output_token_logprobs"]]


def test_all_pages_are_the_history_itself(servers, text):
    client = Client(servers(*FLAGS, env=ENVIRONMENT))
    client.flush()
    history, tail = text[: PAGES * P], text[PAGES * P :]
    client.generate(history)
    selection = Selection(tuple(history), None, tuple(range(PAGES)))
    copied = ask(client, selection, tail)
    plain = client.generate(text, 6, return_logprob=True, logprob_start_len=len(history))["meta_info"]
    assert copied["cached_tokens"] == plain["cached_tokens"] == len(history)
    assert logprobs(copied) == pytest.approx(logprobs(plain), abs=1e-3)


@pytest.mark.parametrize("pages", [(0, 1, 5, 9, 10, 13), (0, 7)], ids=["some", "few"])
def test_chosen_pages_are_all_that_is_read(servers, model, text, pages):
    client = Client(servers(*FLAGS, env=ENVIRONMENT))
    history, tail = text[: PAGES * P], text[PAGES * P :]
    client.generate(history)
    selection = Selection(tuple(history), None, pages)
    meta = ask(client, selection, tail)
    assert meta["cached_tokens"] == len(pages) * P
    want = expected(model, selection, tail, answer_of(meta))
    differences = [abs(a - b) for a, b in zip(logprobs(meta), want, strict=True)]
    assert sum(differences) / len(differences) < CLOSE, differences
    other = Selection(tuple(history), None, (2, 4))
    wrong = expected(model, other, tail, answer_of(meta))
    assert sum(abs(a - b) for a, b in zip(logprobs(meta), wrong)) / len(wrong) > 2 * CLOSE


def exchanged(pages: list[int]) -> list[int]:
    """Returns these pages with another page instead of the last."""
    return sorted({*pages[:-1], next(page for page in range(PAGES - 1, 0, -1) if page not in pages)})


def readings(model, chosen: list[Selection], tail: list[int], metas: list[dict]) -> list[tuple[Readings, Readings]]:
    """Compares each answer with what its own pages give, and with what they give after one is exchanged."""
    answers = []
    for selection, meta in zip(chosen, metas):
        history, said = selection.history.tolist(), tail[1:] + answer_of(meta)
        top = [{token: found} for token, found in zip(said, logprobs(meta), strict=True)]
        pages = selection.pages.tolist()
        answer = SessionAnswer("", history + tail[:1], said, [], 0, top=top, history=len(history), pages=pages)
        answers += [answer, replace(answer, pages=exchanged(pages))]
    found = both_ends(model).several(answers)
    return list(zip(found[::2], found[1::2]))


def test_several_at_once_beside_plain_requests(servers, model, text):
    """Copies and their originals may be evicted and made again; each answer reads its own pages.

    A copy that had to wait may find that its window's BF16 pages were given to others. So an answer reads anything
    between both ends of precision, which are 0.12 to 0.15 apart here. One exchanged page moves both by 0.18 and more.
    """
    client = Client(servers(*FLAGS, env=ENVIRONMENT))
    client.flush()
    history, tail = text[: PAGES * P], text[PAGES * P :]
    client.generate(history)
    chosen = [Selection(tuple(history), None, pages) for pages in ((0, 1, 2), (0, 4, 8), (0, 13), (5, 6, 7, 8))]
    plain = [[(i * 37 + j) % 3000 + 10 for j in range(400)] for i in range(4)]
    jobs = [lambda s=s: ask(client, s, tail, 4) for s in chosen]
    got = together([*jobs, *(lambda ids=ids: client.generate(ids, 8) for ids in plain)])
    for own, other in readings(model, chosen, tail, got):
        assert own.distance < 1 < other.distance, (own, other)


def test_a_history_that_is_gone_is_said_to_be(servers, text):
    client = Client(servers(*FLAGS, env=ENVIRONMENT))
    client.flush()
    selection = Selection(tuple(text[: PAGES * P]), None, (0, 3))
    body = {"input_ids": selection.tokens.tolist() + text[PAGES * P :], "extra_key": selection.name}
    params = {"max_new_tokens": 4, "custom_params": {SELECTION: selection.encode()}}
    response = client.post("/generate", **body, sampling_params=params)
    assert "no longer cached" in response.text and response.status_code == 400


#: Pages of a pool that fills quickly.
SMALL = 20


@pytest.fixture
def small(servers):
    client = Client(servers(*FLAGS, "--max-total-tokens", str(SMALL * P), env=ENVIRONMENT))
    client.flush()
    return client


def test_without_room_a_selection_waits(small, model, text):
    """The history, another request and the copies do not fit; the copies are made after that request has ended."""
    history, tail = text[: PAGES * P], text[PAGES * P :]
    small.generate(history)
    selection, ended = Selection(tuple(history), None, (0, 2, 5, 9, 13)), {}

    running = threading.Event()

    def other() -> None:
        for _ in small.stream(text[100:250], 80):
            running.set()
        ended["other"] = time.monotonic()

    def chosen() -> dict:
        assert running.wait(300)
        meta = ask(small, selection, tail)
        ended["chosen"] = time.monotonic()
        return meta

    _, meta = together([other, chosen])
    assert ended["chosen"] > ended["other"] and meta["cached_tokens"] == len(selection.pages) * P
    differences = np.subtract(logprobs(meta), expected(model, selection, tail, answer_of(meta)))
    assert np.abs(differences).mean() < CLOSE, differences


def test_what_never_fits_ends_with_an_error(small, text):
    history, tail = text[: PAGES * P], text[PAGES * P :]
    small.generate(history)
    selection = Selection(tuple(history), None, tuple(range(SMALL - PAGES + 1)))
    body = {"input_ids": selection.tokens.tolist() + tail, "extra_key": selection.name}
    params = {"max_new_tokens": 4, "custom_params": {SELECTION: selection.encode()}}
    response = small.post("/generate", **body, sampling_params=params)
    assert response.status_code == 400 and "is too small for a history of 896 tokens and copies of 448" in response.text
    assert small.generate(history)["meta_info"]["cached_tokens"] == len(history) - P
