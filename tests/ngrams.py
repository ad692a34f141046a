"""SGLang's n-grams: C++ that it compiles when a server starts, or a test asks for drafts."""

from __future__ import annotations

from sglang_kvq.releases import OLD_TREE
from sglang_kvq.sglang import compat


def compiler() -> dict[str, str]:
    """Variables with which they compile: in the older releases they lack a header."""
    return {"CXX": "c++ -include cstddef"} if compat.applies(OLD_TREE, compat.sglang_version()) else {}
