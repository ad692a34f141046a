"""Long prefill chunks through FlashInfer: stored prefixes in BF16, each followed by its new tokens, in one ragged buffer.

    request i:  [prefix_i; new_i]      causal attention aligns the last tokens of both sides

What fits the workspace is one call. The beginning of a longer prefix takes calls of its own (all of it is
visible, so they are not causal), and their results are merged by log-sum-exp.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np
import torch

from sglang_kvq.attention.base import ExtendBatch
from sglang_kvq.cache.transfer import upload
from sglang_kvq.config import PAGE_SIZE

#: What FlashInfer's prefill kernels are built for, of the sizes the cache serves.
HEAD_DIMS = (64, 128, 256)
#: Below this many new tokens per request (mean) or in all, our own kernel serves, which needs no plan. From here on
#: FlashInfer is faster: 136 against 175 us for 128 tokens after 8,192 (benchmarks/results/kernels_h200.json).
LEAST_PER_REQUEST, LEAST_TOKENS = 64, 64
#: Calls that are planned at once, each with 8 MiB of FlashInfer's tables.
MAX_CALLS = 16
FLOAT_WORKSPACE = 256 << 20


@dataclass
class Call:
    """One FlashInfer call, planned on the host.

    Attributes:
        q: the new tokens that attend, ``[begin, end)`` in the batch.
        q_lens, kv_lens: of each request in the call.
        causal: False for the beginning of a longer prefix.
        alone: no other call is about these queries.
        first: the first call about them.
        pages: int32 ``[n, 4]`` for ``gather_pages``; none where no prefix is read.
        places: where the new tokens go in the workspace; None if they are not in this call, or are used in place.
    """

    q: tuple[int, int]
    q_lens: list[int]
    kv_lens: list[int]
    causal: bool
    alone: bool
    first: bool
    pages: np.ndarray
    places: np.ndarray | None

    @property
    def gathers(self) -> bool:
        return len(self.pages) > 0


def plan_calls(prefix_lens: list[int], new_lens: list[int], capacity: int) -> list[Call]:
    """Calls in order; ``capacity`` is the workspace in tokens, whole pages.

    Requests that fit the workspace together share a call. A longer one gets its own: the beginning of its
    prefix, ``capacity`` tokens at a time, then the rest with the new tokens. New tokens that fill the
    workspace by themselves are used in place.
    """
    calls: list[Call] = []
    group: list[tuple[int, int, int]] = []  # request, first token of its prefix to read, first query

    def close(first: bool = True) -> None:
        if not group:
            return
        begin, end = group[0][2], group[-1][2] + new_lens[group[-1][0]]
        prefixes = [prefix_lens[i] - start for i, start, _ in group]
        q_lens = [new_lens[i] for i, _, _ in group]
        pages, places, at = [], [], 0
        for (i, start, _), prefix, new in zip(group, prefixes, q_lens):
            pages.append(_pages(i, start, start + prefix, at))
            places.append(np.arange(at + prefix, at + prefix + new))
            at += prefix + new
        kv_lens = [prefix + new for prefix, new in zip(prefixes, q_lens)]
        gathers = any(prefixes)
        target = np.concatenate(places) if gathers else None
        calls.append(Call((begin, end), q_lens, kv_lens, True, first, first, np.concatenate(pages), target))
        group.clear()

    used = query = 0
    for i, (prefix, new) in enumerate(zip(prefix_lens, new_lens)):
        if used + prefix + new > capacity:
            close()
            used = 0
        if prefix + new <= capacity:
            group.append((i, 0, query))
            used += prefix + new
        else:
            # The rest starts at a page; what is before it is whole pages.
            room = max(capacity - new, 0)
            rest = min(-(-(prefix - room) // PAGE_SIZE) * PAGE_SIZE, prefix)
            for start in range(0, rest, capacity):
                end = min(start + capacity, rest)
                pages = _pages(i, start, end, 0)
                calls.append(Call((query, query + new), [new], [end - start], False, False, start == 0, pages, None))
            group.append((i, rest, query))
            close(first=prefix == 0)
        query += new
    close()
    return calls


def _pages(request: int, begin: int, end: int, at: int) -> np.ndarray:
    """The pages of a request's tokens ``[begin, end)``, ``begin`` a page's first, to rows ``at ...``."""
    index = np.arange(begin // PAGE_SIZE, -(-end // PAGE_SIZE) if end > begin else begin // PAGE_SIZE)
    start = index * PAGE_SIZE
    rows = np.minimum(PAGE_SIZE, end - start)
    return np.stack([np.full_like(index, request), index, at + start - begin, rows], axis=1)


@dataclass
class _Wrapper:
    """A FlashInfer wrapper; its tables on the host are free again when ``copied`` has happened."""

    wrapper: object
    copied: torch.cuda.Event | None = None

    @property
    def free(self) -> bool:
        return self.copied is None or self.copied.query()


@dataclass
class PlannedCall:
    """A ``Call`` with its wrapper planned and its indices on the device."""

    call: Call
    wrapper: object
    pages: torch.Tensor
    places: torch.Tensor | None


@dataclass
class RaggedPrefill:
    """FlashInfer's ragged prefill over the two-tier cache.

    Args:
        library: the ``flashinfer`` module, or a stand-in with the three names used here.
        capacity: tokens of the BF16 workspace.
    """

    library: ModuleType
    q_heads: int
    kv_heads: int
    head_dim: int
    device: torch.device
    capacity: int
    wrappers: list[_Wrapper] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = FLOAT_WORKSPACE if self.device.type == "cuda" else 1
        self._floats = torch.empty(size, dtype=torch.uint8, device=self.device)
        for _ in range(4):  # pinned memory is allocated now and not while requests run
            self._add()

    def suits(self, new_lens: list[int]) -> bool:
        """Whether a batch's chunks are long enough."""
        tokens = sum(new_lens)
        return min(new_lens) > 0 and tokens >= max(LEAST_TOKENS, LEAST_PER_REQUEST * len(new_lens))

    def plan(self, batch: ExtendBatch, scale: float) -> list[PlannedCall] | None:
        """For all layers of a batch, never waiting for the device; None if the wrappers do not suffice."""
        calls = plan_calls(batch.prefix_lens, batch.new_lens, self.capacity)
        wrappers = self._take(len(calls))
        if wrappers is None:
            return None
        parts = [x for call in calls for x in (call.pages, call.places if call.places is not None else call.pages[:0])]
        flat = upload(np.concatenate([part.ravel() for part in parts]), self.device).split([part.size for part in parts])
        planned = []
        for call, taken, pages, places in zip(calls, wrappers, flat[::2], flat[1::2]):
            taken.wrapper.plan(
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
                taken.copied = torch.cuda.Event()
                taken.copied.record()
            # index_copy_ takes int64
            planned.append(PlannedCall(call, taken.wrapper, pages.view(-1, 4), None if call.places is None else places.long()))
        return planned

    def run(self, calls: list[PlannedCall], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gather) -> torch.Tensor:
        """One layer; ``gather(k, v, pages)`` fills rows of the workspace from stored pages."""
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = torch.empty_like(q)
        size = max((sum(c.call.kv_lens) for c in calls if c.call.gathers), default=0)
        space = torch.empty(2, size, *k.shape[1:], dtype=k.dtype, device=k.device)
        lse = None
        for planned in calls:
            call, mine = planned.call, slice(*planned.call.q)
            keys, values = k[mine], v[mine]
            if call.gathers:
                stored_k, stored_v = space[:, : sum(call.kv_lens)]
                gather(stored_k, stored_v, planned.pages)
                if planned.places is not None:
                    _place(stored_k, planned, keys)
                    _place(stored_v, planned, values)
                keys, values = stored_k, stored_v
            if call.alone:
                planned.wrapper.run(q[mine], keys, values, out=out[mine])
            elif call.first:
                _, lse = planned.wrapper.run(q[mine], keys, values, out=out[mine], return_lse=True)
            else:
                part, part_lse = planned.wrapper.run(q[mine], keys, values, return_lse=True)
                self.library.merge_state_in_place(out[mine], lse, part, part_lse)
        return out

    def _take(self, count: int) -> list[_Wrapper] | None:
        free = [w for w in self.wrappers if w.free]
        while len(free) < count and len(self.wrappers) < MAX_CALLS:
            free.append(self._add())
        return free[:count] if len(free) >= count else None

    def _add(self) -> _Wrapper:
        wrapper = self.library.BatchPrefillWithRaggedKVCacheWrapper(self._floats, "NHD")
        self.wrappers.append(_Wrapper(wrapper))
        return self.wrappers[-1]

    def _indptr(self, lens: list[int]) -> torch.Tensor:
        """Bounds on the host: FlashInfer plans there, and copies them itself."""
        bounds = torch.zeros(len(lens) + 1, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        bounds[1:] = torch.tensor(lens).cumsum(0)
        return bounds


def _place(stored: torch.Tensor, planned: PlannedCall, new: torch.Tensor) -> None:
    """New tokens behind their prefixes."""
    if len(planned.call.q_lens) == 1:
        stored[-len(new) :].copy_(new)
    else:
        stored.index_copy_(0, planned.places, new)


def load(
    q_heads: int, kv_heads: int, head_dim: int, device: torch.device, capacity: int
) -> tuple[RaggedPrefill | None, str]:
    """FlashInfer's prefill if this host has it, and one line that says what is used and why.

    Its kernels are built and run once here: on a host that cannot build them the server must say so at
    start, and serve with ours.
    """
    if device.type != "cuda":
        return None, "triton (no GPU)"
    if head_dim not in HEAD_DIMS:
        return None, f"triton (FlashInfer has no kernels for heads of {head_dim})"
    try:
        import flashinfer
    except ImportError:
        return None, "triton (FlashInfer is not installed)"
    begin = time.monotonic()
    try:
        prefill = RaggedPrefill(flashinfer, q_heads, kv_heads, head_dim, device, capacity)
        _try(prefill)
    except Exception as error:  # whatever building and launching foreign kernels can raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        return None, f"triton (FlashInfer {flashinfer.__version__} does not work here: {reason})"
    backend = getattr(prefill.wrappers[0].wrapper, "_backend", "auto")
    seconds = time.monotonic() - begin
    return prefill, (
        f"flashinfer {flashinfer.__version__} {backend} for chunks of {LEAST_TOKENS} tokens and more, else triton "
        f"(ready in {seconds:.0f} s)"
    )


def _try(prefill: RaggedPrefill) -> None:
    """A prefix that takes two calls and a merge."""
    old = prefill.capacity
    prefill.capacity = 2 * PAGE_SIZE
    new = PAGE_SIZE
    batch = ExtendBatch(None, [3 * PAGE_SIZE], [new], None, None, None)
    q, k = (
        torch.zeros(new, heads, prefill.head_dim, dtype=torch.bfloat16, device=prefill.device)
        for heads in (prefill.q_heads, prefill.kv_heads)
    )
    try:
        out = prefill.run(prefill.plan(batch, 1.0), q, k, k, lambda keys, values, pages: (keys.zero_(), values.zero_()))
    finally:
        prefill.capacity = old
    if out.any():
        raise RuntimeError("its attention over zeros is not zero")
