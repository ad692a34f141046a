"""The Triton backend: ``AttentionOps`` on a GPU, or in Triton's interpreter for tests."""

from __future__ import annotations

import torch

from sglang_kvq.attention.base import AttentionOps, ExtendBatch, LayerRotations
from sglang_kvq.attention.extend_costs import Geometry
from sglang_kvq.attention.extend_plan import Slab, plan_slabs
from sglang_kvq.attention.ragged import PlannedCall, RaggedPrefill, workspace_tokens
from sglang_kvq.attention.short_extend import PlannedExtend, ShortExtends, plan_short
from sglang_kvq.attention.step_plan import StepPlan
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.config import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.kernels.codes import record_of
from sglang_kvq.kernels.common import INTERPRETED, can_overlap
from sglang_kvq.kernels.decode import DecodeLaunch, decode, decode_launch, is_two_bit, value_dims
from sglang_kvq.kernels.extend import extend
from sglang_kvq.kernels.flash import flash_attention, plan_tiles, rows_per_tile
from sglang_kvq.kernels.gather import gather_pages
from sglang_kvq.kernels.merge import merge_splits
from sglang_kvq.kernels.quantize import quantize_slots, quantize_tokens
from sglang_kvq.kernels.rotate import rotate, split_rotation
from sglang_kvq.kernels.store import store_tokens


