"""Router-to-scheduler message: this request continues behind an episode."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError

#: The entry of a request's ``custom_params`` that holds ``FoldedPrefix.encode``.
PARAMETER = "kvq_prefix"


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
        """The inverse of ``encode``.

        Raises:
            KVQuantError: it is not; from outside nothing but the router may set it.
        """
        try:
            fields = json.loads(text)
            tokens, offset = int(fields["tokens"]), int(fields["offset"])
        except (ValueError, KeyError, TypeError) as error:
            raise KVQuantError(f"{PARAMETER}: not a prefix ({error!r}); only the router sets it.") from None
        return cls(tokens, offset)
