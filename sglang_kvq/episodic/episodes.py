"""The episodes of one session: which segments belong together, the prompts that stand for them, and what was built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from sglang_kvq.episodic.chain import ChainPlan, Step, stand_ins
from sglang_kvq.episodic.cluster import Episodes, cluster, medoids
from sglang_kvq.episodic.config import PROMPT_TOKENS
from sglang_kvq.episodic.prompt import patched_prompt

#: Segments that stand for an episode in its patched prompt, and the longest such prompt in tokens.
MEDOIDS = 8
#: Growth after which a conversation is divided into episodes again.
GROWTH = 2.0
#: Memory of a prompt beside its tokens.
BYTES = 256


@dataclass(eq=False)
class EpisodesOfSession:
    """Clusters of a conversation's segments, made when a block is first folded, and again when it has doubled.

    In between prompts stay as they are, so that new blocks are folded into the episodes that there are.

    Attributes:
        segments: that were divided; 0 before.
        tokens: of these segments.
        clusters, prompts: of them.
        answered: the episode that the last request read.
    """

    segments: int = 0
    tokens: int = 0
    clusters: Episodes | None = None
    prompts: dict[int, np.ndarray] = field(default_factory=dict)
    answered: int | None = None

    def keep(self, tokens: int) -> None:
        """Only the first ``tokens`` of the conversation are still what they were."""
        if tokens < self.tokens:
            self.segments, self.tokens, self.clusters, self.answered = 0, 0, None, None
            self.prompts = {}

    def copy(self) -> EpisodesOfSession:
        """The same, to be changed by itself."""
        return replace(self, prompts=dict(self.prompts))

    def divide(self, rows: np.ndarray, count: int, tokens: int) -> Episodes:
        """Clusters of the conversation's segments so far.

        Args:
            rows: float32 ``[segments, D]``, of length 1, one at least.
            count: episodes at most.
            tokens: of these segments.
        """
        if self.clusters is None or len(rows) >= GROWTH * self.segments:
            self.clusters, self.segments, self.tokens = cluster(rows, count), len(rows), tokens
            self.prompts = {}
        return self.clusters

    @property
    def nbytes(self) -> int:
        """Memory of its arrays."""
        clusters = 0 if self.clusters is None else self.clusters.labels.nbytes + self.clusters.centroids.nbytes
        return clusters + sum(BYTES + prompt.nbytes for prompt in self.prompts.values())

    def prompt(
        self, number: int, rows: np.ndarray, text: Callable[[int], str], encode: Callable[[str], list[int]]
    ) -> np.ndarray:
        """The patched prompt of an episode: int64 ``[<= PROMPT_TOKENS]``.

        Args:
            rows: as of ``divide``.
            text: of a segment, by number; encode: a text's token ids.
        """
        assert self.clusters is not None
        if number not in self.prompts:
            chosen = medoids(rows[: self.segments], self.clusters, number, MEDOIDS)
            ids = encode(patched_prompt([text(int(segment)) for segment in chosen]))
            self.prompts[number] = np.asarray(ids[:PROMPT_TOKENS], np.int64)
        return self.prompts[number]


def step_ids(step: Step, history: np.ndarray, prompt: np.ndarray, plan: ChainPlan) -> np.ndarray:
    """Ids of a step's request: what stands for its prefix, its block, its prompt: int64 ``[n]``."""
    before = history[: step.prefix] if step.offset == 0 else stand_ins(history, plan)
    return np.concatenate([before, history[step.start : step.end], prompt]).astype(np.int64)
