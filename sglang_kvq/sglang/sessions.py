"""The router of ``--episodic-policy``: which pages of a session's history a request reads.

AROUND ``TokenizerManager.generate_request``, through which chat, completions, ``/generate`` and ``Engine`` pass. The
client sends its whole conversation . A prompt within the budget goes on untouched. Of a longer one the history
is computed as an ordinary prefix, after the last answer or else first, and the request that answers begins with the
pages of it that are nearest to its question (``sglang.selection``).

Everything here runs in the event loop of one process; what takes long runs in a thread (``episodic.encoding``).
Requests of one session are looked at one after the other and generate at once. A request looks at an index of its own,
which no other changes; those that do not go on with the conversation make branches (``episodic.session``).
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from fastapi import HTTPException

from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.episodic.branch import Namespace
from sglang_kvq.episodic.choice import Choice, Question, choose
from sglang_kvq.episodic.config import EPICACHE, EpisodicConfig
from sglang_kvq.episodic.embed import Embedder
from sglang_kvq.episodic.encoding import EncodingThread
from sglang_kvq.episodic.page_index import PageIndex
from sglang_kvq.episodic.plan import Plan, plan
from sglang_kvq.episodic.question import occurrences, question_start, user_turn
from sglang_kvq.episodic.selection import TOO_SMALL, Selection
from sglang_kvq.episodic.session import Session
from sglang_kvq.episodic.store import MIB, SessionStore
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sglang import session_answers as answers
from sglang_kvq.sglang import session_requests as requests
from sglang_kvq.sglang.runtime import config_of
from sglang_kvq.sglang.session_episodes import EpisodeRouter, FoldedAnswer
from sglang_kvq.sglang.session_metrics import NoMetrics, SessionMetrics
from sglang_kvq.sglang.session_requests import GenerateRequest, HTTPRequest, Output
from sglang_kvq.sglang.types import Original

logger = logging.getLogger("sglang_kvq")

#: ``managers.tokenizer_manager.TokenizerManager``.
TokenizerManager: TypeAlias = Any
Outputs: TypeAlias = AsyncGenerator[Output, None]

#: On a TokenizerManager: its router.
_ATTRIBUTE = "_kvq_router"


@functools.lru_cache(maxsize=1)
def load_embedder(folder: str, device: str) -> Embedder:
    """Loaded once in a process: first by the checks at start.

    Raises:
        KVQuantError: as ``Embedder.load``, or no such device here.
    """
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # how PyTorch refuses a device
        reason = str(error).splitlines()[0]
        raise KVQuantError(
            f"--episodic-embedder-device {device}: {reason}; give cpu, or a device of this machine such as cuda:0."
        ) from error
    embedder = Embedder.load(folder, device)
    embedder.encode(["Does it work?"])
    return embedder


def around_generate_request(
    original: Original, self: TokenizerManager, obj: GenerateRequest, request: HTTPRequest | None = None
) -> Outputs:
    """AROUND ``TokenizerManager.generate_request``."""
    router = router_of(self)
    if router is None or not hasattr(obj, "session_params"):  # embeddings
        return original(self, obj, request)  # type: ignore[no-any-return]
    try:
        requests.check_client(obj)
        session_id = requests.session_id_of(obj, request)
        if session_id is None:
            return original(self, obj, request)  # type: ignore[no-any-return]
        requests.check_session(obj)
    except KVQuantError as error:
        return _failing(error)
    return router.serve(functools.partial(original, self), obj, request, session_id)


async def _failing(error: KVQuantError) -> Outputs:
    """Errors come out of the generator, where SGLang's endpoints expect them."""
    raise error
    yield {}  # what makes it a generator


def before_abort(self: TokenizerManager, rid: str = "", abort_all: bool = False) -> None:
    """BEFORE ``TokenizerManager.abort_request``: a request that is not sent yet is not sent at all."""
    router: Router | None = getattr(self, _ATTRIBUTE, None)
    if router is not None:
        router.aborted.update(router.preparing if abort_all else router.preparing & {rid})


