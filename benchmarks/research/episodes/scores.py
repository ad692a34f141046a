"""Scores of keys that decide which are kept: float32 ``[rows, kv_heads, T]``, higher is better."""

from __future__ import annotations

import torch

from benchmarks.research.episodes.past import Past, attention, group_rows
from benchmarks.research.episodes.runner import Runner, pad

#: Slots over which SnapKV smooths its scores.
SNAPKV_KERNEL = 7
#: Asks the model to repeat what it read (KVzip's idea, our words).
REPEAT = "\n\nRepeat this part of the conversation word for word:\n"


def highest(
    q: torch.Tensor, k: torch.Tensor, valid: torch.Tensor | None, lengths: list[int], scale: float
) -> torch.Tensor:
    """Returns the highest probability that any query of a KV head's group pays each stored key.

    The softmax is over stored keys only.

    Args:
        q: ``[B, q_heads, n, D]``.
        k: ``[1 or B, kv_heads, slots, D]``.
        valid: bool ``[1 or B, kv_heads, slots]`` or None.
        lengths: tokens of each prompt; the rest is padding.

    Returns:
        float32 ``[B, kv_heads, slots]``.
    """
    found = []
    for row, length in enumerate(lengths):
        of_row = min(row, k.shape[0] - 1)
        queries = group_rows(q[row : row + 1, :, :length], k.shape[1])[0]
        scores = (queries.float() * scale) @ k[of_row].float().mT
        if valid is not None:
            scores.masked_fill_(~valid[min(row, valid.shape[0] - 1)][:, None], -torch.inf)
        found.append(scores.softmax(-1).amax(1))
    return torch.stack(found)


def by_prompts(runner: Runner, past: Past, prompts: list[list[int]], first: int) -> list[torch.Tensor]:
    """Returns EpiCache's scores of the past's keys by each prompt's queries, per layer ``[prompts, kv_heads, slots]``.

    Args:
        past: one row, or a row for each prompt.
        first: position of the prompts' first tokens.
    """
    lengths = [len(prompt) for prompt in prompts]
    scores: list[torch.Tensor] = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        scores.append(highest(q, past.k[layer], past.valid[layer], lengths, scale))
        return past.attend(layer, q, k, v, scale)

    runner.hidden(pad(prompts), first, attend)
    return scores


def snapkv(runner: Runner, full: Past, questions: list[list[int]]) -> list[torch.Tensor]:
    """Computes SnapKV's scores (arXiv 2404.14469) with the question as window: per layer ``[questions, kv_heads, T]``.

    These are probabilities over the history, summed over the question's queries and the group's heads, then smoothed.
    """
    scores: list[torch.Tensor] = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        stored = full.k[layer]
        of_rows = []
        for row, question in enumerate(questions):
            queries = group_rows(q[row : row + 1, :, : len(question)], k.shape[1])[0]
            of_rows.append(((queries.float() * scale) @ stored[0].float().mT).softmax(-1).sum(1))
        summed = torch.stack(of_rows)
        half = SNAPKV_KERNEL // 2
        scores.append(torch.nn.functional.avg_pool1d(summed, SNAPKV_KERNEL, 1, half, count_include_pad=False))
        return full.attend(layer, q, k, v, scale)

    runner.hidden(pad(questions), full.k[0].shape[2], attend)
    return scores


def kvzip(
    runner: Runner, full: Past, ids: list[int], instruction: list[int], *, chunk: int, batch: int
) -> list[torch.Tensor]:
    """Computes KVzip's scores (arXiv 2505.23416): how a model that repeats a part of the history attends to that part.

    A key's score is the highest probability that any query of the instruction and the repeated chunk pays it. The
    softmax runs over the chunk's keys and, causally, the prompt's own, as in the paper. The full cache is read.

    Returns:
        Per layer float32 ``[1, kv_heads, T]``.
    """
    tokens = len(ids)
    scores = [torch.zeros(1, runner.kv_heads, tokens, device=runner.device) for _ in range(runner.layers)]
    spans = [(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]
    for at in range(0, len(spans), batch):
        some = spans[at : at + batch]
        prompts = [instruction + ids[start:end] for start, end in some]

        def attend(
            layer: int,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            scale: float,
            some: list[tuple[int, int]] = some,
            prompts: list[list[int]] = prompts,
        ) -> torch.Tensor:
            for row, (start, end) in enumerate(some):
                n = len(prompts[row])
                queries, own = q[row : row + 1, :, :n], k[row : row + 1, :, :n]
                stored = full.k[layer][:, :, start:end]
                scores[layer][0, :, start:end] = _repeated(queries, stored, own, scale)
            return attention(q, k, v, full.k[layer], full.v[layer], full.valid[layer], scale)

        runner.hidden(pad(prompts), tokens, attend)
    return scores


def _repeated(q: torch.Tensor, stored: torch.Tensor, own: torch.Tensor, scale: float) -> torch.Tensor:
    """Returns ``[kv_heads, slots]``: the highest share of a stored key in a softmax over stored and own keys."""
    kv_heads, n, slots = own.shape[1], own.shape[2], stored.shape[2]
    scores = group_rows(q, kv_heads)[0].float() @ torch.cat([stored, own], 2)[0].float().mT * scale
    causal = torch.ones(n, n, dtype=torch.bool, device=q.device).tril().repeat(q.shape[1] // kv_heads, 1)
    scores[..., slots:].masked_fill_(~causal, -torch.inf)
    return (scores[..., :slots] - scores.logsumexp(-1, keepdim=True)).amax(1).exp()


def keydiff(full: Past) -> list[torch.Tensor]:
    """Computes KeyDiff's scores (arXiv 2504.15364): keys unlike the mean direction of all keys, by cosine."""
    scores = []
    for k in full.k:
        unit = torch.nn.functional.normalize(k.float(), dim=-1)
        scores.append(-torch.nn.functional.cosine_similarity(unit, unit.mean(2, keepdim=True), dim=-1))
    return scores
