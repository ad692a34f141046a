"""FlashInfer's attention at the same shapes, timed in the same run; None where it is not installed."""

from __future__ import annotations

from collections.abc import Callable

import torch

PAGE = 64  # shuffled pages of the size ours have
DTYPES = (torch.bfloat16, torch.float8_e4m3fn)  # of its cache


def version() -> str | None:
    try:
        import flashinfer
    except ImportError:
        return None
    return flashinfer.__version__


def _workspace() -> torch.Tensor:
    return torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")


def decode_us(
    timer: Callable[[Callable], float], q: torch.Tensor, lengths: list[int], kv_heads: int, dtype: torch.dtype
) -> float | None:
    """A decode step of q BF16 ``[batch, q_heads, D]`` over that many tokens each, stored in one of ``DTYPES``."""
    if version() is None:
        return None
    import flashinfer

    d, counts = q.shape[-1], [-(-length // PAGE) for length in lengths]
    cache = torch.empty(sum(counts), 2, PAGE, kv_heads, d, dtype=torch.bfloat16, device="cuda").normal_().to(dtype)
    indices = torch.randperm(sum(counts), dtype=torch.int32, device="cuda")
    indptr = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
    last = torch.tensor(
        [length - (n - 1) * PAGE for length, n in zip(lengths, counts)], dtype=torch.int32, device="cuda"
    )
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=indptr.clone(),
        paged_kv_indices_buffer=indices.clone(),
        paged_kv_last_page_len_buffer=last.clone(),
    )
    wrapper.plan(indptr, indices, last, q.shape[1], kv_heads, d, PAGE, q_data_type=torch.bfloat16, kv_data_type=dtype)
    return timer(lambda: wrapper.run(q, cache))


def prefill_us(
    timer: Callable[[Callable], float],
    q: torch.Tensor,
    context: int,
    kv_heads: int,
    batch: int = 1,
    backends: tuple[str, ...] = ("auto",),
) -> float | None:
    """Causal prefill of q BF16 ``[batch * new, q_heads, D]``, the last tokens of ``context`` each, by the fastest."""
    if version() is None:
        return None
    import flashinfer

    tokens, q_heads, d = q.shape
    k, v = (torch.empty(batch * context, kv_heads, d, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
    bounds = [torch.arange(batch + 1, dtype=torch.int32, device="cuda") * n for n in (tokens // batch, context)]
    times = []
    for backend in backends:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(), "NHD", backend=backend)
        wrapper.plan(*bounds, q_heads, kv_heads, d, causal=True, q_data_type=torch.bfloat16)
        times.append(timer(lambda: wrapper.run(q, k, v)))  # noqa: B023
    return min(times)
