"""An SGLang plugin for tests that changes the server itself; the fixture ``faulty`` in conftest.py installs it.

The variable ``KVQ_TEST_FAULTS`` lists changes to the scheduler's process, separated by commas:

- ``canary_on_cpu``: SGLang's KV canary runs its own torch references, without streams, events and pinned memory.
- ``lost_page``: the allocator forgets one page that comes back.
- ``lost_bf16_page``: the tiers are not told of one page that comes back.
- ``counted_error``: a plan of decode steps counts one error, after a long prompt.
- ``page_given_twice``: the allocator hands out a page that a request or the tree still holds.
- ``scored_requests``: the first PAST tokens of a request named ``scored-PAST-LENGTH`` are scored. After its last
  token, before the next prefill, the scores go to ``scored-PAST-LENGTH.pt`` in the folder ``KVQ_TEST_SCORES``.
- ``folds``: no fault; requests may end as folds that keep the tokens named by their ids (``chosen_tokens``).
"""

from __future__ import annotations

import functools
import os
import sys
from types import SimpleNamespace

import torch


def install() -> None:
    if "sglang.srt.managers.scheduler" in sys.modules:
        for name in filter(None, os.environ.get("KVQ_TEST_FAULTS", "").split(",")):
            globals()[name]()


def canary_on_cpu() -> None:
    from sglang.srt.kv_canary import req_to_expected_token_ids_manager as expected
    from sglang.srt.kv_canary.runner import canary_manager, future_tensor

    class Now:
        """A tensor, or a dict with tensors, copied immediately."""

        @classmethod
        def device_to_host(cls, values, *, d2h_stream):
            now = cls()
            if isinstance(values, dict):
                now.values = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
            else:
                now.values = values.clone()
            return now

        def wait(self):
            return self.values

    future_tensor.FutureTensors = Now
    canary_manager.create_device_stream = lambda device: None
    unpinned = {name: _without(getattr(torch, name), "pin_memory") for name in ("tensor", "zeros")}
    others = {name: getattr(torch, name) for name in ("device", "int64", "cumsum", "Tensor")}
    expected.torch = SimpleNamespace(**others, **unpinned)
    flatten = expected.flatten_arrays_to_int64_tensor
    expected.flatten_arrays_to_int64_tensor = lambda parts, device, pin: flatten(parts, device, False)
    _canary_of_0_5_16()


def _without(function, keyword: str):
    return lambda *args, **kwargs: function(*args, **{k: v for k, v in kwargs.items() if k != keyword})


def _canary_of_0_5_16() -> None:
    """Calls the torch references in releases before 0.5.19, which would call their CUDA kernels on every device."""
    try:
        from sglang.jit_kernel.kv_canary import plan_ref, verify_ref, write_ref
    except ImportError:
        return
    from sglang.srt.kv_canary import endpoint
    from sglang.srt.kv_canary.runner import canary_manager, kernel_launcher

    kernel_launcher.launch_canary_plan_kernels = plan_ref.launch_canary_plan_kernels_torch_reference
    endpoint.launch_canary_verify_kernel = verify_ref.launch_canary_verify_kernel_torch_reference
    endpoint.launch_canary_write_kernel = write_ref.launch_canary_write_kernel_torch_reference
    cuda = SimpleNamespace(Stream=lambda device: None)
    canary_manager.torch = SimpleNamespace(cuda=cuda, Tensor=torch.Tensor, device=torch.device)
    torch.cuda.is_current_stream_capturing = lambda: False


def lost_page() -> None:
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator as Allocator

    def free_tokens(original, self, index):
        if not index.numel():
            return NotImplemented
        pages = index // self.page_size
        return original(self, index[pages != pages[-1]])

    if hasattr(Allocator, "_release_page_ids"):
        _once(Allocator, "_release_page_ids", lambda original, self, *ids: original(self, ids[0][1:], *ids[1:]))
    else:
        _once(Allocator, "free", free_tokens)


def lost_bf16_page() -> None:
    from sglang_kvq.cache.pending import PendingOps

    _once(PendingOps, "free_pages", lambda original, self, pages: None)


