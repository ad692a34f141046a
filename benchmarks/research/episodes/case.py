"""Prepares one conversation for questions: its tokens, segments and episodes, and its full cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from benchmarks.research.episodes.conversations import Ask, Conversation, History, Writer
from benchmarks.research.episodes.past import Past, RoundTrip
from benchmarks.research.episodes.prefill import prefill
from benchmarks.research.episodes.runner import Runner
from benchmarks.research.episodes.segments import Segment, segment
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.sessions.episodes import Episodes, cluster, medoids, patched_prompt
from sglang_kvq.sessions.index import Lexical
from sglang_kvq.sessions.search import fuse, rank_windows, windows


@dataclass(frozen=True)
class Settings:
    """Settings that all policies share.

    Attributes:
        episodes: clusters of a conversation.
        medoids: segments in an episode's patched prompt, of which at most ``prompt_tokens`` are read.
        block: tokens of EpiCache's blocks.
        chunk: tokens of a prefill's chunks.
        repeat: tokens that KVzip repeats at once.
        sinks: first tokens that every policy keeps, in addition to the system prompt.
        recent_pages: most recent pages that ``retrieve`` keeps.
        batch: questions answered at once.
        batch_tokens: most tokens of a batch of prompts with their own texts.
        seed: seed of k-means.
    """

    episodes: int = 4
    medoids: int = 4
    prompt_tokens: int = 1024
    block: int = 1024
    chunk: int = 2048
    repeat: int = 512
    sinks: int = PAGE_SIZE
    recent_pages: int = 2
    batch: int = 24
    batch_tokens: int = 65536
    seed: int = 0


class Embeds(Protocol):
    """Interface of ``sglang_kvq.sessions.embedding.Embedder``."""

    def encode(self, texts: Sequence[str]) -> np.ndarray: ...


@dataclass
class Case:
    """A conversation for one model.

    Attributes:
        round_trip: how stored keys and values are read, or None for BF16.
        with_mass: whether the prefill also sums attention, which ``h2o`` needs and which is slow.
    """

    runner: Runner
    writer: Writer
    embedder: Embeds
    conversation: Conversation
    settings: Settings = field(default_factory=Settings)
    round_trip: RoundTrip | None = None
    with_mass: bool = True

    def stored_as(self, round_trip: RoundTrip | None, *, with_mass: bool) -> Case:
        """Returns the same conversation with another cache; results that depend only on its text are shared."""
        other = replace(self, round_trip=round_trip, with_mass=with_mass)
        own = {one.name for one in fields(self)} | {"_prefilled"}
        vars(other).update({name: value for name, value in vars(self).items() if name not in own})
        return other

    @cached_property
    def history(self) -> History:
        return self.writer.history(self.conversation.turns)

    @cached_property
    def asks(self) -> list[Ask]:
        return [self.writer.ask(question) for question in self.conversation.questions]

    @cached_property
    def questions(self) -> list[list[int]]:
        """Returns the questions' tokens without their answers."""
        return [ask.ids[: len(ask.ids) - ask.answer] for ask in self.asks]

    @cached_property
    def segments(self) -> list[Segment]:
        return segment(self.conversation.turns)

    @cached_property
    def embeddings(self) -> np.ndarray:
        """Embeddings of the segments, float32 ``[segments, D]``."""
        return self.embedder.encode([one.text for one in self.segments])

    @cached_property
    def question_rows(self) -> np.ndarray:
        """Embeddings of the questions' texts alone, without the prompt around them, float32 ``[questions, D]``."""
        return self.embedder.encode([question.text for question in self.conversation.questions])

    @cached_property
    def fused_segments(self) -> np.ndarray:
        """Segments ranked for each question by embeddings and letters: int64 ``[questions, segments]``."""
        index = Lexical()
        index.add([one.text for one in self.segments])
        asked = zip(self.question_rows, self.conversation.questions)
        scores = [fuse(self.embeddings @ row, index.scores(question.text)) for row, question in asked]
        return np.argsort(-np.stack(scores), axis=1, kind="stable")

    @cached_property
    def windows(self) -> list[tuple[int, int]]:
        """Returns the token spans of windows of whole pages."""
        return windows(len(self.history))

    @cached_property
    def ranked_windows(self) -> np.ndarray:
        """Windows ranked for each question from tokens alone, as a server does: int64 ``[questions, windows]``."""
        texts = [self.writer.text(self.history.ids[start:end]) for start, end in windows(len(self.history), 1)]
        pages, index = self.embedder.encode(texts), Lexical()
        index.add(texts)
        asked = zip(self.question_rows, self.conversation.questions)
        return np.stack([rank_windows(question.text, row, pages, index) for row, question in asked])

    @cached_property
    def episodes(self) -> Episodes:
        return cluster(self.embeddings, self.settings.episodes, self.settings.seed)

    @cached_property
    def segment_of_turn(self) -> np.ndarray:
        """Segment of each turn, int64 ``[turns]``."""
        return np.repeat(np.arange(len(self.segments)), [len(one.turns) for one in self.segments])

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """Token spans of the segments."""
        return [self.history.span(one.first, one.last) for one in self.segments]

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Patched prompts of the episodes."""
        return [
            self.writer.tokens(
                patched_prompt(
                    [
                        self.segments[n].text
                        for n in medoids(self.embeddings, self.episodes, episode, self.settings.medoids)
                    ]
                )
            )[: self.settings.prompt_tokens]
            for episode in range(len(self.episodes))
        ]

    @cached_property
    def pinned(self) -> int:
        """Number of first tokens that stay: sinks and system prompt, in whole pages."""
        return -(-max(self.settings.sinks, len(self.history.prefix)) // PAGE_SIZE) * PAGE_SIZE

    @cached_property
    def _prefilled(self) -> tuple[Past, list[torch.Tensor] | None]:
        return prefill(
            self.runner, self.history.ids, chunk=self.settings.chunk, mass=self.with_mass, round_trip=self.round_trip
        )

    @property
    def full(self) -> Past:
        """The full cache."""
        return self._prefilled[0]

    @property
    def mass(self) -> list[torch.Tensor]:
        """``prefill``'s attention mass of the full cache."""
        mass = self._prefilled[1]
        if mass is None:
            raise ValueError("this case was made without mass")
        return mass

    def budget(self, compression: float) -> int:
        """Returns the tokens kept at a compression, in whole pages."""
        return int(len(self.history) / compression) // PAGE_SIZE * PAGE_SIZE

    def turns_of_segments(self, segments: Sequence[int] | np.ndarray) -> list[int]:
        return [turn for n in segments for turn in self.segments[n].turns]

    def recall(self, coverage: torch.Tensor) -> np.ndarray:
        """Returns the share of each question's evidence that is kept, averaged over its turns: float64 ``[questions]``.

        Args:
            coverage: share of a token's copies that is kept, float32 ``[1 or questions, T]``.
        """
        spans = [[self.history.spans[turn] for turn in q.evidence] for q in self.conversation.questions]
        rows = coverage.double().cpu().numpy()
        return np.array(
            [
                np.mean([rows[min(n, len(rows) - 1), a:b].mean() for a, b in of_question])
                for n, of_question in enumerate(spans)
            ]
        )

    def recall_of_segments(self, chosen: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
        """Returns the share of each question's evidence turns in its chosen segments: float64 ``[questions]``."""
        return np.array(
            [
                np.isin(self.segment_of_turn[list(question.evidence)], some).mean()
                for question, some in zip(self.conversation.questions, chosen)
            ]
        )
