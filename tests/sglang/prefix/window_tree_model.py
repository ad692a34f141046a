"""``TreeModel`` of a model with sliding windows, with SGLang's two pools, its allocator of both and its unified tree.

Besides pages and BF16 pages it checks windows: a batch must read from SGLang's window pool what its own tokens wrote
there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.cache.layout import KVGeometry, MemoryLayout
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.runtime import CONFIG_ATTRIBUTE, WindowLayers
from tests.cache.remembering_ops import RememberingOps
from tests.cache.scheduler_model import Request, row_indices
from tests.sglang.prefix.tree_model import EVERYTHING, OLD, SglangRequest, TreeModel, sglang_request

#: Tokens that a token sees before itself.
WINDOW = 100
CONFIG = KVQuantConfig("int2")


@dataclass
class WindowTreeModel(TreeModel):
    """A worker of a model with sliding windows.

    Attributes:
        window_pages: pages of SGLang's window pool.
        windows_read: how many checked reads did not reach back to the request's first token.
    """

    window_pages: int = 40
    windows_read: int = field(default=0)

    def __post_init__(self) -> None:
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

        from sglang_kvq.sglang.memory.build import build_allocator
        from sglang_kvq.sglang.memory.window_pool import build_hybrid_swa_kv_pool

        rows = ReqToTokenPool(
            size=self.rows, max_context_len=(self.pages + 2) * P, device="cpu", enable_memory_saver=False
        )
        geometry = KVGeometry(1, (PageFormat(64, 64, 0.96, 0.92),))
        state = runtime._current = runtime.Runtime(CONFIG, geometry, (1,))
        state.windows = WindowLayers(frozenset({0}), need=None)
        state.layout = MemoryLayout(
            geometry, pages=self.pages, slots=self.slots, max_requests=self.rows, whole_windows=self.rows
        )
        full, windows = self.pages * P, self.window_pages * P

        def theirs(configurator: Any, *, mha_pool_class: Callable) -> Any:
            return SWAKVPool(
                size=full,
                size_swa=windows,
                page_size=P,
                dtype=torch.bfloat16,
                head_num=1,
                head_dim=64,
                swa_attention_layer_ids=[0],
                full_attention_layer_ids=[1],
                device="cpu",
                token_to_kv_pool_class=mha_pool_class,
                enable_kv_cache_copy=False,
            )

        configurator = SimpleNamespace(
            server_args=SimpleNamespace(**{CONFIG_ATTRIBUTE: CONFIG}),
            is_draft_worker=False,
            kv_cache_dtype=torch.bfloat16,
            model_config=SimpleNamespace(dtype=torch.bfloat16, context_len=4096),
            device="cpu",
        )
        self.both = build_hybrid_swa_kv_pool(theirs, configurator, mha_pool_class=MHATokenToKVPool)
        self.allocator = build_allocator(
            lambda self, *, token_to_kv_pool, **_: SWATokenToKVPoolAllocator(
                full, windows, P, torch.bfloat16, "cpu", token_to_kv_pool, False
            ),
            configurator,
            sizes=SimpleNamespace(max_total_num_tokens=full, swa_max_total_num_tokens=windows),
            token_to_kv_pool=self.both,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=None,
        )
        self.ours = state.allocator
        assert self.allocator.full_attn_allocator is self.ours
        self.pool = state.pages
        self.pool.bf16_pages.fill_(float("nan"))
        self.ops = RememberingOps(self.pool, LayerRotations())
        state.tiers = self.manager(self.pool, self.sink_pages, self.recent_pages, self.ops.quantize_slots)
        self.tiers, self.request_rows = state.tiers, rows
        self.unified = window_tree(rows, self.allocator)

    # -- memory ---------------------------------------------------------------------------------------

    @property
    def free(self) -> list[int]:  # type: ignore[override]
        pages = self.ours.free_pages if OLD else self.ours.get_all_free_pages()
        return pages.tolist()

    @free.setter
    def free(self, value: list[int]) -> None:
        raise AssertionError("SGLang's allocator keeps these")

    def evict(self, count: int) -> None:
        self._evict(count, count % 3)

    def _evict(self, pages: int, window_pages: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.unified.evict(EvictParams(num_tokens=pages * P, swa_num_tokens=window_pages * P))

    def take_pages(self, count: int) -> list[int] | None:
        if count == 0:
            return []
        available = (self.allocator.full_available_size() // P, self.allocator.swa_available_size() // P)
        if count > min(available):
            self._evict(*(max(count - n, 0) for n in available))
        none, tokens = torch.zeros(1, dtype=torch.int64), torch.tensor([count * P])
        locations = self.allocator.alloc_extend(none, none, tokens, tokens, none - 1, count * P)
        return None if locations is None else (locations[::P] // P).tolist()

    # -- requests -------------------------------------------------------------------------------------

    def start(self, tokens: list[int]) -> Request | None:
        if not self.request_rows.free_slots:
            return None
        req = sglang_request(tokens)
        req.init_next_round_input(self.unified)
        matched = req.prefix_indices if OLD else self.unified.prefix_device_indices(req)
        if OLD:
            from sglang.srt.managers.schedule_batch import ReqKvInfo

            req.swa_uuid_for_lock = self.unified.inc_lock_ref(req.last_node).swa_uuid_for_lock
            req.kv = ReqKvInfo(kv_allocated_len=0, swa_evicted_seqlen=0)
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
        requests = [(r, n if r.stored + n == len(r.tokens) else max(n // P, 1) * P) for r, n in requests]
        requests = [(r, min(n, len(r.tokens) - r.stored)) for r, n in requests]
        before = [(r, r.stored) for r, _ in requests]
        if not super(TreeModel, self).extend(requests):
            return False
        for request, stored in before:
            self._use_window(request, stored)
        return True

    def decode(self, requests: list[Request], padding: int = 0) -> bool:
        if not super(TreeModel, self).decode(requests, padding):
            return False
        for request in requests:
            self._use_window(request, request.stored - 1)
            if request.stored % 32 == 0:
                self._leave_behind(request, request.stored - 1)
        return True

    def _use_window(self, request: Request, before: int) -> None:
        """Writes tokens from ``before`` on to the window pool, then checks all that they see there."""
        table = row_indices(request.tokens, request.indices)
        keys = self.both.swa_kv_pool.k_buffer[0]
        loc = self.pool.req_to_token[request.row, : request.stored].long()
        places = self.both.translate_loc_from_full_to_swa(loc)
        assert (places[before:] > 0).all(), "a new token has no place in the windows' pool"
        keys[places[before:], 0, :2] = _digits(table[before : request.stored])
        first = max(0, before - WINDOW)
        assert (places[first:] > 0).all(), f"row {request.row}: a token within the window has no place"
        assert torch.equal(keys[places[first:], 0, :2], _digits(table[first : request.stored])), "of another token"
        self.windows_read += first > 0

    def _leave_behind(self, request: Request, length: int) -> None:
        """Lets SGLang free what no window reaches any more, as it does now and then while decoding."""
        if not OLD:
            self.unified.evict_sliding_windows(request.req, length)
            return
        from sglang.srt.mem_cache.common import free_swa_out_of_window_slots

        free_swa_out_of_window_slots(
            request.req,
            length,
            sliding_window_size=WINDOW,
            page_size=P,
            req_to_token_pool=self.request_rows,
            token_to_kv_pool_allocator=self.allocator,
        )

    def publish(self, request: Request, finished: bool, length: int | None = None) -> None:
        length = request.stored if length is None else length
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

        if not request.stored:
            self.request_rows.free(request.req)
            self.running.remove(request)
            return
        self._tell(request, request.stored if length is None else length)
        memory = request.req.kv
        memory.kv_allocated_len = request.stored
        (request.req if OLD else memory).kv_committed_len = request.stored
        if publish:
            request.req.finished_reason = FINISH_LENGTH(length=1)
        release_kv_cache(request.req, self.unified, **{"is_insert" if OLD else "checkpoint": publish})
        self.running.remove(request)

    # -- the oracle -----------------------------------------------------------------------------------

    def check_empty(self) -> None:
        self.land()
        self._evict(EVERYTHING, EVERYTHING)
        self.check()
        assert len(self.free) == self.pages and self.allocator.swa_available_size() == self.window_pages * P
        assert self.tiers.counts().slots_used == 0


def _digits(values: list[int]) -> torch.Tensor:
    """Returns numbers below 4096 as two digits each, which BF16 represents exactly."""
    values = torch.tensor(values)
    return torch.stack([values // 64, values % 64], dim=1).bfloat16()


def window_tree(rows: Any, allocator: Any) -> Any:
    """Returns SGLang's tree for a model with sliding windows."""
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
        sliding_window_size=WINDOW,
    )
    params.tree_components = (ComponentType.FULL, ComponentType.SWA)
    return UnifiedRadixCache(params)
