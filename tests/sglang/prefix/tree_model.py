"""``scheduler_model`` over SGLang's own allocator, rows, requests and unified tree, with recurrent states in the tree.

The tree takes a request's tokens up to its last recurrent state, and matches only up to a state. Here a state is only a
place in SGLang's pool; pages and BF16 pages are checked as in ``scheduler_model``.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.cache.integrity import check_integrity
from sglang_kvq.cache.layout import KVGeometry
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.releases import OLD_TREE
from sglang_kvq.sglang import compat, runtime
from tests.cache.remembering_ops import RememberingOps
from tests.cache.scheduler_model import Model, Request

#: True if SGLang keeps its record of a request's memory on the request itself.
OLD = compat.applies(OLD_TREE, compat.sglang_version())
#: Tokens between two states kept while decoding (``--mamba-track-interval``).
INTERVAL = 2 * P
EVERYTHING = 1 << 20


@dataclass(eq=False)
class SglangRequest(Request):
    """A request of the model, with SGLang's own request as ``req``."""

    req: Any = None

    @property
    def memory(self) -> Any:
        """The object with the request's row, states and lengths."""
        return self.req if OLD else self.req.kv


@dataclass
class TreeModel(Model):
    """A worker of a hybrid model; ``request_rows``, ``allocator`` and ``unified`` are SGLang's.

    The plugin's hooks must be applied and on; this worker becomes the current one of ``runtime``.

    Attributes:
        states: places for recurrent states.
        longest_match: tokens of the longest prefix that a request found in the tree.
    """

    states: int = 48
    longest_match: int = 0
    repointed: int = field(default=0)

    def __post_init__(self) -> None:
        from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

        from sglang_kvq.sglang.memory.build import build_allocator
        from sglang_kvq.sglang.memory.pool import KVQuantPool

        rows = HybridReqToTokenPool(
            size=self.rows,
            mamba_size=self.states,
            mamba_spec_state_size=self.rows,
            max_context_len=(self.pages + 2) * P,
            device="cpu",
            enable_memory_saver=False,
            cache_params=state_params(),
            mamba_layer_ids=[0],
            enable_mamba_extra_buffer=True,
        )
        geometry = KVGeometry(1, (PageFormat(64, 64, 0.96, 0.92),))
        state = runtime._current = runtime.Runtime(KVQuantConfig("int2"), geometry, (3,))
        ours = object.__new__(KVQuantPool)
        ours.layout = SimpleNamespace(geometry=geometry, pages=self.pages, slots=self.slots, arena=None)
        ours.page_size = P
        self.allocator = build_allocator(
            None,
            SimpleNamespace(device="cpu", kv_cache_dtype=torch.bfloat16),
            sizes=SimpleNamespace(max_total_num_tokens=self.pages * P),
            token_to_kv_pool=SimpleNamespace(full_kv_pool=ours),
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=None,
        )
        self.pool = state.pages
        self.pool.bf16_pages.fill_(float("nan"))
        self.ops = RememberingOps(self.pool, LayerRotations())
        state.tiers = self.manager(self.pool, self.sink_pages, self.recent_pages, self.ops.quantize_slots)
        self.tiers, self.request_rows = state.tiers, rows
        self.unified = unified_tree(rows, self.allocator)

    # -- memory ---------------------------------------------------------------------------------------

    @property
    def free(self) -> list[int]:  # type: ignore[override]
        pages = self.allocator.free_pages if OLD else self.allocator.get_all_free_pages()
        return pages.tolist()

    @free.setter
    def free(self, value: list[int]) -> None:
        raise AssertionError("SGLang's allocator keeps these")

    def evict(self, count: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.unified.evict(EvictParams(num_tokens=count * P, mamba_num=count % 2))

    def take_pages(self, count: int) -> list[int] | None:
        if count == 0:
            return []
        if count > len(self.free):
            self.evict(count - len(self.free))
        locations = self.allocator.alloc(count * P)
        return None if locations is None else (locations[::P] // P).tolist()

    def _room_for_states(self, count: int) -> bool:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        states = self.request_rows.mamba_allocator
        if states.available_size() < count:
            self.unified.evict(EvictParams(num_tokens=0, mamba_num=count - states.available_size()))
        return states.available_size() >= count

    # -- requests -------------------------------------------------------------------------------------

    def start(self, tokens: list[int]) -> Request | None:
        # One state for the request, two to keep, one for a match to copy into.
        if not self.request_rows.free_slots or not self._room_for_states(4):
            return None
        req = sglang_request(tokens)
        req.init_next_round_input(self.unified)
        matched = req.prefix_indices if OLD else self.unified.prefix_device_indices(req)
        if OLD:
            self.unified.inc_lock_ref(req.last_node)
        else:
            req.lock = self.unified.lock(req.last_node)
        (row,) = self.request_rows.alloc([req])
        self.request_rows.write((row, slice(0, len(matched))), matched.int())
        request = SglangRequest(list(tokens), row, req=req)
        request.stored = request.protected = len(matched)
        request.fresh = len(matched) == 0
        self.longest_match = max(self.longest_match, len(matched))
        self.running.append(request)
        return request

    def extend(self, requests: list[tuple[Request, int]]) -> bool:
        # SGLang cuts prompts at whole pages.
        requests = [(r, n if r.stored + n == len(r.tokens) else max(n // P, 1) * P) for r, n in requests]
        requests = [(r, min(n, len(r.tokens) - r.stored)) for r, n in requests]
        if not super().extend(requests):
            return False
        for request, n in requests:
            if n >= P:  # SGLang keeps a state at each 64th token of a chunk and remembers the last of them
                prefix = request.stored - n
                kept, branch = prefix + n // P * P, request.req.mamba_branching_seqlen
                self._keep_state(request, branch if branch and prefix < branch < kept else kept)
        return True

    def decode(self, requests: list[Request], padding: int = 0) -> bool:
        if not super().decode(requests, padding):
            return False
        for request in requests:
            if request.stored % INTERVAL == 0:
                self._keep_state(request, request.stored)
        return True

    def _keep_state(self, request: Request, length: int) -> None:
        memory = request.memory
        if not OLD:
            memory.mamba_last_track_idx = memory.mamba_next_track_idx
            memory.mamba_prev_track_seqlen = memory.mamba_last_track_seqlen
        memory.mamba_next_track_idx = self.request_rows.get_mamba_ping_pong_other_idx(memory.mamba_next_track_idx)
        memory.mamba_last_track_seqlen = length

    def _tell(self, request: Request, length: int) -> None:
        """Makes SGLang's request know its first ``length`` tokens."""
        req = request.req
        known = len(req.origin_input_ids) + len(req.output_ids)
        req.output_ids.extend(request.tokens[known:length])
        req.refresh_fill_ids() if not OLD else req._refresh_fill_ids()

    def publish(self, request: Request, finished: bool, length: int | None = None) -> None:
        length = request.stored if length is None else length
        if not self._room_for_states(1):
            return
        self._tell(request, length)
        before = self.row_pages(request, length)
        if OLD:
            request.req.set_extend_range(0, length)
            self.unified.cache_unfinished_req(request.req, chunked=True)
        else:
            self.unified.checkpoint(request.req, up_to=length)
        request.protected = request.memory.cache_protected_len
        self.repointed += self.row_pages(request, length) != before

    def leave(self, request: Request, publish: bool, length: int | None = None) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH
        from sglang.srt.mem_cache.common import release_kv_cache

        if not request.stored:  # SGLang takes a row for a request with its first batch
            self.request_rows.free_mamba_cache(request.req)
            self.request_rows.free(request.req)
            self.running.remove(request)
            return
        self._tell(request, request.stored if length is None else length)
        if OLD:
            from sglang.srt.managers.schedule_batch import ReqKvInfo

            request.req.kv = ReqKvInfo(kv_allocated_len=request.stored, swa_evicted_seqlen=0)
            request.req.kv_committed_len = request.stored
        else:
            request.memory.kv_allocated_len = request.memory.kv_committed_len = request.stored
        if publish:
            request.req.finished_reason = FINISH_LENGTH(length=1)
        release_kv_cache(request.req, self.unified, **{"is_insert" if OLD else "checkpoint": publish})
        if not publish and request.memory.mamba_pool_idx is not None:
            self.request_rows.free_mamba_cache(request.req)  # as ``retract_decode`` does
        self.running.remove(request)

    def fold(self, request: Request, chosen: list[int], publish: bool, length: int | None = None) -> list[int] | None:
        """Ends the request: without a recurrent state, its chosen tokens cannot be a prefix."""
        self.leave(request, publish, length)
        return None

    def flush(self) -> None:
        assert not self.running
        self.unified.reset()
        self.request_rows.clear()
        self.allocator.clear()

    # -- the oracle -----------------------------------------------------------------------------------

    def check(self) -> None:
        if self.flying is None:
            check_integrity(self.tiers, torch.tensor(self.free, dtype=torch.int64), idle=not self.running)
        owned = [p for r in self.running for p in self.row_pages(r, r.stored)[r.protected // P :]]
        assert sorted(self.free + owned + self.in_tree()) == list(range(1, self.pages + 1)), (
            "a page is lost or owned twice"
        )

    def in_tree(self) -> list[int]:
        """Returns the pages that the tree holds."""
        pages: list[int] = (self.unified.all_values_flatten()[::P] // P).tolist()
        return pages

    def check_empty(self) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.land()
        self.unified.evict(EvictParams(num_tokens=EVERYTHING, mamba_num=EVERYTHING))
        self.check()
        assert len(self.free) == self.pages
        assert self.request_rows.mamba_allocator.available_size() == self.states
        assert self.tiers.counts().slots_used == 0


def state_params() -> Any:
    """Returns the smallest parameters that SGLang's pool of states accepts."""
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape

    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=8, n_groups=1, num_heads=1, head_dim=8, state_size=8, conv_kernel=4
    )
    return Mamba2CacheParams(
        shape=shape, layers=[0], dtype=Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    )


def unified_tree(rows: Any, allocator: Any) -> Any:
    """Returns SGLang's tree for a model with recurrent states."""
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    if OLD:
        from sglang.srt.mem_cache.unified_cache_components import ComponentType
    else:
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
        page_size=P,
        enable_mamba_extra_buffer=True,
    )
    params.tree_components = (ComponentType.FULL, ComponentType.MAMBA)
    return UnifiedRadixCache(params)


def sglang_request(tokens: list[int]) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    return Req("r", "", array("q", tokens), SamplingParams(max_new_tokens=1 << 20))
