"""Router-to-scheduler message: when this request finishes, keep the selected tokens as a reusable prefix."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError

#: The entry of a request's ``custom_params`` that holds ``Fold.encode``.
PARAMETER = "kvq_fold"


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
    def decode(cls, text: str) -> Fold:
        """The inverse of ``encode``.

        Raises:
            KVQuantError: it is not; from outside nothing but the router may set it.
        """
        try:
            fields = json.loads(text)
            return cls(str(fields["name"]), int(fields["length"]), int(fields["kept"]), int(fields.get("pinned", 0)))
        except KVQuantError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise KVQuantError(f"{PARAMETER}: not a fold ({error!r}); only the router sets it.") from None
