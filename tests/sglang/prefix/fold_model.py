"""``TreeModel`` of a plain model, whose requests may end as folds, with SGLang's allocator, rows, requests and tree."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.cache.layout import KVGeometry
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.sessions.messages import FOLD, Fold
from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.prefix import folding
from tests.cache.remembering_ops import RememberingOps
from tests.cache.scheduler_model import Request, row_indices
from tests.sglang.prefix.tree_model import EVERYTHING, OLD, SglangRequest, TreeModel


@dataclass
class FoldModel(TreeModel):
    """A worker of a plain model, whose requests may end as folds.

    Attributes:
        prefixes: by a fold's first placeholder token: its namespace and the ids that find it.
        chosen: by request id: the tokens that it keeps.
        groups: whether requests end while SGLang collects frees.
        refused: requests that ended with an error instead of as a fold.
    """

    prefixes: dict[int, tuple[str, list[int]]] = field(default_factory=dict)
    chosen: dict[str, torch.Tensor] = field(default_factory=dict)
    groups: bool = True
    refused: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        from sglang_kvq.sglang.memory.build import build_allocator
        from sglang_kvq.sglang.memory.pool import KVQuantPool

        rows = ReqToTokenPool(
            size=self.rows, max_context_len=(self.pages + 2) * P, device="cpu", enable_memory_saver=False
        )
        geometry = KVGeometry(1, (PageFormat(64, 64, 0.96, 0.92),))
        state = runtime._current = runtime.Runtime(KVQuantConfig("int2"), geometry, (0,))
        ours = object.__new__(KVQuantPool)
        ours.layout = SimpleNamespace(geometry=geometry, pages=self.pages, slots=self.slots, arena=None)
        ours.page_size = P
        self.allocator = build_allocator(
            None,
            SimpleNamespace(device="cpu", kv_cache_dtype=torch.bfloat16),
            sizes=SimpleNamespace(max_total_num_tokens=self.pages * P),
            token_to_kv_pool=ours,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=None,
        )
        self.pool = state.pages
        self.pool.bf16_pages.fill_(float("nan"))
        self.ops = RememberingOps(self.pool, LayerRotations())
        state.tiers = self.manager(self.pool, self.sink_pages, self.recent_pages, self.ops.quantize_slots)
        self.tiers, self.request_rows = state.tiers, rows
        self.unified = plain_tree(rows, self.allocator)
        folding.serve(lambda req, fold: self.chosen.get(req.rid))

    # -- parts of a hybrid that a plain model lacks ---------------------------------------------------

    def evict(self, count: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.unified.evict(EvictParams(num_tokens=count * P))

    def _room_for_states(self, count: int) -> bool:
        return True

    def _keep_state(self, request: Request, length: int) -> None:
        pass

    # -- requests -------------------------------------------------------------------------------------

    def start(self, tokens: list[int]) -> Request | None:
        if not self.request_rows.free_slots:
            return None
        namespace, ids = self.prefixes.get(tokens[0], (None, []))
        self.clock += 1
        req = sglang_request(f"r{self.clock}", ids + tokens[len(ids) :], namespace)
        req.init_next_round_input(self.unified)
        matched = req.prefix_indices if OLD else self.unified.prefix_device_indices(req)
        if ids and len(matched) < len(ids):  # evicted in the meantime: such a request must not run
            return None
        if OLD:
            from sglang.srt.managers.schedule_batch import ReqKvInfo

            self.unified.inc_lock_ref(req.last_node)
            req.kv = ReqKvInfo(kv_allocated_len=0, swa_evicted_seqlen=0)
            req.cache_protected_len = len(matched)
        else:
            req.lock = self.unified.lock(req.last_node)
        (row,) = self.request_rows.alloc([req])
        self.request_rows.write((row, slice(0, len(matched))), matched.int())
        request = SglangRequest(list(tokens), row, req=req, indices=list(self.named.get(tokens[0], [])))
        request.stored = request.protected = len(matched)
        request.fresh = len(matched) == 0
        self.longest_match = max(self.longest_match, len(matched))
        self.running.append(request)
        return request

    def leave(self, request: Request, publish: bool, length: int | None = None) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH

        self._tell(request, request.stored if length is None else length)
        if publish:
            request.req.finished_reason = FINISH_LENGTH(length=1)
        self.release(request, publish)

    def release(self, request: Request, publish: bool) -> None:  # type: ignore[override]
        """Gives back the request's memory as SGLang's scheduler does."""
        from sglang.srt.mem_cache.common import release_kv_cache

        if not request.stored:  # SGLang takes a row for a request with its first batch
            self.request_rows.free(request.req)
            self.running.remove(request)
            return
        memory = request.req.kv
        memory.kv_allocated_len = request.stored
        (request.req if OLD else memory).kv_committed_len = request.stored
        if self.groups:
            self.allocator.free_group_begin()
        release_kv_cache(request.req, self.unified, **{"is_insert" if OLD else "checkpoint": publish})
        if self.groups:
            self.allocator.free_group_end()
        self.running.remove(request)

    def fold(self, request: Request, chosen: list[int], publish: bool, length: int | None = None) -> list[int] | None:
        """Folds the prompt's whole pages only, as far as they are computed."""
        length = request.stored if length is None else length
        full = min(length, len(request.req.origin_input_ids)) // P
        chosen = [i for i in chosen if i < full * P]
        chosen = chosen[: len(chosen) // P * P]
        if not chosen:
            self.leave(request, publish, length)
            return None
        names = self.ask(request, chosen, full * P)
        self.leave(request, True, length)
        if request.req.finished_reason.to_json()["type"] == "abort":
            self.refused.append(request.req.finished_reason)
            return None
        self.folded += 1
        return names

    def ask(self, request: Request, chosen: list[int], length: int) -> list[int]:
        """Asks for the request to end as a fold; returns placeholder tokens for the tokens that it keeps."""
        self.clock += 1
        names = [-(self.clock * 10**6 + i) for i in range(len(chosen))]
        fold = Fold(f"fold-{self.clock}", length, len(chosen))
        request.req.sampling_params.custom_params = {FOLD: fold.encode()}
        del request.req._kvq_fold  # cached when the request began
        assert folding.fold_of(request.req) == fold
        sinks = min(self.sink_pages * P, len(chosen))
        if chosen[:sinks] != list(range(sinks)):
            chosen = [*range(sinks), *[i for i in chosen if i >= sinks]][: len(chosen)]
            chosen += [i for i in range(length) if i not in set(chosen)][: fold.kept - len(chosen)]
        self.chosen[request.req.rid] = torch.tensor(chosen)[None, None]
        self.prefixes[names[0]] = (fold.name, list(request.req.origin_input_ids[: fold.kept]))
        states = row_indices(request.tokens, request.indices)
        self.named[names[0]] = [states[i] for i in chosen]
        return names

    # -- the oracle -----------------------------------------------------------------------------------

    def in_tree(self) -> list[int]:
        # The tree of ``OLD`` cannot list its pages while it holds none.
        return super().in_tree() if self.unified.evictable_size() + self.unified.protected_size() else []

    def check_empty(self) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.land()
        self.unified.evict(EvictParams(num_tokens=EVERYTHING))
        self.check()
        assert len(self.free) == self.pages
        assert self.tiers.counts().slots_used == 0


def plain_tree(rows: Any, allocator: Any) -> Any:
    """Returns SGLang's tree for a model with full attention only."""
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    params = CacheInitParams(disable=False, req_to_token_pool=rows, token_to_kv_pool_allocator=allocator, page_size=P)
    if OLD:
        from sglang.srt.mem_cache.radix_cache import RadixCache

        return RadixCache(params)
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    params.tree_components = (ComponentType.FULL,)
    return UnifiedRadixCache(params)


def sglang_request(rid: str, tokens: list[int], namespace: str | None) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    return Req(rid, "", array("q", tokens), SamplingParams(max_new_tokens=1 << 20), extra_key=namespace)