def router_of(manager: TokenizerManager) -> Router | None:
    """The router of a server with ``--episodic-policy``, made when first asked for; None without."""
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


@dataclass
class Turn:
    """One prompt of a session on its way.

    Attributes:
        send: ``TokenizerManager.generate_request`` itself.
        obj: the client's request, normalized.
        ids: int32, its prompt.
        delivery: what the client has of its answer.
        computed: tokens that were computed for it before its own request.
        output: of its answer.
        index: of its first pages, as far as they are known or were embedded for it.
    """

    send: Original
    obj: GenerateRequest
    request: HTTPRequest | None
    session: Session
    ids: np.ndarray
    namespace: Namespace
    delivery: answers.Delivery
    computed: int = 0
    output: list[int] = field(default_factory=list)
    index: PageIndex = field(default_factory=PageIndex)


@dataclass(frozen=True)
class Prepared:
    """A prompt that is served in part.

    Attributes:
        inner: the request that answers it.
        again: computes again what the request begins with, if it turns out to be evicted.
    """

    inner: GenerateRequest
    again: Callable[[], Awaitable[None]]


class Router:
    """Sessions of one server.

    Args:
        config: for sinks and recent tokens, which are always read.
    """

    def __init__(
        self, manager: TokenizerManager, config: KVQuantConfig, episodic: EpisodicConfig, embedder: Embedder
    ) -> None:
        self.manager, self.config, self.episodic = manager, config, episodic
        memory, share = episodic.state_memory * MIB, episodic.tenant_share
        self.store = SessionStore(episodic.sessions, episodic.idle_seconds, memory=memory, share=share)
        self.thread = EncodingThread(embedder)
        self.marker = user_turn(manager.tokenizer)
        self.metrics = SessionMetrics() if getattr(manager, "enable_metrics", False) else NoMetrics()
        #: Router of the policy epicache, or None.
        self.episodes: EpisodeRouter | None = None
        if episodic.policy == EPICACHE:
            self.episodes = EpisodeRouter(self, episodic, config.method, max(config.sink_pages, 1) * PAGE_SIZE)
        #: Ids of requests that are looked at, and those of them that were aborted meanwhile.
        self.preparing: set[str] = set()
        self.aborted: set[str] = set()
        #: Tasks that continue after answers; the event loop itself keeps no reference.
        self.background: set[asyncio.Task[None]] = set()

    # -- one request --------------------------------------------------------------------------------------

    async def serve(
        self, send: Original, obj: GenerateRequest, request: HTTPRequest | None, session_id: str
    ) -> Outputs:
        """A session's request, from its prompt to its last chunk.

        Raises:
            ValueError: as SGLang's own, or KVQuantError for what a session cannot serve.
        """
        obj.normalize_batch_and_arguments()
        tenant = requests.tenant_of(request, self.episodic.tenant_header)
        delivery = answers.Delivery(obj, self.manager.incremental_streaming_output)
        version = getattr(self.manager.server_args, "weight_version", None)
        try:
            with self._abortable(obj.rid):
                given = (
                    obj.input_ids if obj.input_ids is not None else (await self.manager._tokenize_texts(obj.text))[0]
                )
        except answers.Ended as error:
            yield delivery.end(error, 0, version)
            return
        ids = requests.token_ids(given)
        session = self.store.use(tenant, session_id)
        session.requests += 1
        turn = Turn(send, obj, request, session, ids, requests.namespace_of(obj), delivery)
        self._show_state()
        if len(ids) <= self.episodic.budget:
            self.metrics.answered("whole")
            outputs = self._whole(turn)
        else:
            whole = list(given)
            self.manager._validate_one_request(obj, whole)  # with --allow-auto-truncate it shortens the prompt
            turn.ids = turn.ids[: len(whole)]
            outputs = self._chosen(turn)
        try:
            with self.store.answering(session):
                async with aclosing(outputs):
                    async for out in outputs:
                        yield out
            return
        except answers.Ended as error:
            ended = error
        except HTTPException as error:  # of a request inside; one that leaves a stream would break the connection
            if not obj.stream:
                raise
            ended = answers.aborted(str(error.detail), error.status_code)
        yield delivery.end(ended, len(turn.ids), version)

    def _show_state(self) -> None:
        self.metrics.known(len(self.store), self.store.bytes)

    @contextmanager
    def _abortable(self, rid: str) -> Iterator[None]:
        """While nothing is sent under a request's id, in which SGLang would not notice its abort.

        Raises:
            answers.Ended: at the end, if it was aborted meanwhile.
        """
        self.preparing.add(rid)
        try:
            yield
        finally:
            self.preparing.discard(rid)
            aborted = rid in self.aborted
            self.aborted.discard(rid)
        if aborted:
            raise answers.aborted("Abort before its answer began")

    async def _whole(self, turn: Turn) -> Outputs:
        """Serve the prompt as it came, and remember the conversation."""
        turn.session.hot, turn.session.history, turn.session.pages, turn.session.matches = len(turn.ids), 0, (), ()
        turn.output.clear()
        async with aclosing(self.sent(turn, turn.obj)) as outputs:
            async for out in outputs:
                if not turn.delivery.passes(out):
                    continue
                self._note(turn, out)
                if _ends(out):
                    self._remember(turn, out, whole=True)
                yield out

    async def _chosen(self, turn: Turn) -> Outputs:
        """Serve the prompt from chosen pages of its history, or behind an episode."""
        with self._abortable(turn.obj.rid):
            work = self._prepare(turn) if self.episodes is None else self._prepare_episode(turn)
            prepared = await answers.while_wanted(work, turn.request, turn.obj)
        if prepared is None:
            async with aclosing(self._whole(turn)) as outputs:
                async for out in outputs:
                    yield out
            return
        turn.session.selected += 1
        self.metrics.answered("chosen")
        for attempt in range(2):
            problem = None
            turn.output.clear()
            try:
                async with aclosing(self.sent(turn, prepared.inner)) as outputs:
                    async for out in outputs:
                        if problem := answers.problem_of((answers.abort_of(out) or {}).get("message")):
                            break
                        if not turn.delivery.passes(out):
                            continue
                        out = requests.answer_output(out, turn.obj, turn.ids, turn.computed)
                        self._note(turn, out)
                        if _ends(out):
                            self._remember(turn, out, whole=False)
                        yield out
            except ValueError as error:
                problem = answers.problem_of(error)
                if problem is None:
                    raise
            if problem is None:
                return
            turn.delivery.begin_again()
            if TOO_SMALL in problem:
                break
            turn.session.rebuilt += 1
            self.metrics.rebuilt()
            turn.session.lost()
            if attempt == 0:
                with self._abortable(turn.obj.rid):
                    async with turn.session.computing:
                        await answers.while_wanted(prepared.again(), turn.request, turn.obj)
        else:
            problem = "its history is evicted as soon as it is computed."
        logger.warning("kv-quant: the prompt of session %r is read whole: %s", turn.session.id, problem)
        async with aclosing(self._whole(turn)) as outputs:
            async for out in outputs:
                yield out

    async def _prepare(self, turn: Turn) -> Prepared:
        """Plan a prompt, have its history computed where it is not, and choose its pages."""
        session, ids = turn.session, turn.ids
        async with session.planning:
            known = session.follow(ids, turn.namespace)
            turns = occurrences(ids, self.marker)
            question = question_start(ids, known, turns)
            planned = self._plan(turn, question)
            embedding = asyncio.ensure_future(self.embedded(turn, planned.history // PAGE_SIZE))
            try:
                if planned.compute:
                    async with session.computing:
                        planned = self._plan(turn, question)  # what went on in the background may have done it
                        if planned.compute:
                            await self._compute(turn, ids[: planned.history], turn.obj.rid)
                await embedding
            finally:
                embedding.cancel()
            index = await self.embedded(turn, planned.history // PAGE_SIZE)  # the history may have grown
            choice = await self._choose(ids, index, planned, question, int(turns[0]) if len(turns) else 0)
            selection = Selection(ids[: planned.history], turn.namespace[0], choice.pages, session.tenant)
            inner = self._answer(turn, planned, selection)
            session.hot, session.history = planned.hot, planned.history
            session.pages, session.matches = tuple(choice.pages.tolist()), choice.matches
        history = ids[: planned.history]
        return Prepared(inner, functools.partial(self._compute, turn, history, turn.obj.rid))

    async def _prepare_episode(self, turn: Turn) -> Prepared | None:
        """Build the episode that a prompt asks for, as far as it is not built; None if there is nothing to fold yet."""
        assert self.episodes is not None
        session, ids = turn.session, turn.ids
        async with session.planning:
            known = session.follow(ids, turn.namespace)
            turns = occurrences(ids, self.marker)
            question = question_start(ids, known, turns)
            folded = self.episodes.folded(len(ids), question)
            if not folded:
                return None
            chosen = await self.episodes.choose(turn, question, folded, int(turns[0]) if len(turns) else 0)
            async with session.computing:
                await self.episodes.build(turn, chosen)
            planned = Plan(len(ids), folded, pages=self.episodic.budget // PAGE_SIZE)
            inner = self._answer(turn, planned, self.episodes.answer(turn, chosen))
            session.hot, session.history, session.pages, session.matches = planned.hot, folded, (), ()
        return Prepared(inner, functools.partial(self.episodes.build_again, turn, chosen))

    def _answer(self, turn: Turn, planned: Plan, start: Selection | FoldedAnswer) -> GenerateRequest:
        preferred = self.manager.preferred_sampling_params or {}
        room = self.manager.context_len - planned.tokens - 2  # what the scheduler would leave a whole prompt
        return requests.answer_request(turn.obj, turn.ids, planned, start, preferred, max(0, room))

    def _plan(self, turn: Turn, question: int) -> Plan:
        session, ids = turn.session, turn.ids
        exact = session.exact_of(ids, turn.namespace)
        return plan(len(ids), exact, question, budget=self.episodic.budget, block=self.episodic.block)

    async def _choose(self, ids: np.ndarray, index: PageIndex, planned: Plan, question: int, system: int) -> Choice:
        """Pages of the history that are read.

        Args:
            index: of the history.
            system: tokens before the first user message, which are read as far as there is room.
        """
        text = self.text(ids[question:])
        (row,) = await asyncio.wrap_future(self.thread.question(text))
        sinks = max(self.config.sink_pages, 1, min(-(-system // PAGE_SIZE), planned.pages // 4))
        size = self.episodic.segment // PAGE_SIZE
        choosing = functools.partial(
            choose, Question(text, row), index, planned, size=size, sinks=sinks, recent=self.config.recent_pages
        )
        return await asyncio.wrap_future(self.thread.run(choosing))

    # -- requests inside ----------------------------------------------------------------------------------

    async def sent(self, turn: Turn, inner: GenerateRequest) -> Outputs:
        """Yields SGLang's answer to a request; aborts the request if it is left before its end."""
        outputs = turn.send(inner, turn.request)
        ended = False
        try:
            async for out in outputs:
                ended = _ends(out)
                yield out
        finally:
            state = self.manager.rid_to_state.get(inner.rid)
            if not ended and state is not None and state.obj is inner:  # another may have the same id
                self.manager.abort_request(inner.rid)
            await outputs.aclose()

    async def _compute(self, turn: Turn, history: np.ndarray, rid: str | None) -> None:
        """Have a history computed, or found in SGLang's cache.

        Args:
            rid: the client's request id where it waits for this: aborting it aborts this. None: an own one.

        Raises:
            ValueError: SGLang refuses it.
            Ended: it was aborted.
        """
        inner = requests.compute_request(turn.obj, history, turn.namespace, rid)
        inner.normalize_batch_and_arguments()
        reason: Any = None
        async with aclosing(self.sent(turn, inner)) as outputs:
            async for out in outputs:
                meta = out["meta_info"]
                reason = meta["finish_reason"]
                turn.computed += requests.computed_of(meta) if _ends(out) else 0
                answers.check_not_aborted(out)
        if not isinstance(reason, dict):
            raise KVQuantError(f"request {inner.rid}: ended while its history was computed.")
        turn.session.computed(history, turn.namespace)

    # -- what is known of sessions ------------------------------------------------------------------------

    def _note(self, turn: Turn, out: Output) -> None:
        """Keep the answer's tokens: a chunk has all so far, with --incremental-streaming-output the new ones only."""
        ids = out.get("output_ids") or []
        if turn.obj.stream and self.manager.incremental_streaming_output:
            turn.output.extend(ids)
        elif _ends(out):
            turn.output[:] = ids

    def _remember(self, turn: Turn, out: Output, whole: bool) -> None:
        """Take the answer into the session, and go on with it in the background.

        Args:
            out: the last chunk.
            whole: the answer was computed with everything before it, so that it is history already.
        """
        session = turn.session
        said = np.concatenate([turn.ids, np.asarray(turn.output, np.int32)])
        session.follow(said, turn.namespace, asked=len(turn.ids))
        reason = out["meta_info"]["finish_reason"]
        if isinstance(reason, dict) and reason.get("type") == "abort":
            return
        if whole:  # the last token that was sampled has not been computed
            session.computed(said[: (len(said) - 1) // PAGE_SIZE * PAGE_SIZE], turn.namespace)
        task = asyncio.ensure_future(self._afterwards(turn, said, compute=not whole and self.episodes is None))
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    async def _afterwards(self, turn: Turn, said: np.ndarray, compute: bool) -> None:
        """Compute and embed what was said, so that the next turn finds it."""
        session = turn.session
        after = Turn(turn.send, turn.obj, None, session, said, turn.namespace, turn.delivery, index=turn.index)
        try:
            with self.store.preparing(session):
                if compute:
                    async with session.computing:
                        ready = session.said(said, turn.namespace) // PAGE_SIZE * PAGE_SIZE  # it may have been edited
                        if session.exact_of(said, turn.namespace) < ready and self.store.holds(session):
                            await self._compute(after, said[:ready], None)
                if self.store.holds(session):
                    await self.embedded(after, len(said) // PAGE_SIZE)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the next turn does it itself, and reports what is wrong
            logger.warning("kv-quant: preparing session %r for its next turn failed: %s", session.id, error)
        finally:
            self._show_state()

    async def embedded(self, turn: Turn, pages: int) -> PageIndex:
        """An index of the first ``pages`` of a prompt; what its session does not know is embedded."""
        session, ids, size = turn.session, turn.ids, PAGE_SIZE
        known = session.index_of(ids)
        turn.index = max(turn.index, known, key=len)
        while (first := len(turn.index)) < pages:
            last = min(first + self.thread.batch, pages)
            texts = [self.text(ids[at * size : (at + 1) * size]) for at in range(first, last)]
            new = await asyncio.wrap_future(self.thread.pages(texts))
            turn.index.add(new)
            session.learn(ids, turn.index)
            self.store.weigh(session)
            # Another request of this session may be ahead.
            turn.index = max(turn.index, session.index_of(ids), key=len)
        return turn.index.first(pages)

    async def embed_question(self, ids: np.ndarray) -> np.ndarray:
        """Float32 ``[1, D]``, of length 1."""
        return await asyncio.wrap_future(self.thread.question(self.text(ids)))

    def text(self, ids: np.ndarray) -> str:
        text: str = self.manager.tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        return text


def _ends(out: Output) -> bool:
    return out["meta_info"].get("finish_reason") is not None
