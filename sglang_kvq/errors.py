"""The one error type users see, and parts of its messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


def typed(field: str, value: object) -> str:
    """Returns a setting of ServerArgs as a user types it: ``--enable-lora``, or ``--page-size 16``."""
    return f"--{field.replace('_', '-')}" + ("" if value is True else f" {value}")


def refused_beside(
    refused: Iterable[tuple[str, str, tuple[object, ...]]], values: Mapping[str, object], other: str, fix: str = ""
) -> list[str]:
    """Returns a line for each setting that is refused beside another.

    Args:
        refused: a field of ServerArgs, the reason, and the field's harmless values.
        values: settings; a field that it lacks is harmless.
        other: the setting beside which they are refused, as a user types it; fix: follows the reason.
    """
    return [
        f"{typed(field, values[field])} and {other}: {why}{fix}."
        for field, why, allowed in refused
        if field in values and values[field] not in allowed
    ]


def first_line(error: Exception) -> str:
    """Returns an exception's first line, of the system's errors without the path, or its type's name if it has none."""
    text = getattr(error, "strerror", None) or str(error)
    return (text.splitlines() or [type(error).__name__])[0]


def shorten(value: object, most: int = 60) -> str:
    """The ``repr`` of a value that a file holds: on one line, and not longer than ``most`` characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # integers of thousands of digits, tensors of odd types
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}..."
