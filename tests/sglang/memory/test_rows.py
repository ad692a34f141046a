"""Every row that SGLang gives back is recorded, whichever method does it."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang.srt
import torch

from sglang_kvq.cache.pending import PendingOps
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.releases import OLD_TREE
from sglang_kvq.sglang import compat, hooks, runtime

SOURCE = Path(next(iter(sglang.srt.__path__)))
RELEASE = compat.sglang_version()
ROWS = "ReqToTokenPool"
#: A separate pool, for a decode server's rows.
DECODE_ROWS = "DecodeReqToTokenPool"
#: True if the plugin refuses a decode server with this release.
REFUSES_TRANSFERS = compat.applies(hooks.NO_TRANSFERS, RELEASE)
#: Hooks on rows, which record the same event.
HANDLERS = ("prefix.rows:", "disaggregation.seam:around_free")
#: Methods that set up the pool's list of rows; ``clear`` is called with the allocator's, which resets the tiers.
SETS_UP = {"__init__", "clear"}


def trees() -> dict[str, ast.Module]:
    """Returns the parsed modules that mention the list, by dotted name below ``sglang.srt``."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        if name.startswith("disaggregation.") and REFUSES_TRANSFERS:
            continue
        text = path.read_text()
        if "free_slots" in text or ROWS in text:
            found[name] = ast.parse(text)
    return found


def is_list(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "free_slots"


def gives_back(node: ast.AST) -> ast.Attribute | None:
    """Returns the ``X.free_slots`` that a statement or a call lengthens or replaces; None if it does neither."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_list(node.func.value):
        return node.func.value if node.func.attr in ("append", "extend", "insert") else None
    if isinstance(node, ast.AugAssign) and is_list(node.target):
        return node.target
    if isinstance(node, ast.Assign) and any(map(is_list, node.targets)):
        taken = isinstance(node.value, ast.Subscript) and is_list(node.value.value)  # free_slots = free_slots[n:]
        return None if taken else node.targets[0]
    return None


def pools(modules: dict[str, ast.Module]) -> set[str]:
    """Returns the class of the pool of request rows, and those derived from it."""
    bases = {
        node.name: {b.id for b in node.bases if isinstance(b, ast.Name)}
        for tree in modules.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    known = {ROWS} if REFUSES_TRANSFERS else {ROWS, DECODE_ROWS}
    while more := {name for name, of in bases.items() if of & known} - known:
        known |= more
    return known


def givers() -> set[str]:
    """Returns each method, dotted below ``sglang.srt``, that puts rows on the pool's list of free ones."""
    modules = trees()
    known, found = pools(modules), set()
    for name, tree in modules.items():
        for owner in ast.walk(tree):
            if not isinstance(owner, (ast.ClassDef, ast.Module)):
                continue
            for function in owner.body:
                if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    continue
                for target in filter(None, map(gives_back, ast.walk(function))):
                    own = isinstance(target.value, ast.Name) and target.value.id == "self"
                    if own and (getattr(owner, "name", None) not in known or function.name in SETS_UP):
                        continue  # a list of another class, with another meaning
                    where = [name, owner.name] if isinstance(owner, ast.ClassDef) else [name]
                    found.add(".".join([*where, function.name]))
    return found


def test_every_place_that_gives_rows_back_is_hooked():
    hooked = {h.target for h in hooks.for_release(RELEASE) if (h.handler or "").startswith(HANDLERS)}
    assert givers() == hooked


@pytest.fixture
def pending(applied, monkeypatch):
    """Returns the events recorded while the hooks act as in a server with ``--kv-quant``."""
    tiers = SimpleNamespace(pending=PendingOps())
    monkeypatch.setattr(runtime, "tiers", lambda: tiers)
    monkeypatch.setattr(applied, "_config", KVQuantConfig("hadamard"))
    return tiers.pending


def freed_rows(pending: PendingOps) -> list[int]:
    packed = pending.pack(torch.device("cpu"))
    if packed is None:
        return []
    spans, _, events = packed
    return spans[3 * events :].tolist()


@pytest.fixture
def pool(applied):
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    return ReqToTokenPool(size=4, max_context_len=256, device="cpu", enable_memory_saver=False)


def test_request(pending, pool):
    """A request that finishes, aborts or is retracted gives its row back."""
    on_request = SimpleNamespace(req_pool_idx=3, holds_kv=True)
    pool.free(SimpleNamespace(req_pool_idx=3, kv=on_request))
    assert freed_rows(pending) == [3]
    assert pool.free_slots[-1] == 3


if not compat.applies(OLD_TREE, RELEASE):  # older releases give rows back one by one

    def test_several_requests(pending, pool):
        pool.free_rows([3, 1])
        assert freed_rows(pending) == [3, 1]


def test_session(pending, pool):
    """A streaming session keeps its row between turns and gives it back when it closes."""
    from sglang.srt.session.streaming_session import SessionSlot, StreamingSession

    cache = SimpleNamespace(
        req_to_token_pool=pool,
        token_to_kv_pool_allocator=SimpleNamespace(free=lambda pages: None),
        page_size=64,
        unlock=lambda lock: None,
        free_kv_row=lambda kv, spans: None,
    )
    sessions = StreamingSession(cache)
    on_request = SimpleNamespace(req_pool_idx=2, holds_kv=True, kv_allocated_len=100, cache_protected_len=0)
    slot = SessionSlot(kv=on_request)
    if "req_pool_idx" in SessionSlot.__dataclass_fields__:  # the slot has the row up to 0.5.18, later its record has it
        slot.req_pool_idx = 2
    sessions.slots["s"] = slot
    sessions.release_session("no such session")
    assert not pending
    sessions.release_session("s")
    assert freed_rows(pending) == [2]
    assert pool.free_slots[-1] == 2
