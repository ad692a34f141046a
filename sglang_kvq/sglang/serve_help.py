"""The flags in ``sglang serve --help``, which SGLang prints before it loads plugins.

SGLang asks installed platform plugins (entry point group ``sglang.srt.platforms``) which device to use as soon as
it is imported. This one answers "not me", and if help was asked for arranges that the flags are listed.
"""

from __future__ import annotations

import argparse
import sys
from types import ModuleType


def activate() -> None:
    """Entry point; None says that this is no platform. Does nothing unless the command line asks for help."""
    if {"-h", "--help"} & set(sys.argv):
        import wrapt

        wrapt.register_post_import_hook(_list_flags, "sglang.srt.server_args")


def _list_flags(server_args: ModuleType) -> None:
    """Wraps ``ServerArgs.add_cli_args`` of the module just imported; adding the flags twice is harmless."""
    from sglang_kvq.sglang.flags import add_flags

    add_upstream = server_args.ServerArgs.add_cli_args

    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        add_upstream(parser)
        add_flags(parser)

    server_args.ServerArgs.add_cli_args = staticmethod(add_cli_args)
