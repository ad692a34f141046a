"""Messages from the router to the scheduler; each is one string in a request's ``custom_params``."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError

#: Keys of the messages in ``custom_params``; no client may set them.
SELECTION, FOLD, PREFIX = "kvq_selection", "kvq_fold", "kvq_prefix"
#: Prefix of the namespaces of selections; no client may use such a namespace.
NAME_PREFIX = "kvq-pages-"
#: Part of the error message of a request whose history was evicted; the router then has the history computed again.
GONE = "no longer cached"
#: Part of the error message of a request whose history and copies exceed the whole cache; the router then sends the
#: whole prompt.
TOO_SMALL = "is too small for"
#: Tokens of a history that are encoded at once; a multiple of 3, so that the base64 texts can be joined.
_PART = 3 << 14

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Selection:
    """Message: this request begins with chosen pages of a history that is cached in another namespace.

    The request's first tokens are ``tokens``, in the namespace ``name``. The tokens after them have the positions that
    they would have after the whole history: ``offset`` more than their index in the request.

    Attributes:
        history: token ids of the whole history, int32 ``[tokens]`` or convertible to that; whole pages.
        namespace: the ``extra_key`` under which the history is cached.
        pages: ascending indices of the chosen pages, int32 ``[pages]`` or convertible to that.
        owner: owner of the copies of these pages; other owners get separate copies.

    Raises:
        KVQuantError: the history ends within a page; or there are no pages, they do not ascend, or are not in the
            history.
    """

    history: np.ndarray
    namespace: str | None
    pages: np.ndarray
    owner: str = ""

    def __post_init__(self) -> None:
        for name in ("history", "pages"):
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), dtype="<i4"))
        history, pages = self.history, self.pages
        if history.ndim != 1 or len(history) % PAGE_SIZE:
            raise KVQuantError(f"a history of shape {list(history.shape)}: must be whole pages of {PAGE_SIZE} tokens.")
        whole = len(history) // PAGE_SIZE
        one_by_one = pages.ndim == 1 and len(pages) > 0 and bool((np.diff(pages) > 0).all())
        if not one_by_one or pages[0] < 0 or pages[-1] >= whole:
            raise KVQuantError(f"pages {pages.tolist()}: must be ascending indices below {whole}, at least one.")

    @property
    def tokens(self) -> np.ndarray:
        """Ids of the chosen pages' tokens, in order: int32 ``[pages * PAGE_SIZE]``."""
        return np.asarray(self.history.reshape(-1, PAGE_SIZE)[self.pages].reshape(-1))

    @property
    def offset(self) -> int:
        return len(self.history) - len(self.pages) * PAGE_SIZE

    @property
    def name(self) -> str:
        """A namespace for exactly this choice: a hash of all fields, so the chosen tokens mean these pages only."""
        digest = hashlib.sha256()
        for part in (self.history.data, self.pages.data, json.dumps([self.namespace, self.owner]).encode()):
            digest.update(memoryview(part).nbytes.to_bytes(8, "little"))
            digest.update(part)
        return f"{NAME_PREFIX}{digest.hexdigest()}"

    def encode(self) -> str:
        """Returns the message as one string, a form that reaches the scheduler unchanged."""
        # The history is encoded in parts, so that other threads can run in between if it is long.
        starts = range(0, len(self.history), _PART)
        parts = (base64.b64encode(self.history[at : at + _PART].tobytes()) for at in starts)
        head = json.dumps([self.namespace, self.owner, self.pages.tolist()])
        return head + "\n" + b"".join(parts).decode("ascii")

    @classmethod
    def decode(cls, text: Any) -> Selection:
        """Inverts ``encode``.

        Raises:
            KVQuantError: ``text`` is not such a message, as if a client had set it.
        """

        def read() -> Selection:
            head, encoded = text.split("\n")
            namespace, owner, pages = json.loads(head)
            return cls(np.frombuffer(base64.b64decode(encoded, validate=True), "<i4"), namespace, pages, str(owner))

        return _decoded(read, SELECTION, "a selection of pages")


@dataclass(frozen=True)
class Fold:
    """Message: when this request finishes, keep chosen ones of its first tokens as a reusable prefix.

    Requests find that prefix by the ids of this request's first ``kept`` tokens, in the namespace ``name``. These ids
    are placeholders, because each KV head keeps different tokens.

    Attributes:
        name: the ``extra_key`` of the new prefix, unique for its sources and the way in which it is made.
        length: number of the request's first tokens to choose from; whole pages.
        kept: number of tokens to keep, for each layer and KV head; whole pages.
        pinned: number of first tokens that are kept whatever their scores.

    Raises:
        KVQuantError: the name is empty, ``length`` or ``kept`` is not whole pages, or more tokens are to be kept or
            pinned than there are.
    """

    name: str
    length: int
    kept: int
    pinned: int = 0

    def __post_init__(self) -> None:
        if not self.name:
            raise KVQuantError("a fold without a name: its prefix is found by name. Give one.")
        if not 0 < self.kept <= self.length or self.kept % PAGE_SIZE or self.length % PAGE_SIZE:
            raise KVQuantError(
                f"a fold of {self.length} tokens into {self.kept}: both must be multiples of {PAGE_SIZE}, one page at "
                "least and no more than there are."
            )
        if not 0 <= self.pinned <= self.kept:
            raise KVQuantError(f"a fold that keeps {self.kept} tokens, {self.pinned} of them pinned: pin fewer.")

    def encode(self) -> str:
        """Returns the message as one string; see ``Selection.encode``."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: Any) -> Fold:
        """Inverts ``encode``; raises the errors of ``Selection.decode``."""

        def read() -> Fold:
            fields = json.loads(text)
            return cls(str(fields["name"]), int(fields["length"]), int(fields["kept"]), int(fields.get("pinned", 0)))

        return _decoded(read, FOLD, "a fold")


@dataclass(frozen=True)
class FoldedPrefix:
    """Message: this request's first tokens are placeholders for an episode, which is cached in its namespace.

    The placeholder ids only serve to find the episode, so they must never be computed. The tokens after them have the
    positions that they would have after the whole history.

    Attributes:
        tokens: number of tokens of the episode, the first ones of the request; whole pages.
        offset: number to add to the other tokens' indices in the request to get their positions.

    Raises:
        KVQuantError: ``tokens`` is not whole pages, or the offset is negative.
    """

    tokens: int
    offset: int

    def __post_init__(self) -> None:
        if self.tokens < PAGE_SIZE or self.tokens % PAGE_SIZE or self.offset < 0:
            raise KVQuantError(
                f"an episode of {self.tokens} tokens at offset {self.offset}: the tokens must be a positive multiple "
                f"of {PAGE_SIZE}, and the offset at least 0."
            )

    def encode(self) -> str:
        """Returns the message as one string; see ``Selection.encode``."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: Any) -> FoldedPrefix:
        """Inverts ``encode``; raises the errors of ``Selection.decode``."""

        def read() -> FoldedPrefix:
            fields = json.loads(text)
            return cls(int(fields["tokens"]), int(fields["offset"]))

        return _decoded(read, PREFIX, "a prefix")


def _decoded(read: Callable[[], T], parameter: str, what: str) -> T:
    try:
        return read()
    except KVQuantError:
        raise
    except (AttributeError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise KVQuantError(f"{parameter}: not {what} ({error!r}); only the router sets it.") from None
