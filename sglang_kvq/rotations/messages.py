"""Shared parts of this package's error messages."""

from __future__ import annotations


def first_line(error: Exception) -> str:
    """Returns the first line of an exception's text, or its type's name if it has no text."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def shorten(value: object, most: int = 60) -> str:
    """The ``repr`` of a value that a file holds: on one line, and not longer than ``most`` characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # integers of thousands of digits, tensors of odd types
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}..."
