"""The Triton backend: ``AttentionOps`` on a GPU, or in Triton's interpreter for tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from triton import next_power_of_2

from sglang_kvq.attention.base import AttentionOps, ExtendBatch, LayerRotations
from sglang_kvq.attention.drafts import DraftBatch
from sglang_kvq.attention.planning.extend_costs import Geometry
from sglang_kvq.attention.planning.extend_plan import Slab, plan_slabs
from sglang_kvq.attention.planning.graph_tables import DequantizedTables, DirectTables, GraphTables, PlannedExtend
from sglang_kvq.attention.planning.short_extend import AS_MEASURED, ShortExtends, plan_short
from sglang_kvq.attention.planning.step_order import StepOrder
from sglang_kvq.attention.planning.step_plan import StepPlan, StepPlans
from sglang_kvq.attention.ragged import PlannedCall, RaggedPrefill, workspace_tokens
from sglang_kvq.attention.scores.paged_scores import PlannedScores
from sglang_kvq.attention.scores.scoring import ScoringPart
from sglang_kvq.attention.verification import Verification
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.config import MAX_GQA_GROUP
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.kernels.decode.decode_attention import SM_BYTES, DecodeLaunch, decode, decode_launch
from sglang_kvq.kernels.decode.merge import items_at_a_time, merge_splits
from sglang_kvq.kernels.device.arguments import Stored
from sglang_kvq.kernels.device.codes import PlaneRecord, Record, record_of
from sglang_kvq.kernels.device.common import INTERPRETED, can_overlap
from sglang_kvq.kernels.device.shape import value_dims
from sglang_kvq.kernels.extend.extend_attention import extend, extend_launch, is_cheap
from sglang_kvq.kernels.extend.flash_attention import flash_attention, plan_tiles, rows_per_tile
from sglang_kvq.kernels.extend.gather_pages import gather_pages
from sglang_kvq.kernels.quantize.keep_sink_tokens import restore_pages
from sglang_kvq.kernels.quantize.quantize_pages import quantize_slots, quantize_tokens
from sglang_kvq.kernels.quantize.rotate import FEW_TOKENS, Store, rotate, split_rotation

#: Most new tokens of a batch whose layers all write rotated queries, keys and values to the same buffers.
_REUSED_TOKENS = 1024
#: Most new tokens of a CUDA graph that reads stored pages directly, and fewest of one that dequantizes them first:
#: about 256 tokens take as long in both ways (``extend_costs``).
_MOST_DIRECT, _LEAST_DEQUANTIZED = 512, 256
#: Most tokens of the workspace of all CUDA graphs that dequantize first: a batch's stored tokens and its new ones.
_GRAPH_SPACE = 32768
#: Microseconds that a layer's attention may take longer in a CUDA graph than in the best way outside one. Outside, the
#: host launches it, which takes 180 to 360 us on a host of an H100, and the GPU waits.
_GRAPH_SAVES_US = 100.0


@dataclass
class BatchPlans:
    """Plans for a batch of new tokens, made at its first layer and reused at the others.

    Attributes:
        ways: the method that attends; the key says whether the layer's records are cheap (``extend.is_cheap``).
        slower_us: microseconds that the direct kernel takes longer in a layer of a CUDA graph; None if not predicted.
        short, calls, slabs: the plan of each way to attend: pages read directly, a library's calls, our kernel's slabs.
        scores: plans for scoring past keys, by request.
    """

    batch: ExtendBatch
    ways: dict[bool, Callable[..., None]] = field(default_factory=dict)
    slower_us: float | None = None
    short: PlannedExtend | None = None
    calls: list[PlannedCall] | None = None
    slabs: list[Slab] | None = None
    scores: dict[int, PlannedScores] = field(default_factory=dict)


class TritonOps(AttentionOps):
    """Runs the kernels of ``sglang_kvq.kernels`` over one ``PagePool``.

    Every buffer that a decode step uses is allocated here, so CUDA graphs keep their addresses.

    Args:
        q_heads: query heads of this worker, a multiple of the pool's KV heads, at most 16 per KV head.
        max_batch: the most requests in one decode batch; ``reserve`` raises it.
        slab_tokens: stored tokens that prefill dequantizes at a time; None for ``ragged.workspace_tokens``.
        launch: launch parameters of the decode kernel; None chooses by geometry.
        prefill: a library's attention for long chunks (``prefill_library.load``); None uses our own for all chunks.
        short: chooses the batches for the kernel that reads stored pages directly; None never uses that kernel.
    """

    def __init__(
        self,
        pool: PagePool,
        rotations: LayerRotations,
        q_heads: int,
        max_batch: int,
        slab_tokens: int | None = None,
        launch: DecodeLaunch | None = None,
        prefill: RaggedPrefill | None = None,
        short: ShortExtends | None = AS_MEASURED,
    ) -> None:
        super().__init__(pool, rotations)
        if pool.device.type != "cuda" and not INTERPRETED:
            raise KVQuantError(f"The Triton kernels need a GPU, not {pool.device}; on a CPU use ReferenceOps.")
        if q_heads % pool.kv_heads or not 1 <= q_heads // pool.kv_heads <= MAX_GQA_GROUP:
            raise KVQuantError(
                f"{q_heads} query heads over {pool.kv_heads} KV heads: the kernels need 1 to {MAX_GQA_GROUP} whole "
                "query heads per KV head."
            )
        _check_formats(pool)
        self.q_heads = q_heads
        self.slab_pages = (slab_tokens or workspace_tokens(pool.kv_heads, pool.head_dim)) // PAGE_SIZE
        self._records: list[Record | PlaneRecord] = [record_of(format, pool.page_stride) for format in pool.formats]
        self._stores = [(store, record_of(store.format, pool.page_stride)) for store in pool.stores]
        self._cheap = [is_cheap(record, pool.head_dim) for record in self._records]
        self._launches: list[DecodeLaunch] = [
            launch or decode_launch(pool.head_dim, q_heads // pool.kv_heads, record, pool.kv_heads)
            for record in self._records
        ]
        self._sms = multiprocessors(pool.device)
        # Views of each layer are made once, because host work per layer delays a prefill without CUDA graphs.
        k, v = (None if r is None else split_rotation(r) for r in (rotations.k, rotations.v))
        of_layers = (k if rotations.q is None else split_rotation(rotations.q), k, v)
        self._rotations = [tuple(None if r is None else r[i] for r in of_layers) for i in range(pool.layers)]
        mean = rotations.k_mean
        self._means = [None if mean is None else mean[i].contiguous() for i in range(pool.layers)]
        self._layers = [
            Stored(
                records=pool.records[layer],
                bf16_pages=pool.bf16_pages[layer],
                slot=pool.bf16_pages.stride(1),
                page_slot=pool.page_slot,
                row_pages=pool.row_pages,
                pages_row=pool.row_pages.stride(0),
                row_sink_end=pool.row_sink_end,
                row_history_end=pool.row_history_end,
            )
            for layer in range(pool.layers)
        ]
        outputs = rotations.outputs
        self._r_v_back = None if outputs is None else split_rotation(outputs.transpose(-1, -2))
        self.order = StepOrder(can_overlap(pool.device))
        self.prefill, self.short = prefill, short
        self.in_graphs = prefill is not None and prefill.in_graphs
        self.geometry = Geometry(q_heads, pool.kv_heads, pool.head_dim, self._sms)
        self._extend_plans: BatchPlans | None = None
        self._rotated: tuple[torch.Tensor | None, ...] = (None, None, None)
        self._graph_space: torch.Tensor | None = None
        self._branch: torch.cuda.Stream | None = None  # of graphs, for work beside attention
        self._capturing = False
        self._read: tuple[torch.Tensor, ...] | None = None  # by the branch; None if the graph has joined it
        self._outgrown: list[object] = []  # buffers whose addresses CUDA graphs may hold
        self._verifications: dict[int, Verification] = {}  # by the number of drafts
        self.max_batch = 0
        self.plans: list[StepPlan] = []
        self.layer_plans: list[StepPlan] = []
        self._partial = self._lse = torch.empty(0, device=pool.device)
        self.reserve(max_batch)

    def reserve(self, batch: int) -> None:
        if batch <= self.max_batch:
            return
        pool = self.pool
        if self.max_batch:
            self._outgrown.append((self.plans, self._partial, self._lse))
        self.max_batch = batch
        programs = pool.kv_heads * (pool.head_dim // value_dims(pool.head_dim))
        made = StepPlans(self._launches, programs, self._sms, batch, self.q_heads, pool.head_dim, pool.device)
        self.plans, self.layer_plans, self._partial, self._lse = made.plans, made.layers, made.partial, made.lse

    def reserve_drafts(self, batch: int, count: int) -> None:
        old = self._verifications.get(count)
        if old is not None and batch <= old.batch:
            return
        if old is not None:
            self._outgrown.append(old)
            batch = max(batch, 2 * old.batch)  # so that all outgrown ones together take no more than the last one
        launches = None if old is None else old.launches
        self._verifications[count] = self._verification(count, batch, launches)

    def _verification(self, count: int, batch: int, launches: list[DecodeLaunch] | None) -> Verification:
        return Verification(self.pool, self._records, self.q_heads, self._sms, count, batch, launches)

    def fit_programs(self, used: Sequence[int], drafts: int = 0) -> bool:
        """Plans no more programs than an SM holds at once, and tells if that changes a plan.

        Call it before steps are captured in CUDA graphs, which keep the addresses of plans.

        Args:
            used: bytes of shared memory of a program of each layer's decode kernel, as it was compiled.
            drafts: as for ``step_kind``.
        """
        planned = self._verifications[drafts].launches if drafts else self._launches
        sm_bytes = shared_memory(self.pool.device)
        fitting = [launch.fitting(n, sm_bytes) for launch, n in zip(planned, used)]
        if fitting == planned:
            return False
        if drafts:
            self._verifications[drafts] = self._verification(drafts, self._verifications[drafts].batch, fitting)
        else:
            batch, self.max_batch = self.max_batch, 0
            self._launches = fitting
            self.reserve(batch)
        return True

    def step_kind(self, requests: int, drafts: int) -> tuple[int, ...]:
        """Returns numbers that two batches share if the same compiled kernels serve a step of both.

        Args:
            drafts: drafts of a request that the step verifies, as for ``reserve_drafts``; 0 for a step that decodes.
        """
        plans = self._verifications[drafts].plans if drafts else self.plans
        chunks = [items_at_a_time(plan.count(requests), requests) for plan in plans]
        return next_power_of_2(requests), requests * max(drafts, 1) <= FEW_TOKENS, *chunks

    @contextmanager
    def in_capture(self) -> Iterator[None]:
        shared, self._rotated = self._rotated, (None, None, None)
        if self._branch is None and self.pool.device.type == "cuda":
            self._branch = torch.cuda.Stream(self.pool.device)
        self._capturing = True
        try:
            yield
        finally:
            self._rotated, self._capturing, self._read = shared, False, None

    def beside(self, work: Callable[[], None], *reads: torch.Tensor) -> None:
        """Does work on a stream of its own while a graph is captured.

        The kernels that store a short prompt's tokens are too small to fill the GPU.
        """
        if not self._capturing or self._branch is None:
            work()
            return
        self._branch.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._branch):
            work()
        self._read = reads  # kept, so that the graph does not use their memory for other tensors meanwhile

    def join(self) -> None:
        if self._read is not None and self._branch is not None:
            torch.cuda.current_stream().wait_stream(self._branch)
            self._read = None

    def rotate(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = rotate((q, k, v), self._rotations[layer], mean=self._means[layer])
        return q, k, v

    def rotate_output(self, layer: int, o: torch.Tensor) -> torch.Tensor:
        if self._r_v_back is None:
            return o
        kv = o[:, : self.pool.kv_heads]
        out: torch.Tensor = rotate((o, kv, kv), (self._r_v_back[layer], None, None))[0]
        return out

    def store_tokens(self, layer: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        rotate((k, k, v), (None, None, None), self._store(layer, loc))

    def rotate_and_store(
        self, layer: int, loc: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Rotates and stores in one launch, even if K and V are not rotated."""
        overlap, store = self.order.rotate(), self._store(layer, loc)
        out: torch.Tensor = rotate((q, k, v), self._rotations[layer], store, overlap, self._means[layer])[0]
        return out

    def rotate_and_keep(
        self, layer: int, loc: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotates and stores in one launch.

        In a short batch, each layer overwrites the previous layer's results, because allocating would take the host too
        long.
        """
        q, k, v = self._keep(layer, loc, (q, k, v), self._rotations[layer])
        return q, k, v

    def keep_tokens(
        self, layer: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _, r_k, r_v = self._rotations[layer]
        _, k, v = self._keep(layer, loc, (k, k, v), (None, r_k, r_v))
        return k, v

    def _keep(
        self,
        layer: int,
        loc: torch.Tensor,
        x: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotations: tuple[torch.Tensor | None, ...],
    ) -> tuple[torch.Tensor, ...]:
        store = self._store(layer, loc)
        x = rotate(x, rotations, store, mean=self._means[layer], keep=True, space=self._rotated)
        if x[1].shape[0] <= _REUSED_TOKENS:
            self._rotated = tuple([old if r is None else y for r, y, old in zip(rotations, x, self._rotated)])
        return x

    def quantize_tokens(
        self, layer: int, first: torch.Tensor, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        pool = self.pool
        quantize_tokens(pool.records[layer], self._records[layer], pool.ranks[layer], first, pages, k, v)

    def quantize_slots(self, slots: torch.Tensor, pages: torch.Tensor, count: torch.Tensor) -> None:
        pool = self.pool
        for store, record in self._stores:
            rest = (pool.ranks, pool.bf16_pages, slots, pages, count, self._sms * 16)
            quantize_slots(store.records, record, store.layer_ids, *rest)

    def restore_pages(self, pages: torch.Tensor) -> None:
        pool = self.pool
        if pool.sink_cache is None:
            return
        tables = (pool.page_slot, pool.bf16_pages, pool.sink_cache.entry, pool.sink_cache.tokens)
        for store, record in self._stores:
            restore_pages(pages, store.records, record, store.layer_ids, *tables)

    def plan_attention(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
        self.reserve(len(rows))
        for plan in self.plans:
            plan.make(rows, seq_lens, self.pool)
        self.order.plan()

    def decode(
        self,
        layer: int,
        q: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        plan = self.layer_plans[layer]
        items = plan.items(len(q))
        partial, lse = self._partial[: len(items)], self._lse[: len(items)]
        launch, overlap = self._launches[layer], self.order.attend()
        decode(partial, lse, q, items, scale, *self._stored(layer), launch=launch, overlap=overlap)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        merge_splits(out, partial, lse, plan.spans[: len(q)], self.order.merge(), sinks=sinks)
        return out

    def plan_drafts(self, drafts: DraftBatch) -> None:
        self.reserve_drafts(len(drafts.rows), drafts.count)
        self._verifications[drafts.count].plan(drafts)
        self.order.plan()

    def verify(
        self,
        layer: int,
        q: torch.Tensor,
        drafts: DraftBatch,
        scale: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        _, stored = self._stored(layer)
        return self._verifications[drafts.count].run(layer, q, drafts, scale, stored, sinks)

    def extend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: ExtendBatch,
        scale: float,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        plans, cheap = self._plans_of(batch), self._cheap[layer]
        attend = plans.ways.get(cheap)
        if attend is None:
            attend = plans.ways[cheap] = self._way(batch, cheap)
        attend(layer, out, q, k, v, plans, scale, sinks)
        return out

    def graph_tables(self, tokens: int, requests: int) -> list[GraphTables]:
        tables: list[GraphTables] = []
        if not self.in_graphs:
            return tables
        rows = min(_GRAPH_SPACE, self.slab_pages * PAGE_SIZE)
        if _LEAST_DEQUANTIZED <= tokens <= rows // 2:
            if self._graph_space is None:
                shape = (2, rows, self.pool.kv_heads, self.pool.head_dim)
                self._graph_space = torch.zeros(shape, dtype=torch.bfloat16, device=self.pool.device)
            tables.append(DequantizedTables(tokens, requests, self._graph_space))
        if tokens <= _MOST_DIRECT and self.short is not None:
            launch = self.short.launch or extend_launch(self.pool.head_dim)
            tables.append(DirectTables(tokens, requests, self.geometry, launch, self.pool.device))
        return tables

    def suits_graph(self, batch: ExtendBatch, tables: GraphTables) -> bool:
        plans = self._plans_of(batch)
        if plans.slower_us is None:
            plans.slower_us = self._slower_us(batch)
        if isinstance(tables, DequantizedTables):
            return tables.hold(batch.prefix_lens) and plans.slower_us > 0
        return plans.slower_us <= _GRAPH_SAVES_US

    def _slower_us(self, batch: ExtendBatch) -> float:
        """Predicts how much longer the direct kernel takes than dequantizing first, in the layers where it loses most.

        The batch must have a stored prefix.
        """
        if self.short is None:
            return math.inf
        lens, others = (batch.prefix_lens, batch.new_lens), self._instead(batch)
        return max(self.short.slower_us(*lens, self.geometry, cheap, *others) for cheap in set(self._cheap))

    def _plans_of(self, batch: ExtendBatch) -> BatchPlans:
        if self._extend_plans is None or self._extend_plans.batch is not batch:
            self._extend_plans = BatchPlans(batch)
        return self._extend_plans

    def _way(self, batch: ExtendBatch, cheap: bool) -> Callable[..., None]:
        """Returns the method that attends in layers whose records are cheap, or are not (``extend.is_cheap``)."""
        if isinstance(batch.tables, DirectTables) and self.short is not None:  # ``graph_tables``
            return partial(self._extend_short, self.short)
        if (batch.bounds is not None or batch.tables is not None) and self.prefill is not None:  # ``in_graphs``
            return partial(self._extend_ragged, self.prefill)
        lens = batch.prefix_lens, batch.new_lens
        if self.short is not None and self.short.suits(*lens, self.geometry, cheap, *self._instead(batch)):
            return partial(self._extend_short, self.short)
        library = self._library(batch)
        return partial(self._extend_ragged, library) if library else self._extend_slabs

    def _instead(self, batch: ExtendBatch) -> tuple[int, bool]:
        """Returns the workspace's tokens if prefixes are dequantized first, and whether a library then attends."""
        library = self._library(batch)
        return library.capacity if library else self.slab_pages * PAGE_SIZE, library is not None

    def _library(self, batch: ExtendBatch) -> RaggedPrefill | None:
        """Returns the library that would attend to dequantized prefixes; None if our own kernel would."""
        return self.prefill if self.prefill is not None and self.prefill.suits(batch.new_lens) else None

    def _extend_short(
        self,
        short: ShortExtends,
        layer: int,
        out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plans: BatchPlans,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> None:
        """Attends with the kernel that reads stored pages directly; writes the result to ``out``."""
        if plans.short is None:
            tables = plans.batch.tables
            if isinstance(tables, DirectTables):
                plans.short = tables.plan
            else:
                plans.short = plan_short(plans.batch, short, self.geometry, self.pool.device)
        plan, rows = plans.short, plans.batch.rows
        partial = torch.empty(plan.partials, *q.shape[1:], dtype=torch.float32, device=q.device)
        lse = torch.empty(partial.shape[:2], dtype=torch.float32, device=q.device)
        how = {"launch": plan.launch, "sinks": sinks}
        extend(out, partial, lse, q, (k, v), plan.items, rows, scale, *self._stored(layer), **how)
        if plan.partials:
            merge_splits(out, partial, lse, plan.spans, least=2, sinks=sinks)

    def _extend_ragged(
        self,
        prefill: RaggedPrefill,
        layer: int,
        out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plans: BatchPlans,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> None:
        """Dequantizes prefixes, then attends with a library's kernel."""
        if plans.calls is None:
            plans.calls = prefill.plan(plans.batch, scale)

        def gather(keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor) -> None:
            gather_pages(keys, values, plans.batch.rows, pages, *self._stored(layer))

        prefill.run(plans.calls, q, k, v, gather, out, sinks)

    def _extend_slabs(
        self,
        layer: int,
        out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plans: BatchPlans,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> None:
        """Dequantizes prefixes slab by slab and attends to each with our own kernel."""
        batch = plans.batch
        rows = rows_per_tile(self.pool.head_dim, max(batch.new_lens))
        if plans.slabs is None:
            plans.slabs = plan_slabs(
                batch.prefix_lens,
                batch.new_lens,
                self.slab_pages,
                lambda new, stored: plan_tiles(new, stored, rows),
                self.pool.device,
            )
        slabs = plans.slabs
        state = None
        if len(slabs) > 1:
            state = tuple(torch.empty(*q.shape[:2], n, dtype=torch.float32, device=q.device) for n in (q.shape[2], 2))
        space = None
        if most := len(slabs[0].pages) * PAGE_SIZE:
            space = torch.empty(2, most, *k.shape[1:], dtype=k.dtype, device=k.device)
        for i, slab in enumerate(slabs):
            stored = k, v  # placeholders: if a slab has no pages, its tiles read no stored keys
            if space is not None and (count := len(slab.pages) * PAGE_SIZE):
                stored = space[0, :count], space[1, :count]
                gather_pages(*stored, batch.rows, slab.pages, *self._stored(layer))
            ends = {"first": i == 0, "last": slab is slabs[-1]}
            flash_attention(out, state, q, (k, v), stored, slab.tiles, scale, rows=rows, sinks=sinks, **ends)

    def score_keys(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, batch: ExtendBatch, part: ScoringPart, scale: float
    ) -> None:
        plans = self._plans_of(batch).scores
        planned = plans.get(part.request)
        if planned is None or planned.part is not part:
            planned = plans[part.request] = PlannedScores.of(part, self.slab_pages, self.pool.device)

        def gather(keys: torch.Tensor, pages: torch.Tensor) -> None:
            gather_pages(keys, None, batch.rows, pages, *self._stored(layer))

        planned.run(part.values[layer], q, k, scale, self._sms, gather)

    def _stored(self, layer: int) -> tuple[Record | PlaneRecord, Stored]:
        """Returns the arguments for kernels that read a layer's stored pages."""
        return self._records[layer], self._layers[layer]

    def _store(self, layer: int, loc: torch.Tensor) -> Store:
        """Returns the destination of the keys and values of the tokens at ``loc``."""
        stored = self._layers[layer]
        return Store(stored.bf16_pages, stored.slot, self.pool.places, stored.page_slot, loc)


def multiprocessors(device: torch.device) -> int:
    """Returns the device's streaming multiprocessors; 2 in the interpreter."""
    return 2 if INTERPRETED else int(torch.cuda.get_device_properties(device).multi_processor_count)


def shared_memory(device: torch.device) -> int:
    """Returns the bytes of shared memory of each of the device's multiprocessors; a Hopper GPU's on a CPU."""
    on_gpu = device.type == "cuda"
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor if on_gpu else SM_BYTES)


def _check_formats(pool: PagePool) -> None:
    """Refuses formats that the kernels do not support; no method uses them.

    Raises:
        KVQuantError: the message names the first such layer and its codes.
    """
    for layer, format in enumerate(pool.formats):
        if not isinstance(format, PageFormat):
            continue
        if format.v.axis == "channel" or (format.k.axis == "channel" and format.run < 16):
            raise KVQuantError(
                f"layer {layer}: keys in {format.k.describe()} with runs of {format.run} tokens, values in "
                f"{format.v.describe()}: the GPU kernels scale only keys per channel, over 16 tokens or more. Use 16, "
                "32 or 64, or a CPU."
            )
