"""Names for SGLang's objects in our signatures.

The classes differ between supported releases, and importing them would load SGLang. So each name is ``Any`` to a type
checker. ``hooks.TABLE`` lists the attributes that we read and the parameters that handlers get.
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
