"""An SGLang plugin that lets the boundary of a small shared memory move; ``benchmarks/soak.py`` installs it.

``--max-total-tokens`` leaves a memory in which the windows of all requests fit beside all pages
(``cache.layout.share``). There the boundary between records and BF16 pages never moves. With this plugin only half of
the windows fit, so pages and windows take memory from each other. ``/server_info`` counts the moves (``live_state``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any


def share(original: Callable, *sizes: Any, wanted: int | None = None, **more: Any) -> Any:
    """Returns the layout of a memory with room for the windows of half of the ``wanted`` requests beside all pages."""
    return original(*sizes, wanted=max((8 if wanted is None else wanted) // 2, 1), **more)


class Moves:
    """Counts the moves of one worker's boundary."""

    def __init__(self) -> None:
        self.count = 0

    def move(self, original: Callable, pending: Any, first_slot: int) -> None:
        self.count += 1
        original(pending, first_slot)

    def live_state(self, original: Callable) -> dict[str, Any]:
        from sglang_kvq.sglang import runtime

        shared = runtime.started().shared is not None
        return {**original(), **({"boundary_moves": self.count} if shared else {})}


def install() -> None:
    """Wraps the plugin's layout and events in a scheduler's process."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang_kvq.cache.pending import PendingOps
    from sglang_kvq.sglang import observe
    from sglang_kvq.sglang.memory import capacity

    moves, original = Moves(), PendingOps.move_boundary

    @wraps(original)
    def move_boundary(pending: PendingOps, first_slot: int) -> None:
        moves.move(original, pending, first_slot)

    PendingOps.move_boundary = move_boundary
    capacity.share = partial(share, capacity.share)
    observe.live_state = partial(moves.live_state, observe.live_state)
