"""``--enable-mixed-chunk``: batches of prefills and decoding requests answer like separate ones."""

from __future__ import annotations

import re
import threading

import pytest

from benchmarks.answers import another_page, behind
from benchmarks.tiny_models import VOCABULARY
from launch.server import Server
from tests.e2e.client import Client, together
from tests.e2e.modes.tiny import FLAGS, OURS, write
from tests.e2e.test_serving import assert_empties
from tests.gpu.families import ROUNDING, prompt

ANSWER = 90


@pytest.fixture(scope="module")
def server(servers, plugins, tmp_path_factory) -> Server:
    model = write(tmp_path_factory.mktemp("mixed"))
    return servers(*FLAGS, *OURS, "--enable-mixed-chunk", model=model, env=plugins("mixed_batches"))


def test_answers_in_mixed_batches_are_those_of_separate_ones(server):
    """Each token of an answer is about as likely as the likeliest token, by a later prefill.

    SGLang mixes no batch that returns log-probabilities, so answers are requested without them and forced afterwards.
    The batches' own log-probabilities cannot be compared. After a wrong page, tokens are far less likely.
    """
    prompts = [prompt(f"mixed {n}", 250 + 130 * n) for n in range(4)]
    begun = [threading.Event() for _ in prompts]

    def ask(n: int) -> list[int]:
        assert n == 0 or begun[n - 1].wait(300)  # a prompt comes while the one before it decodes
        for chunk in Client(server).stream(prompts[n], ANSWER):
            answer = chunk["output_ids"]
            begun[n].set()
        return answer

    answers = together([lambda n=n: ask(n) for n in range(len(prompts))])
    assert [len(answer) for answer in answers] == [ANSWER] * len(prompts)
    missed = [behind(server, ids, answer).mean for ids, answer in zip(prompts, answers)]
    wrong = behind(server, another_page(prompts[0], 1, 0, VOCABULARY), answers[0]).mean
    print(f"behind the likeliest by {missed}, after a wrong page by {wrong}")
    assert max(missed) < ROUNDING < 0.3 < wrong
    mixed = re.findall(r"mixed batch: (\d+) prefills, (\d+) decoding", server.log())
    assert len(mixed) >= 5 and max(int(decoding) for _, decoding in mixed) > 1, mixed
    assert Client(server).state()["errors"] == 0
    assert_empties(Client(server))
