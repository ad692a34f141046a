"""Attention with rotated, fake-quantized keys and values in plain PyTorch, as a reader of the cache computes it.

    context = RotatedContext.of(rotations, layer, q, k, v, scale, sink=64, recent=256)
    change = context.output(k=round_trip(context.k, bits=2, clip=0.9)) - context.exact()
    context.to_model_basis(change)

Clip ratios, sensitivities, ``kvq inspect`` and the divergence of a whole model are all measured this way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.formats.code import CodeFormat
from sglang_kvq.formats.quantize import clip_rank, dequantize_rows, quantize_rows
from sglang_kvq.formats.record import RecordFormat


@dataclass(frozen=True)
class RotatedContext:
    """One context of one layer in the rotated basis, with history between a BF16 sink and a BF16 window.

    A query's history is the tokens past the sink that were at least ``recent`` tokens old when the query's page began.
    The server's window also moves by whole pages.

    Attributes:
        q: float32 ``[q_heads, T, D]``.
        k, v: float32 ``[kv_heads, T, D]``, rounded to BF16, their stored precision.
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
        rotations: LayerRotations,
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
        """Builds a context from activations in the model's own basis, which it rotates.

        Args:
            q, k, v: ``[q_heads, T, D]``, ``[kv_heads, T, D]`` twice, after RoPE, of any float dtype.
            round_queries: round rotated queries to BF16 too, as the server does.
        """
        group = q.shape[0] // k.shape[0]
        q, k, v, back = q.float(), k.float(), v.float(), None
        if rotations.queries is not None:
            q = q @ _per_query_head(rotations.queries[layer].to(q.device), group)
        if rotations.k is not None:
            k = k @ rotations.k[layer].to(k.device)
        if rotations.k_mean is not None:
            k = k - rotations.k_mean[layer].to(k.device)[:, None]
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
        """Computes the output of the page of queries that begins at ``start``, float32 ``[q_heads, n, D]``.

        ``k`` and ``v`` are read for the history, with the shape of ``self.k``; None reads the exact ones.
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

    def output(self, k: torch.Tensor | None = None, v: torch.Tensor | None = None, pages: int = 1) -> torch.Tensor:
        """Computes ``block`` for every page of queries, float32 ``[q_heads, T, D]``.

        ``pages`` pages are computed together. More than one is faster on a GPU, where single pages wait for launches,
        and slower on a CPU.
        """
        if pages == 1:
            blocks = [self.block(start, k, v) for start in range(0, self.q.shape[1], PAGE_SIZE)]
        else:
            blocks = [self._pages(start, pages, k, v) for start in range(0, self.q.shape[1], pages * PAGE_SIZE)]
        return torch.cat(blocks, dim=1)

    def _pages(self, start: int, pages: int, k: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor:
        """Computes ``block`` for several pages of queries at once.

        The pages differ in where their history ends. Keys between the history's end of the first page and that of the
        last page therefore appear twice, quantized and exact. A mask selects one of the two for each query.
        """
        q = self.q[:, start : start + pages * PAGE_SIZE]
        heads, n, end = self.k.shape[0], q.shape[1], start + q.shape[1]
        last = (end - 1) // PAGE_SIZE * PAGE_SIZE
        low, high = (max(page - self.recent, self.sink) for page in (start, last))

        def mixed(exact: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
            old = exact if old is None else old
            return torch.cat((exact[:, : min(self.sink, end)], old[:, self.sink : high], exact[:, low:end]), dim=1)

        group = q.shape[0] // heads  # query heads become rows of their KV head: torch's kernels then repeat no keys
        rows = q.unflatten(0, (heads, group)).flatten(1, 2)
        mask = _mask_of_pages(start, end, self.sink, self.recent, q.device).repeat(group, 1)
        out = torch.nn.functional.scaled_dot_product_attention(
            rows[None], mixed(self.k, k)[None], mixed(self.v, v)[None], attn_mask=mask, scale=self.scale
        )
        blocks: torch.Tensor = out[0].unflatten(1, (group, n)).flatten(0, 1)
        return blocks

    def to_model_basis(self, output: torch.Tensor) -> torch.Tensor:
        """Transforms an output, or a difference of two, to the model's own basis; same shape."""
        return output if self.back is None else output @ self.back


@lru_cache(maxsize=256)
def _mask_of_pages(start: int, end: int, sink: int, recent: int, device: torch.device) -> torch.Tensor:
    """Builds the mask of ``RotatedContext._pages``, bool ``[queries, keys]``, which is the same in all layers."""
    with torch.inference_mode(False):  # autograd may use the cached tensor later
        query = torch.arange(start, end, device=device)[:, None]
        history_end = (query // PAGE_SIZE * PAGE_SIZE - recent).clamp(min=sink)
        low, high = (max(page - recent, sink) for page in (start, (end - 1) // PAGE_SIZE * PAGE_SIZE))
        first, old, exact = (
            torch.arange(*ends, device=device) for ends in ((min(sink, end),), (sink, high), (low, max(end, low)))
        )
        return torch.cat(
            [first <= query, old < history_end, (exact >= history_end) & (exact <= query)],
            dim=1,
        )


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Computes causal attention: q ``[q_heads, T, D]``, k and v ``[kv_heads, T, D]``; returns ``[q_heads, T, D]``."""
    return torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True
    )[0]


def round_trip(x: torch.Tensor, bits: int, clip: float) -> torch.Tensor:
    """Quantizes BF16 rows ``[..., D]`` in any float dtype and dequantizes them, float32 rounded to BF16.

    Codes are uniform, with one scale per min(head_dim, 128) elements of a token, clipped at a quantile.
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


def _per_query_head(matrices: torch.Tensor, group: int) -> torch.Tensor:
    """Repeats ``[1 or kv_heads, D, D]`` for query heads: ``group`` consecutive query heads read one KV head."""
    return matrices if matrices.shape[0] == 1 else matrices.repeat_interleave(group, 0)
