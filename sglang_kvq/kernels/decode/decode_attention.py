"""Decode attention: split-KV partial results over INT2 records and BF16 pages, in one launch.

A program takes one KV head of one item of the plan (``split_work.split_work``): some pages of one request's history,
some of its BF16 copies (sinks, window, the page being filled), rarely both. With codes c in 0..3, scale s and offset z
per token, and queries q:

    q k     = s_k (q c_k) + z_k sum(q)            the affine terms stay outside the product
    sum p v = sum (p s_v) c_v + sum p z_v         s_v is folded into p, z_v is one number per query head

If a head has several groups, q k is a sum over them. p is computed once and multiplied by each group's s_v.

Both products run on INT8 tensor cores, with tokens (then dims of V) on the 16-row side and query heads on the 8-column
side. Codes are packed in memory in the order in which the operand needs them in registers. Each head has two columns,
the high and low part of its INT8 split: x = unit (high + low / 256), 15 bits.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.kernels.decode.history_fp16 import has_int8_keys, history_half
from sglang_kvq.kernels.decode.history_general import history_general
from sglang_kvq.kernels.decode.history_k_int8_v_fp16 import history_half_int8
from sglang_kvq.kernels.decode.history_planes_fp16 import history_half_planes
from sglang_kvq.kernels.decode.history_planes_int8 import history_planes
from sglang_kvq.kernels.decode.split_work import BF16_PAGE_TILE, WorkCosts, load_item
from sglang_kvq.kernels.device.arguments import Stored, View, view
from sglang_kvq.kernels.device.codes import PlaneRecord, Record
from sglang_kvq.kernels.device.common import INTERPRETED, NO_OVERLAP, PAGE, Overlap, dot, page_of, to_bf16
from sglang_kvq.kernels.device.launch import start_kernel
from sglang_kvq.kernels.device.plane_codes import row_dims
from sglang_kvq.kernels.device.shape import Shape, shape_of, value_dims
from sglang_kvq.kernels.device.softmax import LOG2E, NEVER, Softmax, first_columns

#: Bytes of shared memory of an SM (Hopper); then the bytes of it that are reserved for each program.
SM_BYTES, _RESERVED_BYTES = 228 * 1024, 1024

#: Possible results of ``decode_routine``.
ROUTINES = (
    "history_general",
    "history_fp16",
    "history_k_int8_v_fp16",
    "history_planes_int8",
    "history_planes_fp16",
)

#: Share of the programs in all waves that must be busy; otherwise another wave is tried.
BUSY = 0.9


@dataclass(frozen=True)
class DecodeLaunch:
    """Compile options of the kernel, and inputs of its plan.

    Attributes:
        stages, registers: compiler options.
        programs_per_sm: one-warp programs that an SM holds at once.
        half_pages: pages per iteration of ``history_fp16.history_half``, 1 or 2, or of ``history_planes_fp16``, 2; 0
            for INT8 products.
        shared_weights: True if weights become operands of ``history_planes_fp16`` through shared memory.
        bf16_page_cost: ``WorkCosts.bf16_page``.
    """

    stages: int
    registers: int
    programs_per_sm: int
    half_pages: int = 0
    shared_weights: bool = False
    bf16_page_cost: int = 5

    @property
    def costs(self) -> WorkCosts:
        """Costs for plans of this launch's items."""
        return WorkCosts(self.bf16_page_cost, turn=1 if self.half_pages == 1 else 2)

    def fitting(self, used: int, sm_bytes: int) -> "DecodeLaunch":
        """Returns the launch without the programs that do not fit an SM with ``used`` bytes of shared memory each."""
        return replace(self, programs_per_sm=_most_programs(self.programs_per_sm, used, sm_bytes))

    def items(self, batch: int, programs: int, sms: int) -> int:
        """Returns the number of items of a plan for ``batch`` requests, ``programs`` programs each.

        The items fill whole waves: the fewest at which a batch of equal requests keeps ``BUSY`` of the programs busy,
        or the best of the eight smallest numbers.
        """
        wave = max(sms * self.programs_per_sm // programs, 1)
        least = -(-batch // wave)
        busy = {waves: wave * waves // batch * batch / (wave * waves) for waves in range(least, least + 8)}
        good = [waves for waves, share in busy.items() if share >= BUSY]
        return wave * (good[0] if good else max(busy, key=busy.get))


class Drafts(NamedTuple):
    """Several query tokens of each request, its last ones, which see the stored tokens and some of each other.

    Attributes:
        seen: int64 ``[B, count]``, last axis contiguous. Bit j of entry (i, t) is set if draft t of request i sees its
            draft j.
        row: elements of a row of ``seen``.
        count: drafts of a request, at most 63.
        of_chunk: number of drafts whose attention one program computes.
    """

    seen: torch.Tensor
    row: int
    count: int
    of_chunk: int

    @property
    def chunks(self) -> int:
        return -(-self.count // self.of_chunk)


def decode_launch(head_dim: int, gqa_group: int, record: Record | PlaneRecord, kv_heads: int) -> DecodeLaunch:
    """Returns the launch for a geometry and its codes; ``gqa_group`` query heads share each of the worker's KV heads.

    Measurements favor twelve programs on an SM, or eight if the loop would spill much
    (``benchmarks/formats.py --sweep``, ``benchmarks/kernels.py --sweep-heads``). Numbers in between lose up to half,
    because an SM's four schedulers then have unequal shares.
    """
    if suits_half(record, head_dim) and not isinstance(record, PlaneRecord):
        if head_dim == 64 and gqa_group <= 8:
            return DecodeLaunch(stages=3, registers=168, programs_per_sm=12, half_pages=2)
        if head_dim == 128 and gqa_group > 4:
            if gqa_group > 8:
                return DecodeLaunch(4, registers=255, programs_per_sm=8, half_pages=1, bf16_page_cost=3)
            if kv_heads == 1:  # each program has few pages, and fewer programs begin sooner
                return DecodeLaunch(4, registers=255, programs_per_sm=8, half_pages=1, bf16_page_cost=4)
            return DecodeLaunch(4, registers=168, programs_per_sm=12, half_pages=1, bf16_page_cost=4)
    if isinstance(record, PlaneRecord):
        # With up to four heads a product is half empty, yet at 64 dims it takes fewer instructions.
        if suits_half(record, head_dim) and (gqa_group > 4 or head_dim == 64):
            return _half_planes_launch(head_dim, gqa_group, record)
        return _planes_launch(head_dim, gqa_group, record)
    if gqa_group > 8:  # spills in any case: more heads need more accumulators
        shape = shape_of(1, head_dim, gqa_group)
        copies = 4 * record.bytes * shape.DP // head_dim + 8 * shape.INT8_JP * shape.HEADS
        return DecodeLaunch(stages=3 if copies <= _program_bytes(8) else 2, registers=255, programs_per_sm=8)
    wide = head_dim > 128 or (gqa_group > 4 and (head_dim > 64 or not is_fast(record)))
    four_bits = any(codes.bits == 4 for codes in (record.k, record.v)) and not record.k.channel
    if wide or (head_dim > 64 and (four_bits or record.k.centred)):
        return DecodeLaunch(stages=2, registers=255, programs_per_sm=8)
    return DecodeLaunch(
        stages=2, registers=160 if is_two_bit(record, head_dim) and gqa_group <= 4 else 168, programs_per_sm=12
    )


def _planes_launch(head_dim: int, gqa_group: int, record: PlaneRecord) -> DecodeLaunch:
    """Returns the launch for records of planes with INT8 products.

    A third stage hides more latency, if the copies of all programs fit in an SM's shared memory.
    """
    wide = head_dim > 128 or gqa_group > 4
    programs, shape = 8 if wide else 12, shape_of(1, head_dim, gqa_group)
    page = _page_bytes(record, shape.INT8_JP, shape.VP)
    operands = 4 * shape.INT8_JP * 2 * shape.HEADS
    stages = 3 if 4 * page + operands <= _program_bytes(programs) else 2
    fitting = _most_programs(programs, 2 * (stages - 1) * page + operands)
    return DecodeLaunch(stages, registers=255 if wide else 168, programs_per_sm=fitting)


def _half_planes_launch(head_dim: int, gqa_group: int, record: PlaneRecord) -> DecodeLaunch:
    """Returns the launch for records of planes with FP16 products.

    If shared memory is short, a third stage has priority. With more than eight heads, shared weights have priority,
    because the loop would spill otherwise.
    """
    wide = gqa_group > 8 or head_dim > 64
    programs = 8 if wide else 12
    shape, room = shape_of(1, head_dim, gqa_group), _program_bytes(programs)
    page = _page_bytes(record, shape.JP, shape.VP)
    row = 2 * max(shape.HEADS, 8)  # bytes of an operand's columns
    operands = sum(cell.shares * len(cell.fields) for cell in record.k.cells) * shape.JP * row  # of queries
    weights = 2 * PAGE_SIZE * row
    stages = 3 if 4 * page + operands + (weights if gqa_group > 8 else 0) <= room else 2
    copies = 2 * (stages - 1) * page + operands
    fitting, shared_weights = _most_programs(programs, copies), copies + weights <= room
    return DecodeLaunch(stages, 255 if wide else 168, fitting, half_pages=2, shared_weights=shared_weights)


def _page_bytes(record: PlaneRecord, columns: int, dims: int) -> int:
    """Returns the bytes of a page's copy in whole tiles: K's planes padded to ``columns``, V's dims to ``dims``."""
    return PAGE_SIZE * (columns * sum(record.k.widths) + dims // 4 * sum(record.v.widths)) // 8 + 2 * PAGE_SIZE


def _program_bytes(programs: int) -> int:
    """Returns the shared memory of each of ``programs`` programs on an SM."""
    return SM_BYTES // programs - _RESERVED_BYTES


def _most_programs(programs: int, used: int, sm_bytes: int = SM_BYTES) -> int:
    """Returns ``programs``, or the most programs that fit on an SM with ``used`` bytes of shared memory each."""
    return min(programs, sm_bytes // (used + _RESERVED_BYTES))


def is_fast(record: Record | PlaneRecord) -> bool:
    """Tells if records hold uniform 2-bit codes with one scale and offset per token and group."""
    if isinstance(record, PlaneRecord):
        return False
    k, v = record.k, record.v
    plain = all(c.bits == 2 and c.uniform and c.has_offset and not c.channel for c in (k, v))
    return plain and k.group == v.group and not k.centred


def is_two_bit(record: Record | PlaneRecord, head_dim: int) -> bool:
    """Tells if records are fast and of the largest group, so that ``extend.history.history_two_bits`` reads them."""
    return is_fast(record) and record.k.group == value_dims(head_dim)


def suits_half(record: Record | PlaneRecord, head_dim: int) -> bool:
    """Tells if FP16 products can read these records: two bits with one group per row, or planes."""
    return head_dim <= value_dims(head_dim) and (isinstance(record, PlaneRecord) or is_two_bit(record, head_dim))


def decode_routine(record: Record | PlaneRecord, shape: Shape, half_pages: int) -> str:
    """Returns the module whose loop reads these records, one of ``ROUTINES``; ``half_pages`` is the launch's."""
    if isinstance(record, PlaneRecord):
        return "history_planes_fp16" if half_pages else "history_planes_int8"
    if half_pages:
        return "history_k_int8_v_fp16" if has_int8_keys(shape) else "history_fp16"
    return "history_general"


def decode(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    items: torch.Tensor,
    scale: float,
    record: Record | PlaneRecord,
    stored: Stored,
    *,
    launch: DecodeLaunch,
    overlap: Overlap = NO_OVERLAP,
    drafts: Drafts | None = None,
    plain: bool = INTERPRETED,
) -> None:
    """Computes partial results of every item.

    The drafts of a chunk, if there are any, count as further query heads of each KV head. q_heads below is then
    ``kv_heads * of_chunk * gqa_group``; a KV head's heads are ordered by draft. q has ``B * chunks`` tokens, and
    results are ``[items, chunks * q_heads]``.

    Args:
        out: float32 ``[items, q_heads, D]``; rows of unused items stay untouched.
        lse: float32 ``[items, q_heads]``, log2 of the softmax's denominator; rows of unused items stay untouched.
        q: BF16 ``[B, q_heads, D]``, rotated; last axis contiguous.
        items: from ``split_work.split_work``.
        record, stored: of one layer.
        launch: from ``decode_launch``.
        overlap: with an early start, the previous launch may write queries and BF16 pages of new tokens. It must not
            write items, which are read before it has ended. The next launch starts when programs of this one end.
        drafts: None for one query token of each request.
        plain: unpacks codes without inline assembly, as the interpreter requires.

    Raises:
        KVQuantError: the launch has FP16 products, but these records do not support them.
    """
    count, q_heads, d = len(out), q.shape[1], q.shape[2]
    if launch.half_pages and not suits_half(record, d):
        raise KVQuantError(
            f"{launch}: products in FP16 need planes, or uniform 2-bit codes with one group per row, at most 128 "
            "dims. Use half_pages=0."
        )
    if launch.half_pages == 1 and isinstance(record, PlaneRecord):
        raise KVQuantError(f"{launch}: records of planes are read two pages per iteration. Use half_pages=2.")
    shape = shape_of(stored.records.shape[1], d, q_heads)
    chunks = 1 if drafts is None else drafts.chunks
    start_kernel(
        _decode, (shape.KV_HEADS * (d // shape.DIMS) * chunks, count),
        out, lse, view(q), items, scale * LOG2E, stored,
        items if drafts is None else drafts.seen, 0 if drafts is None else drafts.row,
        RECORD=record,
        SHAPE=shape,
        ROUTINE=decode_routine(record, shape, launch.half_pages),
        HALF_PAGES=launch.half_pages,
        SHARED_WEIGHTS=launch.shared_weights,
        PLAIN=plain,
        EARLY=overlap.early,
        LETS_NEXT=overlap.lets_next,
        CHUNKS=chunks,
        DRAFTS=1 if drafts is None else drafts.count,
        OF_CHUNK=1 if drafts is None else drafts.of_chunk,
        num_warps=1,
        num_stages=launch.stages,
        maxnreg=launch.registers,
        enable_fp_fusion=True,
        launch_pdl=overlap.early,
    )  # fmt: skip


@triton.jit
def _decode(
    out, lse, q, items, scale_log2, stored, seen, seen_row,
    RECORD: tl.constexpr, SHAPE: tl.constexpr, ROUTINE: tl.constexpr, HALF_PAGES: tl.constexpr, PLAIN: tl.constexpr,
    EARLY: tl.constexpr, LETS_NEXT: tl.constexpr, CHUNKS: tl.constexpr, DRAFTS: tl.constexpr, OF_CHUNK: tl.constexpr,
    SHARED_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Program ((kv_head * parts of V + part) * chunks + chunk, item): loads the item, attends to its records, then to
    its BF16 copies, and stores the result.

    A chunk has ``OF_CHUNK`` drafts, which count as heads (see ``decode``).
    """
    PARTS: tl.constexpr = SHAPE.D // SHAPE.DIMS
    HEADS: tl.constexpr = SHAPE.HEADS
    VP: tl.constexpr = SHAPE.VP
    chunk = tl.program_id(0) % CHUNKS
    head = tl.program_id(0) // (CHUNKS * PARTS)
    v_first = tl.program_id(0) // CHUNKS % PARTS * SHAPE.DIMS  # this program's dims of V
    item = load_item(items, tl.program_id(1))
    if item.request >= 0:
        table = stored.row_pages + item.row.to(tl.int64) * stored.pages_row
        if EARLY:
            tl.extra.cuda.gdc_wait()
        first_head = head * SHAPE.GQA_GROUP
        token = item.request.to(tl.int64) * CHUNKS + chunk
        mine = View(q.data + token * q.token + first_head * q.head, q.token, q.head)
        state = Softmax(
            tl.zeros([VP, HEADS], tl.float32), tl.zeros([HEADS], tl.float32), tl.full([HEADS], NEVER, tl.float32)
        )
        if item.first_page < item.last_page:
            records = stored.records + head * RECORD.bytes
            if ROUTINE == "history_planes_fp16":
                state = history_half_planes(
                    mine, item, table, records, v_first, scale_log2, RECORD, SHAPE, PLAIN, SHARED_WEIGHTS
                )
            elif ROUTINE == "history_planes_int8":
                state = history_planes(mine, item, table, records, v_first, scale_log2, RECORD, SHAPE, PLAIN)
            elif ROUTINE == "history_k_int8_v_fp16":
                state = history_half_int8(
                    mine, item, table, records, v_first, scale_log2, RECORD, SHAPE, PLAIN, HALF_PAGES
                )
            elif ROUTINE == "history_fp16":
                state = history_half(mine, item, table, records, v_first, scale_log2, RECORD, SHAPE, PLAIN, HALF_PAGES)
            else:
                state = history_general(mine, item, table, records, v_first, scale_log2, RECORD, SHAPE, PLAIN)
        dims, inside = row_dims(v_first, RECORD, SHAPE)
        if item.first_tile < item.last_tile:
            bf16_pages = stored.bf16_pages
            hidden = _hidden(seen, seen_row, item.request, chunk, SHAPE, DRAFTS, OF_CHUNK)
            other = _bf16_page(
                mine,
                item,
                table,
                bf16_pages,
                stored.slot,
                stored.page_slot,
                head,
                dims,
                inside,
                hidden,
                scale_log2,
                SHAPE,
                DRAFTS,
            )
            state = _merged(state, other)
        if LETS_NEXT:
            tl.extra.cuda.gdc_launch_dependents()
        h = tl.arange(0, HEADS)
        result = ((tl.program_id(1) * CHUNKS + chunk) * SHAPE.Q_HEADS + first_head + h).to(tl.int64)  # [HEADS]
        tl.store(lse + result, state.top + tl.log2(state.total), mask=h < SHAPE.GQA_GROUP)
        address = out + result[None, :] * SHAPE.D + dims[:, None]
        tl.store(address, state.acc / state.total[None, :], mask=inside[:, None] & (h < SHAPE.GQA_GROUP)[None, :])


@triton.jit
def _merged(a, b):
    """Merges two softmax states over different keys; heads are columns."""
    top = tl.maximum(a.top, b.top)
    decay_a, decay_b = tl.exp2(a.top - top), tl.exp2(b.top - top)
    acc = a.acc * decay_a[None, :] + b.acc * decay_b[None, :]
    return Softmax(acc, a.total * decay_a + b.total * decay_b, top)


@triton.jit
def _hidden(seen, row, request, chunk, SHAPE: tl.constexpr, DRAFTS: tl.constexpr, OF_CHUNK: tl.constexpr):
    """Returns the drafts that each column does not see, a bit each; columns are those of ``_bf16_page``."""
    COLUMNS: tl.constexpr = 8 if SHAPE.HEADS < 8 else SHAPE.HEADS
    h = tl.arange(0, COLUMNS)
    if DRAFTS == 1:
        return tl.zeros([COLUMNS], tl.int64)
    else:
        draft = chunk * OF_CHUNK + h // (SHAPE.GQA_GROUP // OF_CHUNK)
        live = (h < SHAPE.GQA_GROUP) & (draft < DRAFTS)
        return ~tl.load(seen + request.to(tl.int64) * row + draft, mask=live, other=0)


@triton.jit
def _bf16_page(
    q, item, table, bf16_pages, bf16_page_slot, page_slot, head, dims, in_dims, hidden, scale_log2,
    SHAPE: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """Attends to BF16 tiles of the item's pages outside the history; returns a state like ``history_general``."""
    TILE: tl.constexpr = BF16_PAGE_TILE
    TILES: tl.constexpr = PAGE // TILE
    D: tl.constexpr = SHAPE.D
    VP: tl.constexpr = SHAPE.VP
    HEADS: tl.constexpr = SHAPE.HEADS
    KV_HEADS: tl.constexpr = SHAPE.KV_HEADS
    COLUMNS: tl.constexpr = 8 if HEADS < 8 else HEADS  # the smallest product has eight
    h = tl.arange(0, COLUMNS)
    dim = tl.arange(0, SHAPE.DP)
    inside = (dim < D)[:, None] & (h < SHAPE.GQA_GROUP)[None, :]
    q_all = tl.load(q.data + h[None, :] * q.head + dim[:, None], mask=inside, other=0.0)  # [DP, COLUMNS]
    acc = tl.zeros([VP, COLUMNS], tl.float32)
    top = tl.full([COLUMNS], NEVER, tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    for step in tl.range(item.first_tile, item.last_tile):
        index = step // TILES
        token = (step - index * TILES) * TILE + tl.arange(0, TILE)
        index = tl.where(index < item.history, index, index + item.history_end - item.history)
        page = page_of(table, index)
        slot = tl.maximum(tl.load(page_slot + page), 0).to(tl.int64)
        live = index * PAGE + token < item.length
        base = bf16_pages + slot * bf16_page_slot + head * (PAGE * D) + token[:, None] * D  # [TILE, 1]
        k = tl.load(base + dim[None, :], mask=live[:, None] & (dim < D)[None, :], other=0.0)
        v = tl.load(
            base + KV_HEADS * PAGE * D + dims[None, :],
            mask=live[:, None] & in_dims[None, :],
            other=0.0,
        )
        x = dot(k, q_all, tl.zeros([TILE, COLUMNS], tl.float32)) * scale_log2
        if DRAFTS == 1:
            x = tl.where(live[:, None], x, NEVER)
        else:
            # Index of the draft that a token is; all columns see tokens before the first draft. A column that sees
            # nothing of a tile counts it with the weight 2^NEVER.
            draft = index * PAGE + token - (item.length - DRAFTS)
            bit = (hidden[None, :] >> tl.maximum(draft, 0).to(tl.int64)[:, None]) & 1
            x = tl.where(live[:, None] & ((draft < 0)[:, None] | (bit == 0)), x, NEVER)
        new_top = tl.maximum(top, tl.max(x, 0))
        decay = tl.exp2(top - new_top)
        top = new_top
        p = tl.exp2(x - top[None, :])
        total = total * decay + tl.sum(p, 0)
        acc = dot(tl.trans(v), to_bf16(p), acc * decay[None, :])
    return first_columns(Softmax(acc, total, top), COLUMNS, HEADS)
