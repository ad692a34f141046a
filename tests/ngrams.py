"""SGLang's n-grams: C++ code that SGLang compiles when a server or a test first needs it."""

from __future__ import annotations

import os
from pathlib import Path

from sglang_kvq.releases import OLD_TREE
from sglang_kvq.sglang import compat

#: Folder with stand-ins for kernels that SGLang's CPU engine has only on machines with AMX.
STANDINS = Path(__file__).parent / "e2e" / "speculation"


def compiler() -> dict[str, str]:
    """Returns variables for compiling them: the older releases lack an include.

    The compiler is one word, because 0.5.18 quotes it.
    """
    return {"CXX": str(STANDINS / "c++-with-cstddef")} if compat.applies(OLD_TREE, compat.sglang_version()) else {}


def on_cpu(path: str | None = None) -> dict[str, str]:
    """Returns variables for a server that drafts with them on a CPU; ``path``: its PYTHONPATH, or this process's."""
    path = os.environ.get("PYTHONPATH") if path is None else path
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(STANDINS), path))), **compiler()}
