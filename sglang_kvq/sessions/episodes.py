"""Episodes of a conversation (EpiCache, arXiv 2509.17396): k-means clusters of its segments, and how one is built.

An episode is built by a chain of ordinary requests ``[prefix | block | patched prompt]``. After each, every layer and
KV head keeps its own ``budget`` of the tokens of prefix and block. These are a prefix cached under the step's ``name``,
a hash of all that its content follows from: equal histories share episodes, a fork is free, and building again what was
evicted gives the same names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.config import PROMPT_TOKENS
from sglang_kvq.sessions.embedding import unit

#: Runs of k-means from other starting points, of which the best counts.
STARTS = 10
#: Segments that stand for an episode in its patched prompt, and the longest such prompt in tokens.
MEDOIDS = 8
#: Growth after which a conversation is divided into episodes again.
GROWTH = 2.0
#: Memory of a prompt beside its tokens.
BYTES = 256
INSTRUCTION = "\n\nWhat matters in the parts of this conversation that follow? Recall every fact in them.\n\n"


@dataclass(frozen=True)
class Episodes:
    """Assignment of segments to episodes.

    Attributes:
        labels: int64 ``[segments]``, from 0 to episodes - 1, each of which occurs.
        centroids: float32 ``[episodes, D]``, of length 1.
    """

    labels: np.ndarray
    centroids: np.ndarray

    def __len__(self) -> int:
        return len(self.centroids)

    def nearest(self, question: np.ndarray) -> int:
        """The episode whose centroid is nearest to a question, float32 ``[D]`` (EpiCache)."""
        return int((self.centroids @ question).argmax())

    def members(self, episode: int) -> np.ndarray:
        """Its segments, in order of the conversation."""
        return np.flatnonzero(self.labels == episode)


def cluster(embeddings: np.ndarray, episodes: int, seed: int = 0) -> Episodes:
    """At most ``episodes`` clusters of segments, fewer if there are fewer different segments.

    Args:
        embeddings: float32 ``[segments, D]``, rows of length 1.

    Raises:
        KVQuantError: no segments, fewer than one episode, or scikit-learn is missing.
    """
    if embeddings.ndim != 2 or not len(embeddings):
        raise KVQuantError(f"embeddings of shape {embeddings.shape}: clustering needs [segments, D], one or more.")
    if episodes < 1:
        raise KVQuantError(f"{episodes} episodes: give 1 or more.")
    count = min(episodes, len(np.unique(embeddings, axis=0)))
    if count == 1:
        labels = np.zeros(len(embeddings), dtype=np.int64)
    else:
        labels = _k_means(embeddings, count, seed)
    # Numbered by first occurrence: k-means' own numbers mean nothing.
    _, first, labels = np.unique(labels, return_index=True, return_inverse=True)
    labels = np.argsort(np.argsort(first))[labels].astype(np.int64)
    means = np.stack([embeddings[labels == e].mean(0) for e in range(int(labels.max()) + 1)])
    return Episodes(labels, unit(means))


def _k_means(embeddings: np.ndarray, count: int, seed: int) -> np.ndarray:
    try:
        from sklearn.cluster import KMeans
    except ImportError as error:
        raise KVQuantError(
            "clustering a conversation needs scikit-learn: pip install 'sglang-kvq[episodes]'."
        ) from error
    return np.asarray(KMeans(n_clusters=count, n_init=STARTS, random_state=seed).fit(embeddings).labels_)


def medoids(embeddings: np.ndarray, episodes: Episodes, episode: int, count: int) -> np.ndarray:
    """The ``count`` segments of an episode nearest to its centroid, in order of the conversation: int64 ``[<= count]``.

    Raises:
        KVQuantError: a count below 1, or no such episode.
    """
    if count < 1 or not 0 <= episode < len(episodes):
        raise KVQuantError(f"{count} medoids of episode {episode}: there are {len(episodes)} episodes.")
    members = episodes.members(episode)
    nearest = np.argsort(-(embeddings[members] @ episodes.centroids[episode]), kind="stable")[:count]
    return np.sort(members[nearest])


def patched_prompt(segments: Sequence[str]) -> str:
    """An instruction followed by the segments that stand for the episode (its medoids), in order."""
    return INSTRUCTION + "\n".join(segments)


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
        """A copy that may change independently."""
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


@dataclass(frozen=True)
class ChainPlan:
    """Sizes in tokens, multiples of ``PAGE_SIZE``.

    Attributes:
        budget: tokens that an episode keeps (M).
        block: tokens that are folded at once (B).
        pinned: first tokens that every head keeps: sinks and the system prompt.

    Raises:
        KVQuantError: a size that is no multiple of a page, no block, or nothing beside the pinned tokens.
    """

    budget: int
    block: int
    pinned: int = PAGE_SIZE

    def __post_init__(self) -> None:
        for name in ("budget", "block", "pinned"):
            value = getattr(self, name)
            if value % PAGE_SIZE or value < 0 or not (value or name == "pinned"):
                raise KVQuantError(f"{name} of {value} tokens: must be a multiple of {PAGE_SIZE}, above 0.")
        if self.budget <= self.pinned:
            raise KVQuantError(f"a budget of {self.budget} tokens holds only the {self.pinned} pinned ones: raise it.")

    def folded(self, tokens: int) -> int:
        """Tokens of a history of so many that are folded: whole blocks up to its end, none while all fit the budget."""
        whole = tokens // self.block * self.block
        return whole if whole > self.budget else 0


@dataclass(frozen=True)
class Step:
    """One step of a chain: the block ``[start, end)`` of the history joins ``prefix`` tokens cached under ``before``.

    Attributes:
        before: namespace of the prefix: the client's own for the first step, else the name of the step before.
        name: namespace of the result.
    """

    before: str | None
    name: str
    prefix: int
    start: int
    end: int

    @property
    def offset(self) -> int:
        """Positions by which the request's tokens after the prefix stand further than their place in the request."""
        return self.start - self.prefix


