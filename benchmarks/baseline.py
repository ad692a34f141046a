"""Times other libraries' attention at the same shapes in the same run: FlashInfer, and FlashAttention 3 for prefill.

Functions return None if no library is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

from sglang_kvq.attention import fa3

PAGE = 64  # shuffled pages, of the same size as ours
#: The name of FlashAttention 3 among FlashInfer's backends.
FA3 = "FlashAttention 3"
DTYPES = (torch.bfloat16, torch.float8_e4m3fn)  # dtypes of FlashInfer's cache


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
    """Times a decode step of q, BF16 ``[batch, q_heads, D]``, over requests of these lengths.

    ``dtype`` is that of the cache, one of ``DTYPES``.
    """
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
    backends: tuple[str, ...] = ("auto", FA3),
) -> float | None:
    """Times causal prefill of q, BF16 ``[batch * new, q_heads, D]``, with the fastest backend.

    Args:
        context: tokens of each request, including the new ones.
        backends: names of FlashInfer's backends, and ``FA3``; those that this host lacks are skipped.
    """
    tokens, q_heads, d = q.shape
    k, v = (torch.empty(batch * context, kv_heads, d, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
    bounds = [torch.arange(batch + 1, dtype=torch.int32) * n for n in (tokens // batch, context)]
    how = {"causal": True, "sm_scale": d**-0.5, "q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    times = []
    for library, backend in _prefill_libraries(q.device, d, backends):
        wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(_workspace(), "NHD", backend=backend)
        wrapper.plan(*bounds, q_heads, kv_heads, d, **how)
        times.append(timer(lambda: wrapper.run(q, k, v)))  # noqa: B023
    return min(times, default=None)


def _prefill_libraries(device: torch.device, head_dim: int, backends: tuple[str, ...]) -> Iterator[tuple[Any, str]]:
    """Yields the libraries that this host has, with the names of their backends."""
    if version() is not None:
        import flashinfer

        yield from ((flashinfer, backend) for backend in backends if backend != FA3)
    if FA3 in backends:
        with suppress(RuntimeError):
            yield fa3.load(device, head_dim)[0], FA3
