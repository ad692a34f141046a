"""The soak of sessions: its bookkeeping, with functions for server and model; its reference, with a tiny model."""

from __future__ import annotations

import hashlib
import io
import json
import math
import random
import threading
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from benchmarks import soak_sessions as soak
from benchmarks.session_reference import TOP, Readings, Reference, SessionAnswer, another_page, taken
from benchmarks.tiny_models import MODELS, VOCABULARY
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE as P
from tests.pairs import few

SCALE = replace(soak.CPU, clients=3, wait=0.01, calibration=6, compared=40)
#: Answers from chosen pages until which the traffic lasts: turns of every kind occur among so many. In a given time, a
#: busy machine may answer so few that one kind does not.
ANSWERED = 200


def value(read: int, step: int, token: int, part: str = "") -> float:
    """Returns a number in [0, 1) that depends on the tokens read.

    A checksum would not do: the checksums of equally long texts differ by the same bits whatever ``step`` and ``token``
    are, so other tokens read would often change all values a little, and none much.
    """
    digest = hashlib.blake2b(f"{read} {step} {token} {part}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") / 2**32


def logprob(read: int, step: int, token: int, quantized: float) -> float:
    """Returns a log-probability that depends on all tokens read, minus the cost of quantizing them."""
    return -5 * value(read, step, token) - 0.2 * quantized * value(read, step, token, "quantized")


def read_of(prompt: list[int], history: int, pages: Sequence[int]) -> int:
    """Returns a hash of the tokens that are read."""
    return zlib.crc32(
        str([token for page in pages for token in prompt[page * P : (page + 1) * P]] + prompt[history:]).encode()
    )


