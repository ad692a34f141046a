"""The router of ``--episodic-policy``: decides which pages of a session's history a request reads.

It wraps ``TokenizerManager.generate_request``, which serves chat, completions, ``/generate`` and ``Engine``. The client
sends its whole conversation. A prompt within the budget is served unchanged. For a longer prompt, the history is
computed as an ordinary prefix: after the previous answer, or otherwise before this one. The answering request then
begins with the pages of the history that are nearest to its question (``prefix.selection``).

Everything here runs in the event loop of one process; slow work runs in a thread (``sessions.embedding``). The router
prepares requests of one session one after the other, but they generate concurrently. Each request has its own view of
the index, which no other request changes. Requests that do not continue the conversation start branches
(``sessions.session``).
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
from fastapi import HTTPException

from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.config import EPICACHE, EpisodicConfig
from sglang_kvq.sessions.embedding import Embedder
from sglang_kvq.sessions.index import PageIndex
from sglang_kvq.sessions.messages import TOO_SMALL, Selection
from sglang_kvq.sessions.planning import Plan, occurrences, plan, question_start, user_turn
from sglang_kvq.sessions.search import Choice, Question, choose
from sglang_kvq.sessions.store import MIB, SessionStore
from sglang_kvq.sglang.router import answers, requests
from sglang_kvq.sglang.router.episodes import EpisodeRouter
from sglang_kvq.sglang.router.metrics import NoMetrics, SessionMetrics
from sglang_kvq.sglang.router.requests import GenerateRequest, HTTPRequest, Output
from sglang_kvq.sglang.router.turns import Outputs, TokenizerManager, Turn, Workers, ends
from sglang_kvq.sglang.runtime import config_of
from sglang_kvq.sglang.types import Original

logger = logging.getLogger("sglang_kvq")

#: Attribute of a TokenizerManager that holds its router.
_ATTRIBUTE = "_kvq_router"


@functools.lru_cache(maxsize=1)
def load_embedder(folder: str, device: str) -> Embedder:
    """Loads the embedder, once per process; the checks at start do so first.

    Raises:
        KVQuantError: as in ``Embedder.load``, or this machine has no such device.
    """
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # how PyTorch refuses a device
        reason = str(error).splitlines()[0]
        raise KVQuantError(
            f"--episodic-embedder-device {device}: {reason}. Give cpu, or a device of this machine such as cuda:0."
        ) from error
    embedder = Embedder.load(folder, device)
    embedder.encode(["Does it work?"])
    return embedder


def around_generate_request(
    original: Original, self: TokenizerManager, obj: GenerateRequest, request: HTTPRequest | None = None
) -> Outputs:
    """AROUND ``TokenizerManager.generate_request``: serves requests with a session id through the router."""
    router = router_of(self)
    if router is None or not hasattr(obj, "session_params"):  # such as requests for embeddings
        return original(self, obj, request)  # type: ignore[no-any-return]
    try:
        requests.check_client(obj)
        session_id = requests.session_id_of(obj, request, router.episodic.session_header)
        if session_id is None:
            return original(self, obj, request)  # type: ignore[no-any-return]
    except KVQuantError as error:
        return _failing(error)
    return router.serve(functools.partial(original, self), obj, request, session_id)


async def _failing(error: KVQuantError) -> Outputs:
    """Raises the error from a generator, where SGLang's endpoints expect errors."""
    raise error
    yield {}  # makes this function a generator


def before_abort(self: TokenizerManager, rid: str = "", abort_all: bool = False) -> None:
    """BEFORE ``TokenizerManager.abort_request``: marks requests that are not sent yet, so that they are never sent."""
    router: Router | None = getattr(self, _ATTRIBUTE, None)
    if router is not None:
        workers = router.workers
        workers.aborted.update(workers.preparing if abort_all else workers.preparing & {rid})


def router_of(manager: TokenizerManager) -> Router | None:
    """Returns the router of a server with ``--episodic-policy``, created by the first call; None without the flag."""
    if not hasattr(manager, _ATTRIBUTE):
        config = config_of(manager.server_args)
        router = None
        if config is not None and config.episodic is not None:
            episodic = config.episodic
            embedder = load_embedder(episodic.embedder, episodic.embedder_device)
            router = Router(manager, config, episodic, embedder)
        setattr(manager, _ATTRIBUTE, router)
    found: Router | None = getattr(manager, _ATTRIBUTE)
    return found


