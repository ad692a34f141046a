"""What the hooks of one scheduler process share: one model worker, one cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from sglang_kvq.cache.layout import KVGeometry, MemoryLayout
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.config import KVQuantConfig

logger = logging.getLogger("sglang_kvq")

#: Set on SGLang's ServerArgs by the flags; travels with it into every process.
CONFIG_ATTRIBUTE = "_kvq_config"


def config_of(server_args) -> KVQuantConfig | None:
    """The configuration of this server, None when ``--kv-quant`` is off."""
    return getattr(server_args, CONFIG_ATTRIBUTE, None)


@dataclass
class Runtime:
    """Filled in the order SGLang builds things: sizes, pool, allocator, attention backend."""

    config: KVQuantConfig
    geometry: KVGeometry
    budget_slots: int = 0
    layout: MemoryLayout | None = None
    pages: PagePool | None = None
    tiers: TierManager | None = None
    allocator: object | None = None
    status: dict = field(default_factory=dict)


_current: Runtime | None = None


def start(config: KVQuantConfig, geometry: KVGeometry) -> Runtime:
    """Begin (or, when SGLang sizes twice, begin again) this process's cache."""
    global _current
    if _current is None or _current.geometry != geometry or _current.config != config:
        _current = Runtime(config, geometry)
    return _current


def current() -> Runtime | None:
    """This process's cache, None when ``--kv-quant`` is off or nothing is built yet."""
    return _current


def tiers() -> TierManager | None:
    """The live tier manager, None until the attention backend exists."""
    return _current.tiers if _current else None
