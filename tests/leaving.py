"""The end of a process of tests."""

import atexit
import os
import sys
from typing import NoReturn


def leave(status: int = 0) -> NoReturn:
    """Ends this process after its exit functions. Python would also free what was imported, for seconds."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
