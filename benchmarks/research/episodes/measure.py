"""Runs all policies on all conversations, and computes the rows and comparisons."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.research.episodes import gain
from benchmarks.research.episodes.case import Case
from benchmarks.research.episodes.policies import POLICIES, VARIANTS, Outcome, epicache_layers

#: Pairs (ours, theirs) of a policy and a matching, whose differences of gain kept decisions depend on.
PAIRS = (
    (("epicache_layers", "centroid"), ("epicache", "centroid")),
    (("epicache_heads", "centroid"), ("epicache", "centroid")),
    (("epicache", "segments"), ("epicache", "centroid")),
    (("epicache", "evidence"), ("epicache", "centroid")),
    (("epicache", "segments"), ("text", "segments")),
    (("retrieve", "segments"), ("retrieve", "centroid")),
    (("retrieve", "segments"), ("epicache", "segments")),
    (("retrieve", "segments"), ("text", "segments")),
    (("retrieve", "segments"), ("snapkv", "question")),
    (("retrieve", "segments"), ("kvzip", None)),
    (("retrieve", "windows"), ("retrieve", "segments")),
    (("retrieve", "windows"), ("epicache", "segments")),
    (("retrieve", "windows"), ("text", "segments")),
    (("retrieve", "windows"), ("text", "fused")),
    (("retrieve", "windows"), ("snapkv", "question")),
    (("retrieve", "windows"), ("kvzip", None)),
    (("text", "fused"), ("text", "segments")),
)

Name = tuple[str, str | None]
#: Data set, compression (None if the policy has none), kv_quant.
Group = tuple[str, float | None, str]


@dataclass
class Measured:
    """Outcomes so far.

    Attributes:
        outcomes: by group and (policy, matching), one for each conversation, by its name.
        tokens: length of each conversation's history, by data set and name; data sets may cut the same one differently.
        seconds: time that each policy took.
    """

    outcomes: dict[Group, dict[Name, dict[str, Outcome]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )
    tokens: dict[tuple[str, str], int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, group: Group, conversation: str, outcomes: Iterator[Outcome], device: torch.device) -> None:
        start, policy = time.perf_counter(), ""
        for outcome in outcomes:
            policy = policy or outcome.policy
            self.outcomes[group][outcome.policy, outcome.matching][conversation] = outcome
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.seconds[policy] += time.perf_counter() - start


def measure_case(
    measured: Measured,
    dataset: str,
    case: Case,
    kv_quant: str,
    compressions: Sequence[float],
    policies: Sequence[str],
    layers_of: Callable[[int, int], tuple[int, ...]],
) -> None:
    """Measures one conversation; with ``kv_quant`` "none" also the two ends that define *gain kept*.

    Args:
        layers_of: returns layer budgets for an average number of tokens and a number of pinned ones.
    """
    name, device = case.conversation.name, case.runner.device
    measured.tokens[dataset, name] = len(case.history)
    ends = [end for end in ("full", "none") if kv_quant == "none" or (end in policies and end == "full")]
    for end in ends:
        measured.add((dataset, None, kv_quant), name, POLICIES[end](case, 0), device)
    for compression in compressions:
        tokens = case.budget(compression)
        for policy in policies:
            if policy in ("full", "none") or (policy in VARIANTS and compression != compressions[0]):
                continue
            if policy == "epicache_layers":
                outcomes = epicache_layers(case, tokens, layers_of(tokens, case.pinned))
            else:
                outcomes = POLICIES[policy](case, tokens)
            measured.add((dataset, compression, kv_quant), name, outcomes, device)


def rows(measured: Measured, bytes_per_token: dict[str, float]) -> list[dict[str, Any]]:
    """Returns flat rows in the form of results.

    Args:
        bytes_per_token: bytes of the KV cache per token, over all layers and heads, by kv_quant.
    """
    found = []
    for (dataset, compression, kv_quant), policies in measured.outcomes.items():
        for (policy, matching), outcomes in policies.items():
            likelihoods, conversation = _likelihoods(measured, dataset, outcomes)
            kept, kept_se = gain.with_error(likelihoods, conversation)
            less, less_se = gain.mean_with_error(likelihoods.policy - likelihoods.full, conversation)
            every = list(outcomes.values())
            matched = [one.matched for one in every if one.matched is not None]
            hot, total = (float(np.mean(of)) for of in ([one.hot for one in every], [one.total for one in every]))
            found.append(
                {
                    "dataset": dataset,
                    "policy": policy,
                    "matching": matching,
                    "compression": compression,
                    "kv_quant": kv_quant,
                    "gain_kept": kept,
                    "gain_kept_se": kept_se,
                    "evidence_recall": float(np.concatenate([one.recall for one in every]).mean()),
                    "matched_recall": float(np.concatenate(matched).mean()) if matched else None,
                    "hot_tokens": hot,
                    "total_bytes": total * bytes_per_token[kv_quant],
                    "hot_bytes": hot * bytes_per_token[kv_quant],
                    "logprob": float(likelihoods.policy.mean()),
                    "less_full": less,
                    "less_full_se": less_se,
                    "history_tokens": float(np.mean([measured.tokens[dataset, name] for name in outcomes])),
                    "conversations": len(outcomes),
                    "questions": len(likelihoods.policy),
                }
            )
    return found


def comparisons(measured: Measured) -> list[dict[str, Any]]:
    """Returns paired differences of gain kept: ``PAIRS``, and each policy's with quantized pages minus BF16."""
    found = []
    for (dataset, compression, kv_quant), policies in measured.outcomes.items():
        pairs = [((a, policies.get(a)), (b, policies.get(b))) for a, b in PAIRS]
        if kv_quant != "none":
            plain = measured.outcomes.get((dataset, compression, "none"), {})
            pairs += [((name, ours), (name, plain.get(name))) for name, ours in policies.items()]
        for number, ((ours, our), (theirs, their)) in enumerate(pairs):
            if our is None or their is None:
                continue
            both = [name for name in our if name in their]
            likelihoods, conversation = _likelihoods(measured, dataset, {name: our[name] for name in both})
            other = np.concatenate([their[name].likelihoods for name in both])
            difference, error = gain.difference(likelihoods.policy, other, likelihoods, conversation)
            found.append(
                {
                    "dataset": dataset,
                    "compression": compression,
                    "kv_quant": kv_quant,
                    "ours": _label(ours),
                    "theirs": _label(theirs) + (" without kv_quant" if number >= len(PAIRS) else ""),
                    "gain_difference": difference,
                    "gain_difference_se": error,
                }
            )
    return found


def _label(name: Name) -> str:
    return name[0] if name[1] is None else f"{name[0]} by {name[1]}"


def _likelihoods(measured: Measured, dataset: str, outcomes: dict[str, Outcome]) -> tuple[gain.Likelihoods, np.ndarray]:
    """Joins the likelihoods of all conversations' questions, with those of the BF16 full cache and of no history."""
    ends = measured.outcomes[dataset, None, "none"]
    columns = (outcomes, ends["full", None], ends["none", None])
    joined = [np.concatenate([column[name].likelihoods for name in outcomes]) for column in columns]
    number = np.repeat(np.arange(len(outcomes)), [len(one.likelihoods) for one in outcomes.values()])
    return gain.Likelihoods(*joined), number
