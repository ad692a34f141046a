"""Checks which pages of a conversation an answer read, by reading the same pages, and all but one, in transformers.

A server reads a stored page from its record or in BF16, depending on which BF16 pages are free, and computes a prompt
in pieces that fit its batches. Two correct answers to one prompt can therefore differ. Despite such differences,
``Reference`` finds two faults:

- A page was not read (``Readings.missing``). The reference computes how the log-probabilities of likely tokens change
  without each page. A least-squares fit then gives the share of each page's change in the answer: 0 if the page was
  read, 1 if it was not read or another page was read instead.
- An answer is far from every correct reading of these pages (``Readings.distance``). At one end, the prompt is computed
  at once and nothing is quantized. At the other, it is computed in small pieces that read everything but sinks and
  recent tokens from records. A correct answer is no farther from the nearer end than the ends are from each other, plus
  rounding.
"""

from __future__ import annotations

import math
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

#: Likely tokens of each step whose log-probabilities are compared. One token alone says little, because an answer may
#: repeat it.
TOP = 24
#: Change of log-probabilities by BF16's rounding alone, in nats. ``docs/testing.md`` has 0.015 to 0.042.
ROUNDING = 0.042
#: Tokens per piece in which the quantized end is computed. Smaller pieces take longer.
PIECE = 4 * PAGE_SIZE
#: Parts into which a prompt that is read whole is divided, because a single page of it would change too little.
PARTS = 4


@dataclass(kw_only=True)  # ``Answer`` may get further fields
class SessionAnswer(Answer):
    """An answer in a session.

    Attributes:
        top: log-probabilities of the likely tokens of each step.
        history, pages: tokens from which pages were chosen, and the pages that were read; 0 and none if the prompt was
            read whole.
        retracted: how often the request was retracted and restarted.
    """

    top: list[dict[int, float]] = field(default_factory=list)
    history: int = 0
    pages: Sequence[int] = field(default_factory=list)
    retracted: int = 0


@dataclass(frozen=True)
class Readings:
    """Differences between an answer and the reference, over likely tokens: mean absolute differences in nats.

    Attributes:
        exact, quantized: distance of the answer from the end without quantization, and from the end with the most.
        between: distance between the two ends.
        missing: share of each page (or of each part, if the prompt was read whole) that the answer lacks.
    """

    exact: float
    quantized: float
    between: float
    missing: Sequence[float]

    @property
    def nearest(self) -> float:
        """Distance to the nearer end, in nats."""
        return min(self.exact, self.quantized)

    @property
    def distance(self) -> float:
        """Distance to the nearer end, relative to the ends' distance and rounding combined, which are independent."""
        return self.nearest / math.hypot(self.between, ROUNDING)

    @property
    def most_missing(self) -> float:
        """The largest share of a page that the answer lacks."""
        return max(self.missing)

    def __str__(self) -> str:
        nats = f"{self.exact:.3f}, {self.quantized:.3f} of {self.between:.3f} nats"
        return f"distance {self.distance:.2f}: {nats}, {self.most_missing:.2f} of a page missing"


#: Keys and values of tokens, ``[1, kv_heads, tokens, D]`` per layer; empty for no tokens.
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def joined(first: Pairs, second: Pairs) -> Pairs:
    """Concatenates the keys and values of two token sequences."""
    if not (first and second):
        return first or second
    return [(torch.cat([a, c], 2), torch.cat([b, d], 2)) for (a, b), (c, d) in zip(first, second)]


def taken(layers: Pairs, at: torch.Tensor | slice) -> Pairs:
    """Selects the keys and values of some tokens."""
    return [(keys[:, :, at], values[:, :, at]) for keys, values in layers]


