"""Merge the splits of a decode step by their log-sum-exp.

    out = sum_s 2^(lse_s - max lse) o_s / sum_s 2^(lse_s - max lse)
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from sglang_kvq.kernels.common import to_bf16

#: Elements of the partial results that a warp holds.
_PER_WARP = 2048


def merge_splits(out: torch.Tensor, partial: torch.Tensor, lse: torch.Tensor, early: bool = False) -> None:
    """partial float32 ``[splits, B, q_heads, D]`` and lse float32 ``[splits, B, q_heads]`` (base 2) to out BF16 ``[B, q_heads, D]``.

    What splits whose lse is -inf hold does not matter; a row with no other kind becomes 0. With ``early``, the
    kernel launched just before may still be running, and is waited for here (``DecodeLaunch.early_merge``).
    """
    splits, batch, heads, d = partial.shape
    padded, columns = triton.next_power_of_2(splits), triton.next_power_of_2(d)
    if splits > 16:  # few rows, then: spread each over several programs
        columns = min(columns, 32)
    _merge[(batch * heads, triton.cdiv(d, columns))](
        out, partial, lse, splits,
        SPLITS=padded,
        D=d,
        COLUMNS=columns,
        EARLY=early,
        num_warps=min(8, max(1, padded * columns // _PER_WARP)),
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


@triton.jit
def _merge(
    out, partial, lse, splits,
    SPLITS: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (r, c): dims c * COLUMNS .. of row r of B * q_heads."""
    if EARLY:
        gdc_wait()
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    s, dim = tl.arange(0, SPLITS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(lse + s * rows + row, mask=s < splits, other=float("-inf"))
    inside = (s < splits)[:, None] & (dim < D)[None, :]
    o = tl.load(partial + (s[:, None] * rows + row) * D + dim[None, :], mask=inside, other=0.0)  # [SPLITS, COLUMNS]
    weight = tl.exp2(x - tl.maximum(tl.max(x, 0), -1e30))
    o = tl.sum(tl.where((weight > 0)[:, None], o * weight[:, None], 0.0), 0)
    tl.store(out + row * D + dim, to_bf16(o / tl.maximum(tl.sum(weight, 0), 1e-30)), mask=dim < D)
