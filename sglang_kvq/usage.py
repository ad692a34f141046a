"""Runs the command line so that whatever a user gets wrong is one line on stderr, and no traceback."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from sglang_kvq.errors import KVQuantError

if TYPE_CHECKING:
    import typer  # hosts without it use ``Parser`` alone

#: Exit statuses: of settings, files and models that cannot be used; of words that are no command line.
REFUSED, USAGE = 1, 2


def run(app: typer.Typer, words: Sequence[str], show: Callable[[str], None]) -> int:
    """Run a command of ``app`` and return the exit status.

    Args:
        words: the command line, without the program's name.
        show: shows an error line.
    """
    try:
        status = app(args=list(words), prog_name="kvq", standalone_mode=False)
    except KVQuantError as error:
        show(f"error: {error}")
        return REFUSED
    except OSError as error:
        if error.filename is None:  # not about a file that was named
            raise
        show(f"error: {error.filename}: {error.strerror}; check the path and its permissions.")
        return REFUSED
    except Exception as error:  # click's, or those of typer's own copy of click: they have no common base to name
        if not hasattr(error, "format_message"):
            raise
        return _show_usage(error, words, show)
    return status if isinstance(status, int) else 0


def _show_usage(error: Any, words: Sequence[str], show: Callable[[str], None]) -> int:
    """Show click's exception and return its exit status."""
    if "NoArgs" in type(error).__name__:  # its message is the help
        print(error.format_message(), file=sys.stderr)
    else:
        show(f"error: {described(error, words)}")
    return int(error.exit_code)


def described(error: Any, words: Sequence[str]) -> str:
    """Click's message as ``flag value: problem``, on one line, and where to read more."""
    message = " ".join(error.format_message().split())
    names = list(getattr(getattr(error, "param", None), "opts", ()))
    value = _value_of(names, words)
    if value is not None and message.startswith("Invalid value for"):
        message = f"{names[-1]} {value}: {' '.join(str(error.message).split())}"
    context = getattr(error, "ctx", None)
    return f"{message.rstrip('.')}; see `{context.command_path if context else 'kvq'} --help`."


def _value_of(names: Sequence[str], words: Sequence[str]) -> str | None:
    """Returns the word after the last of these options on the command line, or None without one."""
    found = None
    for word, following in zip(words, [*words[1:], ""]):
        name, equals, value = word.partition("=")
        if name in names:
            found = value if equals else following
    return found


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line each."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        print(f"error: {message.removeprefix('argument ')}; see `{self.prog} --help`.", file=sys.stderr)
        sys.exit(USAGE)
