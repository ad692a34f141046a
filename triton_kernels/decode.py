"""Decode attention: split-KV partial results over INT2 records and BF16 overlays, in one launch.

A program takes one KV head of one item of the plan (``plan.split_work``): some pages of one request's history,
some of its overlays (sinks, window, the page being filled), seldom both. With codes c in 0..3, scale s and offset z
per token, and queries q:

    q k     = s_k (q c_k) + z_k sum(q)            the affine terms stay outside the product
    sum p v = sum (p s_v) c_v + sum p z_v         s_v is folded into p, z_v is one number per query head

Where a head has several groups, q k is a sum over them, and p, computed once, is multiplied by each group's s_v in turn.

Both products run on INT8 tensor cores with tokens (then dims of V) on the 16-row side, where codes lie
packed in memory the way the operand wants them in registers, and query heads on the 8-column side. Each
head has two columns, the high and low part of its INT8 split: x = unit (high + low / 256), 15 bits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_kvq.kernels.codes import Record
from sglang_kvq.kernels.common import INTERPRETED, PAGE, dot, page_of, to_bf16
from sglang_kvq.kernels.decode_general import history_general
from sglang_kvq.kernels.int8 import (
    MAGIC_BITS,
    base_of,
    empty_groups,
    group_product,
    group_scales,
    join_parts,
    query_operands,
    spread_sum,
    stack_groups,
    tile_scales,
    tokens_of_tile,
    weight_operands,
)
from sglang_kvq.kernels.plan import FIELDS, OVERLAY_TILE

LOG2E = 1.4426950408889634
NEVER = tl.constexpr(-1e30)
#: How much of the last wave of programs must be busy before another wave is tried.
BUSY = 0.9


@dataclass(frozen=True)
class DecodeLaunch:
    """How the kernel is compiled, and how many items the plan makes.

    Attributes:
        stages, registers: the compiler's.
        programs_per_sm: one-warp programs that an SM holds at once.
    """

    stages: int
    registers: int
    programs_per_sm: int

    def items(self, batch: int, programs: int, sms: int) -> int:
        """Items of a plan for ``batch`` requests, ``programs`` programs each.

        As many as fill whole waves: the fewest waves of which a batch of equal requests keeps ``BUSY`` busy, or the
        best of eight.
        """
        wave = max(sms * self.programs_per_sm // programs, 1)
        least = -(-batch // wave)
        busy = {waves: wave * waves // batch * batch / (wave * waves) for waves in range(least, least + 8)}
        good = [waves for waves, share in busy.items() if share >= BUSY]
        return wave * (good[0] if good else max(busy, key=busy.get))


def decode_launch(head_dim: int, gqa_group: int, record: Record) -> DecodeLaunch:
    """The launch for that geometry and those codes; ``gqa_group`` query heads share a KV head.

    Twelve programs on an SM, or eight where the loop would spill much, as measured (``benchmarks/formats.py --sweep``).
    Numbers between lose up to a half: an SM's four schedulers then have unequal shares.
    """
    if gqa_group > 8:  # spills all the same: more heads hold more accumulators
        return DecodeLaunch(stages=3, registers=255, programs_per_sm=8)
    wide = head_dim > 128 or (gqa_group > 4 and (head_dim > 64 or not is_fast(record)))
    four_bits = any(codes.bits == 4 for codes in (record.k, record.v)) and not record.k.channel
    if wide or (head_dim > 64 and (four_bits or record.k.centred)):
        return DecodeLaunch(stages=2, registers=255, programs_per_sm=8)
    return DecodeLaunch(
        stages=2, registers=160 if is_two_bit(record, head_dim) and gqa_group <= 4 else 168, programs_per_sm=12
    )


def is_fast(record: Record) -> bool:
    """Whether ``_history`` reads these records: uniform 2-bit codes, a scale and an offset per token and group, no more."""
    k, v = record.k, record.v
    plain = all(c.bits == 2 and c.uniform and c.has_offset and not c.channel for c in (k, v))
    return plain and k.group == v.group and not k.centred


def is_two_bit(record: Record, head_dim: int) -> bool:
    """Whether they are fast and of the largest group: what ``extend_history.history_two_bits`` reads."""
    return is_fast(record) and record.k.group == value_dims(head_dim)


def value_dims(head_dim: int) -> int:
    """Dims of V that a program accumulates: no more than its registers hold."""
    return min(head_dim, 128)


def decode(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    items: torch.Tensor,
    scale: float,
    *,
    record: Record,
    records: torch.Tensor,
    overlays: torch.Tensor,
    page_slot: torch.Tensor,
    row_pages: torch.Tensor,
    launch: DecodeLaunch,
    early: bool = False,
    overlap: bool = False,
    plain: bool = INTERPRETED,
    **_: torch.Tensor,
) -> None:
    """Partial results of every item.

    Args:
        out: float32 ``[items, q_heads, D]``; unused items leave theirs untouched.
        lse: float32 ``[items, q_heads]``, log2 of the softmax's denominator, likewise.
        q: BF16 ``[B, q_heads, D]``, rotated; last axis contiguous.
        items: from ``plan.split_work``; the tables are ``PagePool``'s.
        record, records, overlays: one layer's.
        launch: from ``decode_launch``.
        early: start while the launch before this one runs (``common.can_overlap``). That one may write queries and
            overlays of new tokens; not items, which are read before it has ended.
        overlap: let the next launch start when programs of this one end, if it can.
        plain: unpack codes without inline assembly, as the interpreter must.
    """
    count, q_heads, d = out.shape
    kv_heads, dims = records.shape[1], value_dims(d)
    heads = max(4, triton.next_power_of_2(q_heads // kv_heads))
    _decode[(kv_heads * (d // dims), count)](
        out, lse, q, items, scale * LOG2E,
        records, overlays, page_slot, row_pages,
        q.stride(0), q.stride(1), row_pages.stride(0),
        RECORD=record,
        FAST=is_fast(record),
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEADS=heads,
        D=d,
        DP=triton.next_power_of_2(d),
        JP=max(32, triton.next_power_of_2(d // 4)),
        DIMS=dims,
        VP=triton.next_power_of_2(dims),
        PLAIN=plain,
        EARLY=early,
        OVERLAP=overlap,
        num_warps=1,
        num_stages=launch.stages,
        maxnreg=launch.registers,
        enable_fp_fusion=True,
        launch_pdl=early,
    )  # fmt: skip


@triton.jit
def _decode(
    out, lse, q, items, scale_log2,
    records, overlays, page_slot, row_pages,
    q_token, q_head, table_row,
    RECORD: tl.constexpr, FAST: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, JP: tl.constexpr, DIMS: tl.constexpr, VP: tl.constexpr,
    PLAIN: tl.constexpr, EARLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (kv_head * parts + part of V, item)."""
    head = tl.program_id(0) // (D // DIMS)
    v_first = tl.program_id(0) % (D // DIMS) * DIMS  # this program's dims of V
    GQA_GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    item = items + tl.program_id(1) * FIELDS
    request = tl.load(item)
    first, last = tl.load(item + 1), tl.load(item + 2)
    first_tile, last_tile = tl.load(item + 3), tl.load(item + 4)
    begin, end = tl.load(item + 5), tl.load(item + 6)
    if request >= 0:
        row, length = tl.load(item + 7).to(tl.int64), tl.load(item + 8)
        table = row_pages + row * table_row
        page_a, page_b = tl.load(item + 9).to(tl.int64), tl.load(item + 10).to(tl.int64)
        if EARLY:
            tl.extra.cuda.gdc_wait()
        q += request.to(tl.int64) * q_token + head * GQA_GROUP * q_head
        acc = tl.zeros([VP, HEADS], tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        top = tl.full([HEADS], NEVER, tl.float32)
        if first < last:
            if FAST:
                acc, total, top = _history(
                    q, q_head, page_a, page_b, table, first, last, length, records, head, v_first, scale_log2,
                    RECORD.k.group, KV_HEADS, GQA_GROUP, HEADS, D, DP, JP, DIMS, VP, PLAIN,
                )  # fmt: skip
            else:
                acc, total, top = history_general(
                    q, q_head, page_a, page_b, table, first, last, length, records, head, v_first, scale_log2,
                    RECORD, KV_HEADS, GQA_GROUP, HEADS, D, DP, JP, DIMS, VP, PLAIN,
                )  # fmt: skip
        if first_tile < last_tile:
            acc_o, total_o, top_o = _overlay(
                q, q_head, table, first_tile, last_tile, begin, end, length, overlays, page_slot, head, v_first,
                scale_log2, KV_HEADS, GQA_GROUP, HEADS, D, DP, DIMS, VP,
            )  # fmt: skip
            new_top = tl.maximum(top, top_o)
            decay, decay_o = tl.exp2(top - new_top), tl.exp2(top_o - new_top)
            acc = acc * decay[None, :] + acc_o * decay_o[None, :]
            total = total * decay + total_o * decay_o
            top = new_top
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        h, dim = tl.arange(0, HEADS), tl.arange(0, VP)
        result = (tl.program_id(1) * Q_HEADS + head * GQA_GROUP + h).to(tl.int64)  # [HEADS]
        tl.store(lse + result, top + tl.log2(total), mask=h < GQA_GROUP)
        place = out + result[None, :] * D + v_first + dim[:, None]
        tl.store(place, acc / total[None, :], mask=(dim < DIMS)[:, None] & (h < GQA_GROUP)[None, :])


@triton.jit
def _history(
    q, q_head, page_a, page_b, table, first, last, length, records, head, v_first, scale_log2,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, GQA_GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, JP: tl.constexpr, DIMS: tl.constexpr, VP: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Records of pages first .. last: (acc [VP, HEADS], denominator [HEADS], maximum [HEADS]), base 2.

    page_a and page_b are the ids of the first two.

    A tile is two pages, 128 tokens. Its row n = (plane, page, half, i) is token plane * 16 + 2 i + half of that
    page, as K's codes are stored: the tokens whose codes share a byte plane of V are 32 consecutive rows, and
    rows n and n + 8, which one thread holds, are neighbours whose scales it reads at once.
    """
    TILE: tl.constexpr = 2 * PAGE
    COLUMNS: tl.constexpr = 2 * HEADS
    QUARTER: tl.constexpr = PAGE // 4
    D4: tl.constexpr = D // 4
    CODES: tl.constexpr = PAGE * D4
    SCALES: tl.constexpr = PAGE * (D // GROUP)
    RECORD: tl.constexpr = 2 * CODES + 8 * SCALES
    OWN: tl.constexpr = GROUP if GROUP < DIMS else DIMS  # dims of V that share a scale
    GROUPS: tl.constexpr = DIMS // OWN
    ROWS: tl.constexpr = VP if GROUPS == 1 else OWN

    dim = tl.arange(0, DP)
    # Planes 1 and 3 carry four times their code.
    q0, q1, q2, q3, q_all, unit = query_operands(q, q_head, 0.25, GQA_GROUP, HEADS, D, DP, JP)
    unit = unit * scale_log2
    row = tl.arange(0, TILE)
    second, plane, token = tokens_of_tile()
    fraction = tl.where(plane % 2 == 1, 0.25, 1.0)
    j = tl.arange(0, JP)
    k_row = plane * QUARTER + row % QUARTER  # which holds that token: ``common.key_row``
    k_place = k_row[:, None] * D4 + j[None, :]
    dim_v = tl.arange(0, ROWS)
    v_place = CODES + (v_first + dim_v)[None, :, None] * QUARTER + tl.arange(0, QUARTER)[None, None, :]
    records += head * RECORD
    # Scales and offsets, of K's first group and of this program's first of V, in one load: [page, kind, which, token].
    which = tl.arange(0, 4)[None, :, None]
    scale_place = which * SCALES + which // 2 * (v_first // GROUP * PAGE) + tl.arange(0, PAGE)[None, None, :]

    accs, offsets = empty_groups(GROUPS, ROWS, HEADS)
    top = tl.full([HEADS], NEVER, tl.float32)
    total = tl.zeros([8, HEADS], tl.float32)
    for index in tl.range(first, last, 2):
        base_a, base_b = page_a * (KV_HEADS * RECORD), page_b * (KV_HEADS * RECORD)
        page_a = page_of(table, tl.minimum(index + 2, last - 1))
        page_b = page_of(table, tl.minimum(index + 3, last - 1))
        base = records + base_of(second, base_a, base_b)  # [TILE]
        if D4 == JP:
            k = tl.load(base[:, None] + k_place)  # [TILE, JP]
        else:
            k = tl.load(base[:, None] + k_place, mask=(j < D4)[None, :], other=0)
        both = records + base_of(tl.arange(0, 2) == 1, base_a, base_b)[:, None, None]  # [2, 1, 1]
        # Page by page, so that neighbouring lanes read neighbouring bytes.
        values = ()
        for g in tl.static_range(GROUPS):
            if ROWS == OWN:
                v = tl.load(both + v_place + g * (OWN * QUARTER))  # [2, ROWS, QUARTER]
            else:
                v = tl.load(both + v_place, mask=(dim_v < OWN)[None, :, None], other=0)
            values += (tl.reshape(tl.permute(v, (1, 0, 2)), [ROWS, 2 * QUARTER]),)
        scales = (both + 2 * CODES).to(tl.pointer_type(tl.float16))
        s_k, z_k, s_v, z_v = tile_scales(tl.load(scales + scale_place))  # [TILE] each

        k0, k1, k2, k3 = _unpack4(k, PLAIN)
        x = tl.zeros([TILE, HEADS], tl.float32)
        for g in tl.static_range(D // GROUP):
            if g > 0:
                s_k, z_k = group_scales(scales + g * PAGE, SCALES)
            products = tl.full([TILE, COLUMNS], MAGIC_BITS, tl.int32)
            products = group_product(k0, q0, products, 0, g, D4, JP, GROUP)
            products = group_product(k1, q1, products, 1, g, D4, JP, GROUP)
            products = group_product(k2, q2, products, 2, g, D4, JP, GROUP)
            products = group_product(k3, q3, products, 3, g, D4, JP, GROUP)
            q_sum = tl.sum(tl.where((dim // GROUP == g)[:, None], q_all, 0.0), 0) * scale_log2
            x += join_parts(products, TILE, HEADS) * s_k[:, None] * unit[None, :] + z_k[:, None] * q_sum[None, :]
        position = (index + second.to(tl.int32)) * PAGE + token
        x = tl.where((position < tl.minimum(last * PAGE, length))[:, None], x, NEVER)

        new_top = tl.maximum(top, tl.max(x, 0))
        decay = tl.exp2(top - new_top)
        top = new_top
        p = tl.exp2(x - top[None, :])
        total = total * decay[None, :] + spread_sum(p, HEADS)
        old_accs, old_offsets = accs, offsets
        accs, offsets = (), ()
        for g in tl.static_range(GROUPS):
            if g > 0:
                s_v, z_v = group_scales(scales + (2 * SCALES + g * PAGE) + v_first // GROUP * PAGE, SCALES)
            offsets += (old_offsets[g] * decay[None, :] + spread_sum(p * z_v[:, None], HEADS),)
            p0, p1, p2, p3, p_unit = weight_operands(p, s_v, fraction, HEADS)
            v0, v1, v2, v3 = _unpack4(values[g], PLAIN)
            products = tl.full([ROWS, COLUMNS], MAGIC_BITS, tl.int32)
            products = tl.dot(v0, p0, products, out_dtype=tl.int32)
            products = tl.dot(v1, p1, products, out_dtype=tl.int32)
            products = tl.dot(v2, p2, products, out_dtype=tl.int32)
            products = tl.dot(v3, p3, products, out_dtype=tl.int32)
            accs += (old_accs[g] * decay[None, :] + join_parts(products, ROWS, HEADS) * p_unit[None, :],)
    return stack_groups(accs, offsets), tl.sum(total, 0), top


@triton.jit
def _unpack4(packed, PLAIN: tl.constexpr):
    """uint8 tile of four codes each to four INT8 tiles: c0, 4 c1, c2, 4 c3. The factors save half the shifts."""
    if PLAIN:
        c0 = (packed & 3).to(tl.int8)
        c1 = (packed & 12).to(tl.int8)
        c2 = ((packed >> 4) & 3).to(tl.int8)
        c3 = ((packed >> 4) & 12).to(tl.int8)
    else:
        c0, c1, c2, c3 = tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 upper;
            and.b32 $0, $4, 0x03030303;
            and.b32 $1, $4, 0x0c0c0c0c;
            shr.u32 upper, $4, 4;
            and.b32 $2, upper, 0x03030303;
            and.b32 $3, upper, 0x0c0c0c0c;
            }""",
            constraints="=r,=r,=r,=r,r",
            args=[packed],
            dtype=(tl.int8, tl.int8, tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    return c0, c1, c2, c3


@triton.jit
def _overlay(
    q, q_head, table, first, last, begin, end, length, overlays, page_slot, head, v_first, scale_log2,
    KV_HEADS: tl.constexpr, GQA_GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    DIMS: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Overlay tiles first .. last of the request's pages outside the history; results as ``_history``."""
    TILE: tl.constexpr = OVERLAY_TILE
    COLUMNS: tl.constexpr = 8 if HEADS < 8 else HEADS  # the smallest product has eight
    h = tl.arange(0, COLUMNS)
    dim, dim_v = tl.arange(0, DP), tl.arange(0, VP)
    inside = (dim < D)[:, None] & (h < GQA_GROUP)[None, :]
    q_all = tl.load(q + h[None, :] * q_head + dim[:, None], mask=inside, other=0.0)  # [DP, COLUMNS]
    acc = tl.zeros([VP, COLUMNS], tl.float32)
    top = tl.full([COLUMNS], NEVER, tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    TILES: tl.constexpr = PAGE // TILE
    for step in tl.range(first, last):
        index = step // TILES
        token = (step - index * TILES) * TILE + tl.arange(0, TILE)
        index = tl.where(index < begin, index, index + end - begin)
        page = page_of(table, index)
        slot = tl.maximum(tl.load(page_slot + page), 0).to(tl.int64)
        live = index * PAGE + token < length
        base = overlays + (slot * (2 * KV_HEADS) + head) * (PAGE * D) + token[:, None] * D  # [TILE, 1]
        k = tl.load(base + dim[None, :], mask=live[:, None] & (dim < D)[None, :], other=0.0)
        v = tl.load(
            base + KV_HEADS * PAGE * D + v_first + dim_v[None, :],
            mask=live[:, None] & (dim_v < DIMS)[None, :],
            other=0.0,
        )
        x = dot(k, q_all, tl.zeros([TILE, COLUMNS], tl.float32)) * scale_log2
        x = tl.where(live[:, None], x, NEVER)
        new_top = tl.maximum(top, tl.max(x, 0))
        decay = tl.exp2(top - new_top)
        top = new_top
        p = tl.exp2(x - top[None, :])
        total = total * decay + tl.sum(p, 0)
        acc = dot(tl.trans(v), to_bf16(p), acc * decay[None, :])
    if COLUMNS > HEADS:  # keep the first half
        acc = tl.sum(tl.where((h < HEADS)[None, :], acc, 0.0).reshape(VP, 2, HEADS), 1)
        total = tl.sum(tl.where(h < HEADS, total, 0.0).reshape(2, HEADS), 0)
        top = tl.max(tl.where(h < HEADS, top, NEVER).reshape(2, HEADS), 0)
    return acc, total, top
