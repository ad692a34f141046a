"""Long random schedules for ``scheduler_model``, most of whose steps decode: what a shrinking search rarely tries."""

from __future__ import annotations

import random

from sglang_kvq.config import PAGE_SIZE as P
from tests.cache.scheduler_model import Model


def drive(model: Model, rng: random.Random, steps: int) -> None:
    """Random events of every kind, decoding most of all; prompts share prefixes, fork and are computed twice."""
    prefilling, decoding = [], []

    def leave(request, publish: bool) -> None:
        (prefilling if request in prefilling else decoding).remove(request)
        model.leave(request, publish)

    def start(tokens: list[int]) -> None:
        if len(tokens) // P + 2 < model.pages and (request := model.start(tokens)):
            prefilling.append(request)

    for _ in range(steps):
        running = prefilling + decoding
        kind = rng.choices(("prefill", "decode", "leave", "fork", "evict", "start"), (4, 6, 1, 1, 1, 3))[0]
        if kind == "start" or not running:
            stride, length = rng.choice((1, 1, 5)), rng.randint(1, 11 * P)
            start([i * stride % 241 for i in range(length)])
        elif kind == "prefill" and prefilling:
            chosen = prefilling[: rng.randint(1, 3)]
            batch = [(r, rng.choice((n := len(r.tokens) - r.stored, n, rng.randint(1, n)))) for r in chosen]
            if not model.extend(batch):  # undone by retraction, as SGLang would not have admitted it
                for request, _ in batch:
                    leave(request, publish=False)
                continue
            for request in chosen:
                model.publish(request, finished=False)
                if request.stored == len(request.tokens):
                    prefilling.remove(request)
                    decoding.append(request)
        elif kind == "decode":
            padding = rng.randint(0, 2)
            for _ in range(rng.choice((1, 3, 64))):
                model.evict(sum(r.stored % P == 0 for r in decoding) - len(model.free))
                while sum(r.stored % P == 0 for r in decoding) > len(model.free):
                    leave(decoding[-1], publish=False)
                for request in decoding:
                    request.tokens.append(rng.randint(0, 3))
                if decoding:
                    assert model.decode(decoding, padding)
        elif kind == "leave":
            leave(rng.choice(running), publish=rng.random() < 0.7)
        elif kind == "fork" and decoding:
            source = rng.choice(decoding)
            start(source.tokens[: source.stored] + [9] * rng.randint(1, 100))
        elif kind == "evict":
            model.evict(rng.randint(1, 5))
        model.check()
    for request in prefilling + decoding:
        leave(request, publish=True)
    model.flush()
