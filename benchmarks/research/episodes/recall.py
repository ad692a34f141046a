"""Compares ways to search a conversation by the evidence that their pages hold; no language model is needed.

    python -m benchmarks.research.episodes.recall --model .models/Qwen2.5-Coder-0.5B-Instruct --embedder FOLDER/model \\
        --data FOLDER --out benchmarks/results/recall_qwen2.5-coder-0.5b-instruct.json

The tokenizer of --model decides where pages end. --data and --embedder are those of `benchmarks.research.episodes`.
Every second conversation is used to choose a way to search; the others report its recall.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record
from benchmarks.research.episodes import gain
from benchmarks.research.episodes.cached import CachedEmbedder
from benchmarks.research.episodes.case import Embeds, Settings
from benchmarks.research.episodes.conversations import Conversation, Writer, header
from benchmarks.research.episodes.datasets import DATASETS, conversations
from benchmarks.research.episodes.matching import rank_segments
from benchmarks.research.episodes.segments import segment
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.embedding import Embedder, unit
from sglang_kvq.sessions.episodes import cluster
from sglang_kvq.sessions.index import Lexical, runs
from sglang_kvq.sessions.search import choose_pages, fuse, windows

#: Longest history.
LONGEST = 24576
COMPRESSIONS = (4.0, 6.0, 8.0, 12.0)
#: Compressions by which a way to search is chosen.
CHOSEN_BY = (4.0, 6.0)


@dataclass(frozen=True)
class Pieces:
    """The units that are searched: segments of ``turns``, which never cross sessions, or windows of whole ``pages``.

    Attributes:
        apart: whether windows do not overlap; otherwise a window begins at every page.
        whole: whether a window is embedded and indexed as one text; otherwise each of its pages is, once.
    """

    turns: int = 0
    pages: int = 0
    apart: bool = False
    whole: bool = False


PIECES = {
    "4 turns": Pieces(turns=4),
    "2 turns": Pieces(turns=2),
    "1 turn": Pieces(turns=1),
    "1 page": Pieces(pages=1),
    "2 pages": Pieces(pages=2),
    "3 pages": Pieces(pages=3),
    "4 pages": Pieces(pages=4),
    "2 pages apart": Pieces(pages=2, apart=True),
    "2 pages whole": Pieces(pages=2, whole=True),
}
#: ``bm25`` counts runs of letters, ``bm25_words`` words; ``fused`` and ``reciprocal_ranks`` combine cosine and
#: ``bm25``; ``centroid_E`` orders E episodes by the nearness of their centroids; ``recent`` searches nothing.
RANKINGS = ("cosine", "bm25_words", "bm25", "reciprocal_ranks", "fused", "centroid_4", "centroid_8", "recent")
#: Ranks below this count nearly the same in ``reciprocal_ranks`` (Cormack, Clarke and Büttcher 2009).
NEAR_RANKS = 60
#: Numbers of pages before and after a hit that are added with it.
NEIGHBOURS = {"none": (0, 0), "both": (1, 1), "before": (1, 0), "after": (0, 1)}
HEADER_LINE = re.compile(r"\n?\[Session [^\]\n]*\]\n?")


@dataclass(frozen=True)
class Search:
    """A way to search: names from the tables above.

    Attributes:
        dates: whether the lines above sessions, which have the dates, are part of the texts.
    """

    pieces: str
    ranking: str
    neighbours: str = "none"
    dates: bool = True

    @property
    def served(self) -> bool:
        """True if a server can search this way; it sees tokens, including headers, but no turns."""
        return self.ranking == "recent" or (PIECES[self.pieces].pages > 0 and self.dates)


def searches(among: Sequence[str] = tuple(PIECES)) -> list[Search]:
    """Returns the searches to compare. As in EpiCache, segments omit dates by default; windows include them."""
    own = {name: kind.pages > 0 for name, kind in PIECES.items()}
    found = [Search(pieces, ranking, dates=own[pieces]) for pieces in among for ranking in RANKINGS[:-1]]
    for pieces in ("4 turns", "1 page", "2 pages"):
        if pieces not in among:
            continue
        for ranking in ("cosine", "fused"):
            found += [Search(pieces, ranking, beside, own[pieces]) for beside in NEIGHBOURS if beside != "none"]
            found.append(Search(pieces, ranking, dates=not own[pieces]))
    return [*found, Search("1 page", "recent")]


class Searched:
    """One conversation that can be searched in any way.

    Attributes:
        shares: share of each question's evidence in each page, float64 ``[questions, pages]``, rows of sum 1; all
            evidence turns count equally, as in the oracle.
    """

    def __init__(self, conversation: Conversation, writer: Writer, embedder: Embeds) -> None:
        self.conversation, self.writer, self.embedder = conversation, writer, embedder
        self.history = writer.history(conversation.turns)
        self.questions = [question.text for question in conversation.questions]
        self.rows = embedder.encode(self.questions)
        self.shares = evidence_shares(
            [[self.history.spans[turn] for turn in q.evidence] for q in conversation.questions], len(self.history)
        )
        self.spans = cache(self._spans)
        self.texts = cache(self._texts)
        self.embeddings = cache(self._embeddings)
        self.scores = cache(self._scores)

    def _spans(self, pieces: str) -> list[tuple[int, int]]:
        """Returns the token spans of the pieces."""
        kind = PIECES[pieces]
        if kind.pages:
            return windows(len(self.history), kind.pages)[:: kind.pages if kind.apart else 1]
        return [self.history.span(one.first, one.last) for one in segment(self.conversation.turns, kind.turns)]

    def _texts(self, pieces: str, dates: bool) -> list[str]:
        """Returns the texts that are embedded and indexed: for windows their pages, unless they are ``whole``."""
        kind, turns = PIECES[pieces], self.conversation.turns
        if kind.turns:
            return [(header(turns[one.first]) if dates else "") + one.text for one in segment(turns, kind.turns)]
        spans = windows(len(self.history), kind.pages if kind.whole else 1)
        texts = [self.writer.text(self.history.ids[start:end]) for start, end in spans]
        return texts if dates else [HEADER_LINE.sub("\n", text) for text in texts]

    def _embeddings(self, pieces: str, dates: bool) -> np.ndarray:
        """Returns float32 ``[pieces, D]``."""
        rows, kind = self.embedder.encode(self.texts(pieces, dates)), PIECES[pieces]
        if kind.pages and not kind.whole:
            rows = unit(runs(rows, kind.pages))[:: kind.pages if kind.apart else 1]
        return rows

    def _scores(self, pieces: str, dates: bool, ranking: str) -> np.ndarray:
        """Returns float ``[questions, pieces]``; higher is better."""
        kind = PIECES[pieces]
        if ranking == "cosine":
            return self.rows @ self.embeddings(pieces, dates).T
        if ranking in ("bm25", "bm25_words"):
            index = Lexical() if ranking == "bm25" else Lexical(letters=0)
            index.add(self.texts(pieces, dates))
            run = kind.pages if kind.pages and not kind.whole else 1
            scores = np.stack([index.scores(question, run) for question in self.questions])
            return scores[:, :: kind.pages if kind.apart else 1]
        if ranking in ("fused", "reciprocal_ranks"):
            both = zip(*(self.scores(pieces, dates, one) for one in ("cosine", "bm25")))
            return np.stack([(fuse if ranking == "fused" else by_ranks)(*of_question) for of_question in both])
        embeddings = self.embeddings(pieces, dates)
        episodes = cluster(embeddings, int(ranking.removeprefix("centroid_")))
        ranked = np.stack([rank_segments(row, embeddings, episodes, "centroid") for row in self.rows])
        return -np.argsort(ranked, axis=1).astype(np.float64)

    def recall(self, search: Search, compression: float, settings: Settings) -> np.ndarray:
        """Returns the share of each question's evidence in the chosen pages: float64 ``[questions]``."""
        size = len(self.history)
        spans: list[tuple[int, int]] = []
        scores = np.zeros((len(self.questions), 0))
        if search.ranking != "recent":
            spans = self.spans(search.pieces)
            scores = self.scores(search.pieces, search.dates, search.ranking)
        pinned = -(-max(settings.sinks, len(self.history.prefix)) // PAGE_SIZE)
        found = np.empty(len(self.questions))
        for n, of_question in enumerate(scores):
            order = np.argsort(-of_question, kind="stable")
            ranked = with_neighbours([spans[at] for at in order], size, *NEIGHBOURS[search.neighbours])
            pages = choose_pages(
                ranked,
                size,
                int(size / compression) // PAGE_SIZE,
                page=PAGE_SIZE,
                sink_pages=pinned,
                recent_pages=settings.recent_pages,
            )
            found[n] = self.shares[n, pages].sum()
        return found


def by_ranks(*scores: np.ndarray) -> np.ndarray:
    """Fuses scores ``[items]`` by reciprocal ranks, float64 ``[items]``; of equal scores the first ranks first."""
    ranks = np.argsort(np.argsort(-np.stack(scores), axis=1, kind="stable"), axis=1)
    return np.asarray((1 / (NEAR_RANKS + 1 + ranks)).sum(0))


def evidence_shares(evidence: Sequence[Sequence[tuple[int, int]]], tokens: int) -> np.ndarray:
    """Returns the share of evidence in each page: float64 ``[questions, pages]``, rows of sum 1.

    Args:
        evidence: spans ``[start, end)`` of each question's evidence turns; each turn counts equally.
        tokens: length of the history.
    """
    shares = np.zeros((len(evidence), -(-tokens // PAGE_SIZE)))
    for row, turns in zip(shares, evidence):
        for start, end in turns:
            pages = np.arange(start, end) // PAGE_SIZE
            np.add.at(row, pages, 1 / (end - start) / len(turns))
    return shares


def with_neighbours(
    ranked: Sequence[tuple[int, int]], tokens: int, before: int, after: int
) -> Iterator[tuple[int, int]]:
    """Yields each span, then the pages before and after it, if there are any."""
    for start, end in ranked:
        yield start, end
        first, last = start // PAGE_SIZE, (end - 1) // PAGE_SIZE
        if before and first:
            yield (first - 1) * PAGE_SIZE, first * PAGE_SIZE
        if after and (last + 1) * PAGE_SIZE < tokens:
            yield (last + 1) * PAGE_SIZE, min((last + 2) * PAGE_SIZE, tokens)


def rows(
    found: dict[str, list[Searched]],
    compressions: Sequence[float],
    settings: Settings,
    among: Sequence[str] = tuple(PIECES),
) -> list[dict[str, Any]]:
    """Returns flat rows in the form of results: ``recall`` is reported, ``recall_choose`` is used for the choice.

    Args:
        found: conversations by data set. The first, third, … conversation reports, the others choose.

    Raises:
        KVQuantError: a data set has fewer than two conversations.
    """
    table = []
    for dataset, every in found.items():
        if len(every) < 2:
            raise KVQuantError(
                f"{dataset}: {len(every)} conversation, but one is needed to choose and another to report. "
                "Raise --limit."
            )
        number = np.repeat(np.arange(len(every)), [len(one.questions) for one in every])
        reports = number % 2 == 0
        for search in searches(among):
            for compression in compressions:
                recall = np.concatenate([one.recall(search, compression, settings) for one in every])
                mean, error = gain.mean_with_error(recall[reports], number[reports])
                choose, choose_error = gain.mean_with_error(recall[~reports], number[~reports])
                table.append(
                    {
                        "dataset": dataset,
                        "pieces": search.pieces if search.ranking != "recent" else "",
                        "ranking": search.ranking,
                        "neighbours": search.neighbours,
                        "dates": search.dates,
                        "served": search.served,
                        "compression": compression,
                        "recall": mean,
                        "recall_se": error,
                        "complete": float((recall[reports] > 1 - 1e-9).mean()),
                        "questions": int(reports.sum()),
                        "conversations": len(every) - len(every) // 2,
                        "recall_choose": choose,
                        "recall_choose_se": choose_error,
                        "questions_choose": int((~reports).sum()),
                    }
                )
    return table


def best(table: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the way to search with the best ``recall_choose`` among those that a server can do.

    The mean over data sets and ``CHOSEN_BY`` decides. Among all ways within a standard error of the highest, the
    plainest is chosen: without neighbors, with pages embedded once, with the fewest pages.

    Args:
        table: rows of at least one compression of ``CHOSEN_BY``.
    """
    of_search: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for row in table:
        if row["served"] and row["compression"] in CHOSEN_BY:
            name = (row["pieces"], row["ranking"], row["neighbours"])
            of_search.setdefault(name, []).append((row["recall_choose"], row["recall_choose_se"] or 0.0))
    means = {name: float(np.mean([mean for mean, _ in of])) for name, of in of_search.items()}
    highest = max(means, key=lambda name: means[name])
    # Compressions of a data set err together, so their errors are averaged; those of data sets are independent.
    errors = np.array([error for _, error in of_search[highest]])
    error = float(errors.mean() / np.sqrt(len({row["dataset"] for row in table})))
    near = [name for name, mean in means.items() if mean >= means[highest] - error]

    def plainness(name: tuple[str, str, str]) -> tuple[bool, bool, int, float]:
        kind = PIECES.get(name[0], Pieces())
        return name[2] != "none", kind.whole, kind.pages, -means[name]

    pieces, ranking, neighbours = min(near, key=plainness)
    return {"pieces": pieces, "ranking": ranking, "neighbours": neighbours}


def text_table(table: Sequence[dict[str, Any]]) -> str:
    """Returns a line for each way to search and data set, with a column per compression: reported recall in percent."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for row in table:
        dates = "dates" if row["dates"] else ""
        name = (row["dataset"], row["pieces"], row["ranking"], row["neighbours"], dates)
        error = "" if row["recall_se"] is None else f" ± {100 * row['recall_se']:.1f}"
        lines.setdefault(name, []).append(f"{row['compression']:g}x {100 * row['recall']:5.1f}{error:6}")
    return "\n".join(f"{a:10}{b:14}{c:17}{d:7}{e:6} " + " ".join(cells) for (a, b, c, d, e), cells in lines.items())


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.research.episodes.recall",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="folder or hub id of a chat model, for its tokenizer")
    parser.add_argument("--embedder", required=True, type=Path, help="folder of a sentence-transformers model")
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--datasets", default=",".join(DATASETS))
    parser.add_argument("--compressions", default=",".join(f"{x:g}" for x in COMPRESSIONS))
    parser.add_argument("--pieces", default=",".join(PIECES))
    parser.add_argument("--limit", type=int, default=6, help="conversations of each dataset")
    parser.add_argument("--questions", type=int, default=1000, help="questions about each conversation")
    parser.add_argument("--history-tokens", type=int, default=LONGEST)
    parser.add_argument("--cache", type=Path, help="an .npz of embeddings by this embedder, made if missing")
    return parser.parse_args(words)


def run(args: argparse.Namespace, writer: Writer, embedder: Embeds) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns rows, and the file's further fields.

    Raises:
        KVQuantError: an argument is invalid.
    """
    try:
        compressions = [float(word) for word in args.compressions.split(",")]
    except ValueError:
        compressions = [0.0]
    if min(compressions) <= 1:
        raise KVQuantError(f"--compressions {args.compressions}: give numbers above 1, such as 4,6.")
    if not set(CHOSEN_BY) & set(compressions):
        needed = " or ".join(f"{x:g}" for x in CHOSEN_BY)
        raise KVQuantError(
            f"--compressions {args.compressions}: a way to search is chosen by its recall at {needed}. Add one of them."
        )
    for name in ("limit", "questions"):
        if getattr(args, name) < 1:
            raise KVQuantError(f"--{name} {getattr(args, name)}: give 1 or more.")
    if unknown := set(args.datasets.split(",")) - DATASETS.keys():
        raise KVQuantError(f"--datasets {', '.join(sorted(unknown))}: choose some of {', '.join(DATASETS)}.")
    pieces = args.pieces.split(",")
    if unknown := set(pieces) - PIECES.keys():
        raise KVQuantError(f"--pieces {', '.join(sorted(unknown))}: choose some of {', '.join(PIECES)}.")
    settings = Settings()
    options = {"most_tokens": args.history_tokens, "limit": args.limit, "questions": args.questions}
    start = time.perf_counter()
    found: dict[str, list[Searched]] = {}
    for dataset in args.datasets.split(","):
        loaded = conversations(dataset, args.data, writer, **options)
        found[dataset] = [Searched(one, writer, embedder) for one in loaded]
    table = rows(found, compressions, settings, pieces)
    more = {
        "model": Path(args.model).name,
        "embedder": Path(args.embedder).parent.name,
        "history_tokens_at_most": args.history_tokens,
        "recent_pages": settings.recent_pages,
        "chosen": best(table),
        "seconds": round(time.perf_counter() - start, 1),
    }
    return table, more


def main() -> None:
    from transformers import AutoTokenizer

    args = arguments()
    writer = Writer(AutoTokenizer.from_pretrained(args.model))
    table, more = run(args, writer, CachedEmbedder(lambda: Embedder.load(args.embedder), args.cache))
    table = [{k: round(x, 5) if isinstance(x, float) else x for k, x in row.items()} for row in table]
    print(text_table(table))
    print("chosen:", *more["chosen"].values())
    record.write(args.out, f"recall_{more['model'].lower()}", table, **more)


if __name__ == "__main__":
    main()