def chain(
    history: np.ndarray,
    prompt: Sequence[int] | np.ndarray,
    plan: ChainPlan,
    *,
    tenant: str,
    namespace: str | None,
    method: str,
) -> list[Step]:
    """The steps that fold a history into one episode, in order; none while it fits the budget.

    Args:
        history: int token ids, at least ``plan.folded(len(history))`` of which count.
        prompt: ids of the episode's patched prompt.
        namespace: in which the history itself is cached.
        method: what the cache's content depends on beside tokens: method, bits, rotations, model.
    """
    end = plan.folded(len(history))
    fixed = hashlib.sha256("\0".join((tenant, namespace or "", method)).encode())
    fixed.update(np.array([plan.budget, plan.block, plan.pinned, len(prompt), *prompt], np.int64).tobytes())
    first = plan.budget // plan.block * plan.block if end else 0
    digest = hashlib.sha256(fixed.digest() + _bytes(history[:first]))
    before, prefix, steps = namespace, first, []
    for start in range(first, end, plan.block):
        digest = hashlib.sha256(digest.digest() + _bytes(history[start : start + plan.block]))
        name = f"kvq-episode-{digest.hexdigest()}"
        steps.append(Step(before, name, prefix, start, start + plan.block))
        before, prefix = name, plan.budget
    return steps


def stand_ins(history: np.ndarray, plan: ChainPlan) -> np.ndarray:
    """Ids int64 ``[budget]`` that stand for an episode's tokens in requests: the first ones of its history.

    In an episode's namespace they mean its pages, which hold other tokens in every layer and head.
    """
    return np.asarray(history[: plan.budget], dtype=np.int64)


def _bytes(tokens: np.ndarray) -> bytes:
    return np.asarray(tokens, dtype=np.int64).tobytes()


def step_ids(step: Step, history: np.ndarray, prompt: np.ndarray, plan: ChainPlan) -> np.ndarray:
    """Ids of a step's request: what stands for its prefix, its block, its prompt: int64 ``[n]``."""
    before = history[: step.prefix] if step.offset == 0 else stand_ins(history, plan)
    return np.concatenate([before, history[step.start : step.end], prompt]).astype(np.int64)
