"""SGLang's n-grams: C++ that it compiles when a server starts, or a test asks for drafts."""

from __future__ import annotations

import os
from pathlib import Path

from sglang_kvq.releases import OLD_TREE
from sglang_kvq.sglang import compat

#: What stands in for kernels that SGLang's CPU engine has on machines with AMX only.
STANDINS = Path(__file__).parent / "e2e" / "speculation"


def compiler() -> dict[str, str]:
    """Variables with which they compile: in the older releases they lack a header."""
    return {"CXX": "c++ -include cstddef"} if compat.applies(OLD_TREE, compat.sglang_version()) else {}


def on_cpu(path: str | None = None) -> dict[str, str]:
    """Variables with which a server on the CPU engine drafts by them; path: its PYTHONPATH, or this process's."""
    path = os.environ.get("PYTHONPATH") if path is None else path
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(STANDINS), path))), **compiler()}
