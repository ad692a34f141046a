"""Chooses the library that attends to long prefill chunks, and compares it with plain attention before it is used."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from types import ModuleType

import torch

from sglang_kvq.attention import fa3
from sglang_kvq.attention.base import ExtendBatch
from sglang_kvq.attention.ragged import FLOAT_WORKSPACE, LEAST_TOKENS, RaggedPrefill
from sglang_kvq.constants import PAGE_SIZE

#: The head_dims that both the cache and FlashInfer's prefill kernels support.
HEAD_DIMS = (64, 128, 256)


def load(
    q_heads: int, kv_heads: int, head_dim: int, device: torch.device, capacity: int
) -> tuple[RaggedPrefill | None, str]:
    """Returns the fastest prefill that works on this host, and one line that says what is used and why.

    The kernels are built and run once here, because some hosts cannot build them. The server must then say so at start
    and use our kernel.
    """
    if device.type != "cuda":
        return None, "triton (no GPU)"
    reasons = []
    libraries = (("FlashAttention 3", fa3.load, 0), ("FlashInfer", _flashinfer, FLOAT_WORKSPACE))
    for title, find, workspace in libraries:
        begin = time.monotonic()
        try:
            library, name = find(device, head_dim)
            prefill = RaggedPrefill(library, q_heads, kv_heads, head_dim, device, capacity, float_workspace=workspace)
            _try(prefill)
        except Exception as error:  # building or launching a library's kernels may raise anything
            reasons.append(f"{title}: {(str(error).strip().splitlines() or [type(error).__name__])[-1]}")
            continue
        seconds = time.monotonic() - begin
        if backend := getattr(prefill.wrappers["auto"][0].wrapper, "_backend", None):  # FlashInfer's own choice
            name += f" {backend}"
        return prefill, (
            f"{name} for chunks of {LEAST_TOKENS} tokens and more, else triton; {capacity:,} tokens of workspace, "
            f"{capacity * kv_heads * head_dim * 4 >> 20} MiB (ready in {seconds:.0f} s)"
            + "".join(f"; {reason}" for reason in reasons)
        )
    return None, f"triton ({'; '.join(reasons)})"


def _flashinfer(device: torch.device, head_dim: int) -> tuple[ModuleType, str]:
    """Returns FlashInfer with its name and version.

    Raises:
        RuntimeError: FlashInfer has no kernels for this head_dim.
        ImportError: FlashInfer is not installed.
    """
    if head_dim not in HEAD_DIMS:
        raise RuntimeError(f"no kernels for heads of {head_dim}")
    import flashinfer

    return flashinfer, f"FlashInfer {flashinfer.__version__}"


#: Stored and new tokens of the requests that test a library, and the workspace in tokens. With these sizes the first
#: prefix takes two calls, the first call contains two requests, and the third request attends in place.
_TRIED = ((9 * PAGE_SIZE, PAGE_SIZE), (PAGE_SIZE + 6, PAGE_SIZE + 16), (0, 8 * PAGE_SIZE))
#: A new prompt, whose only call returns no log-sum-exp.
_ALONE = ((0, PAGE_SIZE + 16),)
_TRIED_IN, _TRIED_IN_PLACE = 8 * PAGE_SIZE, PAGE_SIZE


def _try(prefill: RaggedPrefill) -> None:
    """Compares a library's attention with plain attention, for requests that need all ways to call it.

    Raises:
        RuntimeError: they differ by more than rounding.
    """
    # As large as the log-sum-exp of these scores, so that a log-sum-exp in the wrong base is detected.
    sinks = torch.full((prefill.q_heads,), 5.0, device=prefill.device)
    error = max(_error(prefill, _TRIED, sinks), _error(prefill, _ALONE, None))
    if not error <= 0.02:
        raise RuntimeError(f"its attention differs from the reference by {error:.3f}, for values up to 1")


def _error(prefill: RaggedPrefill, lens: Sequence[tuple[int, int]], sinks: torch.Tensor | None) -> float:
    """Returns the largest error of a library's attention for requests with stored and new tokens; inf if it is NaN."""
    generator = torch.Generator().manual_seed(0)

    def draw(tokens: int, heads: int) -> torch.Tensor:
        x = torch.rand(tokens, heads, prefill.head_dim, generator=generator) * 2 - 1
        return x.to(prefill.device, torch.bfloat16)

    prefixes, news = (list(each) for each in zip(*lens))
    heads = (prefill.q_heads, prefill.kv_heads, prefill.kv_heads)
    q, k, v = draw(sum(news), sum(heads)).split(heads, dim=1)  # slices of one projection, as in many models
    stored = [[draw(n, prefill.kv_heads) for _ in "kv"] for n in prefixes]
    none = torch.empty(0, dtype=torch.int64)
    out = torch.full(q.shape, math.nan, dtype=q.dtype, device=q.device)  # must be overwritten

    def gather(keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor) -> None:
        for request, index, first, count in pages.tolist():
            of, at = slice(first, first + count), slice(index * PAGE_SIZE, index * PAGE_SIZE + count)
            keys[of], values[of] = (x[at] for x in stored[request])

    limits = prefill.capacity, prefill.in_place
    prefill.capacity, prefill.in_place = _TRIED_IN, _TRIED_IN_PLACE
    try:
        calls = prefill.plan(ExtendBatch(none, prefixes, news, none, none), prefill.head_dim**-0.5)
        prefill.run(calls, q, k, v, gather, out, sinks)
    finally:
        prefill.capacity, prefill.in_place = limits
    whole = [
        [torch.cat(parts) for parts in zip(old, own)] for old, own in zip(stored, zip(k.split(news), v.split(news)))
    ]
    wanted = [_attention(queries, k, v, sinks) for queries, (k, v) in zip(q.split(news), whole)]
    return float((out.float() - torch.cat(wanted)).abs().nan_to_num(math.inf).max())


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Computes causal attention by definition, in float32; the queries belong to the last tokens."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * q.shape[2] ** -0.5
    seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
    scores = scores.masked_fill(~seen, -math.inf)
    sink = scores.new_full((len(scores),), -math.inf) if sinks is None else sinks
    weights = torch.cat([scores, sink[:, None, None].expand(-1, len(q), 1)], 2).softmax(2)[:, :, :-1]
    return torch.einsum("hqk,khd->qhd", weights, values)
