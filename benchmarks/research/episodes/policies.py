"""The policies: each keeps ``tokens`` tokens of a history per head, and yields the worth of its questions' answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.research.episodes import scores
from benchmarks.research.episodes.ask import after_texts, likelihoods
from benchmarks.research.episodes.blocks import Budget, build
from benchmarks.research.episodes.case import Case
from benchmarks.research.episodes.matching import MATCHINGS, match, rank_segments
from benchmarks.research.episodes.past import Kept, Past
from benchmarks.research.episodes.prefill import prefill
from benchmarks.research.episodes.select import pin, top_of_heads, top_of_layer
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.config import ALIASES
from sglang_kvq.sessions.search import choose_pages


@dataclass(frozen=True)
class Outcome:
    """Result of a policy for the questions of one conversation.

    Attributes:
        policy, matching: the policy's name, and how it found the subject of a question, or None.
        likelihoods: per answer token, float64 ``[questions]``.
        recall: share of the evidence that was kept, float64 ``[questions]``.
        matched: share of the evidence's turns in the chosen segments or episode, or None.
        hot: tokens per head that a question reads.
        total: tokens per head that have to be stored.
    """

    policy: str
    matching: str | None
    likelihoods: np.ndarray
    recall: np.ndarray
    matched: np.ndarray | None
    hot: float
    total: float


#: ``policy(case, tokens)``; ``tokens`` is a multiple of the page.
Policy = Callable[[Case, int], Iterator[Outcome]]


def _answers(case: Case, past: Past | Callable[[list[int]], Past], first: int | None = None) -> np.ndarray:
    one = past if callable(past) else lambda _: past
    at = len(case.history) if first is None else first
    return likelihoods(case.runner, case.asks, one, at, case.settings.batch)


def full(case: Case, tokens: int) -> Iterator[Outcome]:
    """Keeps the whole history: the upper end of *gain kept*."""
    size, ones = len(case.history), torch.ones(1, len(case.history))
    yield Outcome("full", None, _answers(case, case.full), case.recall(ones), None, size, size)


def none(case: Case, tokens: int) -> Iterator[Outcome]:
    """Keeps only the system prompt and the question: the lower end."""
    prefix = case.history.prefix
    past, _ = prefill(case.runner, prefix, chunk=case.settings.chunk)
    kept = torch.zeros(1, len(case.history))
    yield Outcome("none", None, _answers(case, past, len(prefix)), case.recall(kept), None, len(prefix), len(prefix))


def window(case: Case, tokens: int) -> Iterator[Outcome]:
    """Keeps sinks and the most recent tokens of the full cache, in place (StreamingLLM, arXiv 2309.17453)."""
    at = torch.arange(len(case.history), device=case.runner.device)
    keys = at.float().expand(1, case.runner.kv_heads, -1)
    yield _selected(case, "window", [keys] * case.runner.layers, tokens)


def _selected(case: Case, policy: str, found: list[torch.Tensor], tokens: int, *, per_head: bool = False) -> Outcome:
    """Keeps the best tokens of the full cache by scores ``[1, kv_heads, T]`` of each layer; sinks are pinned."""
    first = torch.arange(len(case.history), device=case.runner.device) < case.pinned
    pinned = [pin(of_layer.clone(), first) for of_layer in found]
    if per_head:
        chosen = [top_of_layer(of_layer, tokens) for of_layer in pinned]
        kept = Kept([index for index, _ in chosen], [valid for _, valid in chosen])
    else:
        kept = Kept([top_of_heads(of_layer, tokens) for of_layer in pinned], [None] * len(pinned))
    past, recall = kept.of(case.full), case.recall(kept.coverage(len(case.history)))
    return Outcome(policy, None, _answers(case, past), recall, None, past.slots(), past.slots())


def h2o(case: Case, tokens: int) -> Iterator[Outcome]:
    """Keeps the most recent tokens, and those that received most attention, half each (H2O, arXiv 2306.14048).

    The choice is made once, from the whole history's attention, not step by step. This is kinder than the paper's
    greedy eviction.
    """
    recent = torch.arange(len(case.history), device=case.runner.device) >= len(case.history) - tokens // 2
    yield _selected(case, "h2o", [pin(mass.clone(), recent) for mass in case.mass], tokens)


def keydiff(case: Case, tokens: int) -> Iterator[Outcome]:
    """Keeps keys unlike the others, chosen once."""
    yield _selected(case, "keydiff", scores.keydiff(case.full), tokens)


def kvzip(case: Case, tokens: int) -> Iterator[Outcome]:
    """Keeps keys that help to repeat the history: equal counts for all heads, or shared among the heads of a layer."""
    found = scores.kvzip(
        case.runner,
        case.full,
        case.history.ids,
        case.writer.tokens(scores.REPEAT),
        chunk=case.settings.repeat,
        batch=8,
    )
    yield _selected(case, "kvzip", found, tokens)
    yield _selected(case, "kvzip_heads", found, tokens, per_head=True)


def snapkv(case: Case, tokens: int) -> Iterator[Outcome]:
    """Lets the question select tokens from the full cache, all of which every question needs."""
    first = torch.arange(len(case.history), device=case.runner.device) < case.pinned
    recalls = np.zeros(len(case.asks))

    def past_of(some: list[int]) -> Past:
        found = scores.snapkv(case.runner, case.full, [case.questions[n] for n in some])
        kept = Kept([top_of_heads(pin(of_layer, first), tokens) for of_layer in found], [None] * len(found))
        for n, row in zip(some, kept.coverage(len(case.history))):
            recalls[n] = case.recall(row[None])[n]
        return kept.of(case.full)

    found = _answers(case, past_of)
    yield Outcome("snapkv", "question", found, recalls, None, tokens, len(case.history))


def retrieve(case: Case, tokens: int) -> Iterator[Outcome]:
    """Lets the question choose pages of the full cache: sinks, the nearest pages, and the recent tail.

    Pages are found by segments of turns and their embeddings, or by windows of pages, embeddings and letters, which can
    be served.
    """
    size = len(case.history)
    for matching in (*MATCHINGS, "windows"):
        if matching == "windows":
            ranked = [[case.windows[n] for n in order] for order in case.ranked_windows]
        else:
            ranked = [
                [case.spans[n] for n in rank_segments(row, case.embeddings, case.episodes, matching)]
                for row in case.question_rows
            ]
        pages = [
            choose_pages(
                of_question,
                size,
                tokens // PAGE_SIZE,
                page=PAGE_SIZE,
                sink_pages=case.pinned // PAGE_SIZE,
                recent_pages=case.settings.recent_pages,
            )
            for of_question in ranked
        ]
        slots = [np.concatenate([np.arange(p * PAGE_SIZE, min((p + 1) * PAGE_SIZE, size)) for p in of]) for of in pages]
        index = torch.tensor(np.stack(slots), device=case.runner.device)
        coverage = torch.zeros(len(index), size, device=case.runner.device).scatter_(1, index, 1.0)

        def past_of(some: list[int], index: torch.Tensor = index) -> Past:
            rows = index[some][:, None].expand(-1, case.runner.kv_heads, -1)
            return Kept([rows] * case.runner.layers, [None] * case.runner.layers).of(case.full)

        yield Outcome("retrieve", matching, _answers(case, past_of), case.recall(coverage), None, index.shape[1], size)


def text(case: Case, tokens: int) -> Iterator[Outcome]:
    """Puts the segments nearest to the question before it as text, in order of the conversation; keeps no cache.

    Segments are ranked by embeddings, or by embeddings and letters.
    """
    by_embeddings = np.stack([rank_segments(row, case.embeddings) for row in case.question_rows])
    for matching, ranked in (("segments", by_embeddings), ("fused", case.fused_segments)):
        chosen = [_segments_in(case, of_question, tokens) for of_question in ranked]
        texts = [case.history.of_turns(case.turns_of_segments(some)) for some in chosen]
        found = after_texts(case.runner, case.asks, texts, case.settings.batch_tokens)
        recall, hot = case.recall_of_segments(chosen), float(np.mean([len(one) for one in texts]))
        yield Outcome("text", matching, found, recall, recall, hot, hot)


def text_recent(case: Case, tokens: int) -> Iterator[Outcome]:
    """Keeps the most recent segments as text, like a client that cuts its transcript."""
    chosen = _segments_in(case, np.arange(len(case.segments))[::-1], tokens, stop=True)
    ids = case.history.of_turns(case.turns_of_segments(chosen))
    past, _ = prefill(case.runner, ids, chunk=case.settings.chunk)
    recall = case.recall_of_segments([chosen] * len(case.asks))
    yield Outcome("text_recent", None, _answers(case, past, len(ids)), recall, None, len(ids), len(ids))


def _segments_in(case: Case, ranked: np.ndarray, tokens: int, *, stop: bool = False) -> list[int]:
    """Returns segments in order of rank whose text, headers included, takes at most ``tokens``.

    A segment that does not fit is left out; with ``stop`` the choice ends there.
    """
    chosen: list[int] = []
    sessions: set[int] = set()
    used = len(case.history.prefix)
    for n in map(int, ranked):
        turn = case.segments[n].first
        session = case.conversation.turns[turn].session
        more = case.history.size(case.segments[n].turns, header=session not in sessions)
        if used + more <= tokens:
            chosen.append(n)
            sessions.add(session)
            used += more
        elif stop:
            break
    return chosen


def epicache(case: Case, tokens: int) -> Iterator[Outcome]:
    """Runs EpiCache with equally many tokens for every layer and head, chosen per head, as pages can hold them."""
    yield from _episodes(case, "epicache", Budget((tokens,) * case.runner.layers, pinned=case.pinned))


def epicache_heads(case: Case, tokens: int) -> Iterator[Outcome]:
    """Runs EpiCache with a layer's tokens shared unequally by its heads."""
    budget = Budget((tokens,) * case.runner.layers, per_head=True, pinned=case.pinned)
    yield from _episodes(case, "epicache_heads", budget)


