"""Long prefill chunks through FlashAttention 3 or FlashInfer: each BF16 prefix is followed by its new tokens, in one
ragged buffer.

    request i:  [prefix_i; new_i]      causal attention aligns the last tokens of both sides

One call reads what fits the workspace. Further calls read the rest. They are not causal, because all of the rest is
visible, and their results are merged by log-sum-exp. Each call reads a proportional part of every request's prefix, so
it has work for the whole GPU. All but the last few have equal shapes, so they share one FlashInfer plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch

from sglang_kvq.attention import fa3
from sglang_kvq.attention.base import ExtendBatch
from sglang_kvq.attention.fa3 import FlashAttention3
from sglang_kvq.cache.transfer import upload
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.kernels.decode.learned_sinks import scale_by_sinks
from sglang_kvq.kernels.extend.gather_pages import PageRead

#: The head_dims that the cache serves and FlashInfer's prefill kernels are built for.
HEAD_DIMS = (64, 128, 256)
#: Bytes of FlashInfer's own workspace.
FLOAT_WORKSPACE = 256 << 20
#: With fewer new tokens per request (mean) or in total, our own kernel serves, which needs no plan. From here on
#: FlashInfer is faster: 136 us against 175 us for 128 tokens after 8,192 (benchmarks/results/kernels_h200.json).
LEAST_PER_REQUEST, LEAST_TOKENS = 64, 64
#: Most stored prefixes in BF16 per call, in bytes and in tokens. Larger calls fill the GPU better and leave fewer
#: results to merge. A prefill allocates only what it needs.
WORKSPACE_BYTES, WORKSPACE_TOKENS = 256 << 20, 1 << 17
#: New tokens of a request per program and head.
TILE = 128
#: Approximate limit on groups of requests per batch: each takes up to three plans, with 8 MiB of tables each.
MOST_GROUPS = 6


def workspace_tokens(kv_heads: int, head_dim: int) -> int:
    """Returns how many stored tokens prefill dequantizes at a time, in whole pages; heads are this worker's."""
    return min(WORKSPACE_BYTES // (4 * kv_heads * head_dim), WORKSPACE_TOKENS) // PAGE_SIZE * PAGE_SIZE


#: A call's q_lens, kv_lens and causal.
CallShape: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], bool]
#: Fills rows of keys and values from stored pages: ``(keys, values, pages)``.
Gather: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


@dataclass
class Call:
    """One FlashInfer call, planned on the host.

    Attributes:
        q: range ``[begin, end)`` of the new tokens that attend, in the batch.
        q_lens, kv_lens: lengths per request in the call.
        causal: False for the beginning of a longer prefix.
        first: True for the first call with these queries; it gives every query a key.
        last: True if no later call has any of the queries of the first one.
        pages: int32 ``[n, 4]``, a ``gather.PageRead`` each; empty if no prefix is read.
        positions: rows of the new tokens in the workspace; None if this call lacks them or uses them in place.
    """

    q: tuple[int, int]
    q_lens: list[int]
    kv_lens: list[int]
    causal: bool
    first: bool
    last: bool
    pages: np.ndarray
    positions: np.ndarray | None

    @property
    def gathers(self) -> bool:
        return len(self.pages) > 0

    @property
    def alone(self) -> bool:
        """True if no other call has these queries."""
        return self.first and self.last

    @property
    def shape(self) -> CallShape:
        """Key of the plan: calls of the same shape share one."""
        return tuple(self.q_lens), tuple(self.kv_lens), self.causal