@dataclass(frozen=True)
class Prepared:
    """A prompt of which only a part is read, prepared for its answer.

    Attributes:
        inner: the request that answers the prompt.
        again: computes the beginning of that request again, if it turns out to be evicted.
    """

    inner: GenerateRequest
    again: Callable[[], Awaitable[None]]


class Router:
    """Serves the sessions of one server.

    Args:
        config: gives the sinks and recent tokens, which every request reads.
    """

    def __init__(
        self, manager: TokenizerManager, config: KVQuantConfig, episodic: EpisodicConfig, embedder: Embedder
    ) -> None:
        self.manager, self.config, self.episodic = manager, config, episodic
        memory, share = episodic.state_memory * MIB, episodic.tenant_share
        self.store = SessionStore(episodic.sessions, episodic.idle_seconds, memory=memory, share=share)
        self.metrics = SessionMetrics() if getattr(manager, "enable_metrics", False) else NoMetrics()
        self.workers = Workers(manager, self.store, embedder, self.metrics)
        self.marker = user_turn(manager.tokenizer)
        #: Router of the policy epicache; None with other policies.
        self.episodes: EpisodeRouter | None = None
        if episodic.policy == EPICACHE:
            sinks = max(config.sink_pages, 1) * PAGE_SIZE
            self.episodes = EpisodeRouter(self.workers, self.metrics, episodic, config.method, sinks)
        #: Tasks that continue after answers. They are kept here because the event loop keeps no strong reference.
        self.background: set[asyncio.Task[None]] = set()
        #: Looks for idle sessions, because a server without requests must forget them too.
        self._expiry: asyncio.TimerHandle | None = None

    async def serve(
        self, send: Original, obj: GenerateRequest, request: HTTPRequest | None, session_id: str
    ) -> Outputs:
        """Serves a session's request, from its prompt to its last chunk.

        Raises:
            ValueError: SGLang refuses the request.
            KVQuantError: a session cannot serve the request.
        """
        delivery, prompt = answers.Delivery(obj, self.manager.incremental_streaming_output), 0
        try:
            requests.check_session(obj)
            obj.normalize_batch_and_arguments()
            tenant = requests.tenant_of(request, self.episodic.tenant_header)
            with self.workers.abortable(obj.rid):
                given = obj.input_ids
                if given is None:
                    given, _ = await self.manager._tokenize_texts(obj.text)
                ids = await requests.token_ids(given)
            prompt = len(ids)
            session = self.store.use(tenant, session_id)
            session.requests += 1
            turn = Turn(send, obj, request, session, ids, requests.namespace_of(obj), delivery)
            self.show_state()
            if prompt <= self.episodic.budget:
                outputs = self._serve_whole(turn)
            else:
                self.manager._validate_one_request(obj, given)  # with --allow-auto-truncate it shortens the prompt
                turn.ids, prompt = ids[: len(given)], len(given)
                outputs = self._serve_selected(turn)
            try:
                with self.store.answering(session):
                    async with aclosing(outputs):
                        async for out in outputs:
                            yield out
            finally:
                self.show_state()
            return
        except KVQuantError as error:
            raise KVQuantError(f"session {session_id!r}: {error}") from error
        except answers.Ended as error:
            ended = error
        except HTTPException as error:  # from an inner request; raised within a stream it would break the connection
            if not obj.stream:
                raise
            ended = answers.aborted(str(error.detail), error.status_code)
        yield delivery.end(ended, prompt, getattr(self.manager.server_args, "weight_version", None))

    def show_state(self) -> None:
        """Forgets idle sessions, sets the gauges, and does so again when the next session may have been idle."""
        self.metrics.known(len(self.store), self.store.bytes)
        if self._expiry is not None:
            self._expiry.cancel()
        wait = self.store.expires_in()
        self._expiry = None if wait is None else asyncio.get_running_loop().call_later(wait, self.show_state)

    def _begins(self, turn: Turn, read: str) -> None:
        """Counts a request when its answer begins; what is generated again is not counted again."""
        if not turn.read:
            turn.read = read
            turn.session.selected += read == "chosen"
            self.metrics.answered(read)

    async def _serve_whole(self, turn: Turn) -> Outputs:
        """Serves the prompt unchanged, and remembers the conversation."""
        turn.session.hot, turn.session.history, turn.session.pages, turn.session.matches = len(turn.ids), 0, (), ()
        async with aclosing(self.workers.sent(turn, turn.obj)) as outputs:
            async for out in outputs:
                if not turn.delivery.passes(out):
                    continue
                self._begins(turn, "whole")
                if turn.computed:  # by inner requests, before it turned out that the prompt must be read whole
                    out = requests.answer_output(out, turn.obj, turn.ids, turn.computed)
                self._keep_tokens(turn, out)
                if ends(out):
                    self._remember(turn, out, whole=True)
                yield out

    async def _serve_selected(self, turn: Turn) -> Outputs:
        """Serves the prompt from chosen pages of its history or from an episode; whole if neither stays cached."""
        with self.workers.abortable(turn.obj.rid):
            episodes = self.episodes
            work = self._prepare_pages(turn) if episodes is None else self._prepare_episode(turn, episodes)
            prepared = await answers.while_wanted(work, turn.request, turn.obj)
        if prepared is not None:
            for attempt in range(2):
                try:
                    async with aclosing(self._answer(turn, prepared.inner)) as outputs:
                        async for out in outputs:
                            yield out
                    return
                except answers.Unreadable as error:
                    problem = str(error)
                turn.delivery.begin_again()
                if TOO_SMALL in problem:
                    break
                turn.session.rebuilt += 1
                self.metrics.rebuilt()
                turn.session.lost()
                if attempt == 0:
                    with self.workers.abortable(turn.obj.rid):
                        async with turn.session.computing:
                            await answers.while_wanted(prepared.again(), turn.request, turn.obj)
            else:
                problem = "its history is evicted as soon as it is computed."
            logger.warning("kv-quant: the prompt of session %r is read whole: %s", turn.session.id, problem)
        async with aclosing(self._serve_whole(turn)) as outputs:
            async for out in outputs:
                yield out

    async def _answer(self, turn: Turn, inner: GenerateRequest) -> Outputs:
        """Yields the answer of a request that begins with chosen pages or an episode.

        Raises:
            Unreadable: the pages or the episode can no longer be read.
        """
        try:
            async with aclosing(self.workers.sent(turn, inner)) as outputs:
                async for out in outputs:
                    answers.check_readable((answers.abort_of(out) or {}).get("message"))
                    if not turn.delivery.passes(out):
                        continue
                    self._begins(turn, "chosen")
                    out = requests.answer_output(out, turn.obj, turn.ids, turn.computed)
                    self._keep_tokens(turn, out)
                    if ends(out):
                        self._remember(turn, out, whole=False)
                    yield out
        except ValueError as error:
            answers.check_readable(error)
            raise

    def _follow(self, turn: Turn) -> tuple[int, int]:
        """Adds a prompt to its session.

        Returns:
            The index at which its question begins, and that of its first user message, 0 if unknown.
        """
        known = turn.session.follow(turn.ids, turn.namespace)
        turns = occurrences(turn.ids, self.marker)
        return question_start(turn.ids, known, turns), int(turns[0]) if len(turns) else 0

    async def _prepare_pages(self, turn: Turn) -> Prepared:
        """Plans a prompt, has its history computed if necessary, and chooses pages of the history."""
        session, ids = turn.session, turn.ids
        async with session.planning:
            question, system = self._follow(turn)
            planned = self._planned(turn, question)
            embedding = asyncio.ensure_future(self.workers.embedded(turn, planned.history // PAGE_SIZE))
            try:
                if planned.compute:
                    async with session.computing:
                        planned = self._planned(turn, question)  # a background task may have computed it meanwhile
                        if planned.compute:
                            await self.workers.compute(turn, ids[: planned.history], turn.obj.rid)
                await embedding
            finally:
                embedding.cancel()
            index = await self.workers.embedded(turn, planned.history // PAGE_SIZE)  # the history may be longer now
            choice, start = await self._choose_pages(turn, index, planned, question, system)
            inner = self._request(turn, planned, start)
            session.hot, session.history = planned.hot, planned.history
            session.pages, session.matches = tuple(choice.pages.tolist()), choice.matches
        return Prepared(inner, functools.partial(self.workers.compute, turn, ids[: planned.history], turn.obj.rid))

    async def _prepare_episode(self, turn: Turn, episodes: EpisodeRouter) -> Prepared | None:
        """Builds the episode nearest to a prompt, unless it exists; returns None if there is nothing to fold yet."""
        session = turn.session
        async with session.planning:
            question, system = self._follow(turn)
            folded = episodes.folded(len(turn.ids), question)
            if not folded:
                return None
            chosen = await episodes.choose(turn, question, folded, system)
            async with session.computing:
                await episodes.build(turn, chosen)
            planned = Plan(len(turn.ids), folded, pages=self.episodic.budget // PAGE_SIZE)
            inner = self._request(turn, planned, episodes.answer(turn, chosen))
            session.hot, session.history, session.pages, session.matches = planned.hot, folded, (), ()
        return Prepared(inner, functools.partial(episodes.build_again, turn, chosen))

    def _request(self, turn: Turn, planned: Plan, start: requests.Beginning) -> GenerateRequest:
        preferred = self.manager.preferred_sampling_params or {}
        room = self.manager.context_len - planned.tokens - 2  # as much as the scheduler would leave for a whole prompt
        return requests.answer_request(turn.obj, turn.ids, planned, start, preferred, max(0, room))

    def _planned(self, turn: Turn, question: int) -> Plan:
        session, ids = turn.session, turn.ids
        exact = session.exact_of(ids, turn.namespace)
        return plan(len(ids), exact, question, budget=self.episodic.budget, block=self.episodic.block)

    async def _choose_pages(
        self, turn: Turn, index: PageIndex, planned: Plan, question: int, system: int
    ) -> tuple[Choice, requests.Beginning]:
        """Chooses the pages of the history to read, and builds the beginning of the request that reads them.

        Args:
            index: index of the history's pages.
            question: index of the question's first token.
            system: number of tokens before the first user message; as many as fit are always read.
        """
        (row,) = await self.workers.embed_question(turn.ids[question:])
        text = self.workers.text(turn.ids[question:])
        sinks = max(self.config.sink_pages, 1, min(-(-system // PAGE_SIZE), planned.pages // 4))
        size = self.episodic.segment // PAGE_SIZE
        recent, history, tenant = self.config.recent_pages, turn.ids[: planned.history], turn.session.tenant

        def work() -> tuple[Choice, requests.Beginning]:
            found = choose(Question(text, row), index, planned, size=size, sinks=sinks, recent=recent)
            selection = Selection(history, turn.namespace[0], found.pages, tenant)
            return found, requests.Beginning.of_pages(selection)

        return await asyncio.wrap_future(self.workers.thread.run(work))

    def _keep_tokens(self, turn: Turn, out: Output) -> None:
        """Keeps the answer's tokens. A chunk has all so far; with --incremental-streaming-output only the new ones."""
        ids = out.get("output_ids") or []
        if turn.obj.stream and self.manager.incremental_streaming_output:
            turn.output.extend(ids)
        elif ends(out):
            turn.output[:] = ids

    def _remember(self, turn: Turn, out: Output, whole: bool) -> None:
        """Adds the answer to the session, and starts to prepare the next turn in the background.

        Args:
            out: the last chunk.
            whole: the answer was computed from the whole prompt, so its cached tokens are already history.
        """
        session = turn.session
        said = np.concatenate([turn.ids, np.asarray(turn.output, np.int32)])
        session.follow(said, turn.namespace, asked=len(turn.ids))
        reason = out["meta_info"]["finish_reason"]
        if isinstance(reason, dict) and reason.get("type") == "abort":
            return
        if whole:  # the last sampled token has no keys and values yet
            session.computed(said[: (len(said) - 1) // PAGE_SIZE * PAGE_SIZE], turn.namespace)
        task = asyncio.ensure_future(self._prepare_next_turn(turn, said, compute=not whole and self.episodes is None))
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    async def _prepare_next_turn(self, turn: Turn, said: np.ndarray, compute: bool) -> None:
        """Computes and embeds the conversation so far, so that the next turn finds it prepared."""
        session = turn.session
        after = Turn(turn.send, turn.obj, None, session, said, turn.namespace, turn.delivery, index=turn.index)
        try:
            with self.store.preparing(session):
                if compute:
                    async with session.computing:
                        ready = session.said(said, turn.namespace) // PAGE_SIZE * PAGE_SIZE  # less after an edit
                        if session.exact_of(said, turn.namespace) < ready and self.store.holds(session):
                            await self.workers.compute(after, said[:ready], None)
                if self.store.holds(session):
                    await self.workers.embedded(after, len(said) // PAGE_SIZE)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the next turn does this work itself, and reports the problem
            logger.warning("kv-quant: preparing session %r for its next turn failed: %s", session.id, error)
        finally:
            self.show_state()
