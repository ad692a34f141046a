"""Answers of sessions on their way to the client: sent text is never changed, and errors look like SGLang's own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import HTTPException

from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.messages import GONE, TOO_SMALL
from sglang_kvq.sglang.router.requests import GenerateRequest, HTTPRequest, Output

#: Seconds between two checks whether the client is still connected; SGLang itself checks every 4 s.
POLL = 1.0
#: Fields that SGLang adds to chunks if the request asks for log-probabilities.
_LOGPROBS = ("input_token_logprobs", "output_token_logprobs", "input_top_logprobs", "output_top_logprobs")

T = TypeVar("T")


class Ended(Exception):
    """Ends the client's request in the same way as SGLang ends an aborted request.

    Attributes:
        reason: SGLang's ``finish_reason``.
    """

    def __init__(self, reason: dict[str, Any]) -> None:
        super().__init__(str(reason.get("message", "aborted")))
        self.reason = reason


def aborted(message: str, status: int | None = None) -> Ended:
    """Returns an ``Ended`` with the reason that SGLang's scheduler would give.

    Args:
        status: HTTP status; None for an abort that the client asked for.
    """
    code = None if status is None else HTTPStatus(status)
    return Ended(
        {"type": "abort", "message": message, "status_code": code, "err_type": None if code is None else code.name}
    )


def unavailable(message: str) -> HTTPException:
    """Returns status 503: the server lacks something now, and the request may be sent again."""
    return HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, f"sglang-kvq: {message}")


def abort_of(out: Output) -> dict[str, Any] | None:
    """Returns the ``finish_reason`` of a chunk if its request was aborted; otherwise None."""
    reason = out["meta_info"].get("finish_reason")
    return reason if isinstance(reason, dict) and reason.get("type") == "abort" else None


def check_not_aborted(out: Output) -> None:
    """Passes on the abort of an inner request.

    Raises:
        Ended: this chunk says that the inner request was aborted.
    """
    if reason := abort_of(out):
        raise Ended(reason)


class Unreadable(Exception):
    """A request cannot read the history with which it begins; the message says why."""


def check_readable(message: object) -> None:
    """Raises ``Unreadable`` if an error message says that the history at a request's beginning cannot be read."""
    text = str(message)
    if GONE in text or TOO_SMALL in text:
        raise Unreadable(text)


async def while_wanted(work: Awaitable[T], request: HTTPRequest | None, obj: GenerateRequest) -> T:
    """Does the work before an answer, and cancels it if the client disconnects.

    SGLang watches the client only while one of its own requests runs, so it may miss this between many short requests.

    Raises:
        KVQuantError: the client has disconnected; the work is cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=POLL))[0]:
            if request is not None and not getattr(obj, "background", False) and await request.is_disconnected():
                raise KVQuantError(f"request {obj.rid}: its client has left. Send it again if its answer is wanted.")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class Delivery:
    """The part of an answer that its client already has.

    After a part of an answer was streamed, it may have to be generated again: if its request was retracted and the
    request's beginning was evicted. Then chunks that repeat the sent part are held back. The rest is sent only if it
    continues the sent part.

    Args:
        incremental: chunks have only new tokens, not all tokens so far.
    """

    def __init__(self, obj: GenerateRequest, incremental: bool) -> None:
        self.obj, self.incremental = obj, incremental
        #: Sent text and token ids, and ``meta_info`` of the last chunk.
        self.text, self.ids, self.last = "", list[int](), dict[str, Any]()
        self.again = False

    def begin_again(self) -> None:
        """Notes that the answer is generated again from its beginning.

        Raises:
            Ended: incremental chunks were sent already, and nothing can tell whether the new answer continues them.
        """
        self.again = bool(self.ids or self.text)
        if self.again and self.incremental:
            raise self._another()

    def passes(self, out: Output) -> bool:
        """Returns True if a chunk must be sent, and False if it only repeats the sent part.

        Raises:
            Ended: the answer that was generated again differs from the sent part.
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
        """Returns the last chunk of a request that ``Ended`` stops.

        Args:
            prompt: number of tokens in the client's prompt.
            weight_version: version of this server's weights.
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
            "sglang-kvq: the history of this answer was evicted during generation, and the regenerated answer differs. "
            "Send the request again.",
            HTTPStatus.SERVICE_UNAVAILABLE,
        )