class FakeServer:
    """A server whose log-probabilities are a function of the tokens read, some of them quantized.

    Args:
        wrong_every: one in so many answers from chosen pages reads a wrong page.
        takes_back: whether a stream's end contradicts what it said before.
    """

    def __init__(self, wrong_every: int = 0, takes_back: bool = False) -> None:
        self.wrong_every, self.takes_back = wrong_every, takes_back
        self.running, self.lock, self.rng, self.count = True, threading.Lock(), random.Random(2), 0
        self.read: dict[tuple[str, str], dict] = {}

    def drain(self) -> None: ...

    def held_when_empty(self) -> list[str]:
        return []

    def log(self) -> str:
        return "Retract requests. #retracted_reqs: 2, new_token_ratio\n9 tokens are no longer cached\nit is read whole"

    log_tail = lambda self, lines=40: self.log()  # noqa: E731

    def request(self, path: str, asked: dict, timeout: float = 60) -> bytes:
        return b""

    def stream(self, path: str, asked: dict | None, timeout: float = 60, headers: dict | None = None) -> io.BytesIO:
        tenant = (headers or {}).get("Authorization", "")
        with self.lock:
            if asked is None:
                return io.BytesIO(json.dumps({"read": self.read[tenant, path.rsplit("/", 1)[1]]}).encode())
            chunks = self._answer(tenant, asked)
        return io.BytesIO(b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks))

    def _answer(self, tenant: str, asked: dict) -> list[dict]:
        prompt, name, rng = asked["input_ids"], asked.get("session_id"), self.rng
        alone, history, pages = tenant == "Bearer alone", 0, []
        if name and len(prompt) > SCALE.budget and rng.random() < 0.9:
            history = (len(prompt) - 1) // P * P
            pages = sorted(rng.sample(range(history // P), SCALE.budget // P - 1))
        if name:
            self.read[tenant, name] = {"of_tokens": history, "pages": pages}
        if not alone and rng.random() < 0.05:
            reason = {"type": "abort", "message": "evicted", "status_code": 503}
            return [{"output_ids": [], "text": "", "meta_info": {"finish_reason": reason}}]
        self.count += history > 0
        if history and not alone and self.wrong_every and self.count % self.wrong_every == 0:
            answer = SessionAnswer("", prompt, [], [], 0, history=history, pages=pages)
            pages = another_page(answer, rng).pages
        read, quantized = read_of(prompt, history, pages), rng.random()
        steps = range(asked["sampling_params"]["max_new_tokens"])
        tokens = [rng.randrange(2, VOCABULARY) for _ in steps]
        tops = [[token, *(n for n in range(2, 2 * TOP) if n != token)][:TOP] for token in tokens]
        likely = [[[logprob(read, n, t, quantized), t, None] for t in top] for n, top in enumerate(tops)]
        meta = {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [step[0] for step in likely],
            "output_top_logprobs": likely,
        }
        last = {"output_ids": tokens, "text": " ".join(map(soak.word, tokens)), "meta_info": meta}
        first = {"output_ids": tokens[:2], "text": "", "meta_info": {"finish_reason": None}}
        if self.takes_back:
            first["output_ids"] = [tokens[0] - 1]
        return [first, last] if asked["stream"] else [last]


class FakeReference:
    """A reference that returns both ends of the range in which ``FakeServer`` answers."""

    def several(self, answers: Sequence[SessionAnswer]) -> list[Readings]:
        return [self._one(answer) for answer in answers]

    @staticmethod
    def _one(answer: SessionAnswer) -> Readings:
        read = read_of(answer.prompt, answer.history, answer.pages)
        at = [(step, token, said) for step, top in enumerate(answer.top) for token, said in top.items()]
        ends = [[logprob(read, step, token, quantized) for step, token, _ in at] for quantized in (0, 1)]
        sums = [math.fsum(abs(a - b[2]) for a, b in zip(end, at)) for end in ends]
        exact, quantized = (one / len(at) for one in sums)
        between = math.fsum(abs(a - b) for a, b in zip(*ends)) / len(at)
        # At most 0.1 if all was read: half the cost of quantizing with every ``value`` 1. Usually about 0.05.
        return Readings(exact, quantized, between, [min(exact, quantized)])


def soaked(server: FakeServer, fault: bool = False) -> tuple[bool, dict]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(soak, "LONGER", 1000.0)
        measured, found, row = soak.serve(server, replace(SCALE, least=ANSWERED), 0.005, 1)
    row |= soak.compared(FakeReference(), measured, found, SCALE.compared, fault)
    return soak.is_right(row, SCALE.least), row


@cache
def sound() -> tuple[bool, dict]:
    """Returns the result of a sound server; no test changes it."""
    return soaked(FakeServer())


def test_a_sound_server_passes_at_whatever_precision_it_reads():
    passed, row = sound()
    assert passed, row
    assert SCALE.least <= row["chosen_pages"] <= row["compared"] <= SCALE.compared
    assert row["wrong_answers"] == row["errors"] == 0 and row["worst_distance"] <= 0.51
    assert row["worst_missing"] <= 0.1 < 1 < row["wrong_page_missing"]
    assert row["wrong_page_seen"] == 1 and row["aborted"] > 0
    assert set(row["kinds"]) >= {"ask", "edit", "abort", "disconnect", "plain", "given_up"}


def test_answers_from_another_page_are_counted():
    passed, row = soaked(FakeServer(wrong_every=2))
    assert not passed and 0 < row["wrong_answers"] < row["chosen_pages"]


def test_exchanged_pages_are_counted():
    passed, row = soaked(FakeServer(), fault=True)
    assert not passed and row["wrong_answers"] == row["chosen_pages"] // 2 and "distance" in row["notes"][0]


def test_a_stream_that_takes_back_what_it_said_is_an_error():
    with pytest.raises(ValueError, match="took back"):  # the stream alone, before the traffic
        soaked(FakeServer(takes_back=True))


def test_an_answer_alone_must_be_right_too():
    _, row = sound()
    assert not soak.is_right(row | {"alone_distance": 1.01}, SCALE.least)
    assert not soak.is_right(row | {"alone_missing": 0.51}, SCALE.least)


def test_answers_are_judged_from_their_file_as_at_once(tmp_path):
    measured, found, row = soak.serve(FakeServer(wrong_every=4), SCALE, 0.01, 1)
    soak.write_answers(tmp_path / "answers.gz", measured, found, row)
    assert soak.read_answers(tmp_path / "answers.gz") == (measured, found, row)


def test_traffic_goes_on_until_enough_was_answered_from_chosen_pages():
    few = [SessionAnswer("session", [], [], [], 0, history=P)] * (SCALE.least - 1)
    assert not soak.is_enough(few, SCALE, 4.9) and soak.is_enough(few, SCALE, 5)
    assert soak.is_enough([*few, few[0]], SCALE, 1) and not soak.is_enough([*few, few[0]], SCALE, 0.9)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(MODELS["llama"].write(tmp_path_factory.mktemp("model")), "cpu", KVQuantConfig("int4"))


@pytest.fixture(scope="module")
def answer() -> SessionAnswer:
    rng = random.Random(4)
    prompt = [rng.randrange(2, VOCABULARY) for _ in range(8 * P + 20)]
    return SessionAnswer("session", prompt, [5, 6, 7, 8], [], 0, history=8 * P, pages=[0, 3, 4, 7])


def likeliest(scores: torch.Tensor) -> list[dict[int, float]]:
    values, tokens = scores.topk(TOP)
    return [dict(zip(*step)) for step in zip(tokens.tolist(), values.tolist())]


@torch.no_grad()
def by_mask(model: torch.nn.Module, answer: SessionAnswer) -> list[dict[int, float]]:
    """Returns the likely tokens of each step, in one pass over all tokens with a mask that hides those not read."""
    ids = torch.tensor([answer.prompt + answer.tokens])
    length, history = ids.shape[1], answer.history
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    for page in set(range(history // P)) - set(answer.pages) if history else ():
        seen[history:, page * P : (page + 1) * P] = False
    hidden = torch.zeros(1, 1, length, length).masked_fill(~seen, torch.finfo(torch.float32).min)
    return likeliest(torch.log_softmax(model(ids, attention_mask=hidden).logits[0], -1)[-len(answer.tokens) - 1 : -1])


@pytest.mark.parametrize("chosen", [True, False], ids=["chosen pages", "read whole"])
def test_the_exact_end_is_the_model_with_a_mask(reference, answer, chosen):
    answer = answer if chosen else replace(answer, history=0, pages=())
    answer = replace(answer, top=by_mask(reference.model, answer))
    (found,) = reference.several([answer])
    assert found.exact < 1e-4 and found.distance < 0.01 and max(map(abs, found.missing)) < 0.001
    assert len(found.missing) == 4
    assert found.quantized == pytest.approx(found.between, abs=1e-4) and 0.02 < found.between < 0.3


@torch.no_grad()
def read_in_pieces(reference: Reference, answer: SessionAnswer, pieces: Sequence[int]) -> SessionAnswer:
    """Returns the answer as a server under pressure gives it: all stored pages from records, with BF16's rounding."""
    layers = reference.in_pieces(answer.prompt[: answer.history], pieces)
    at = torch.cat([torch.arange(page * P, (page + 1) * P) for page in answer.pages])
    new = answer.prompt[answer.history :] + answer.tokens
    logits, _ = reference._extend(taken(layers, at), new, answer.history, len(answer.tokens) + 1)
    scores = torch.log_softmax(logits[0, :-1], -1)
    return replace(
        answer, top=likeliest(scores + 0.03 * torch.randn(scores.shape, generator=torch.Generator().manual_seed(0)))
    )


@pytest.mark.parametrize(
    "pieces", few([[24 * P], [20 * P + 10, *[6] * 41], [P, 23 * P], [4 * P] * 6], 2), ids=lambda some: str(some[:2])
)
def test_pages_that_were_read_are_not_missing_and_others_are(reference, pieces):
    """Pages that were read are not missing, however the prompt was computed; an exchanged page is found."""
    rng = random.Random(4)
    prompt, said = ([rng.randrange(2, VOCABULARY) for _ in range(count)] for count in (24 * P + 20, 20))
    chosen = sorted(rng.sample(range(24), 10))
    answer = SessionAnswer("session", prompt, said, [], 0, history=24 * P, pages=chosen)
    answer = read_in_pieces(reference, answer, pieces)
    others = [another_page(answer, random.Random(seed)) for seed in range(4)]
    own, *found = reference.several([answer, *others])
    assert own.most_missing < 0.25 and own.distance < 0.8 and not soak.is_wrong(own), own
    for other, readings in zip(others, found):
        (exchanged,) = set(other.pages) - set(answer.pages)
        assert soak.is_wrong(readings) and readings.most_missing > 0.75, readings
        assert other.pages[readings.missing.index(readings.most_missing)] == exchanged


def test_a_quarter_that_was_not_read_is_found_in_what_is_read_whole(reference):
    rng = random.Random(4)
    prompt, said = ([rng.randrange(2, VOCABULARY) for _ in range(count)] for count in (24 * P + 20, 20))
    answer = SessionAnswer("session", prompt, said, [], 0, history=24 * P, pages=list(range(24)))
    for lacking in (range(0), range(6, 12)):
        pages = [page for page in range(24) if page not in lacking]
        found = read_in_pieces(reference, replace(answer, pages=pages), [4 * P] * 6)
        (readings,) = reference.several([replace(found, history=0, pages=[])])
        assert soak.is_wrong(readings) == bool(lacking), readings
        if lacking:
            assert readings.missing[1] == readings.most_missing > 0.6
        else:
            assert readings.most_missing < 0.3


def test_a_piece_reads_sinks_and_recent_tokens_exactly_and_the_rest_from_records(reference, answer):
    tokens = answer.prompt[: 8 * P]
    exact, at_once = reference.whole(tokens), reference.in_pieces(tokens, [8 * P])
    for before, after in zip(exact, at_once):
        for x, read in zip(before, after):
            assert 0.02 < ((read - x).norm() / x.norm()).item() < 0.15  # the error of 4 bits
    window = reference.config.sink_tokens + reference.config.recent_tokens
    assert window == 5 * P

    def second(first: int) -> float:
        """Returns the mean difference between a page computed as a second piece and computed at once.

        The largest difference would say less: a processor's rounding may move a few codes by a step.
        """
        layers = zip(reference.in_pieces(tokens, [first, P, 7 * P - first]), at_once)
        page = slice(first, first + P)
        return max((a - b)[:, :, page].abs().mean().item() for pair in layers for a, b in zip(*pair))

    assert second(window) < 0.001 < 0.02 < second(window + P)