def epicache_layers(case: Case, tokens: int, layers: tuple[int, ...]) -> Iterator[Outcome]:
    """Runs EpiCache with layer budgets by sensitivity."""
    yield from _episodes(case, "epicache_layers", Budget(layers, pinned=case.pinned))


def _episodes(case: Case, policy: str, budget: Budget) -> Iterator[Outcome]:
    past, kept = build(
        case.runner,
        case.history.ids,
        case.prompts,
        budget,
        block=case.settings.block,
        round_trip=case.round_trip,
    )
    rows = past.k[0].shape[0]
    coverage = kept.coverage(len(case.history))
    chosen = {one: match(case.question_rows, case.embeddings, case.episodes, one) for one in MATCHINGS}
    chosen["evidence"] = _of_evidence(case)
    found = np.full((len(case.episodes), len(case.asks)), np.nan)
    for episode in range(len(case.episodes)):
        asked = [n for n in range(len(case.asks)) if any(some[n] == episode for some in chosen.values())]
        if asked:
            one = past.row(min(episode, rows - 1))
            asks = [case.asks[n] for n in asked]
            found[episode, asked] = likelihoods(
                case.runner, asks, lambda _, one=one: one, len(case.history), case.settings.batch
            )
    for matching, some in chosen.items():
        matched = case.recall_of_segments([case.episodes.members(int(e)) for e in some])
        of_question = coverage[torch.tensor(np.minimum(some, rows - 1), device=coverage.device)]
        recall, hot = case.recall(of_question), past.slots()
        yield Outcome(policy, matching, found[some, np.arange(len(some))], recall, matched, hot, hot * rows)


