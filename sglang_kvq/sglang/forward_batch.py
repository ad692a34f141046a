"""What a batch has beyond SGLang's own: moved positions, and requests that are scored."""

from __future__ import annotations

from typing import Any

from sglang_kvq.sglang import scoring, selection
from sglang_kvq.sglang.types import ForwardBatch


def complete(result: ForwardBatch, cls: type, batch: Any, *args: Any, **kwargs: Any) -> ForwardBatch:
    """AFTER ``ForwardBatch.init_new``."""
    result = selection.move_positions(result, cls, batch, *args, **kwargs)
    scoring.carry(result, batch)
    return result
