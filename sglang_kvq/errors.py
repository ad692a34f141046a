"""The only error type that users see, and functions that build its messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


class KVQuantError(ValueError):
    """A setting, file, model or request that ``--kv-quant`` cannot serve.

    The message names the offending value and the fix; there is no fallback. Settings, files and models are checked
    before the server starts to serve. A request that cannot be served gets the error as its answer.
    """


def unknown(flag: str, value: str, choices: Iterable[str]) -> KVQuantError:
    """Builds the error for a value outside ``choices``; the message lists the choices and the closest match."""
    known = list(choices)
    near = get_close_matches(value, known, 1)
    meant = f" Did you mean {near[0]}?" if near else ""
    return KVQuantError(f"{flag} {value}: unknown.{meant} Choose one of {', '.join(known)}.")


def typed(field: str, value: object) -> str:
    """Formats a setting of ServerArgs as a user types it: ``--enable-lora``, or ``--page-size 16``."""
    return f"--{field.replace('_', '-')}" + ("" if value is True else f" {value}")


def refused_beside(
    refused: Iterable[tuple[str, str, tuple[object, ...]]], values: Mapping[str, object], other: str, fix: str = ""
) -> list[str]:
    """Returns a line for each setting that cannot be combined with another setting.

    Args:
        refused: for each refused setting, its field of ServerArgs, the reason, and the harmless values.
        values: the current settings; a missing field is harmless.
        other: the other setting, as a user types it.
        fix: text that follows the reason.
    """
    return [
        f"{typed(field, values[field])} and {other}: {why}{fix}."
        for field, why, allowed in refused
        if field in values and values[field] not in allowed
    ]


def first_line(error: Exception) -> str:
    """Returns the first line of an exception's message, or the name of its type if the message is empty.

    For errors of the operating system, the line does not contain the path.
    """
    text = getattr(error, "strerror", None) or str(error)
    return (text.splitlines() or [type(error).__name__])[0]


def shorten(value: object, most: int = 60) -> str:
    """Returns the ``repr`` of a value from a file, on one line and not longer than ``most`` characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # integers of thousands of digits, tensors of odd types
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}..."
