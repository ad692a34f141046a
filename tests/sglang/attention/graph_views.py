"""Decode batches as the attention backend sees them in a CUDA graph: SGLang's own view, with fewer attributes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import SimpleNamespace

import torch


def decode_view(rows: Sequence[int], lens: Sequence[int], loc: torch.Tensor, padding: int = 0) -> SimpleNamespace:
    """Returns SGLang's view of a decode batch in a graph that is larger by ``padding`` requests.

    Args:
        rows, lens: each request's row, and its length with the new token.
        loc: int64 ``[requests + padding]``, where the new tokens are stored.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view

    count, size = len(rows), len(rows) + padding
    seq, indices = torch.tensor(lens), torch.tensor(rows)
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=count,
        input_ids=torch.zeros(count, dtype=torch.int64),
        req_pool_indices=indices,
        seq_lens=seq,
        seq_lens_cpu=seq,
        seq_lens_sum=sum(lens),
        out_cache_loc=loc,
        rids=[f"row {row}" for row in rows],
    )
    padded = torch.cat([seq, seq.new_ones(padding)])
    buffers = SimpleNamespace(
        input_ids=torch.zeros(size, dtype=torch.int64),
        positions=torch.zeros(size, dtype=torch.int64),
        req_pool_indices=torch.cat([indices, indices.new_zeros(padding)]),
        seq_lens=padded,
        seq_lens_cpu=padded,
        encoder_lens=None,
        mamba_track_indices=None,
    )
    given = {
        "forward_batch": batch,
        "buffers": buffers,
        "bs": size,
        "raw_bs": count,
        "num_tokens": size,
        "global_num_tokens_cpu": None,
        "seq_len_fill_value": 1,
        "capture_forward_mode": ForwardMode.DECODE,
        "is_encoder_decoder": False,
    }
    view: SimpleNamespace = build_replay_fb_view(
        **{name: given[name] for name in inspect.signature(build_replay_fb_view).parameters}
    )
    return view
