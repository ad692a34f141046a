"""Answers of sessions on their way to the client: what went out is never taken back, and errors are SGLang's own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Any, TypeVar

from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.messages import GONE, TOO_SMALL
from sglang_kvq.sglang.router.requests import GenerateRequest, HTTPRequest, Output

#: Seconds between two looks at whether a client is still there; SGLang's own are 4.
POLL = 1.0
#: Fields that SGLang adds to the chunks of a request for log-probabilities.
_LOGPROBS = ("input_token_logprobs", "output_token_logprobs", "input_top_logprobs", "output_top_logprobs")

T = TypeVar("T")


class Ended(Exception):
    """The client's request ends here, as SGLang ends one that it aborts.

    Attributes:
        reason: SGLang's ``finish_reason``.
    """

    def __init__(self, reason: dict[str, Any]) -> None:
        super().__init__(str(reason.get("message", "aborted")))
        self.reason = reason


def aborted(message: str, status: int | None = None) -> Ended:
    """An ``Ended`` with the reason that SGLang's scheduler would give.

    Args:
        status: HTTP status; None for an abort that the client asked for.
    """
    code = None if status is None else HTTPStatus(status)
    return Ended(
        {"type": "abort", "message": message, "status_code": code, "err_type": None if code is None else code.name}
    )


def abort_of(out: Output) -> dict[str, Any] | None:
    """The ``finish_reason`` of a chunk that says that its request was aborted; None for others."""
    reason = out["meta_info"].get("finish_reason")
    return reason if isinstance(reason, dict) and reason.get("type") == "abort" else None


def check_not_aborted(out: Output) -> None:
    """Pass on the abort of a request inside.

    Raises:
        Ended: this chunk says that it was aborted.
    """
    if reason := abort_of(out):
        raise Ended(reason)


class Unreadable(Exception):
    """A request cannot read the history that it begins with, as its message says."""


def check_readable(message: object) -> None:
    """Raises ``Unreadable`` for an error that refuses a request for the history that it begins with."""
    text = str(message)
    if GONE in text or TOO_SMALL in text:
        raise Unreadable(text)


async def while_wanted(work: Awaitable[T], request: HTTPRequest | None, obj: GenerateRequest) -> T:
    """Does what comes before an answer, unless the client leaves meanwhile.

    SGLang looks after its own requests only, and notices nothing between many short ones.

    Raises:
        KVQuantError: the client has left; the work is cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=POLL))[0]:
            if request is not None and not getattr(obj, "background", False) and await request.is_disconnected():
                raise KVQuantError(f"request {obj.rid}: its client has left; send it again if its answer is wanted.")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class Delivery:
    """The part of its answer that a client has.

    An answer may have to be made again after a part of it was streamed: its request was retracted and what it begins
    with was evicted. What is said again is held back, and only an answer that goes on from it is sent.

    Args:
        incremental: chunks have only what is new, not all so far.
    """

    def __init__(self, obj: GenerateRequest, incremental: bool) -> None:
        self.obj, self.incremental = obj, incremental
        #: Finish reason of the last chunk.
        self.text, self.ids, self.last = "", list[int](), dict[str, Any]()
        self.again = False

    def begin_again(self) -> None:
        """The answer is made again from its beginning.

        Raises:
            Ended: a part of it went out in chunks of which the next cannot be told to go on from it.
        """
        self.again = bool(self.ids or self.text)
        if self.again and self.incremental:
            raise self._another()

    def passes(self, out: Output) -> bool:
        """Tells whether a chunk goes out; one that says only what the client has does not.

        Raises:
            Ended: the answer made again is another one.
        """
        text, ids = out.get("text") or "", out.get("output_ids") or []
        ends = out["meta_info"].get("finish_reason") is not None
        if abort_of(out):
            return True
        if self.again:
            same = min(len(ids), len(self.ids))
            goes_on = text.startswith(self.text) or self.text.startswith(text)
            if ids[:same] != self.ids[:same] or not goes_on or (ends and len(ids) < len(self.ids)):
                raise self._another()
            if not ends and len(ids) <= len(self.ids):
                return False
        if self.obj.stream:
            self.text, self.ids, self.last = text or self.text, ids or self.ids, out["meta_info"]
        return True

    def end(self, ended: Ended, prompt: int, weight_version: str | None) -> Output:
        """The last chunk of a request that ends here.

        Args:
            prompt: tokens of the client's prompt.
            weight_version: of this server.
        """
        meta = {
            "id": self.obj.rid,
            "prompt_tokens": prompt,
            "cached_tokens": 0,
            "completion_tokens": 0,
            "weight_version": weight_version,
        }
        if self.obj.return_logprob:
            meta |= {name: [] for name in _LOGPROBS} | {"output_token_logprobs_length": 0}
        meta |= {**self.last, "finish_reason": ended.reason}
        return {
            "text": "" if self.incremental else self.text,
            "output_ids": [] if self.incremental else self.ids,
            "meta_info": meta,
        }

    def _another(self) -> Ended:
        return aborted(
            "sglang-kvq: what this answer was read from was evicted while it was made, and read again it goes on "
            "differently; send the request again.",
            HTTPStatus.SERVICE_UNAVAILABLE,
        )
