"""The one error type users see."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class KVQuantError(ValueError):
    """A setting, file or model that ``--kv-quant`` cannot serve.

    The message names the offending value and the fix. It is raised before the server starts
    serving; nothing is written and no fallback is taken.
    """


def unknown(flag: str, value: str, choices: Iterable[str]) -> KVQuantError:
    """The error of a value that is none of ``choices``: it names them, and the one that was probably meant."""
    known = list(choices)
    near = get_close_matches(value, known, 1)
    meant = f" did you mean {near[0]}?" if near else ""
    return KVQuantError(f"{flag} {value}: unknown;{meant} choose one of {', '.join(known)}.")