class TritonOps(AttentionOps):
    """Kernels of ``sglang_kvq.kernels`` over one ``PagePool``.

    Every buffer a decode step touches is allocated here, so CUDA graphs keep their addresses.

    Args:
        q_heads: query heads of this worker, a multiple of the pool's KV heads, at most 16 to each.
        max_batch: the most requests in one decode batch; ``reserve`` raises it.
        slab_tokens: stored tokens that prefill dequantizes at a time; None for ``ragged.workspace_tokens``.
        launch: of the decode kernel; None chooses by geometry.
        prefill: FlashInfer's attention for long chunks (``ragged.load``); None uses our own for all.
        short: which batches the kernel that reads stored pages directly serves; None for none.
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
        short: ShortExtends | None = ShortExtends(),  # noqa: B008  (frozen)
    ) -> None:
        super().__init__(pool, rotations)
        if pool.device.type != "cuda" and not INTERPRETED:
            raise KVQuantError(f"The Triton kernels need a GPU, not {pool.device}; on a CPU use ReferenceOps.")
        if q_heads % pool.kv_heads or not 1 <= q_heads // pool.kv_heads <= 16:
            raise KVQuantError(
                f"{q_heads} query heads over {pool.kv_heads} KV heads: the kernels need 1 to 16 whole query heads per KV head."
            )
        _check_formats(pool)
        self.q_heads = q_heads
        self.slab_pages = (slab_tokens or workspace_tokens(pool.kv_heads, pool.head_dim)) // PAGE_SIZE
        self._records = [record_of(format) for format in pool.formats]
        self._launches = [launch or decode_launch(pool.head_dim, q_heads // pool.kv_heads, r) for r in self._records]
        self._sms = 2 if INTERPRETED else torch.cuda.get_device_properties(pool.device).multi_processor_count
        self._r_k = None if rotations.k is None else split_rotation(rotations.k)
        self._r_q = self._r_k if rotations.q is None else split_rotation(rotations.q)
        self._r_v = None if rotations.v is None else split_rotation(rotations.v)
        self._r_v_back = None if rotations.v is None else split_rotation(rotations.v.transpose(-1, -2))
        self.max_batch = 0
        self._outgrown: list[object] = []  # buffers whose addresses CUDA graphs may hold
        self.reserve(max_batch)
        self._can_overlap = can_overlap(pool.device)
        self._rotated = False  # some layer, since the step's plan
        self._just_rotated = False  # by the last launch
        self.prefill, self.short = prefill, short
        self.geometry = Geometry(q_heads, pool.kv_heads, pool.head_dim, self._sms)
        self._routes: tuple[ExtendBatch, dict[bool, bool]] | None = (
            None  # is a batch short, for 2-bit layers and others
        )
        self._planned_short: tuple[ExtendBatch, PlannedExtend] | None = None
        self._planned: tuple[ExtendBatch, int, list[Slab]] | None = None
        self._planned_calls: tuple[ExtendBatch, list[PlannedCall]] | None = None

    def reserve(self, batch):
        if batch <= self.max_batch:
            return
        pool = self.pool
        if self.max_batch:
            self._outgrown.append((self.plans, self._partial, self._lse))
        self.max_batch = batch
        # Layers of which an SM holds as many programs share a plan.
        programs = pool.kv_heads * (pool.head_dim // value_dims(pool.head_dim))
        plans = {
            held: StepPlan(launch, programs, self._sms, batch, pool.device)
            for held, launch in {launch.programs_per_sm: launch for launch in self._launches}.items()
        }
        self.plans, self.layer_plans = (
            list(plans.values()),
            [plans[launch.programs_per_sm] for launch in self._launches],
        )
        shape = (max(plan.most for plan in self.plans), self.q_heads, pool.head_dim)
        self._partial = torch.empty(shape, dtype=torch.float32, device=pool.device)
        self._lse = torch.empty(shape[:2], dtype=torch.float32, device=pool.device)

    def rotate(self, layer, q, k, v):
        return rotate((q, k, v), self._rotations_of(layer))

    def rotate_output(self, layer, o):
        if self._r_v_back is None:
            return o
        kv = o[:, : self.pool.kv_heads]
        return rotate((o, kv, kv), (self._r_v_back[layer], None, None))[0]

    def store_tokens(self, layer, loc, k, v):
        store_tokens(self.pool.overlays[layer], self.pool.page_slot, loc, k, v)

    def rotate_and_store(self, layer, loc, q, k, v):
        """One launch for both, whether K and V are rotated or not.

        From a step's plan to its last layer nothing writes items or tables. So ``decode`` may start while this runs, and
        this while the launch before it runs, unless that one is the plan.
        """
        store = (self.pool.overlays[layer], self.pool.page_slot, loc)
        early = self._can_overlap and self._rotated
        self._rotated = self._just_rotated = True
        return rotate((q, k, v), self._rotations_of(layer), store, overlap=self._can_overlap, early=early)[0]

    def quantize_tokens(self, layer, first, pages, k, v):
        pool = self.pool
        quantize_tokens(pool.records[layer], self._records[layer], pool.ranks[layer], first, pages, k, v)

    def quantize_slots(self, slots, pages, count):
        pool = self.pool
        for store in pool.stores:
            record = record_of(store.format)
            rest = (pool.ranks, pool.overlays, slots, pages, count, self._sms * 16)
            quantize_slots(store.records, record, store.layer_ids, *rest)

    def plan_attention(self, rows, seq_lens):
        self.reserve(len(rows))
        for plan in self.plans:
            plan.make(rows, seq_lens, self.pool)
        self._rotated = self._just_rotated = False

    def decode(self, layer, q, rows, seq_lens, scale):
        plan = self.layer_plans[layer]
        items = plan.items(len(q))
        partial, lse = self._partial[: len(items)], self._lse[: len(items)]
        overlaps = {"early": self._can_overlap and self._just_rotated, "overlap": self._can_overlap}
        self._just_rotated = False
        decode(partial, lse, q, items, scale, launch=self._launches[layer], **overlaps, **self._stored(layer))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        merge_splits(out, partial, lse, plan.spans[: len(q)], early=self._can_overlap)
        return out

    def extend(self, layer, q, k, v, batch: ExtendBatch, scale):
        if self._is_short(layer, batch):
            return self._extend_short(layer, q, k, v, batch, scale)
        if calls := self._calls_of(batch, scale):
            gather = lambda keys, values, pages: gather_pages(keys, values, batch.rows, pages, **self._stored(layer))  # noqa: E731
            return self.prefill.run(calls, q, k, v, gather)
        rows, slabs = self._plan_of(batch)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        state = None
        if len(slabs) > 1:
            state = tuple(torch.empty(*q.shape[:2], n, dtype=torch.float32, device=q.device) for n in (q.shape[2], 2))
        space = torch.empty(2, len(slabs[0].pages) * PAGE_SIZE, *k.shape[1:], dtype=k.dtype, device=k.device)
        for i, slab in enumerate(slabs):
            stored = tuple(space[:, : len(slab.pages) * PAGE_SIZE])
            if len(slab.pages):
                gather_pages(*stored, batch.rows, slab.pages, **self._stored(layer))
            ends = {"first": i == 0, "last": slab is slabs[-1]}
            flash_attention(out, state, q, (k, v), stored, slab.tiles, scale, rows=rows, **ends)
        return out

    def _is_short(self, layer: int, batch: ExtendBatch) -> bool:
        """Whether the kernel that reads stored pages directly serves this layer; decided once for all layers of a kind."""
        if self.short is None:
            return False
        if self._routes is None or self._routes[0] is not batch:
            self._routes = (batch, {})
        routes, two_bit = self._routes[1], is_two_bit(self._records[layer], self.pool.head_dim)
        if two_bit not in routes:
            flashinfer = self.prefill is not None and self.prefill.suits(batch.new_lens)
            capacity = self.prefill.capacity if flashinfer else self.slab_pages * PAGE_SIZE
            lens = (batch.prefix_lens, batch.new_lens)
            routes[two_bit] = self.short.suits(*lens, self.geometry, two_bit, capacity, flashinfer)
        return routes[two_bit]

    def _extend_short(self, layer, q, k, v, batch: ExtendBatch, scale):
        plan = self._short_plan_of(batch)
        partial = torch.empty(plan.partials, *q.shape[1:], dtype=torch.float32, device=q.device)
        lse = torch.empty(partial.shape[:2], dtype=torch.float32, device=q.device)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        extend(out, partial, lse, q, (k, v), plan.items, batch.rows, scale, launch=plan.launch, **self._stored(layer))
        if plan.partials:
            merge_splits(out, partial, lse, plan.spans, least=2)
        return out

    def _short_plan_of(self, batch: ExtendBatch) -> PlannedExtend:
        """The batch's items; planned at its first layer, kept for the others."""
        if self._planned_short is None or self._planned_short[0] is not batch:
            plan = plan_short(batch, self.short, self.geometry, self.pool.device)
            self._planned_short = (batch, plan)
        return self._planned_short[1]

    def _calls_of(self, batch: ExtendBatch, scale: float) -> list[PlannedCall] | None:
        """The batch's FlashInfer calls, planned at its first layer; None if our own kernel does it."""
        if self.prefill is None or not self.prefill.suits(batch.new_lens):
            return None
        if self._planned_calls is None or self._planned_calls[0] is not batch:
            self._planned_calls = (batch, self.prefill.plan(batch, scale))
        return self._planned_calls[1]

    def _plan_of(self, batch: ExtendBatch) -> tuple[int, list[Slab]]:
        """The batch's tile height and slabs; planned at its first layer, kept for the others."""
        if self._planned is None or self._planned[0] is not batch:
            rows = rows_per_tile(self.pool.head_dim, max(batch.new_lens))
            slabs = plan_slabs(
                batch.prefix_lens,
                batch.new_lens,
                self.slab_pages,
                lambda new, stored: plan_tiles(new, stored, rows),
                self.pool.device,
            )
            self._planned = (batch, rows, slabs)
        return self._planned[1:]

    def _stored(self, layer: int) -> dict:
        """What kernels that read stored pages take."""
        pool = self.pool
        return {
            "record": self._records[layer],
            "records": pool.records[layer],
            "overlays": pool.overlays[layer],
            "page_slot": pool.page_slot,
            "row_pages": pool.row_pages,
            "row_sink_end": pool.row_sink_end,
            "row_history_end": pool.row_history_end,
        }

    def _rotations_of(self, layer: int) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if r is None else r[layer] for r in (self._r_q, self._r_k, self._r_v))


def _check_formats(pool: PagePool) -> None:
    """Refuse what no method asks for and the kernels do not do.

    Raises:
        KVQuantError: names the first such layer and its codes.
    """
    for layer, format in enumerate(pool.formats):
        if format.v.axis == "channel" or (format.k.axis == "channel" and format.run < 16):
            raise KVQuantError(
                f"layer {layer}: keys in {format.k.describe()} with runs of {format.run} tokens, values in "
                f"{format.v.describe()}: the GPU kernels scale only keys per channel, over 16 tokens or more; use 16, "
                "32 or 64, or a CPU."
            )
