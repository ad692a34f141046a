"""The plain PyTorch backend: the implementation on CPUs, and the reference in every kernel test."""

from __future__ import annotations

import torch

from sglang_kvq.attention.base import AttentionOps, ExtendBatch
from sglang_kvq.attention.drafts import DraftBatch, mask_of
from sglang_kvq.attention.scores.key_scores import key_scores
from sglang_kvq.attention.scores.scoring import ScoringPart
from sglang_kvq.constants import PAGE_SIZE


class ReferenceOps(AttentionOps):
    """Implements each operation of ``AttentionOps`` in a few lines; loops over requests, runs on any device."""

    def rotate(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        r = self.rotations
        parts = ((q, r.queries, None), (k, r.k, r.k_mean), (v, r.v, None))
        q, k, v = (
            x if matrices is None else _rotate_rows(x, matrices[layer], None if mean is None else mean[layer])
            for x, matrices, mean in parts
        )
        return q, k, v

    def rotate_output(self, layer: int, o: torch.Tensor) -> torch.Tensor:
        outputs = self.rotations.outputs
        return o if outputs is None else _rotate_rows(o, outputs[layer].transpose(-1, -2))

    def store_tokens(self, layer: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        slot = self.pool.page_slot[self.pool.places[loc // PAGE_SIZE].long()].clamp(min=0).long()
        self.pool.bf16_pages[layer, slot, 0, :, loc % PAGE_SIZE] = k
        self.pool.bf16_pages[layer, slot, 1, :, loc % PAGE_SIZE] = v

    def rotate_and_keep(
        self, layer: int, loc: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = self.rotate(layer, q, k, v)
        copied = self.pool.page_slot[self.pool.places[loc // PAGE_SIZE].long()] > 0
        self.store_tokens(layer, loc[copied], k[copied], v[copied])
        return q, k, v

    def keep_tokens(
        self, layer: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _, k, v = self.rotate_and_keep(layer, loc, k[:0], k, v)
        return k, v

    def quantize_tokens(
        self, layer: int, first: torch.Tensor, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        if first.numel() == 0:
            return
        tokens = first[:, None] + torch.arange(PAGE_SIZE, device=first.device)
        self.pool.records[layer][pages] = self.pool.formats[layer].quantize_pages(
            k[tokens].transpose(1, 2), v[tokens].transpose(1, 2)
        )

    def quantize_slots(self, slots: torch.Tensor, pages: torch.Tensor, count: torch.Tensor) -> None:
        n = int(count)  # waits for the device; the GPU backend reads it in the kernel
        for layer in range(self.pool.layers if n else 0):
            bf16_pages = self.pool.bf16_pages[layer, slots[:n]]
            records = self.pool.formats[layer].quantize_pages(bf16_pages[:, 0], bf16_pages[:, 1])
            self.pool.records[layer][pages[:n]] = records

    def restore_pages(self, pages: torch.Tensor) -> None:
        pool, sink_cache = self.pool, self.pool.sink_cache
        if sink_cache is None:
            return
        pages = pages.long()
        slots = pool.page_slot[pages].clamp(min=0).long()
        pages, slots = pages[slots > 0], slots[slots > 0]  # waits for the device, which the GPU backend does not
        for layer in range(pool.layers):
            values = pool.formats[layer].dequantize_pages(pool.records[layer][pages])
            pool.bf16_pages[layer, slots] = torch.stack(values, 1).bfloat16()
        kept = sink_cache.kept(pages)
        pool.bf16_pages[:, slots[kept], :, :, 0] = sink_cache.tokens[:, sink_cache.entries(pages[kept])]

    def decode(
        self,
        layer: int,
        q: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        for i, (row, length) in enumerate(zip(rows.tolist(), seq_lens.tolist())):
            k, v = self._stored(layer, row, length)
            out[i : i + 1] = _attend(q[i : i + 1], k, v, scale, sinks)
        return out

    def verify(
        self,
        layer: int,
        q: torch.Tensor,
        drafts: DraftBatch,
        scale: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out, count = torch.empty_like(q), drafts.count
        for i, (row, length) in enumerate(zip(drafts.rows.tolist(), drafts.seq_lens.tolist())):
            mine = slice(i * count, (i + 1) * count)
            seen = torch.ones(count, length, dtype=torch.bool, device=q.device)
            seen[:, length - count :] = mask_of(drafts.seen[i])
            k, v = self._stored(layer, row, length)
            out[mine] = _attend(q[mine], k, v, scale, sinks, seen)
        return out

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
        out, start = torch.empty_like(q) if out is None else out, 0
        for row, prefix, new in zip(batch.rows.tolist(), batch.prefix_lens, batch.new_lens):
            span = slice(start, start + new)
            k_old, v_old = self._stored(layer, row, prefix)
            keys = torch.cat([k_old, k[span].transpose(0, 1)], dim=1)
            values = torch.cat([v_old, v[span].transpose(0, 1)], dim=1)
            out[span] = _attend(q[span], keys, values, scale, sinks)
            start += new
        return out

    def score_keys(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, batch: ExtendBatch, part: ScoringPart, scale: float
    ) -> None:
        stored, _ = self._stored(layer, int(batch.rows[part.request]), part.stored)
        past = torch.cat([stored.transpose(0, 1), part.new_past(k)])
        values = part.values[layer]
        torch.maximum(values, key_scores(part.scoring(q), past, scale), out=values)

    def _stored(self, layer: int, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the row's first ``length`` keys and values, BF16 ``[kv_heads, length, D]`` each."""
        pool = self.pool
        sink_end, history_end = int(pool.row_sink_end[row]), int(pool.row_history_end[row])
        pages = pool.row_pages[row, : -(-length // PAGE_SIZE)].long()
        first, end = (min(-(-tokens // PAGE_SIZE), len(pages)) for tokens in (sink_end, max(sink_end, history_end)))
        slots = pool.page_slot[torch.cat([pages[:first], pages[end:]])].long()
        if (slots < 0).any():
            raise RuntimeError(f"row {row}: a page outside the history [{sink_end}, {history_end}) has no BF16 copy")
        kept = pool.bf16_pages[layer, slots].transpose(0, 1)
        both = torch.cat([kept[:, :first], self._dequantized(layer, pages[first:end]), kept[:, first:]], dim=1)
        k, v = both.transpose(1, 2).flatten(2, 3)[:, :, :length]
        return k, v

    def _dequantized(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Returns keys and values of records, BF16 ``[2, pages, kv_heads, PAGE_SIZE, D]``."""
        pool = self.pool
        if not len(pages):
            return pool.bf16_pages.new_empty(2, 0, *pool.bf16_pages.shape[3:])
        return torch.stack(pool.formats[layer].dequantize_pages(pool.records[layer][pages])).bfloat16()


def _rotate_rows(x: torch.Tensor, r: torch.Tensor, mean: torch.Tensor | None = None) -> torch.Tensor:
    """Multiplies x BF16 ``[T, heads, D]`` by r float32 ``[kv_heads, D, D]``; query heads use their KV head's matrix.

    mean float32 ``[kv_heads or 1, D]`` is subtracted before the only rounding.
    """
    r = r.repeat_interleave(x.shape[1] // r.shape[0], dim=0)
    rotated = torch.einsum("thd,hde->the", x.float(), r)
    return (rotated if mean is None else rotated - mean).to(x.dtype)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends causally, with queries at the last positions. q ``[n, q_heads, D]``, k, v ``[kv_heads, length, D]``.

    mask: bool ``[n, length]``, the keys that each query sees, in place of the causal mask.
    """
    if sinks is not None:
        return _attend_with_sinks(q, k, v, scale, sinks, mask)
    n, length = q.shape[0], k.shape[1]
    if mask is None and n > 1:
        mask = torch.ones(n, length, dtype=torch.bool, device=q.device).tril(length - n)
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def _attend_with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, sinks: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Computes ``_attend`` in float32 and rounds once, because torch's own attention does not support sinks."""
    n, length, group = q.shape[0], k.shape[1], q.shape[1] // k.shape[0]
    k, v = (x.float().repeat_interleave(group, dim=0) for x in (k, v))
    x = q.float().transpose(0, 1) @ k.transpose(1, 2) * scale  # [q_heads, n, length]
    if mask is None:
        mask = torch.ones(n, length, dtype=torch.bool, device=q.device).tril(length - n)
    x = x.masked_fill(~mask, float("-inf"))
    shares = torch.cat([x, sinks.float()[:, None, None].expand(-1, n, 1)], dim=2).softmax(-1)[:, :, :length]
    return (shares @ v).transpose(0, 1).to(q.dtype)
