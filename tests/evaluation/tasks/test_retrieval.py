"""Retrieval tasks against a server of formulas: sizes, scores, likelihoods, refusals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.client import Client
from sglang_kvq.evaluation.tasks.haystacks import KINDS, Haystack
from sglang_kvq.evaluation.tasks.retrieval import RetrievalTask
from tests.evaluation.fake_server import FakeServer, log_probs

LENGTHS = (2048, 3072, 9000)


def task(name: str = "exact_keys", **settings) -> RetrievalTask:
    return RetrievalTask(**{"name": name, "lengths": LENGTHS, "cases": 3} | settings)


@pytest.mark.parametrize("template", [True, False], ids=["chat", "completion"])
def test_a_model_that_copies_scores_one(bench, template):
    with FakeServer(template=template) as server:
        outcome = task().run(Client(server.url), bench)
    assert (outcome.value, outcome.n) == (1.0, 6)
    assert outcome.row["exact_keys_2k"] == outcome.row["exact_keys_3k"] == 1 and outcome.row["exact_keys_9000"] is None
    assert outcome.details["style"] == ("chat" if template else "completion")
    assert outcome.warnings == ["exact_keys: no requests of 9000 tokens were measured: the server takes at most 4096"]
    for one in outcome.details["asked"]:
        assert one["length"] - 500 < one["prompt_tokens"] < one["length"] - 128, "haystacks fill what is asked for"


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_does_not_scores_zero(bench, kind, monkeypatch):
    monkeypatch.setattr("tests.evaluation.fake_server.answer_to", lambda prompt: "42")
    with FakeServer() as server:
        outcome = task(kind).run(Client(server.url), bench)
    assert outcome.value == 0 and outcome.row[f"{kind}_2k"] == 0


def test_likelihood_is_of_the_value_behind_its_cached_prompt(bench):
    with FakeServer(template=False) as server:
        outcome = task(lengths=(2048,)).run(Client(server.url), bench)
        asked = server.asked("/generate")
    cached, scored = asked[::2], asked[1::2]
    pairs = [(a, b) for a in asked if "return_logprob" not in a for b in asked if "return_logprob" in b]
    behind = [(a, b) for a, b in pairs if b["input_ids"][: len(a["input_ids"])] == a["input_ids"]]
    assert len(cached) == len(scored) == len(behind) == 3
    total = 0.0
    for prompt, whole in behind:
        first, ids = len(prompt["input_ids"]), whole["input_ids"]
        assert whole["logprob_start_len"] == first - 1 and len(ids) - first == 36
        after = log_probs(ids, "none")
        total -= sum(after[i - 1][ids[i]] for i in range(first, len(ids)))
    assert outcome.row["exact_keys_nats"] == pytest.approx(total / (3 * 36))
    assert outcome.row["exact_keys_2k_nats"] == outcome.row["exact_keys_nats"]
    assert outcome.row["exact_keys_2k_nats_se"] == outcome.row["exact_keys_nats_se"] > 0
    assert 0 <= outcome.row["exact_keys_likeliest"] < 0.2


def test_likeliest_tokens_are_those_of_the_value():
    def logprobs(ids, first, top):
        assert (ids[first:], top) == ([97, 98], 1)
        own, likeliest = [[-1.0, 97, None], [-2.0, 98, None]], [[[-1.0, 97, None]], [[-0.5, 5, None]]]
        return {"input_token_logprobs": own, "input_top_logprobs": likeliest}

    case = Haystack("text", "question", "unfinished", ("ab",), "")
    material = SimpleNamespace(begin_token=lambda client: [1], encode=lambda text, client: [*map(ord, text)])
    client = SimpleNamespace(cache=lambda ids: None, prompt_logprobs=logprobs)
    found = task().likelihood(case, client, SimpleNamespace(material=material))
    assert found == {"nats": 3.0, "likeliest": 1, "value_tokens": 2}


@pytest.mark.parametrize(
    "settings,words",
    [
        (dict(name="haystack"), "haystack.*exact_keys"),
        (dict(lengths=(2048, 100)), "--retrieval-lengths"),
        (dict(lengths=()), "--retrieval-lengths"),
        (dict(cases=0), "--retrieval-cases"),
    ],
)
def test_settings_that_make_no_sense_are_named(settings, words):
    with pytest.raises(KVQuantError, match=words):
        task(**settings)


def test_changed_settings_are_another_identity():
    for change in ({"lengths": (2048,)}, {"cases": 4}, {"style": "chat"}, {"seed": 1}):
        assert task(**change).identity() != task().identity() == task().identity()


def test_a_server_that_takes_no_length_is_named(bench):
    with (
        FakeServer(context=1500) as server,
        pytest.raises(KVQuantError, match="--retrieval-lengths 2048,3072,9000: no length fits in the 1500 tokens"),
    ):
        task().run(Client(server.url), bench)
