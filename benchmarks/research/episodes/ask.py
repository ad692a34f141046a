"""Computes the log-likelihood of answers in batches, over the tokens that a policy kept or over texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from benchmarks.research.episodes.conversations import Ask
from benchmarks.research.episodes.past import Past, attend_new
from benchmarks.research.episodes.runner import Attend, Runner, pad


def likelihoods(
    runner: Runner, asks: Sequence[Ask], past_of: Callable[[list[int]], Past], first: int, batch: int
) -> np.ndarray:
    """Returns the mean log-likelihood per answer token of each question: float64 ``[questions]``.

    Args:
        past_of: returns what some questions (by number) read, as one row or a row for each.
        first: position of a question's first token, which is the history's length, whatever was kept of it.
    """
    found = np.empty(len(asks))
    order = sorted(range(len(asks)), key=lambda n: len(asks[n].ids))
    for at in range(0, len(order), batch):
        some = order[at : at + batch]
        found[some] = _of_batch(runner, [asks[n] for n in some], [[]] * len(some), first, past_of(some).attend)
    return found


def after_texts(runner: Runner, asks: Sequence[Ask], texts: Sequence[list[int]], batch_tokens: int) -> np.ndarray:
    """Returns the same for questions that follow their own texts, each read from position 0.

    Args:
        texts: tokens before each question.
        batch_tokens: most tokens of a batch, padding included; a single prompt may have more.
    """
    found = np.empty(len(asks))
    for some in by_length([len(text) + len(ask.ids) for text, ask in zip(texts, asks)], batch_tokens):
        found[some] = _of_batch(runner, [asks[n] for n in some], [texts[n] for n in some], 0, attend_new)
    return found


def by_length(lengths: list[int], batch_tokens: int) -> list[list[int]]:
    """Groups numbers into batches of similar lengths, each of at most ``batch_tokens`` with padding."""
    batches: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batches and lengths[number] * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches


def _of_batch(runner: Runner, asks: list[Ask], texts: Sequence[list[int]], first: int, attend: Attend) -> list[float]:
    rows = [text + ask.ids for text, ask in zip(texts, asks)]
    hidden = runner.hidden(pad(rows), first, attend)
    # The token at n - 1 predicts the token at n.
    before = [hidden[at, len(row) - ask.answer - 1 : len(row) - 1] for at, (row, ask) in enumerate(zip(rows, asks))]
    targets = [token for ask in asks for token in ask.ids[-ask.answer :]]
    found = runner.logprobs(torch.cat(before), torch.tensor(targets)).double().cpu()
    return [float(part.mean()) for part in found.split([ask.answer for ask in asks])]