class Reference:
    """A model in transformers, in float32.

    Args:
        piece: tokens per piece in which the quantized end computes a prompt.
    """

    def __init__(self, folder: Path, device: str, config: KVQuantConfig, piece: int = PIECE) -> None:
        from transformers import AutoModelForCausalLM

        self.device, self.config, self.piece = device, config, piece
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
        rotations = resolve_rotations(config, str(folder), self.model.config)
        self.formats = resolve_formats(config, rotations, self.model.config)
        self.rotations = (None, None) if rotations is None else (rotations.k.to(device), rotations.v.to(device))

    @torch.no_grad()
    def several(self, answers: Sequence[SessionAnswer]) -> list[Readings]:
        """Compares answers to one prompt with both ends; they may have read different pages."""
        prompt, history = answers[0].prompt, answers[0].history
        # A prompt that is read whole is stored up to the end of its last page and read from there.
        stored = history or (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE
        pieces = [self.piece] * math.ceil(stored / self.piece)
        exact, quantized = self.whole(prompt[:stored]), self.in_pieces(prompt[:stored], pieces)
        return [self._readings(answer, stored, exact, quantized) for answer in answers]

    def _readings(self, answer: SessionAnswer, stored: int, exact: Pairs, quantized: Pairs) -> Readings:
        parts = self._parts(answer, stored)
        at = torch.cat(parts).to(self.device)
        hidden = torch.stack([at < 0, *(torch.isin(at, part.to(self.device)) for part in parts)])
        end, *without = self.likely(answer, taken(exact, at), stored, hidden)
        (other,) = self.likely(answer, taken(quantized, at), stored, hidden[:1])
        found = torch.tensor([logprob for step in answer.top for logprob in step.values()])
        distances = [(one - found).abs().mean().item() for one in (end, other)]
        # Quantization gets its own direction; otherwise the fit would attribute it to the pages.
        changes = torch.stack([*without, other]) - end
        shares = torch.linalg.lstsq(changes.T.double(), (found - end).double()[:, None]).solution[:-1, 0]
        if not answer.history:  # almost nothing else is read, so lacking equal shares of all parts changes nothing
            shares -= shares.mean()
        return Readings(*distances, (end - other).abs().mean().item(), shares.tolist())

    @staticmethod
    def _parts(answer: SessionAnswer, stored: int) -> list[torch.Tensor]:
        """Returns the token positions of each page that was read, or of each part if the whole prompt was read."""
        if answer.history:
            return [torch.arange(page * PAGE_SIZE, (page + 1) * PAGE_SIZE) for page in answer.pages]
        return list(torch.arange(stored).tensor_split(min(PARTS, stored // PAGE_SIZE)))

    def likely(self, answer: SessionAnswer, layers: Pairs, start: int, hidden: torch.Tensor) -> torch.Tensor:
        """Returns log-probabilities of the answer's likely tokens after stored ones, step by step.

        Args:
            hidden: ``[readings, stored tokens]``; tokens that a reading does not see.
        """
        new = answer.prompt[start:] + answer.tokens
        logits, _ = self._extend(layers, new, start, len(answer.tokens) + 1, hidden)
        at = torch.tensor([(step, token) for step, top in enumerate(answer.top) for token in top])
        scores: torch.Tensor = torch.log_softmax(logits[:, :-1], -1).cpu()[:, at[:, 0], at[:, 1]]
        return scores

    def whole(self, tokens: list[int]) -> Pairs:
        """Returns keys and values of tokens that are computed at once."""
        return self._extend([], tokens, 0, 1)[1]

    @torch.no_grad()
    def in_pieces(self, tokens: list[int], pieces: Sequence[int]) -> Pairs:
        """Returns keys and values as read from records, of tokens computed piece by piece.

        Args:
            pieces: lengths that add up to all tokens. Each piece reads sinks and recent tokens of earlier pieces
                exactly, and their other tokens from records.
        """
        exact, records, begin = Pairs(), Pairs(), 0
        for piece in pieces:
            recent = max(0, begin - self.config.recent_tokens) // PAGE_SIZE * PAGE_SIZE
            sinks = min(self.config.sink_tokens, recent)
            stored = joined(taken(exact, slice(sinks)), taken(records, slice(sinks, recent)))
            before = joined(stored, taken(exact, slice(recent, None)))
            _, made = self._extend(before, tokens[begin : begin + piece], begin, 1)
            exact, whole = joined(exact, made), begin // PAGE_SIZE * PAGE_SIZE
            begin += piece
            full = taken(exact, slice(whole, begin // PAGE_SIZE * PAGE_SIZE))
            records = joined(records, [self._quantized(layer, *pair) for layer, pair in enumerate(full)])
        return records

    def _extend(
        self, before: Pairs, tokens: list[int], start: int, logits: int, hidden: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Pairs]:
        """Returns logits of the last tokens, ``[readings, logits, vocabulary]``, and the new keys and values."""
        from transformers import DynamicCache

        count, length = 1 if hidden is None else len(hidden), before[0][0].shape[2] if before else 0
        cache, new = DynamicCache(), torch.tensor([tokens], device=self.device).expand(count, -1)
        for index, pair in enumerate(before):
            cache.update(*(x.expand(count, -1, -1, -1) for x in pair), index)
        mask = None  # attends to all stored tokens and, causally, to new ones
        if hidden is not None:
            seen = torch.ones(len(tokens), length + len(tokens), dtype=torch.bool, device=self.device).tril(length)
            seen = seen.expand(count, 1, -1, -1).clone()
            seen[..., :length] &= ~hidden[:, None, None]
            mask = torch.zeros(seen.shape, device=self.device).masked_fill(~seen, torch.finfo(torch.float32).min)
        positions = start + torch.arange(len(tokens), device=self.device)[None]
        out = self.model(new, past_key_values=cache, position_ids=positions, attention_mask=mask, logits_to_keep=logits)
        return out.logits, [(layer.keys[:, :, length:], layer.values[:, :, length:]) for layer in cache.layers]

    def _quantized(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values of whole pages as they are read from records."""
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
    """Returns the answer with one of its pages replaced by another page of its history."""
    pages, rest = list(answer.pages), set(range(answer.history // PAGE_SIZE)) - set(answer.pages)
    pages[rng.randrange(len(pages))] = rng.choice(sorted(rest))
    return replace(answer, pages=sorted(pages))
