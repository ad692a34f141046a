"""Merge the splits of a decode step by their log-sum-exp.

    out = sum_s 2^(lse_s - max lse) o_s / sum_s 2^(lse_s - max lse)
"""

import torch
import triton
import triton.language as tl

from sglang_kvq.kernels.common import to_bf16


def merge_splits(out: torch.Tensor, partial: torch.Tensor, lse: torch.Tensor) -> None:
    """partial float32 ``[splits, B, q_heads, D]`` and lse float32 ``[splits, B, q_heads]`` (base 2) to out BF16 ``[B, q_heads, D]``.

    Splits whose lse is -inf are not read; a row with no other kind becomes 0.
    """
    splits, batch, heads, d = partial.shape
    _merge[(batch * heads,)](
        out, partial, lse, splits,
        SPLITS=triton.next_power_of_2(splits),
        CHUNK=min(32, triton.next_power_of_2(splits)),
        D=d,
        DP=triton.next_power_of_2(d),
        num_warps=4 if splits > 8 else 1,
    )  # fmt: skip


@triton.jit
def _merge(
    out, partial, lse, splits, SPLITS: tl.constexpr, CHUNK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr
):
    """Program r: row r of B * q_heads."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    s, dim = tl.arange(0, SPLITS), tl.arange(0, DP)
    top = tl.max(tl.load(lse + s * rows + row, mask=s < splits, other=float("-inf")), 0)
    top = tl.maximum(top, -1e30)
    acc = tl.zeros([DP], tl.float32)
    total = 0.0
    for start in tl.static_range(0, SPLITS, CHUNK):
        s = start + tl.arange(0, CHUNK)
        weight = tl.exp2(tl.load(lse + s * rows + row, mask=s < splits, other=float("-inf")) - top)  # [CHUNK]
        live = (weight > 0)[:, None] & (dim < D)[None, :]
        o = tl.load(partial + (s[:, None] * rows + row) * D + dim[None, :], mask=live, other=0.0)
        acc += tl.sum(o * weight[:, None], 0)
        total += tl.sum(weight, 0)
    tl.store(out + row * D + dim, to_bf16(acc / tl.maximum(total, 1e-30)), mask=dim < D)
