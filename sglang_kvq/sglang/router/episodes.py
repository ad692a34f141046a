"""The router of ``--episodic-policy epicache``: builds a session's episodes block by block and answers from one.

EpiCache (arXiv 2509.17396) over ordinary requests. A conversation's whole blocks but the last ones are folded into an
episode when it is asked for first: a chain of prefill-only requests, each of which ends as a fold
(``sessions.episodes``). The request that answers begins with the episode whose centroid is nearest to its question, and
goes on with the rest of the prompt as an ordinary suffix. What of a chain was evicted is built again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from fastapi import HTTPException

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.config import EPISODES, PROMPT_TOKENS, EpisodicConfig
from sglang_kvq.sessions.embedding import unit
from sglang_kvq.sessions.episodes import ChainPlan, Step, chain, stand_ins, step_ids
from sglang_kvq.sessions.messages import FOLD, GONE, PREFIX, Fold, FoldedPrefix
from sglang_kvq.sglang.router import answers, requests
from sglang_kvq.sglang.router.metrics import NoMetrics
from sglang_kvq.sglang.router.requests import GenerateRequest
from sglang_kvq.sglang.router.turns import Turn, Workers

#: Names of folds that are remembered as built; an older one is tried from its chain's beginning.
REMEMBERED = 1 << 16
#: Times that a fold is sent while the cache has no room for it, and seconds between them, growing.
ATTEMPTS, PAUSE = 8, 0.1
#: In the error of a fold without room.
_AGAIN = "send the request again"


@dataclass(frozen=True, eq=False)
class Chosen:
    """An episode that a prompt is answered from.

    Attributes:
        plan: sizes of the chain.
        steps: of the episode's chain.
        prompt: whose queries score it.
        folded: the prompt's first tokens that the episode stands for.
    """

    number: int
    plan: ChainPlan
    steps: list[Step]
    prompt: np.ndarray
    folded: int


class EpisodeRouter:
    """Episodes of all sessions of one server.

    Args:
        sinks: first tokens of a conversation that every episode keeps.
    """

    def __init__(self, workers: Workers, metrics: NoMetrics, config: EpisodicConfig, method: str, sinks: int) -> None:
        self.workers, self.metrics, self.config, self.method = workers, metrics, config, method
        self.plan = ChainPlan(config.budget, config.block, sinks)
        self._built: OrderedDict[str, None] = OrderedDict()
        #: One fold at a time: several would each hold its pages while it waits for room for what they become.
        self._folding = asyncio.Lock()

    def folded(self, tokens: int, question: int) -> int:
        """First tokens of a prompt that are folded: whole blocks before its question, of which at most a block is left.

        A patched prompt stands behind its block, so that the last of the model's positions are left to it.

        Args:
            question: where the question begins.
        """
        end = min(max(question, tokens - self.config.block), tokens - 1)
        return self.plan.folded(min(end, max(self.workers.manager.context_len - PROMPT_TOKENS, 0)))

    async def choose(self, turn: Turn, question: int, folded: int, system: int) -> Chosen:
        """The episode nearest to a prompt's question.

        Args:
            system: tokens before the first user message, which are pinned up to a quarter of the budget.
        """
        most = self.config.budget // 4 // PAGE_SIZE
        pinned = max(self.plan.pinned, min(-(-system // PAGE_SIZE), most) * PAGE_SIZE)
        plan = replace(self.plan, pinned=pinned)
        workers, session, ids = self.workers, turn.session, turn.ids
        size = self.config.segment
        episodes = session.nearest(ids)[0].episodes.copy()
        count, pages = max(folded // size, episodes.segments), size // PAGE_SIZE
        index = await workers.embedded(turn, count * pages)
        (asked,) = await workers.embed_question(ids[question:])

        def divide() -> tuple[np.ndarray, int]:
            rows = unit(index.rows().reshape(count, pages, -1).mean(1))
            clusters = episodes.divide(rows, self.config.episodes or EPISODES, count * size)
            return rows, clusters.nearest(asked)

        # A quarter of a second for 64K tokens, in which other sessions' answers go on.
        rows, number = await asyncio.to_thread(divide)
        prompt = episodes.prompt(
            number,
            rows,
            lambda segment: workers.text(ids[segment * size : (segment + 1) * size]),
            lambda text: workers.manager.tokenizer.encode(text, add_special_tokens=False),
        )
        episodes.answered = number
        session.divided(ids, episodes)
        namespace = turn.namespace[0]
        steps = chain(ids[:folded], prompt, plan, tenant=session.tenant, namespace=namespace, method=self.method)
        return Chosen(number, plan, steps, prompt, folded)

    async def build(self, turn: Turn, chosen: Chosen) -> None:
        """Runs the steps of a chain that are not known to be in the cache.

        Raises:
            KVQuantError: the cache has no room for an episode beside what runs.
            Ended: the request was aborted.
            HTTPException: what SGLang ended a request with.
        """
        for _ in range(3):  # what is known may have been evicted, and again while it is built
            known = [step.name in self._built for step in chosen.steps]
            first = len(known) - known[::-1].index(True) if True in known else 0
            try:
                for step in chosen.steps[first:]:
                    if turn.obj.rid in self.workers.aborted:
                        raise answers.aborted("Abort before its answer began")
                    await self._step(turn, chosen, step)
            except _Gone:
                self._forget(chosen)
                turn.session.rebuilt += 1
                continue
            return
        raise KVQuantError(
            "an episode is evicted as soon as it is built: the KV cache is too small for what runs at once; lower "
            "--episodic-budget or --max-running-requests."
        )

    async def build_again(self, turn: Turn, chosen: Chosen) -> None:
        """``build`` of a chain that turned out to be evicted."""
        self._forget(chosen)
        await self.build(turn, chosen)

    def _forget(self, chosen: Chosen) -> None:
        for step in chosen.steps:
            self._built.pop(step.name, None)

    async def _step(self, turn: Turn, chosen: Chosen, step: Step) -> None:
        ids = step_ids(step, turn.ids, chosen.prompt, chosen.plan)
        fold = Fold(step.name, step.prefix + step.end - step.start, chosen.plan.budget, chosen.plan.pinned)
        params = {FOLD: fold.encode()}
        if step.offset:
            params[PREFIX] = FoldedPrefix(step.prefix, step.offset).encode()
        for attempt in range(ATTEMPTS):
            tokens = await requests.token_array(ids)
            inner = requests.compute_request(turn.obj, tokens, (step.before, turn.namespace[1]), None)
            inner.sampling_params["custom_params"] = params
            inner.normalize_batch_and_arguments()
            async with self._folding:
                problem = await self._run(turn, inner)
            if problem is None:
                break
            if GONE in problem:
                raise _Gone
            if _AGAIN not in problem or attempt == ATTEMPTS - 1:
                raise KVQuantError(f"folding tokens {step.start} to {step.end} of the conversation failed: {problem}")
            await asyncio.sleep(PAUSE * 2**attempt)
        self._built[step.name] = None
        self.metrics.folded()
        while len(self._built) > REMEMBERED:
            self._built.popitem(last=False)

    async def _run(self, turn: Turn, inner: GenerateRequest) -> str | None:
        """Sends one request inside; what is wrong with it, None if nothing is.

        Raises:
            Ended: it was aborted.
            HTTPException: as ``build``.
        """
        reason: Any = None
        try:
            async for out in self.workers.sent(turn, inner):
                meta = out["meta_info"]
                reason = meta["finish_reason"]
                if reason is not None:
                    turn.computed += requests.computed_of(meta)
                    answers.check_not_aborted(out)
        except ValueError as error:  # what SGLang raises for status 400
            return str(error)
        except HTTPException as error:
            if "sglang-kvq" not in str(error.detail):  # SGLang took no more requests, or gave this one up
                raise
            return str(error.detail)
        return None if isinstance(reason, dict) else "it ended without a reason"

    def answer(self, turn: Turn, chosen: Chosen) -> requests.Beginning:
        """Returns the beginning of the answering request."""
        offset = chosen.folded - self.plan.budget
        message = FoldedPrefix(self.plan.budget, offset).encode()
        return requests.Beginning(stand_ins(turn.ids, self.plan), chosen.steps[-1].name, offset, PREFIX, message)


class _Gone(Exception):
    """A step's prefix is not in the cache any more."""