def counted_error() -> None:
    from sglang_kvq.cache.tiers import TierManager

    def plan_and_count(original, self, *args):
        original(self, *args)
        self.errors += 1

    _once(TierManager, "plan_decode", plan_and_count)


def page_given_twice() -> None:
    """Makes the allocator hand out the first long prompt's second page again, although it may still be held."""
    first = []

    def alloc_extend(original, self, *args, **kwargs):
        if len(first) == 1:
            self.free_pages = torch.cat((first[0], self.free_pages))
            first.append(None)
        out = original(self, *args, **kwargs)
        if not first and _is_long(out):
            first.append(out[self.page_size : self.page_size + 1] // self.page_size)
        return out

    _around_alloc_extend(alloc_extend)


def scored_requests() -> None:
    from pathlib import Path

    from sglang_kvq.sglang import runtime
    from sglang_kvq.sglang.attention import scoring

    wanted, lengths = scoring.wanted, {}

    def collect_and_write(forward_batch):
        for rid, length in list(lengths.items()):
            scores = runtime.current().scores[rid]
            if scores.seen >= length:
                file = Path(os.environ["KVQ_TEST_SCORES"], f"{rid}.pt")
                torch.save(scores.result(length).clone(), file.with_suffix(".part"))
                file.with_suffix(".part").rename(file)
                scoring.forget(rid)
                del lengths[rid]
        for rid in forward_batch.rids:
            if rid.startswith("scored-") and rid not in lengths:
                past, lengths[rid] = map(int, rid.split("-")[1:])
                scoring.collect(rid, past)
        return wanted(forward_batch)

    scoring.wanted = collect_and_write


def folds() -> None:
    from sglang_kvq.sglang import runtime
    from sglang_kvq.sglang.attention import worker
    from sglang_kvq.sglang.prefix import folding

    create = worker.create_backend

    def create_and_serve(model_runner):
        backend = create(model_runner)
        pool = runtime.started().pages
        folding.serve(lambda req, fold: chosen_tokens(req.rid, pool.layers, pool.kv_heads).to(pool.device))
        return backend

    worker.create_backend = create_and_serve


def chosen_tokens(rid: str, layers: int, kv_heads: int) -> torch.Tensor:
    """Returns tokens by ``fold-LENGTH-KEPT-PINNED-SEED``: each head's first PINNED of LENGTH, then others."""
    length, kept, pinned, seed = map(int, rid.split("-")[1:])
    random = torch.rand(layers, kv_heads, length - pinned, generator=torch.Generator().manual_seed(seed))
    first = torch.arange(pinned).expand(layers, kv_heads, -1)
    return torch.cat([first, random.argsort(-1)[..., : kept - pinned] + pinned], dim=-1)


def _is_long(out: torch.Tensor | None) -> bool:
    """Returns True for the allocation of a long prompt, unlike SGLang's own requests at start."""
    return out is not None and len(out) > 100


def _around_alloc_extend(handler) -> None:
    from sglang_kvq.sglang.memory.allocator import KVQuantAllocator, KVQuantCpuAllocator

    def wrap(original):
        return lambda self, *args, **kwargs: handler(original, self, *args, **kwargs)

    for kind in (KVQuantAllocator, KVQuantCpuAllocator):
        kind.alloc_extend = wrap(kind.alloc_extend)


def _once(owner: type, method: str, replacement) -> None:
    """Replaces, after a long prompt, the first call of a method for which ``replacement`` returns a result."""
    armed, original = [], getattr(owner, method)

    def arm(allocate, self, *args, **kwargs):
        out = allocate(self, *args, **kwargs)
        if _is_long(out) and not armed:
            armed.append("now")
        return out

    @functools.wraps(original)
    def call(*args, **kwargs):
        if armed != ["now"]:
            return original(*args, **kwargs)
        result = replacement(original, *args, **kwargs)
        if result is NotImplemented:
            return original(*args, **kwargs)
        armed.append("done")
        return result

    _around_alloc_extend(arm)
    setattr(owner, method, call)
