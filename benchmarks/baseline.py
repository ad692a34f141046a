"""FlashInfer's BF16 attention at the same shapes, timed in the same run; None where it is not installed."""

from __future__ import annotations

from collections.abc import Callable

import torch

PAGE = 64  # shuffled pages of the size ours have


def version() -> str | None:
    try:
        import flashinfer
    except ImportError:
        return None
    return flashinfer.__version__


def _workspace() -> torch.Tensor:
    return torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")


def decode_us(
    timer: Callable[[Callable], float], q: torch.Tensor, batch: int, context: int, kv_heads: int
) -> float | None:
    """A decode step of q BF16 ``[batch, q_heads, D]`` over ``context`` tokens each."""
    if version() is None:
        return None
    import flashinfer

    d, count = q.shape[-1], -(-context // PAGE)
    cache = torch.empty(batch * count, 2, PAGE, kv_heads, d, dtype=torch.bfloat16, device="cuda").normal_()
    indices = torch.randperm(batch * count, dtype=torch.int32, device="cuda")
    indptr = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * count
    last = torch.full((batch,), context - (count - 1) * PAGE, dtype=torch.int32, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=indptr.clone(),
        paged_kv_indices_buffer=indices.clone(),
        paged_kv_last_page_len_buffer=last.clone(),
    )
    wrapper.plan(
        indptr, indices, last, q.shape[1], kv_heads, d, PAGE, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16
    )
    return timer(lambda: wrapper.run(q, cache))


def prefill_us(timer: Callable[[Callable], float], q: torch.Tensor, context: int, kv_heads: int) -> float | None:
    """Causal prefill of one request: q BF16 ``[new, q_heads, D]``, the last tokens of ``context``."""
    if version() is None:
        return None
    import flashinfer

    new, q_heads, d = q.shape
    k, v = (torch.empty(context, kv_heads, d, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(), "NHD")
    bounds = [torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (new, context)]
    wrapper.plan(*bounds, q_heads, kv_heads, d, causal=True, q_data_type=torch.bfloat16)
    return timer(lambda: wrapper.run(q, k, v))
