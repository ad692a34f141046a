"""Router-to-scheduler message: this request begins with chosen whole pages of an earlier prefix."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError

#: The entry of a request's ``custom_params`` that holds ``Selection.encode``.
PARAMETER = "kvq_selection"
#: Prefix of the names of selections; no client may use such a namespace.
NAME_PREFIX = "kvq-late-"
#: In the error of a request whose history was evicted: the router then has it computed again.
GONE = "no longer cached"
#: In the error of a request whose history and copies exceed the whole cache: the router then reads the prompt whole.
TOO_SMALL = "is too small for"


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

    parameter: ClassVar[str] = PARAMETER

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
        for part in (self.history.tobytes(), self.pages.tobytes(), json.dumps([self.namespace, self.owner]).encode()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return f"{NAME_PREFIX}{digest.hexdigest()}"

    def encode(self) -> str:
        """Returns the message as one string, which survives the way to the scheduler."""
        fields = {"history": _encode(self.history), "pages": _encode(self.pages)}
        return json.dumps({**fields, "namespace": self.namespace, "owner": self.owner})

    @classmethod
    def decode(cls, text: Any) -> Selection:
        """The inverse of ``encode``.

        Raises:
            KVQuantError: it is not; from outside nothing but the router may set it.
        """
        try:
            fields = json.loads(text)
            history, pages = _decode(fields["history"]), _decode(fields["pages"])
            namespace, owner = fields["namespace"], str(fields["owner"])
        except (ValueError, KeyError, TypeError) as error:
            raise KVQuantError(f"{PARAMETER}: not a selection of pages ({error}); only the router sets it.") from None
        return cls(history, namespace, pages, owner)


def _encode(numbers: np.ndarray) -> str:
    return base64.b64encode(numbers.tobytes()).decode()


def _decode(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text, validate=True), "<i4")
