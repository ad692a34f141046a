"""Episodes of a conversation (EpiCache, arXiv 2509.17396): k-means clusters of its segments, and steps to build them.

An episode is built by a chain of ordinary requests ``[prefix | block | patched prompt]``. After each request, every
layer and KV head keeps ``budget`` tokens of prefix and block, each its own choice. The kept tokens become a prefix that
is cached under the step's ``name``, a hash of everything that determines its content. So equal histories share
episodes, a branch of a conversation costs nothing extra, and an evicted episode gets the same name when it is rebuilt.
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

#: Runs of k-means from different starting points; the best result is used.
STARTS = 10
#: Most segments that represent an episode in its patched prompt.
MEDOIDS = 8
#: Factor by which a conversation grows before it is divided into episodes again.
GROWTH = 2.0
#: Bytes of a patched prompt in addition to its tokens.
BYTES = 256
INSTRUCTION = "\n\nWhat matters in the parts of this conversation that follow? Recall every fact in them.\n\n"


@dataclass(frozen=True)
class Episodes:
    """Assignment of segments to episodes.

    Attributes:
        labels: int64 ``[segments]``, the episode of each segment, from 0; every episode occurs.
        centroids: float32 ``[episodes, D]``, rows of length 1.
    """

    labels: np.ndarray
    centroids: np.ndarray

    def __len__(self) -> int:
        return len(self.centroids)

    def nearest(self, question: np.ndarray) -> int:
        """Returns the episode whose centroid is nearest to a question's embedding, float32 ``[D]`` (EpiCache)."""
        return int((self.centroids @ question).argmax())

    def members(self, episode: int) -> np.ndarray:
        """Returns the segments of an episode, in order of the conversation."""
        return np.flatnonzero(self.labels == episode)


def cluster(embeddings: np.ndarray, episodes: int, seed: int = 0) -> Episodes:
    """Divides segments into at most ``episodes`` clusters; fewer if fewer segments differ.

    Args:
        embeddings: float32 ``[segments, D]``, rows of length 1.

    Raises:
        KVQuantError: there are no segments, ``episodes`` is below 1, or scikit-learn is missing.
    """
    if embeddings.ndim != 2 or not len(embeddings):
        raise KVQuantError(f"embeddings of shape {embeddings.shape}: clustering needs [segments, D], one or more.")
    if episodes < 1:
        raise KVQuantError(f"{episodes} episodes: must be at least 1.")
    count = min(episodes, len(np.unique(embeddings, axis=0)))
    if count == 1:
        labels = np.zeros(len(embeddings), dtype=np.int64)
    else:
        labels = _k_means(embeddings, count, seed)
    # Number clusters by first occurrence, because k-means numbers them arbitrarily.
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
    """Returns the ``count`` segments of an episode nearest to its centroid, in order of the conversation.

    Returns:
        int64 ``[<= count]``.

    Raises:
        KVQuantError: ``count`` is below 1, or there is no such episode.
    """
    if count < 1 or not 0 <= episode < len(episodes):
        raise KVQuantError(f"{count} medoids of episode {episode}: there are {len(episodes)} episodes.")
    members = episodes.members(episode)
    nearest = np.argsort(-(embeddings[members] @ episodes.centroids[episode]), kind="stable")[:count]
    return np.sort(members[nearest])


def patched_prompt(segments: Sequence[str]) -> str:
    """Returns an instruction followed by the segments that represent the episode (its medoids), in order."""
    return INSTRUCTION + "\n".join(segments)


