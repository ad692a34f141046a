"""Messages from the router to the scheduler, each one string in a request's ``custom_params``."""

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

#: Entries of ``custom_params``, which no client may set.
SELECTION, FOLD, PREFIX = "kvq_selection", "kvq_fold", "kvq_prefix"
#: Prefix of the names of selections; no client may use such a namespace.
NAME_PREFIX = "kvq-pages-"
#: In the error of a request whose history was evicted: the router then has it computed again.
GONE = "no longer cached"
#: In the error of a request whose history and copies exceed the whole cache: the router then reads the prompt whole.
TOO_SMALL = "is too small for"
#: Tokens of a history that are encoded at once; a multiple of 3, so that their codes join.
_PART = 3 << 14

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Selection:
    """Pages of a prefix that is cached under another name.

    The request's own first tokens are ``tokens``, in its own namespace ``name``; the ones after them stand where they
    would behind the whole history, ``offset`` positions further than their place in the request.

    Attributes:
        history: token ids of the whole prefix, a multiple of ``PAGE_SIZE`` of them: int32 ``[tokens]``, or what can be
            made into that.
        namespace: the ``extra_key`` under which it is cached.
        pages: ascending indices of its pages: int32 ``[pages]``, or what can be made into that.
        owner: whose copies of the pages these are; others make their own.

    Raises:
        KVQuantError: the history ends within a page, or pages are none, not ascending or not in it.
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
        """A namespace in which the chosen tokens mean these pages and nothing else."""
        digest = hashlib.sha256()
        for part in (self.history.data, self.pages.data, json.dumps([self.namespace, self.owner]).encode()):
            digest.update(memoryview(part).nbytes.to_bytes(8, "little"))
            digest.update(part)
        return f"{NAME_PREFIX}{digest.hexdigest()}"

    def encode(self) -> str:
        """Returns the message as one string, which survives the way to the scheduler."""
        # The history follows in parts: a thread that makes a long one lets others run between them.
        starts = range(0, len(self.history), _PART)
        parts = (base64.b64encode(self.history[at : at + _PART].tobytes()) for at in starts)
        head = json.dumps([self.namespace, self.owner, self.pages.tolist()])
        return head + "\n" + b"".join(parts).decode("ascii")

    @classmethod
    def decode(cls, text: Any) -> Selection:
        """The inverse of ``encode``.

        Raises:
            KVQuantError: it is not; from outside nothing but the router may set it.
        """

        def read() -> Selection:
            head, encoded = text.split("\n")
            namespace, owner, pages = json.loads(head)
            return cls(np.frombuffer(base64.b64decode(encoded, validate=True), "<i4"), namespace, pages, str(owner))

        return _decoded(read, SELECTION, "a selection of pages")


@dataclass(frozen=True)
class Fold:
    """When the request ends, chosen ones of its first tokens become a prefix of their own.

    That prefix is found by the ids of the request's own first ``kept`` tokens, in the namespace ``name``: each KV head
    has tokens of its own, so the ids only stand for them.

    Attributes:
        name: the ``extra_key`` of the new prefix; of whatever it was made from and how, and of nothing else.
        length: tokens that are chosen from, the request's first; whole pages.
        kept: how many are chosen, for each layer and KV head; whole pages.
        pinned: first tokens that are chosen whatever their scores.

    Raises:
        KVQuantError: no name, or numbers that are no whole pages, or more to keep than there are.
    """

    name: str
    length: int
    kept: int
    pinned: int = 0

    def __post_init__(self) -> None:
        if not self.name:
            raise KVQuantError("a fold without a name: what it makes must be found by one.")
        if not 0 < self.kept <= self.length or self.kept % PAGE_SIZE or self.length % PAGE_SIZE:
            raise KVQuantError(
                f"a fold of {self.length} tokens into {self.kept}: both must be multiples of {PAGE_SIZE}, one page at "
                "least and no more than there are."
            )
        if not 0 <= self.pinned <= self.kept:
            raise KVQuantError(f"a fold that keeps {self.kept} tokens, {self.pinned} of them pinned: pin fewer.")

    def encode(self) -> str:
        """Returns the message as one string, which survives the way to the scheduler."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: Any) -> Fold:
        """The inverse of ``encode``; raises as ``Selection.decode``."""

        def read() -> Fold:
            fields = json.loads(text)
            return cls(str(fields["name"]), int(fields["length"]), int(fields["kept"]), int(fields.get("pinned", 0)))

        return _decoded(read, FOLD, "a fold")


@dataclass(frozen=True)
class FoldedPrefix:
    """The first tokens of a request stand for an episode, which is cached in the request's namespace.

    Their ids say where it is found, not what it holds: they must never be computed. The tokens after them stand where
    they would behind the whole history.

    Attributes:
        tokens: of the episode, the request's first; whole pages.
        offset: positions by which the others stand further than their place in the request.

    Raises:
        KVQuantError: no whole pages, or an offset below 0.
    """

    tokens: int
    offset: int

    def __post_init__(self) -> None:
        if self.tokens < PAGE_SIZE or self.tokens % PAGE_SIZE or self.offset < 0:
            raise KVQuantError(
                f"an episode of {self.tokens} tokens, {self.offset} positions before what follows: must be a multiple "
                f"of {PAGE_SIZE}, above 0, and not below 0."
            )

    def encode(self) -> str:
        """Returns the message as one string, which survives the way to the scheduler."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: Any) -> FoldedPrefix:
        """The inverse of ``encode``; raises as ``Selection.decode``."""

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