def plan_calls(prefix_lens: list[int], new_lens: list[int], capacity: int, least_tiles: int = 1) -> list[Call]:
    """Plans the calls, in order; ``capacity`` is the workspace in tokens, whole pages.

    Consecutive requests form a group while they fit the workspace together. Beyond that, a group grows until it has
    ``least_tiles`` (``TILE`` new tokens of a request each; more if the batch has many). That is enough work for a call
    even if it reads little of each prefix. A group's first call has the new tokens and as much as fits of the prefixes'
    ends. New tokens without any prefix in that call are used in place.
    """
    calls: list[Call] = []
    tiles = [-(-new // TILE) for new in new_lens]
    least_tiles = max(least_tiles, sum(tiles) // MOST_GROUPS)
    begin = query = 0
    while begin < len(new_lens):
        end = begin + 1
        while end < len(new_lens):
            mine = slice(begin, end + 1)
            fits = sum(prefix_lens[mine]) + sum(new_lens[mine]) <= capacity
            # New tokens must leave room for prefixes, and one page per request must be a small part of a call.
            room = sum(new_lens[mine]) <= capacity // 2 and (end - begin) * 4 * PAGE_SIZE < capacity
            if not (fits or (room and sum(tiles[begin:end]) < least_tiles)):
                break
            end += 1
        prefix, new = np.array(prefix_lens[begin:end]), np.array(new_lens[begin:end])
        calls += _plan_group(begin, prefix, new, query, capacity)
        begin, query = end, query + int(new.sum())
    return calls


def _plan_group(request: int, prefix: np.ndarray, new: np.ndarray, query: int, capacity: int) -> list[Call]:
    """Plans the calls of requests ``request ...``, whose queries are ``query ...``."""
    start = np.zeros_like(prefix)
    room = max(capacity - int(new.sum()), 0)
    parts: list[tuple[np.ndarray, np.ndarray]] = []  # bounds in each prefix
    while (left := int((prefix - start).sum())) > room:
        if left <= capacity:
            parts.append((start, prefix))
            start = prefix
            break
        pages = (prefix - start) // PAGE_SIZE
        rounds = -(-(int(pages.sum()) - room // PAGE_SIZE) // (capacity // PAGE_SIZE))
        share = _shares(pages, rounds, room // PAGE_SIZE, capacity // PAGE_SIZE)
        for _ in range(rounds):
            end = start + share * PAGE_SIZE
            parts.append((start, end))
            start = end
    calls = [_causal(request, start, prefix, new, query)]
    calls += [_visible(request, *part, new, query) for part in parts]
    calls[-1].last = True
    return calls


def _shares(pages: np.ndarray, rounds: int, room: int, capacity: int) -> np.ndarray:
    """Returns the pages of each prefix that each of ``rounds`` calls reads, leaving about ``room`` pages in total."""
    total = int(pages.sum())
    most = -(-(total - room) // rounds)
    share = np.minimum(-(-pages * most // total), pages // rounds)
    return share if share.sum() <= capacity else pages * most // total


def _causal(request: int, start: np.ndarray, prefix: np.ndarray, new: np.ndarray, query: int) -> Call:
    """Plans the call of new tokens over themselves and the ends of their prefixes."""
    kv = prefix - start + new
    ends = np.cumsum(kv)
    pages = np.concatenate([_pages(request + i, *x) for i, x in enumerate(zip(start, prefix, ends - kv))])
    positions = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, new)]) if len(pages) else None
    return Call((query, query + int(new.sum())), new.tolist(), kv.tolist(), True, True, False, pages, positions)


def _visible(request: int, start: np.ndarray, end: np.ndarray, new: np.ndarray, query: int) -> Call:
    """Plans a call of new tokens over parts of their prefixes; leaves out requests at either end without a part."""
    some = np.flatnonzero(end > start)
    mine = slice(some[0], some[-1] + 1)
    query += int(new[: mine.start].sum())
    new, kv = new[mine], (end - start)[mine]
    bounds = zip(start[mine], end[mine], np.cumsum(kv) - kv)
    pages = np.concatenate([_pages(request + mine.start + i, *x) for i, x in enumerate(bounds)])
    return Call((query, query + int(new.sum())), new.tolist(), kv.tolist(), False, False, False, pages, None)


def _pages(request: int, begin: int, end: int, at: int) -> np.ndarray:
    """Returns the pages of a request's tokens ``[begin, end)``, to rows ``at ...``; ``begin`` starts a page."""
    index = np.arange(begin // PAGE_SIZE, -(-end // PAGE_SIZE) if end > begin else begin // PAGE_SIZE)
    start = index * PAGE_SIZE
    reads = PageRead(
        request=np.full_like(index, request),
        index=index,
        first=at + start - begin,
        count=np.minimum(PAGE_SIZE, end - start),
    )
    return np.stack(reads, axis=1)


@dataclass
class _Wrapper:
    """A FlashInfer wrapper; its tables on the host can be reused once ``copied`` has happened."""

    wrapper: Any  # FlashInfer's
    copied: torch.cuda.Event | None = None

    @property
    def free(self) -> bool:
        return self.copied is None or bool(self.copied.query())


@dataclass
class PlannedCall:
    """A ``Call`` with its wrapper planned and its indices on the device."""

    call: Call
    wrapper: Any
    pages: torch.Tensor
    positions: torch.Tensor | None


@dataclass
class RaggedPrefill:
    """A library's ragged prefill over the two-tier cache.

    Args:
        library: the ``flashinfer`` module, or what has its two names used here, as ``fa3.FlashAttention3``.
        capacity: tokens of the BF16 workspace.
        choose: returns FlashInfer's name of the backend for a call.
        float_workspace: bytes of the library's own workspace on a GPU.
    """

    library: ModuleType | FlashAttention3
    q_heads: int
    kv_heads: int
    head_dim: int
    device: torch.device
    capacity: int
    choose: Callable[[Call], str] = lambda call: "auto"
    float_workspace: int = FLOAT_WORKSPACE
    wrappers: dict[str, list[_Wrapper]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = self.float_workspace if self.device.type == "cuda" else 1
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count if self.device.type == "cuda" else 2
        self._least_tiles = -(-2 * sms // self.q_heads)
        self._floats = torch.empty(size, dtype=torch.uint8, device=self.device)
        for _ in range(4):  # allocates pinned memory now and not while requests run
            self._add("auto")

    def suits(self, new_lens: list[int]) -> bool:
        """Returns whether a batch's chunks are long enough."""
        tokens = sum(new_lens)
        return min(new_lens) > 0 and tokens >= max(LEAST_TOKENS, LEAST_PER_REQUEST * len(new_lens))

    def plan(self, batch: ExtendBatch, scale: float) -> list[PlannedCall]:
        """Plans a batch for all layers, never waiting for the device."""
        calls = plan_calls(batch.prefix_lens, batch.new_lens, self.capacity, self._least_tiles)
        parts = []
        for call in calls:
            parts += [call.pages, call.pages[:0] if call.positions is None else call.positions]
        flat = upload(np.concatenate([part.ravel() for part in parts]), self.device)
        tensors = flat.split([part.size for part in parts])
        taken: dict[CallShape, _Wrapper] = {}
        planned = []
        for call, pages, positions in zip(calls, tensors[::2], tensors[1::2]):
            if call.shape not in taken:
                taken[call.shape] = self._planned(call, scale, [*taken.values()])
            # index_copy_ takes int64
            index = None if call.positions is None else positions.long()
            planned.append(PlannedCall(call, taken[call.shape].wrapper, pages.view(-1, 4), index))
        return planned

    def _planned(self, call: Call, scale: float, taken: list[_Wrapper]) -> _Wrapper:
        """Returns a free wrapper that is not in ``taken``, planned for calls of that shape."""
        backend = self.choose(call)
        free = (w for w in self.wrappers.get(backend, []) if w.free and not any(w is x for x in taken))
        mine = next(free, None) or self._add(backend)
        mine.wrapper.plan(
            self._indptr(call.q_lens),
            self._indptr(call.kv_lens),
            self.q_heads,
            self.kv_heads,
            self.head_dim,
            causal=call.causal,
            sm_scale=scale,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        if self.device.type == "cuda":
            mine.copied = torch.cuda.Event()
            mine.copied.record()
        return mine

    def run(
        self,
        calls: list[PlannedCall],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        gather: Gather,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Runs one layer; ``gather(k, v, pages)`` fills rows of the workspace from stored pages.

        out: see ``AttentionOps.extend``; sinks: see ``AttentionOps.decode``.
        """
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if len(calls) == 1 and not calls[0].call.gathers and sinks is None:  # a short prompt waits for this host code
            mine = slice(*calls[0].call.q)
            calls[0].wrapper.run(q[mine], k[mine], v[mine], out=out[mine])
            return
        size = max((sum(c.call.kv_lens) for c in calls if c.call.gathers), default=0)
        space = torch.empty(2, size, *k.shape[1:], dtype=k.dtype, device=k.device)
        begin, lse = 0, torch.empty(0)  # of the first of the calls that are merged
        for planned in calls:
            call, mine = planned.call, slice(*planned.call.q)
            keys, values = k[mine], v[mine]
            if call.gathers:
                stored_k, stored_v = space[:, : sum(call.kv_lens)]
                gather(stored_k, stored_v, planned.pages)
                if planned.positions is not None:
                    _append(stored_k, call, planned.positions, keys)
                    _append(stored_v, call, planned.positions, values)
                keys, values = stored_k, stored_v
            if call.alone and sinks is None:
                planned.wrapper.run(q[mine], keys, values, out=out[mine])
            elif call.first:
                _, lse = planned.wrapper.run(q[mine], keys, values, out=out[mine], return_lse=True)
                begin = mine.start
            else:
                part, part_lse = planned.wrapper.run(q[mine], keys, values, return_lse=True)
                mine_lse = lse[mine.start - begin : mine.stop - begin]
                self.library.merge_state_in_place(out[mine], mine_lse, part, part_lse)
            if call.last and sinks is not None:
                scale_by_sinks(out[begin : begin + len(lse)], lse, sinks)

    def _add(self, backend: str) -> _Wrapper:
        wrapper = _Wrapper(self.library.BatchPrefillWithRaggedKVCacheWrapper(self._floats, "NHD", backend=backend))
        self.wrappers.setdefault(backend, []).append(wrapper)
        return wrapper

    def _indptr(self, lens: list[int]) -> torch.Tensor:
        """Returns bounds on the host: FlashInfer plans there, and copies them itself."""
        bounds = torch.zeros(len(lens) + 1, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        bounds[1:] = torch.tensor(lens).cumsum(0)
        return bounds


def _append(stored: torch.Tensor, call: Call, positions: torch.Tensor, new: torch.Tensor) -> None:
    """Writes new tokens behind their prefixes."""
    if len(call.q_lens) == 1:
        stored[-len(new) :].copy_(new)
    else:
        stored.index_copy_(0, positions, new)


def load(
    q_heads: int, kv_heads: int, head_dim: int, device: torch.device, capacity: int
) -> tuple[RaggedPrefill | None, str]:
    """Returns the fastest prefill that works on this host, and one line that says what is used and why.

    It builds and runs the kernels once here. On a host that cannot build them, the server must say so at
    start and use our kernel.
    """
    if device.type != "cuda":
        return None, "triton (no GPU)"
    reasons = []
    libraries = (("FlashAttention 3", fa3.load, 0), ("FlashInfer", _flashinfer, FLOAT_WORKSPACE))
    for title, find, workspace in libraries:
        begin = time.monotonic()
        try:
            library, name = find(device, head_dim)
            prefill = RaggedPrefill(
                library, q_heads, kv_heads, head_dim, device, capacity, float_workspace=max(workspace, 1)
            )
            _try(prefill)
        except Exception as error:  # whatever building and launching foreign kernels can raise
            reasons.append(f"{title}: {(str(error).strip().splitlines() or [type(error).__name__])[-1]}")
            continue
        seconds = time.monotonic() - begin
        return prefill, (
            f"{name} for chunks of {LEAST_TOKENS} tokens and more, else triton; {capacity:,} tokens of workspace, "
            f"{capacity * kv_heads * head_dim * 4 >> 20} MiB (ready in {seconds:.0f} s)"
            + "".join(f"; {reason}" for reason in reasons)
        )
    return None, f"triton ({'; '.join(reasons)})"


def _flashinfer(device: torch.device, head_dim: int) -> tuple[ModuleType, str]:
    """Returns FlashInfer with its name and version.

    Raises:
        RuntimeError: it has no kernels for these heads.
        ImportError: it is not installed.
    """
    if head_dim not in HEAD_DIMS:
        raise RuntimeError(f"no kernels for heads of {head_dim}")
    import flashinfer

    return flashinfer, f"FlashInfer {flashinfer.__version__}"


#: Stored and new tokens of the requests with which a library is tried, and the workspace: the first prefix takes two
#: calls, and the first call has both requests.
_TRIED, _TRIED_IN = ((9 * PAGE_SIZE, PAGE_SIZE), (PAGE_SIZE + 6, PAGE_SIZE + 16)), 8 * PAGE_SIZE


def _try(prefill: RaggedPrefill) -> None:
    """Compares two requests' attention with plain attention: two calls, a merge, sinks.

    Raises:
        RuntimeError: they differ by more than rounding.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(tokens: int, heads: int) -> torch.Tensor:
        x = torch.rand(tokens, heads, prefill.head_dim, generator=generator) * 2 - 1
        return x.to(prefill.device, torch.bfloat16)

    prefixes, news = (list(lens) for lens in zip(*_TRIED))
    q = draw(sum(news), prefill.q_heads)
    stored, new = ([[draw(n, prefill.kv_heads) for _ in "kv"] for n in lens] for lens in (prefixes, news))
    # As large as a log-sum-exp of these scores, so that one in another base is found.
    sinks = torch.full((prefill.q_heads,), 5.0, device=prefill.device)
    none, out = torch.empty(0, dtype=torch.int64), torch.empty_like(q)

    def gather(keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor) -> None:
        for request, index, first, count in pages.tolist():
            of, at = slice(first, first + count), slice(index * PAGE_SIZE, index * PAGE_SIZE + count)
            keys[of], values[of] = (x[at] for x in stored[request])

    capacity, prefill.capacity = prefill.capacity, _TRIED_IN
    try:
        calls = prefill.plan(ExtendBatch(none, prefixes, news, none, none), prefill.head_dim**-0.5)
        k, v = (torch.cat([each[i] for each in new]) for i in (0, 1))
        prefill.run(calls, q, k, v, gather, out, sinks)
    finally:
        prefill.capacity = capacity
    whole = [[torch.cat(parts) for parts in zip(old, own)] for old, own in zip(stored, new)]
    wanted = [_attention(queries, k, v, sinks) for queries, (k, v) in zip(q.split(news), whole)]
    error = float((out.float() - torch.cat(wanted)).abs().max())
    if not error <= 0.02:
        raise RuntimeError(f"its attention is off by {error:.3f}, for values up to 1")


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Returns causal attention of the last tokens in float32, by definition."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * q.shape[2] ** -0.5
    seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
    scores = scores.masked_fill(~seen, -math.inf)
    weights = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], 2).softmax(2)[:, :, :-1]
    return torch.einsum("hqk,khd->qhd", weights, values)
