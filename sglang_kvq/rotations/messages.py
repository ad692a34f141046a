"""What error messages here have in common."""

from __future__ import annotations


def first_line(error: Exception) -> str:
    """The first line of an exception's text, or its type's name where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
