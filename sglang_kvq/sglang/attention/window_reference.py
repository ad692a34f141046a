"""Attention of layers with sliding windows in plain torch, over SGLang's own pool; runs on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_kvq.sglang.attention.drafts import among_drafts, draft_count
from sglang_kvq.sglang.attention.layers import learned_sinks, own_keys_and_values
from sglang_kvq.sglang.types import AttentionLayer, ForwardBatch, KVCache, ReqToTokenPool


class TorchWindows(AttentionBackend):
    """Attends in a loop over requests.

    Reads keys and values from SGLang's pool of the windows. SGLang maps locations of the other pool to locations there;
    a token that has left every window has none.
    """

    def __init__(self, token_to_kv_pool: KVCache, req_to_token_pool: ReqToTokenPool) -> None:
        super().__init__()
        self.token_to_kv_pool, self.req_to_token_pool = token_to_kv_pool, req_to_token_pool

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Does nothing: a CPU has no graphs."""

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        lens = forward_batch.seq_lens.tolist()
        return self._forward(
            q, k, v, layer, forward_batch, save_kv_cache, kwargs, [n - 1 for n in lens], [1] * len(lens)
        )

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        if forward_batch.forward_mode.is_target_verify():
            lens, count, mask = forward_batch.seq_lens, draft_count(forward_batch), forward_batch.spec_info.custom_mask
            among = None if mask is None else among_drafts(mask, lens, count, full=False)
            new_lens = [count] * len(lens)
            return self._forward(q, k, v, layer, forward_batch, save_kv_cache, kwargs, lens.tolist(), new_lens, among)
        lens = (list(map(int, n)) for n in (forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu))
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, kwargs, *lens)

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        extra: dict[str, object],
        prefix_lens: list[int],
        new_lens: list[int],
        among: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stores the new tokens and attends with them.

        among: which drafts of its request each draft sees, bool ``[requests, new, new]``; None means all before it.
        """
        sinks = learned_sinks(layer, extra)
        k, v = own_keys_and_values(layer, k, v, save_kv_cache, extra)
        pool, tokens = self.token_to_kv_pool, sum(new_lens)  # SGLang's padding tokens attend to nothing
        loc = forward_batch.out_cache_loc[:tokens]
        where = KVWriteLoc(loc, pool.translate_loc_from_full_to_swa(loc))
        k, v = (x[:tokens].reshape(tokens, layer.tp_k_head_num, -1) for x in (k, v))
        pool.set_kv_buffer(layer, where, k, v)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        q = q.reshape(len(q), layer.tp_q_head_num, -1)
        out, start = torch.zeros_like(q), 0
        for i, (row, prefix, new) in enumerate(zip(forward_batch.req_pool_indices.tolist(), prefix_lens, new_lens)):
            first = max(0, prefix - layer.sliding_window_size)
            read = self.req_to_token_pool.req_to_token[row, first : prefix + new].long()
            read = pool.translate_loc_from_full_to_swa(read)
            mine = slice(start, start + new)
            out[mine] = attend_windows(
                q[mine],
                keys[read],
                values[read],
                layer.sliding_window_size,
                layer.scaling,
                sinks,
                None if among is None else among[i],
            )
            start += new
        return out.flatten(1)


def attend_windows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int,
    scale: float,
    sinks: torch.Tensor | None,
    among: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns attention of the last ``len(q)`` positions to themselves and to ``window`` positions before each.

    q ``[n, q_heads, D]``, k and v ``[length, kv_heads, D]``. among: bool ``[n, n]``, which of the last positions each
    of them sees; None means all before it. Computed in float32, rounded once to q's dtype.
    """
    n, length, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (x.float().transpose(0, 1).repeat_interleave(group, dim=0) for x in (k, v))
    x = q.float().transpose(0, 1) @ k.transpose(1, 2) * scale  # [q_heads, n, length]
    behind = torch.arange(length - n, length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    hidden = (behind < 0) | (behind > window)
    if among is not None:
        hidden[:, length - n :] |= ~among
    x = x.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        x = torch.cat([x, sinks.float()[:, None, None].expand(-1, n, 1)], dim=2)
    return (x.softmax(-1)[:, :, :length] @ v).transpose(0, 1).to(q.dtype)
