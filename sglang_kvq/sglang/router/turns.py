"""The state of one prompt of a session while it is served, and the work that SGLang and the embedder do for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.embedding import Embedder, EncodingThread
from sglang_kvq.sessions.index import PageIndex
from sglang_kvq.sessions.session import Namespace, Session
from sglang_kvq.sessions.store import SessionStore
from sglang_kvq.sglang.router import answers, requests
from sglang_kvq.sglang.router.metrics import NoMetrics
from sglang_kvq.sglang.router.requests import GenerateRequest, HTTPRequest, Output
from sglang_kvq.sglang.types import Original

#: ``managers.tokenizer_manager.TokenizerManager``.
TokenizerManager: TypeAlias = Any
Outputs: TypeAlias = AsyncGenerator[Output, None]
T = TypeVar("T")


@dataclass
class Turn:
    """One prompt of a session while it is served.

    Attributes:
        send: SGLang's ``TokenizerManager.generate_request``.
        obj: the client's request, normalized.
        ids: int32, tokens of its prompt.
        delivery: the part of the answer that the client has.
        computed: tokens that other inner requests computed for this prompt.
        output: tokens of the answer.
        index: index of the prompt's first pages, as far as they are embedded.
        read: what the answer read when it began, "chosen" pages or the "whole" prompt; "" before it began.
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
    read: str = ""


class Workers:
    """Work for which answers wait: requests that SGLang computes, texts of tokens, and their embeddings.

    Attributes:
        preparing: ids of requests that are being prepared.
        aborted: ids in ``preparing`` whose requests were aborted meanwhile.
    """

    def __init__(self, manager: TokenizerManager, store: SessionStore, embedder: Embedder, metrics: NoMetrics) -> None:
        self.manager, self.store, self.thread = manager, store, EncodingThread(embedder)
        self.metrics = metrics
        self.preparing: set[str] = set()
        self.aborted: set[str] = set()

    @contextmanager
    def abortable(self, rid: str) -> Iterator[None]:
        """Notices the abort of a request while the body prepares it, when SGLang has no request with this id yet.

        Raises:
            KVQuantError: another request with this id is being prepared.
            answers.Ended: after the body, if the request was aborted meanwhile.
        """
        if rid in self.preparing:
            raise KVQuantError(f"request {rid}: another request has this id. Give each request an id of its own.")
        self.preparing.add(rid)
        try:
            yield
            self.check_wanted(rid)
        finally:
            self.preparing.discard(rid)
            self.aborted.discard(rid)

    def check_wanted(self, rid: str) -> None:
        """Raises ``answers.Ended`` if the request was aborted while it is prepared, so that nothing more is sent."""
        if rid in self.aborted:
            raise answers.aborted("Abort before its answer began")

    async def sent(self, turn: Turn, inner: GenerateRequest) -> Outputs:
        """Yields SGLang's answer to a request; aborts the request if the caller stops before the answer ends."""
        outputs = turn.send(inner, turn.request)
        ended = False
        try:
            async for out in outputs:
                ended = ends(out)
                if ended:
                    self.metrics.computed(max(0, requests.computed_of(out["meta_info"])))
                yield out
        finally:
            state = self.manager.rid_to_state.get(inner.rid)
            if not ended and state is not None and state.obj is inner:  # another request may have the same id
                self.manager.abort_request(inner.rid)
            await outputs.aclose()

    async def compute(self, turn: Turn, history: np.ndarray, rid: str | None) -> None:
        """Has SGLang compute a history, as far as it is not cached.

        Args:
            rid: id of the client's request if it waits for this work, so that its abort also ends this work. None: a
                new id.

        Raises:
            ValueError: SGLang refuses the request.
            KVQuantError: the request ended without a reason.
            Ended: the request was aborted.
        """
        tokens = await requests.token_array(history)
        inner = requests.compute_request(turn.obj, tokens, turn.namespace, rid)
        inner.normalize_batch_and_arguments()
        if rid is not None:
            self.check_wanted(rid)
        reason: Any = None
        async with aclosing(self.sent(turn, inner)) as outputs:
            async for out in outputs:
                meta = out["meta_info"]
                reason = meta["finish_reason"]
                turn.computed += requests.computed_of(meta) if ends(out) else 0
                answers.check_not_aborted(out)
        if not isinstance(reason, dict):
            raise KVQuantError(f"request {inner.rid}: ended while the history was computed. Send the request again.")
        turn.session.computed(history, turn.namespace)

    async def embedded(self, turn: Turn, pages: int) -> PageIndex:
        """Returns an index of a prompt's first ``pages`` pages; embeds the pages that its session does not know."""
        session, ids, size = turn.session, turn.ids, PAGE_SIZE
        known = session.index_of(ids)
        turn.index = max(turn.index, known, key=len)
        while (first := len(turn.index)) < pages:
            last = min(first + self.thread.batch, pages)
            texts = [self.text(ids[at * size : (at + 1) * size]) for at in range(first, last)]
            new = await _embedded(self.thread.pages(texts))
            turn.index.add(new)
            session.learn(ids, turn.index)
            self.store.weigh(session)
            # Another request of this session may have embedded more pages meanwhile.
            turn.index = max(turn.index, session.index_of(ids), key=len)
        return turn.index.first(pages)

    async def embed_question(self, ids: np.ndarray) -> np.ndarray:
        """Returns the embedding of a question, float32 ``[1, D]``, of length 1."""
        return await _embedded(self.thread.question(self.text(ids)))

    def text(self, ids: np.ndarray) -> str:
        """Returns the text of tokens."""
        text: str = self.manager.tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        return text


async def _embedded(result: Future[T]) -> T:
    """Waits for the embedder.

    Raises:
        HTTPException: it failed, for example because its device has no memory left.
    """
    try:
        return await asyncio.wrap_future(result)
    except (RuntimeError, MemoryError) as error:
        reason = (str(error).splitlines() or ["out of memory"])[0].rstrip(".")
        raise answers.unavailable(
            f"the embedder failed: {reason}. Send the request again. If a GPU lacks memory, use "
            "--episodic-embedder-device cpu."
        ) from error


def ends(out: Output) -> bool:
    """Returns True for the last chunk of an answer."""
    return out["meta_info"].get("finish_reason") is not None
