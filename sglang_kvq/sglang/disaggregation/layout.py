"""Names the layout of a server's cache. A server can read another server's pages only if both names are equal."""

from __future__ import annotations

import hashlib

from sglang_kvq.methods import RotationKind, get_method
from sglang_kvq.sglang.runtime import Runtime

#: Version of the wire format of records and staged windows.
WIRE_FORMAT = 1


def layout_name(state: Runtime, attention_workers: int, draft: str | None = None) -> str:
    """Returns the name of this server's layout, in a form that people can compare in an error message.

    It covers codes, widths and clips of every layer, the rotations, the window and the division of heads. With a draft
    model it also covers that model's pages (``drafts.layout_of``). Settings that only decide which pages have BF16
    copies, like ``--kv-quant-bf16-budget``, may differ between servers.
    """
    config, geometry = state.config, state.geometry
    codes = [(layer, repr(form)) for layer, form in zip(state.layer_ids, geometry.formats)]
    kind = get_method(config.method).rotation
    rotations = kind.value
    if kind is RotationKind.RANDOM:
        rotations = f"random:{config.seed or 0}"
    elif kind is RotationKind.LEARNED:
        rotations = str(state.status["rotations_sha256"])[:12]
    return (
        f"kvq{WIRE_FORMAT}-{config.method}-codes:{_short(codes)}-rotations:{rotations}-heads:{geometry.kv_heads}x"
        f"{geometry.head_dim}-sink:{config.sink_tokens}-recent:{config.recent_tokens}-tp:{attention_workers}"
        + (f"-draft:{draft}" if draft else "")
    )


def _short(facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
