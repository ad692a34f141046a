"""Adds the flags to ``sglang serve --help``, which SGLang prints before it loads plugins.

SGLang asks installed platform plugins (entry point group ``sglang.srt.platforms``) which device to use as soon as
it is imported. This one answers that it is no platform. If the user asked for help, it also has the flags listed.
"""

from __future__ import annotations

import argparse
import sys
from types import ModuleType


def activate() -> None:
    """Lists the flags if the command line asks for help; entry point. Returns None because this is no platform."""
    if {"-h", "--help"} & set(sys.argv):
        import wrapt

        wrapt.register_post_import_hook(_list_flags, "sglang.srt.server_args")


def _list_flags(server_args: ModuleType) -> None:
    """Makes ``ServerArgs.add_cli_args`` of the module just imported add our flags; adding them twice is harmless."""
    from sglang_kvq.sglang.flags import add_flags

    add_upstream = server_args.ServerArgs.add_cli_args

    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        add_upstream(parser)
        add_flags(parser)

    server_args.ServerArgs.add_cli_args = staticmethod(add_cli_args)
