"""Attention of models with sliding windows: our backend for layers that see all tokens, SGLang's for the others."""

from __future__ import annotations

import copy
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_kvq.sglang.attention.backend import KVQuantBackend
from sglang_kvq.sglang.types import AttentionLayer, ForwardBatch, KVCache, ModelRunner


class WindowedBackend(AttentionBackend):
    """Plans with both backends, and sends each layer to the backend that has its keys and values.

    Args:
        full: backend of the layers in the cache.
        windows: backend of all other layers. Its planning finishes reading the scheduler's shared data no later than
            the planning of ``full``.
    """

    #: SGLang's backend has room only for as many requests as may run.
    extend_dummy_seqs_capped_by_req_pool = True

    def __init__(self, full: KVQuantBackend, windows: AttentionBackend) -> None:
        super().__init__()
        self.full, self.windows = full, windows
        self.attn_backend_list = [full, windows]
        self.token_to_kv_pool, self.req_to_token_pool = windows.token_to_kv_pool, full.req_to_token_pool
        #: SGLang reads these two with speculative decoding, as in ``KVQuantBackend``.
        self.needs_cpu_seq_lens = full.needs_cpu_seq_lens or windows.needs_cpu_seq_lens
        self.max_context_len = full.max_context_len
        #: The scheduler groups prefills by this value if the backend has it.
        if hasattr(windows, "extend_attention_block_m"):
            self.extend_attention_block_m = windows.extend_attention_block_m

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        for backend in self.attn_backend_list:
            backend.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        for backend in self.attn_backend_list:
            backend.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        for backend in self.attn_backend_list:
            backend.init_forward_metadata_in_graph(forward_batch)

    @property
    def verify_mask(self) -> Any:
        """Mask of SGLang's backend that drafts fill in place; a mask for the longest context would not fit there."""
        return self.windows.verify_mask

    def get_verify_buffers_to_fill_after_draft(self) -> Any:
        """Returns the buffers to fill after drafting; older releases call this instead of ``verify_mask``."""
        return self.windows.get_verify_buffers_to_fill_after_draft()

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        for backend in self.attn_backend_list:
            backend.update_verify_buffers_to_fill_after_draft(spec_info, cuda_graph_bs)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for backend in self.attn_backend_list:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def on_after_cuda_graph_warmup(self) -> None:
        for backend in self.attn_backend_list:
            backend.on_after_cuda_graph_warmup()

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.full.get_cuda_graph_seq_len_fill_value()

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        return self.full.get_cpu_graph_seq_len_fill_value()

    def shared_read_ends(self, forward_mode: Any) -> Any:
        """Returns the later of both backends' values; only some releases ask for it."""
        return max((b.shared_read_ends(forward_mode) for b in self.attn_backend_list), key=lambda end: end.value)

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
        out: torch.Tensor = self._of(layer).forward_decode(
            q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs
        )
        return out

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
        out: torch.Tensor = self._of(layer).forward_extend(
            q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs
        )
        return out

    def _of(self, layer: AttentionLayer) -> AttentionBackend:
        """Returns the backend of a layer, after a wait for its pages that come from the host.

        For layers in our cache the wait is here, because only SGLang's pool of both kinds knows of such loads.
        """
        if layer.layer_id not in self.full.index_of:
            return self.windows
        if getattr(self.token_to_kv_pool, "layer_transfer_counter", None) is not None:
            self.token_to_kv_pool._wait_for_layer(layer.layer_id)
        return self.full


def create_window_backend(model_runner: ModelRunner) -> AttentionBackend:
    """Builds the backend for layers with windows: SGLang's Triton backend on a GPU, plain torch on a CPU.

    SGLang's Triton backend reads the head size from the values of the first layer, which may be in our pool. So it gets
    a view of the pool in which all layers have windows. SGLang's own backend for a CPU cannot be used: it takes
    locations of one pool for those of the other.
    """
    pool = model_runner.token_to_kv_pool
    if torch.device(model_runner.device).type == "cpu":
        from sglang_kvq.sglang.attention.window_reference import TorchWindows

        return TorchWindows(pool, model_runner.req_to_token_pool)
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    backend = TritonAttnBackend(_Seen(model_runner, token_to_kv_pool=windows_only(pool)))
    backend.token_to_kv_pool = pool
    return backend


def windows_only(pool: KVCache) -> KVCache:
    """Returns SGLang's pool of both kinds of layers as if all had windows, so that every layer's values can be read."""
    seen = copy.copy(pool)
    (index, _), *_ = (place for place in pool.layers_mapping.values() if place[1])
    seen.layers_mapping = {i: place if place[1] else (index, True) for i, place in pool.layers_mapping.items()}
    return seen


class _Seen:
    """A model runner with some attributes replaced."""

    def __init__(self, model_runner: ModelRunner, **attributes: Any) -> None:
        self._model_runner = model_runner
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model_runner, name)
