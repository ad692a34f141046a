"""Which whole pages of an earlier prefix a request begins with: what the router tells the scheduler."""

from __future__ import annotations

import base64
import hashlib
import json
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from sglang_kvq.config import PAGE_SIZE
from sglang_kvq.errors import KVQuantError

#: The entry of a request's ``custom_params`` that holds ``Selection.encode``.
PARAMETER = "kvq_selection"


@dataclass(frozen=True)
class Selection:
    """Pages of a prefix that is cached under another name.

    The request's own first tokens are ``tokens``, in its own namespace ``name``; the ones after them stand where they
    would behind the whole history, ``offset`` positions further than their place in the request.

    Attributes:
        history: token ids of the whole prefix, a multiple of ``PAGE_SIZE`` of them.
        namespace: the ``extra_key`` under which it is cached.
        pages: ascending indices of its pages.

    Raises:
        KVQuantError: the history ends within a page, or pages are none, not ascending or not in it.
    """

    history: tuple[int, ...]
    namespace: str | None
    pages: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.history) % PAGE_SIZE:
            raise KVQuantError(f"a history of {len(self.history)} tokens: must be a multiple of {PAGE_SIZE}.")
        whole = len(self.history) // PAGE_SIZE
        ascending = all(a < b for a, b in zip(self.pages, self.pages[1:]))
        if not self.pages or not ascending or self.pages[0] < 0 or self.pages[-1] >= whole:
            raise KVQuantError(f"pages {list(self.pages)}: must be ascending indices below {whole}, at least one.")

    @property
    def tokens(self) -> list[int]:
        """Ids of the chosen pages' tokens, in order."""
        return [token for page in self.pages for token in self.history[page * PAGE_SIZE : (page + 1) * PAGE_SIZE]]

    @property
    def offset(self) -> int:
        return len(self.history) - len(self.pages) * PAGE_SIZE

    @property
    def name(self) -> str:
        """A namespace in which the chosen tokens mean these pages and nothing else."""
        digest = hashlib.sha256(array("q", self.history).tobytes())
        digest.update(array("q", self.pages).tobytes())
        digest.update((self.namespace or "").encode())
        return f"kvq-late-{digest.hexdigest()}"

    def encode(self) -> str:
        """As one string: what survives the way to the scheduler."""
        history = base64.b64encode(array("i", self.history).tobytes()).decode()
        return json.dumps({"history": history, "namespace": self.namespace, "pages": list(self.pages)})

    @classmethod
    def decode(cls, text: str) -> Selection:
        """The inverse of ``encode``.

        Raises:
            KVQuantError: it is not; from outside nothing but the router may set it.
        """
        try:
            fields = json.loads(text)
            history = array("i", base64.b64decode(fields["history"], validate=True))
            pages, namespace = _numbers(fields["pages"]), fields["namespace"]
        except (ValueError, KeyError, TypeError) as error:
            raise KVQuantError(f"{PARAMETER}: not a selection of pages ({error}); only the router sets it.") from None
        return cls(tuple(history), namespace, pages)


def _numbers(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
