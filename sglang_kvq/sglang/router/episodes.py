"""The router of ``--episodic-policy epicache``: builds a session's episodes block by block and answers from one.

This is EpiCache (arXiv 2509.17396), implemented by ordinary requests. When an episode is first needed, all whole blocks
of the conversation except the last ones are folded into it. That takes a chain of prefill-only requests, each of which
ends as a fold (``sessions.episodes``). The answering request begins with the episode whose centroid is nearest to its
question, and continues with the rest of the prompt as an ordinary suffix. Evicted parts of a chain are built again.
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
from sglang_kvq.sessions.episodes import ChainPlan, Episodes, Step, chain, stand_ins, step_ids
from sglang_kvq.sessions.messages import FOLD, GONE, PREFIX, Fold, FoldedPrefix
from sglang_kvq.sglang.router import answers, requests
from sglang_kvq.sglang.router.metrics import NoMetrics
from sglang_kvq.sglang.router.requests import GenerateRequest
from sglang_kvq.sglang.router.turns import Turn, Workers

#: Maximum number of folds that are remembered as built. The chain of a forgotten fold is run from its beginning.
REMEMBERED = 1 << 16
#: Number of attempts to send a fold while the cache has no room for it, and the first pause in seconds, which doubles.
ATTEMPTS, PAUSE = 8, 0.1
#: Text in the error of a fold without room.
_AGAIN = "Send the request again"


@dataclass(frozen=True, eq=False)
class Chosen:
    """The episode from which a prompt is answered.

    Attributes:
        number: the episode's index in the session.
        plan: sizes of its chain.
        steps: steps of its chain.
        prompt: token ids of the patched prompt, whose queries score the tokens.
        folded: number of the prompt's first tokens for which the episode stands.
    """

    number: int
    plan: ChainPlan
    steps: list[Step]
    prompt: np.ndarray
    folded: int


class EpisodeRouter:
    """Builds and chooses the episodes of all sessions of one server.

    Args:
        sinks: number of a conversation's first tokens that every episode keeps.
    """

    def __init__(self, workers: Workers, metrics: NoMetrics, config: EpisodicConfig, method: str, sinks: int) -> None:
        self.workers, self.metrics, self.config, self.method = workers, metrics, config, method
        self.plan = ChainPlan(config.budget, config.block, sinks)
        self._built: OrderedDict[str, None] = OrderedDict()
        #: Allows one fold at a time: several would each hold its own pages while it waits for room for the fold.
        self._folding = asyncio.Lock()

    def folded(self, tokens: int, question: int) -> int:
        """Returns how many first tokens of a prompt are folded.

        These are the whole blocks before its question, and at least those before its last ``block`` tokens. A patched
        prompt follows its block, so the last positions of the model's context are reserved for it.

        Args:
            tokens: number of the prompt's tokens.
            question: index of the question's first token.
        """
        end = min(max(question, tokens - self.config.block), tokens - 1)
        return self.plan.folded(min(end, max(self.workers.manager.context_len - PROMPT_TOKENS, 0)))

    async def choose(self, turn: Turn, question: int, folded: int, system: int) -> Chosen:
        """Chooses the episode nearest to a prompt's question; divides the session into episodes if needed.

        Args:
            question: index of the question's first token.
            folded: number of first tokens that are folded.
            system: number of tokens before the first user message; they are pinned, up to a quarter of the budget.
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

        def divide() -> tuple[np.ndarray, Episodes, int]:
            rows = unit(index.rows().reshape(count, pages, -1).mean(1))
            clusters = episodes.divide(rows, self.config.episodes or EPISODES, count * size)
            return rows, clusters, clusters.nearest(asked)

        # In a thread, because it takes a quarter of a second for 64K tokens and other answers must go on.
        rows, clusters, number = await asyncio.to_thread(divide)
        prompt = episodes.prompt(
            clusters,
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
            KVQuantError: SGLang refuses an inner request.
            Ended: the request was aborted.
            HTTPException: SGLang ended an inner request with this error, or the cache has no room for an episode
                beside the running requests.
        """
        for _ in range(3):  # known folds may have been evicted, and may be evicted again during the build
            known = [step.name in self._built for step in chosen.steps]
            first = len(known) - known[::-1].index(True) if True in known else 0
            try:
                for step in chosen.steps[first:]:
                    await self._step(turn, chosen, step)
            except _Gone:
                self._forget(chosen)
                turn.session.rebuilt += 1
                self.metrics.rebuilt()
                continue
            return
        raise answers.unavailable(
            "an episode is evicted as soon as it is built: the KV cache is too small for what runs at once. Lower "
            "--episodic-budget or --max-running-requests."
        )

    async def build_again(self, turn: Turn, chosen: Chosen) -> None:
        """Builds a chain that turned out to be evicted."""
        self._forget(chosen)
        await self.build(turn, chosen)

    def _forget(self, chosen: Chosen) -> None:
        for step in chosen.steps:
            self._built.pop(step.name, None)

    async def _step(self, turn: Turn, chosen: Chosen, step: Step) -> None:
        ids = step_ids(step, turn.ids, chosen.prompt)
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
                self.workers.check_wanted(turn.obj.rid)
                problem = await self._run(turn, inner)
            if problem is None:
                break
            if GONE in problem:
                raise _Gone
            failed = f"folding tokens {step.start} to {step.end} of the conversation failed: {problem}"
            if _AGAIN not in problem:
                raise KVQuantError(failed)
            if attempt == ATTEMPTS - 1:
                raise answers.unavailable(failed)
            await asyncio.sleep(PAUSE * 2**attempt)
        self._built[step.name] = None
        self.metrics.folded()
        while len(self._built) > REMEMBERED:
            self._built.popitem(last=False)

    async def _run(self, turn: Turn, inner: GenerateRequest) -> str | None:
        """Sends one inner request; returns its error message, None if it succeeded.

        Raises:
            Ended: the request was aborted.
            HTTPException: as in ``build``.
        """
        reason: Any = None
        try:
            async for out in self.workers.sent(turn, inner):
                meta = out["meta_info"]
                reason = meta["finish_reason"]
                if reason is not None:
                    turn.computed += requests.computed_of(meta)
                    answers.check_not_aborted(out)
        except ValueError as error:  # SGLang raises it for status 400
            return str(error)
        except HTTPException as error:
            if "sglang-kvq" not in str(error.detail):  # not a failed fold: SGLang itself refused or dropped the request
                raise
            return str(error.detail)
        return None if isinstance(reason, dict) else "it ended without a reason"

    def answer(self, turn: Turn, chosen: Chosen) -> requests.Beginning:
        """Returns the beginning of the answering request."""
        offset = chosen.folded - self.plan.budget
        message = FoldedPrefix(self.plan.budget, offset).encode()
        return requests.Beginning(stand_ins(turn.ids, self.plan), chosen.steps[-1].name, offset, PREFIX, message)


class _Gone(Exception):
    """A step's prefix is no longer in the cache."""