def _of_evidence(case: Case) -> np.ndarray:
    """Returns the episode with most of each question's evidence, which perfect matching would choose."""
    return np.array(
        [
            np.bincount(case.episodes.labels[case.segment_of_turn[list(question.evidence)]]).argmax()
            for question in case.conversation.questions
        ]
    )


#: Policies by name; ``epicache_layers`` needs budgets, see ``measure``.
POLICIES: dict[str, Policy] = {
    "full": full,
    "none": none,
    "window": window,
    "text": text,
    "text_recent": text_recent,
    "retrieve": retrieve,
    "epicache": epicache,
    "epicache_heads": epicache_heads,
    "snapkv": snapkv,
    "h2o": h2o,
    "keydiff": keydiff,
    "kvzip": kvzip,
}
NAMES = (*POLICIES, "epicache_layers")
#: Forms of EpiCache that ordinary pages cannot hold; they are measured at one compression only.
VARIANTS = ("epicache_heads", "epicache_layers")


def known_names(names: list[str]) -> list[str]:
    """Returns the current names of policies.

    Raises:
        KVQuantError: a name is unknown.
    """
    found = [ALIASES.get(name, name) for name in names]
    for name in found:
        if name not in NAMES:
            raise KVQuantError(f"policy {name}: choose some of {', '.join(NAMES)}.")
    return found
