"""Prefill of long chunks: dequantizes their prefixes into a workspace, then calls a library's attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch

from sglang_kvq.attention.base import ExtendBatch
from sglang_kvq.attention.fa3 import FlashAttention3
from sglang_kvq.attention.planning.graph_tables import DequantizedTables
from sglang_kvq.attention.planning.ragged_calls import Call, CallShape, in_place_tokens, plan_calls
from sglang_kvq.cache.transfer import to_device
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.kernels.decode.learned_sinks import scale_by_sinks
from sglang_kvq.kernels.extend.append_tokens import append_tokens

#: Bytes of FlashInfer's own workspace.
FLOAT_WORKSPACE = 256 << 20
#: Fewest new tokens, per request (mean) and in total, for which a library is used. Below, our own kernel is used, which
#: needs no plan. FlashInfer takes 136 us for 128 tokens after 8,192, our kernel 175 us
#: (benchmarks/results/kernels_h200.json).
LEAST_PER_REQUEST, LEAST_TOKENS = 64, 64
#: Largest workspace for dequantized prefixes per call, in bytes and in tokens. Larger calls fill the GPU better and
#: leave fewer results to merge. A prefill allocates only what it needs.
WORKSPACE_BYTES, WORKSPACE_TOKENS = 256 << 20, 1 << 17


def workspace_tokens(kv_heads: int, head_dim: int) -> int:
    """Returns how many stored tokens prefill dequantizes at a time, whole pages; ``kv_heads`` counts this worker's."""
    return min(WORKSPACE_BYTES // (4 * kv_heads * head_dim), WORKSPACE_TOKENS) // PAGE_SIZE * PAGE_SIZE


#: A function ``(keys, values, pages)`` that fills rows of keys and values from stored pages.
Gather: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


@dataclass
class _Wrapper:
    """A library's wrapper; the host may overwrite its tables once the event ``copied`` has completed."""

    wrapper: Any
    copied: torch.cuda.Event | None = None

    @property
    def free(self) -> bool:
        return self.copied is None or bool(self.copied.query())


@dataclass
class PlannedCall:
    """A ``Call`` with its wrapper planned and its indices on the device; a CUDA graph's has a workspace, too."""

    call: Call
    wrapper: Any
    pages: torch.Tensor
    positions: torch.Tensor | None
    space: torch.Tensor | None = None


@dataclass
class RaggedPrefill:
    """A library's ragged prefill over the two-tier cache.

    Args:
        library: the ``flashinfer`` module, or an object with the two names used here, such as ``fa3.FlashAttention3``.
        capacity: tokens of the BF16 workspace.
        choose: returns the FlashInfer backend to use for a call, by name.
        float_workspace: bytes of the library's own workspace on a GPU.
    """

    library: ModuleType | FlashAttention3
    q_heads: int
    kv_heads: int
    head_dim: int
    device: torch.device
    capacity: int
    choose: Callable[[Call], str] = lambda call: "auto"
    float_workspace: int = FLOAT_WORKSPACE
    wrappers: dict[str, list[_Wrapper]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = self.float_workspace if self.device.type == "cuda" else 1
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count if self.device.type == "cuda" else 2
        self._least_tiles = -(-2 * sms // self.q_heads)
        self.in_place = in_place_tokens(self.kv_heads, self.head_dim)
        self._floats = torch.empty(size, dtype=torch.uint8, device=self.device)
        for _ in range(4):  # allocates pinned memory now, not while requests run
            self._add("auto")

    def suits(self, new_lens: list[int]) -> bool:
        """Returns whether a batch's chunks are long enough for the library."""
        tokens = sum(new_lens)
        return min(new_lens) > 0 and tokens >= max(LEAST_TOKENS, LEAST_PER_REQUEST * len(new_lens))

    @property
    def in_graphs(self) -> bool:
        """True if a CUDA graph can contain the library's calls, because they read the bounds on the device."""
        return isinstance(self.library, FlashAttention3)

    def plan(self, batch: ExtendBatch, scale: float) -> list[PlannedCall]:
        """Plans a batch for all layers. The host does not wait for the device."""
        if batch.bounds is not None or batch.tables is not None:
            return [self._plan_graph(batch, scale)]
        calls = plan_calls(batch.prefix_lens, batch.new_lens, self.capacity, self._least_tiles, self.in_place)
        parts = []
        for call in calls:
            parts += [call.pages.ravel(), call.pages[:0].ravel() if call.positions is None else call.positions]
        tensors = to_device(parts, self.device, torch.int32)
        taken: dict[CallShape, _Wrapper] = {}
        planned = []
        for call, pages, positions in zip(calls, tensors[::2], tensors[1::2]):
            if call.shape not in taken:
                taken[call.shape] = self._planned(call, scale, [*taken.values()])
            index = None if call.positions is None else positions
            planned.append(PlannedCall(call, taken[call.shape].wrapper, pages.view(-1, 4), index))
        return planned

    def _plan_graph(self, batch: ExtendBatch, scale: float) -> PlannedCall:
        """Plans the one call of a CUDA graph: over new prompts (``bounds``), or over dequantized prefixes too."""
        tables, tokens = batch.tables, sum(batch.new_lens)
        wrapper = self.library.BatchPrefillWithRaggedKVCacheWrapper(self._floats, "NHD", backend="auto")
        if isinstance(tables, DequantizedTables):
            keys, reads = tables.space.shape[1], np.zeros(tables.pages.shape, np.int32)  # the device knows which
            wrapper.plan_graph(tables.bounds, (tokens, keys), scale)
            call = Call((0, tokens), [tokens], [keys], True, True, True, reads, None)
            return PlannedCall(call, wrapper, tables.pages, tables.positions, tables.space)
        assert batch.bounds is not None
        wrapper.plan_graph((batch.bounds, batch.bounds), (tokens, tokens), scale)
        call = Call((0, tokens), [tokens], [tokens], True, True, True, np.empty((0, 4), np.int32), None)
        return PlannedCall(call, wrapper, batch.bounds[:0].view(-1, 4), None)

    def _planned(self, call: Call, scale: float, taken: list[_Wrapper]) -> _Wrapper:
        """Returns a free wrapper that is not in ``taken``, after planning it for calls of this shape."""
        backend = self.choose(call)
        free = (w for w in self.wrappers.get(backend, []) if w.free and not any(w is x for x in taken))
        mine = next(free, None) or self._add(backend)
        mine.wrapper.plan(
            self._indptr(call.q_lens),
            self._indptr(call.kv_lens),
            self.q_heads,
            self.kv_heads,
            self.head_dim,
            causal=call.causal,
            sm_scale=scale,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        if self.device.type == "cuda":
            mine.copied = torch.cuda.Event()
            mine.copied.record()
        return mine

    def run(
        self,
        calls: list[PlannedCall],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        gather: Gather,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Runs one layer; ``gather(k, v, pages)`` fills rows of the workspace from stored pages.

        out: see ``AttentionOps.extend``; sinks: see ``AttentionOps.decode``.
        """
        if not self.in_graphs:  # FlashAttention 3 takes any strides
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if len(calls) == 1 and not calls[0].call.gathers and sinks is None:  # a short prompt waits for this host code
            calls[0].wrapper.run(q, k, v, out=out)
            return
        size = max((sum(c.call.kv_lens) for c in calls if c.call.gathers), default=0)
        space = calls[0].space
        if space is None:
            space = torch.empty(2, size, *k.shape[1:], dtype=k.dtype, device=k.device)
        begin, lse = 0, torch.empty(0)  # first query and log-sum-exps of the calls that are being merged
        for planned in calls:
            call, mine = planned.call, slice(*planned.call.q)
            keys, values = k[mine], v[mine]
            if call.gathers:
                stored_k, stored_v = space[:, : sum(call.kv_lens)]
                gather(stored_k, stored_v, planned.pages)
                if planned.positions is not None:
                    append_tokens((stored_k, stored_v), planned.positions, (keys, values))
                keys, values = stored_k, stored_v
            if call.alone and sinks is None:
                planned.wrapper.run(q[mine], keys, values, out=out[mine])
            elif call.first:
                _, lse = planned.wrapper.run(q[mine], keys, values, out=out[mine], return_lse=True)
                begin = mine.start
            else:
                part, part_lse = planned.wrapper.run(q[mine], keys, values, return_lse=True)
                mine_lse = lse[mine.start - begin : mine.stop - begin]
                self.library.merge_state_in_place(out[mine], mine_lse, part, part_lse)
            if call.last and sinks is not None:
                scale_by_sinks(out[begin : begin + len(lse)], lse, sinks)

    def _add(self, backend: str) -> _Wrapper:
        wrapper = _Wrapper(self.library.BatchPrefillWithRaggedKVCacheWrapper(self._floats, "NHD", backend=backend))
        self.wrappers.setdefault(backend, []).append(wrapper)
        return wrapper

    def _indptr(self, lens: list[int]) -> torch.Tensor:
        """Returns the bounds of ``lens`` on the host, because FlashInfer plans there and copies the bounds itself."""
        bounds = torch.zeros(len(lens) + 1, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        bounds[1:] = torch.tensor(lens).cumsum(0)
        return bounds
