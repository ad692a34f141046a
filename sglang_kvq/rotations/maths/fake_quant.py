"""Attention with rotated, fake-quantized keys and values in plain PyTorch, as a reader of the cache computes it.

``RotatedContext`` is one context of one layer as the server holds it: in the rotated basis, keys and values in BF16. To
measure the cost of a quantizer, pass its keys or values through ``round_trip`` (uniform codes) or ``page_round_trip``
(a method's records). Then ``block`` or ``output`` reads them as history:

    context = RotatedContext.of(rotations, layer, q, k, v, scale, sink=64, recent=256)
    change = context.output(k=round_trip(context.k, bits=2, clip=0.9)) - context.exact()
    context.to_model_basis(change)

Clip ratios, sensitivities, ``kvq inspect`` and the divergence of a whole model are all measured this way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.formats.code import CodeFormat
from sglang_kvq.formats.quantize import clip_rank, dequantize_rows, quantize_rows
from sglang_kvq.formats.record import RecordFormat
from sglang_kvq.rotations.base import Rotations


class LayerMatrices(Protocol):
    """``Rotations`` or ``LayerRotations``: matrices ``[layers, heads, D, D]``, heads 1 or the KV heads; None: identity.

    ``k_mean`` ``[layers, heads, D]`` or None is in the model's basis in ``Rotations``, else in the rotated basis.
    """

    @property
    def queries(self) -> torch.Tensor | None: ...
    @property
    def k(self) -> torch.Tensor | None: ...
    @property
    def v(self) -> torch.Tensor | None: ...
    @property
    def outputs(self) -> torch.Tensor | None: ...
    @property
    def k_mean(self) -> torch.Tensor | None: ...


@dataclass(frozen=True)
class RotatedContext:
    """One context of one layer in the rotated basis, with history between a BF16 sink and a BF16 window.

    History is the tokens past the sink that were at least ``recent`` tokens old when their page of queries began. The
    server's window also moves by whole pages.

    Attributes:
        q: float32 ``[q_heads, T, D]``.
        k, v: float32 ``[kv_heads, T, D]``, rounded to BF16, their stored precision.
        scale: factor on the scores.
        sink, recent: BF16 tokens at both ends, multiples of ``PAGE_SIZE``.
        back: R_oᵀ of each query head, float32 ``[q_heads or 1, D, D]``; None for the identity.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    sink: int
    recent: int
    back: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        rotations: LayerMatrices,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        *,
        sink: int,
        recent: int,
        round_queries: bool = False,
    ) -> RotatedContext:
        """Rotates activations from the model's own basis.

        Args:
            q, k, v: ``[q_heads, T, D]``, ``[kv_heads, T, D]`` twice, after RoPE, of any float dtype.
            round_queries: round rotated queries to BF16 too, as the server does. Measurements of codes alone leave
                them exact.
        """
        group = q.shape[0] // k.shape[0]
        q, k, v, back = q.float(), k.float(), v.float(), None
        if rotations.queries is not None:
            q = q @ _per_query_head(rotations.queries[layer].to(q.device), group)
        if rotations.k is not None:
            k = k @ rotations.k[layer].to(k.device)
        mean = _rotated_mean(rotations, layer)
        if mean is not None:
            k = k - mean.to(k.device)[:, None]
        if rotations.v is not None:
            v = v @ rotations.v[layer].to(v.device)
        if rotations.outputs is not None:
            back = _per_query_head(rotations.outputs[layer].to(v.device), group).mT
        if round_queries:
            q = q.bfloat16().float()
        return cls(q, k.bfloat16().float(), v.bfloat16().float(), scale, sink, recent, back)

    def exact(self) -> torch.Tensor:
        """Computes attention with nothing quantized, float32 ``[q_heads, T, D]`` in the rotated basis."""
        return causal_attention(self.q, self.k, self.v, self.scale)

    def block(self, start: int, k: torch.Tensor | None = None, v: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the output of the page of queries at ``start``, float32 ``[q_heads, n, D]``.

        Args:
            start: a multiple of ``PAGE_SIZE``.
            k, v: the history's keys and values, shaped like ``self.k``; None reads them exactly.
        """
        q = self.q[:, start : start + PAGE_SIZE]
        end, history_end = start + q.shape[1], max(start - self.recent, self.sink)

        def mixed(exact: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
            old = exact if old is None else old
            parts = (exact[:, : self.sink], old[:, self.sink : history_end], exact[:, history_end:])
            return torch.cat(parts, dim=1)[None, :, :end]

        causal = torch.ones(q.shape[1], end, dtype=torch.bool, device=q.device).tril(start)
        return torch.nn.functional.scaled_dot_product_attention(
            q[None], mixed(self.k, k), mixed(self.v, v), attn_mask=causal, scale=self.scale, enable_gqa=True
        )[0]

    def output(self, k: torch.Tensor | None = None, v: torch.Tensor | None = None) -> torch.Tensor:
        """Computes ``block`` for every page of queries, float32 ``[q_heads, T, D]``."""
        return torch.cat([self.block(start, k, v) for start in range(0, self.q.shape[1], PAGE_SIZE)], dim=1)

    def to_model_basis(self, output: torch.Tensor) -> torch.Tensor:
        """Transforms an output, or a difference of two, to the model's own basis; same shape."""
        return output if self.back is None else output @ self.back


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Computes causal attention: q ``[q_heads, T, D]``, k and v ``[kv_heads, T, D]``; returns ``[q_heads, T, D]``."""
    return torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True
    )[0]


def round_trip(x: torch.Tensor, bits: int, clip: float) -> torch.Tensor:
    """Quantizes and dequantizes rows: uniform codes per token, one scale per min(head_dim, 128) elements, clipped.

    Args:
        x: BF16 values ``[..., D]`` in any float dtype.
        bits: code width, one of ``formats.code.BITS``.
        clip: clip quantile.

    Returns:
        float32 ``[..., D]``, rounded to BF16.
    """
    code, dim = CodeFormat(bits=bits), x.shape[-1]
    codes, scale, offset = quantize_rows(x, min(dim, 128), clip_rank(dim, clip), code)
    return dequantize_rows(codes, scale, offset, code).bfloat16().float()


def page_round_trip(format: RecordFormat, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes whole pages into a format's records and dequantizes them, rounded to BF16 like the reference backend.

    k, v and both results are float32 ``[kv_heads, T, D]``. A last partial page is unchanged.
    """
    whole = k.shape[1] // PAGE_SIZE * PAGE_SIZE
    k_pages, v_pages = (x[:, :whole].unflatten(1, (-1, PAGE_SIZE)) for x in (k, v))
    read_k, read_v = format.dequantize_pages(format.quantize_pages(k_pages, v_pages))
    return _with_rest(read_k, k), _with_rest(read_v, v)


def _with_rest(pages: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    rows = pages.flatten(1, 2).bfloat16().float()
    return torch.cat([rows, x[:, rows.shape[1] :]], 1)


def _rotated_mean(rotations: LayerMatrices, layer: int) -> torch.Tensor | None:
    """Returns the mean that is subtracted from a layer's rotated keys, float32 ``[heads, D]``."""
    if isinstance(rotations, Rotations):
        return rotations.rotated_mean(layer)
    return None if rotations.k_mean is None else rotations.k_mean[layer]


def _per_query_head(matrices: torch.Tensor, group: int) -> torch.Tensor:
    """Repeats ``[1 or kv_heads, D, D]`` for query heads: ``group`` consecutive query heads read one KV head."""
    return matrices if matrices.shape[0] == 1 else matrices.repeat_interleave(group, 0)
