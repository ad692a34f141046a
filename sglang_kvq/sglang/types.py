"""Names for SGLang's objects in our signatures.

Their classes differ between the releases served, and importing them would load SGLang: to a type checker each is
``Any``. What is read of them, and with which parameters handlers are called, is in ``hooks.TABLE``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

#: The function that an AROUND handler replaces; it takes the same arguments, bound object first.
Original: TypeAlias = Callable[..., Any]

ServerArgs: TypeAlias = Any
Scheduler: TypeAlias = Any
Req: TypeAlias = Any

ModelConfig: TypeAlias = Any
ModelRunner: TypeAlias = Any
ForwardBatch: TypeAlias = Any
#: An attention layer, ``layers.radix_attention.RadixAttention``.
AttentionLayer: TypeAlias = Any

#: ``KVCacheConfigurator``, ``DefaultPoolConfigurator``: they size and build pools.
Configurator: TypeAlias = Any
ReqToTokenPool: TypeAlias = Any
KVCache: TypeAlias = Any
PrefixCache: TypeAlias = Any
#: Collects the requests of the next prefill.
PrefillAdder: TypeAlias = Any
#: Queues and submits HiCache's transfers, ``managers.cache_controller.HiCacheController``.
CacheController: TypeAlias = Any
