"""Reading chosen pages of a conversation in transformers, with nothing quantized and with all that can be.

A server reads a stored page from its record or in BF16, as BF16 pages are left, so two answers to one prompt differ.
``Reference`` computes both ends of that. An answer that read its pages lies between them: it is no farther from the
nearer end than some share of what lies between the ends (``Readings.distance``). Exchanging a page moves both ends
farther.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.soak_traffic import Answer
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.rotations.maths.fake_quant import page_round_trip
from sglang_kvq.rotations.resolve import resolve_formats, resolve_rotations

#: Likely tokens of each step whose log-probabilities are compared. One token's say little: an answer may repeat it.
TOP = 24
#: Least distance of the ends, in nats: what BF16's rounding alone does.
LEAST = 0.04


@dataclass
class SessionAnswer(Answer):
    """An answer of a session.

    Attributes:
        top: log-probabilities of the likely tokens of each step.
        history, pages: what was chosen from, and what of it was read; 0 and none if the prompt was read whole.
        retracted: how often it gave its memory up and began again.
    """

    top: list[dict[int, float]] = field(default_factory=list)
    history: int = 0
    pages: Sequence[int] = ()
    retracted: int = 0


@dataclass(frozen=True)
class Readings:
    """The likely tokens of an answer as the ends read them: mean absolute differences in nats.

    Attributes:
        exact, quantized: of the answer to the end with nothing, and to the one with everything quantized.
        between: of the two ends.
    """

    exact: float
    quantized: float
    between: float

    @property
    def nearest(self) -> float:
        """Distance to the nearer end, in nats."""
        return min(self.exact, self.quantized)

    @property
    def distance(self) -> float:
        """The same as a share of what lies between the ends."""
        return self.nearest / max(self.between, LEAST)

    def __str__(self) -> str:
        return f"distance {self.distance:.2f}: {self.exact:.3f}, {self.quantized:.3f} of {self.between:.3f} nats"


class Store:
    """Keys and values of a sequence's tokens, ``[1, kv_heads, tokens, D]`` for each layer, exact and quantized."""

    def __init__(self, layers: list[tuple[torch.Tensor, torch.Tensor]], read: list[tuple[torch.Tensor, ...]]) -> None:
        self.layers, self.read = layers, read

    def __len__(self) -> int:
        return self.layers[0][0].shape[2] if self.layers else 0

    def taken(self, pages: Sequence[int]) -> Store:
        """These pages alone, as one sequence."""
        at = torch.cat([torch.arange(page * PAGE_SIZE, (page + 1) * PAGE_SIZE) for page in pages])
        at = at.to(self.layers[0][0].device)
        both = ([tuple(x[:, :, at] for x in pair) for pair in side] for side in (self.layers, self.read))
        return Store(*both)


class Reference:
    """A model in transformers, in float32.

    Args:
        chunk: tokens of a prompt that the server computes at once; whole pages.
    """

    def __init__(self, folder: Path, device: str, config: KVQuantConfig, chunk: int) -> None:
        from transformers import AutoModelForCausalLM

        self.device, self.chunk = device, chunk
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
        rotations = resolve_rotations(config, str(folder), self.model.config)
        self.formats = resolve_formats(config, rotations, self.model.config)
        self.rotations = (None, None) if rotations is None else (rotations.k.to(device), rotations.v.to(device))

    @torch.no_grad()
    def several(self, answers: Sequence[SessionAnswer]) -> list[Readings]:
        """Compares answers to one prompt with both ends; they may have read different pages."""
        prompt, history = answers[0].prompt, answers[0].history
        # What is read whole is stored up to its last page's end, and read from there.
        stored = history or (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE
        stores = [self._store(prompt[:stored], quantized) for quantized in (False, True)]
        return [self._readings(answer, stored, stores) for answer in answers]

    def _readings(self, answer: SessionAnswer, stored: int, stores: list[Store]) -> Readings:
        new = answer.prompt[stored:] + answer.tokens
        chosen = [store.taken(answer.pages) if answer.history else store for store in stores]
        ends = [self._forward(store, new, stored, quantized, answer) for quantized, store in zip((False, True), chosen)]
        found = torch.tensor([logprob for step in answer.top for logprob in step.values()])
        distance = [(end - found).abs().mean().item() for end in ends]
        return Readings(*distance, (ends[0] - ends[1]).abs().mean().item())

    def _forward(
        self, store: Store, new: list[int], start: int, quantized: bool, answer: SessionAnswer
    ) -> torch.Tensor:
        """Log-probabilities of the answer's likely tokens behind a store, one after the other."""
        count = len(answer.tokens)
        logits, _ = self._extend(store, new, start, quantized, count + 1)
        scores = torch.log_softmax(logits[:-1], -1).cpu()
        at = [(step, token) for step, top in enumerate(answer.top) for token in top]
        return scores[tuple(torch.tensor(at).T)]

    def _store(self, tokens: list[int], quantized: bool) -> Store:
        """Computes a sequence chunk by chunk, each with what is stored of those before it."""
        store = Store([], [])
        for begin in range(0, len(tokens), self.chunk):
            part = tokens[begin : begin + self.chunk]
            _, made = self._extend(store, part, begin, quantized, 1)
            read = [self._quantized(index, *pair) for index, pair in enumerate(made)] if quantized else made
            if not len(store):
                store = Store(made, read)
                continue
            joined = (
                [tuple(torch.cat([a, b], 2) for a, b in zip(old, more)) for old, more in zip(before, after)]
                for before, after in ((store.layers, made), (store.read, read))
            )
            store = Store(*joined)
        return store

    def _extend(
        self, store: Store, tokens: list[int], start: int, quantized: bool, logits: int
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Logits of the last tokens, and keys and values of all of them."""
        from transformers import DynamicCache

        cache, new = DynamicCache(), torch.tensor([tokens], device=self.device)
        for index, (keys, values) in enumerate(store.read if quantized else store.layers):
            cache.update(keys, values, index)
        positions = start + torch.arange(len(tokens), device=self.device)[None]
        out = self.model(new, past_key_values=cache, position_ids=positions, logits_to_keep=logits)
        made = [(layer.keys[:, :, len(store) :], layer.values[:, :, len(store) :]) for layer in cache.layers]
        return out.logits[0], made

    def _quantized(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as they are read from records."""
        both = [
            x[0] if matrices is None else x[0] @ matrices[layer] for x, matrices in zip((keys, values), self.rotations)
        ]
        read = page_round_trip(self.formats[layer], *(x.bfloat16().float() for x in both))
        k, v = (
            x if matrices is None else x @ torch.linalg.inv(matrices[layer])
            for x, matrices in zip(read, self.rotations)
        )
        return k[None], v[None]


def another_page(answer: SessionAnswer, rng: random.Random) -> SessionAnswer:
    """The answer as if another page of its history had been read instead of one of those that were."""
    pages, rest = list(answer.pages), set(range(answer.history // PAGE_SIZE)) - set(answer.pages)
    pages[rng.randrange(len(pages))] = rng.choice(sorted(rest))
    return replace(answer, pages=sorted(pages))
