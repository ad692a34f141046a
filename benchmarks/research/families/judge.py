"""Computes outcomes of one method on one case, and the rows of all outcomes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.research.families.base import Method
from benchmarks.research.families.cases import Case, Question
from benchmarks.research.families.model import Cache, Prefilled, continue_behind, prefill, store
from sglang_kvq.evaluation.tasks.statistics import clustered, mean_and_error

#: Suffix for questions that are in the prompt when the cache is compressed, so that the choice of tokens may depend on
#: them.
ASKED = "_asked"


class Judge:
    """One case on one model: reads the context once, then judges methods."""

    def __init__(self, model: Any, case: Case, prefilled: Prefilled | None = None) -> None:
        self.model, self.case = model, case
        self.prefilled = prefilled or prefill(model, case.ids)
        exact, _ = store(self.prefilled, None)
        self.reference = self._following(exact)
        self._behind: dict[str, Prefilled] = {}

    def outcome(self, method: Method | None) -> dict[str, Any]:
        """Returns bits, KL and agreement of the next tokens, and each question's answer."""
        caches, bits = store(self.prefilled, method)
        found = self._following(caches)
        kl = torch.nn.functional.kl_div(found, self.reference, reduction="none", log_target=True).sum(-1)
        agree = (found.argmax(-1) == self.reference.argmax(-1)).float()
        row: dict[str, Any] = {"bits": bits, "tokens": len(kl), "kl": float(kl.sum()), "agree": float(agree.sum())}
        for task, question in self.case.questions.items():
            row[task] = self._answer(
                torch.cat([question.ids, question.answer]), self.prefilled.tokens, caches, question
            )
        return row

    def asked(self, method: Method | None) -> dict[str, Any]:
        """Returns the answers if each question was read before the cache was compressed."""
        row: dict[str, Any] = {}
        for task, question in self.case.questions.items():
            if task not in self._behind:
                self._behind[task] = prefill(self.model, question.ids[:-1], self.prefilled)
            behind = self._behind[task]
            caches, bits = store(behind, method)
            ids = torch.cat([question.ids[-1:], question.answer])
            row |= {task + ASKED: self._answer(ids, behind.tokens, caches, question), "bits" + ASKED: bits}
        return row

    def _following(self, caches: list[Cache]) -> torch.Tensor:
        ids = self.case.following
        return continue_behind(self.model, ids, self.prefilled.tokens, caches, len(ids))

    def _answer(self, ids: torch.Tensor, first: int, caches: list[Cache], question: Question) -> dict[str, Any]:
        answer = question.answer
        logp = continue_behind(self.model, ids[:-1], first, caches, len(answer))
        right = logp.argmax(-1) == answer
        nats = -float(logp.gather(1, answer[:, None]).sum())
        return {"nats": nats, "tokens": len(answer), "likeliest": int(right.sum()), "copied": bool(right.all())}


def rows(outcomes: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Summarizes outcomes ``{model, budget, method, setting, case, bits, ...}``: one row per model, method and task.

    ``score`` is KL in nats per token, or the share of answers that are copied completely. An answer is copied if each
    of its tokens is the likeliest one after the right tokens before it, as greedy decoding would write it.
    """
    groups: dict[tuple[str, float, str], list[dict[str, Any]]] = defaultdict(list)
    for one in outcomes:
        groups[one["model"], one["budget"], one["method"]].append(one)
    exact = {model: group for (model, _, method), group in groups.items() if method == "none"}
    for (model, budget, method), group in groups.items():
        base = {"model": model, "budget": budget, "method": method, "setting": group[0]["setting"]}
        base |= {"allocated_bits": round(max(one["bits"] for one in group), 4), "cases": len(group)}
        kl, se = clustered([one["kl"] for one in group], [one["tokens"] for one in group])
        agree, agree_se = clustered([one["agree"] for one in group], [one["tokens"] for one in group])
        tokens = sum(one["tokens"] for one in group)
        yield {**base, "task": "kl", "score": kl, "score_se": se, "bf16_score": 0.0, "top1": agree, "top1_se": agree_se,
               "tokens": tokens}  # fmt: skip
        for task in ("exact_keys", "needle"):
            for name in (task, task + ASKED):
                answers = [one[name] for one in group if name in one]
                if not answers:
                    continue
                score, se = mean_and_error([float(one["copied"]) for one in answers])
                counts = [one["tokens"] for one in answers]
                nats, nats_se = clustered([one["nats"] for one in answers], counts)
                likeliest, _ = clustered([float(one["likeliest"]) for one in answers], counts)
                same = {one["case"]: one[task]["copied"] for one in exact.get(model, [])}
                known = [float(same[one["case"]]) for one in group if one["case"] in same]
                yield {**base, "task": name, "score": score, "score_se": se, "nats": nats, "nats_se": nats_se,
                       "likeliest": likeliest, "bf16_score": sum(known) / len(known) if known else None}  # fmt: skip