@dataclass(eq=False)
class EpisodesOfSession:
    """Clusters of a conversation's segments, made when a block is first folded, and again when the segments double.

    In between, the patched prompts do not change, so that new blocks are folded into the existing episodes.

    Attributes:
        segments: number of segments that were clustered; 0 before the first clustering.
        tokens: number of tokens of these segments.
        clusters: their clusters.
        prompts: token ids of patched prompts, by episode.
        answered: the episode that the last request read.
    """

    segments: int = 0
    tokens: int = 0
    clusters: Episodes | None = None
    prompts: dict[int, np.ndarray] = field(default_factory=dict)
    answered: int | None = None

    def keep(self, tokens: int) -> None:
        """Forgets the clusters if they contain more than the first ``tokens`` tokens, because the rest has changed."""
        if tokens < self.tokens:
            self.segments, self.tokens, self.clusters, self.answered = 0, 0, None, None
            self.prompts = {}

    def copy(self) -> EpisodesOfSession:
        """Returns a copy that may change independently."""
        return replace(self, prompts=dict(self.prompts))

    def divide(self, rows: np.ndarray, count: int, tokens: int) -> Episodes:
        """Returns clusters of the conversation's segments; reuses existing ones until the conversation has doubled.

        Args:
            rows: embeddings of all segments so far, float32 ``[segments, D]``, of length 1; at least one.
            count: the most episodes.
            tokens: number of tokens of these segments.
        """
        if self.clusters is None or len(rows) >= GROWTH * self.segments:
            self.clusters, self.segments, self.tokens = cluster(rows, count), len(rows), tokens
            self.prompts = {}
        return self.clusters

    @property
    def nbytes(self) -> int:
        """Bytes of clusters and prompts."""
        clusters = 0 if self.clusters is None else self.clusters.labels.nbytes + self.clusters.centroids.nbytes
        return clusters + sum(BYTES + prompt.nbytes for prompt in self.prompts.values())

    def prompt(
        self,
        clusters: Episodes,
        number: int,
        rows: np.ndarray,
        text: Callable[[int], str],
        encode: Callable[[str], list[int]],
    ) -> np.ndarray:
        """Returns the patched prompt of an episode: int64 ``[<= PROMPT_TOKENS]``.

        Args:
            clusters: the result of ``divide``.
            number: the episode.
            rows: see ``divide``.
            text: returns a segment's text; encode: returns a text's token ids.
        """
        if number not in self.prompts:
            chosen = medoids(rows[: self.segments], clusters, number, MEDOIDS)
            ids = encode(patched_prompt([text(int(segment)) for segment in chosen]))
            self.prompts[number] = np.asarray(ids[:PROMPT_TOKENS], np.int64)
        return self.prompts[number]


@dataclass(frozen=True)
class ChainPlan:
    """Sizes of a chain in tokens, positive multiples of ``PAGE_SIZE``.

    Attributes:
        budget: tokens that an episode keeps (M).
        block: tokens that are folded at once (B).
        pinned: first tokens that every head keeps: sinks and the system prompt.

    Raises:
        KVQuantError: a size is not a positive multiple of ``PAGE_SIZE``, or the budget holds only pinned tokens.
    """

    budget: int
    block: int
    pinned: int = PAGE_SIZE

    def __post_init__(self) -> None:
        for name in ("budget", "block", "pinned"):
            value = getattr(self, name)
            if value % PAGE_SIZE or value <= 0:
                raise KVQuantError(f"{name} of {value} tokens: must be a multiple of {PAGE_SIZE}, above 0.")
        if self.budget <= self.pinned:
            raise KVQuantError(f"a budget of {self.budget} tokens holds only the {self.pinned} pinned ones. Raise it.")

    def folded(self, tokens: int) -> int:
        """Returns how many of a history's ``tokens`` are folded: all whole blocks; none if these fit the budget."""
        whole = tokens // self.block * self.block
        return whole if whole > self.budget else 0


@dataclass(frozen=True)
class Step:
    """One step of a chain: folds the prefix and the next block of the history into a new prefix.

    Attributes:
        before: namespace of the prefix: the client's own for the first step, else the name of the step before.
        name: namespace of the result.
        prefix: number of tokens of the prefix.
        start, end: the block ``[start, end)`` of the history.
    """

    before: str | None
    name: str
    prefix: int
    start: int
    end: int

    @property
    def offset(self) -> int:
        """Number to add to the indices of the request's tokens after the prefix to get their positions."""
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
    """Returns the steps that fold a history into one episode, in order; none if the history fits the budget.

    Args:
        history: int token ids; the first ``plan.folded(len(history))`` are folded.
        prompt: ids of the episode's patched prompt.
        tenant: owner of the episode; tenants share no episodes.
        namespace: the namespace in which the history itself is cached.
        method: everything else that determines the cache's content: method, bits, rotations, model.
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
    """Returns placeholder ids for an episode in requests: the first ids of its history, int64 ``[budget]``.

    In the episode's namespace these ids lead to its pages, which hold different tokens in every layer and head.
    """
    return np.asarray(history[: plan.budget], dtype=np.int64)


def _bytes(tokens: np.ndarray) -> bytes:
    return np.asarray(tokens, dtype=np.int64).tobytes()


def step_ids(step: Step, history: np.ndarray, prompt: np.ndarray) -> np.ndarray:
    """Returns the token ids of a step's request, int64 ``[n]``: prefix, block, patched prompt.

    The prefix is the history's beginning, or an episode, whose placeholders have the same ids (``stand_ins``).
    """
    parts = history[: step.prefix], history[step.start : step.end], prompt
    return np.concatenate(parts).astype(np.int64)
