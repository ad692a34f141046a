"""Shared parts of this package's error messages."""

from __future__ import annotations


def first_line(error: Exception) -> str:
    """Returns the first line of an exception's text, or its type's name if it has no text."""
    return (str(error).splitlines() or [type(error).__name__])[0]
