"""``kvq eval`` as a subcommand of the typer app: all words go to the command's own parser."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand


class _Words(TyperCommand):
    """Passes every word on unchanged, including ``--`` and ``--help``."""

    def parse_args(
        self, ctx: Any, args: list[str]
    ) -> list[str]:  # the context is click's, or that of typer's own copy of click
        ctx.args = list(args)
        return list(args)


def register(app: typer.Typer) -> None:
    """Adds the command to the app."""

    @app.command("eval", cls=_Words, add_help_option=False)
    def evaluate(ctx: typer.Context) -> None:
        """Compare methods on one model through running servers (kvq eval --help)."""
        from sglang_kvq.evaluation.command import main

        try:
            status = main(ctx.args)
        except KeyboardInterrupt:
            status = 130
        raise typer.Exit(status)
