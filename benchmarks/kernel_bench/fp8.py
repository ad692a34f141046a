"""The fastest available decode over an FP8 cache: FlashAttention 3, XQA and SGLang's Triton kernel, and a bound.

FlashInfer's own FP8 kernel for Hopper is slower than possible, so a ratio to it alone would flatter our kernels. Each
of these kernels is optional. If one is not installed, does not run on this GPU or gives a wrong result, a reason
replaces its time. ``bound_us`` is the time of an ideal kernel: it reads each byte of the FP8 cache once, at the
bandwidth of a copy.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

PAGE = 64
FP8 = torch.float8_e4m3fn
#: The largest relative error. These kernels round queries and probabilities to FP8 too, which costs random inputs about
#: a tenth at 100 tokens and more at many. Attention to wrong tokens would have an error of about 1.4.
BOUND = 0.7
#: Splits of a request's tokens to try with SGLang's Triton kernel; the fastest counts.
SPLITS = (4, 8, 16, 32)
Timing = Callable[[Callable[[], object]], float]


class Unavailable(RuntimeError):
    """A kernel cannot be measured here; the message says why."""


@dataclass(frozen=True)
class Scene:
    """A decode step over FP8 pages.

    Attributes:
        q: BF16 ``[batch, q_heads, D]``.
        k, v: FP8 ``[pages, PAGE, kv_heads, D]``, in shuffled order.
        table: int32 ``[batch, most pages]``.
        lengths: tokens of each request; ``lens`` is the same on the device, int32.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    lengths: Sequence[int]
    lens: torch.Tensor

    @classmethod
    def make(cls, q: torch.Tensor, lengths: Sequence[int], kv_heads: int) -> Scene:
        counts = [-(-length // PAGE) for length in lengths]
        k, v = (
            torch.empty(sum(counts), PAGE, kv_heads, q.shape[-1], dtype=torch.bfloat16, device=q.device)
            .normal_()
            .to(FP8)
            for _ in range(2)
        )
        table = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device=q.device)
        for row, pages in enumerate(torch.randperm(sum(counts), dtype=torch.int32, device=q.device).split(counts)):
            table[row, : len(pages)] = pages
        return cls(q, k, v, table, lengths, torch.tensor(lengths, dtype=torch.int32, device=q.device))

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    def exact(self, row: int) -> torch.Tensor:
        """Computes the attention of one request, float32 ``[q_heads, D]``."""
        length = self.lengths[row]
        pages = self.table[row, : -(-length // PAGE)].long()
        k, v = (x.view(torch.uint8)[pages].view(FP8).float().flatten(0, 1)[:length] for x in (self.k, self.v))
        group = self.q.shape[1] // k.shape[1]
        q = self.q[row].float().unflatten(0, (k.shape[1], group))
        weights = torch.einsum("hgd,nhd->hgn", q, k).mul(self.scale).softmax(-1)
        return torch.einsum("hgn,nhd->hgd", weights, v).flatten(0, 1)


def bound_us(lengths: Iterable[int], kv_heads: int, head_dim: int, bandwidth: float) -> float:
    """Returns the microseconds in which all keys and values are read once, at a byte each.

    Args:
        bandwidth: bytes per microsecond.
    """
    return sum(lengths) * kv_heads * 2 * head_dim / bandwidth


def _attribute(places: Sequence[str], name: str) -> Callable[..., torch.Tensor]:
    """Returns a function from the first module that has it.

    Raises:
        Unavailable: no module has it.
    """
    reasons = []
    for place in places:
        try:
            found: Callable[..., torch.Tensor] = getattr(importlib.import_module(place), name)
            return found
        except (ImportError, AttributeError, OSError) as error:
            reasons.append(str(error).splitlines()[0])
    raise Unavailable("; ".join(dict.fromkeys(reasons)))


def _fa3(scene: Scene) -> list[Callable[[], torch.Tensor]]:
    """Runs FlashAttention 3 as SGLang does: from the ``kernels`` package or, if missing, from sgl-kernel."""
    places = ("sglang.kernels.ops.attention.flash_attention_v3", "sgl_kernel.flash_attn")
    attend = _attribute(places, "flash_attn_with_kvcache")
    one = torch.ones(len(scene.lengths), scene.k.shape[2], device=scene.q.device)

    def run() -> torch.Tensor:
        q = scene.q[:, None].to(FP8)  # it only takes queries of the cache's dtype
        more = {"k_descale": one, "v_descale": one, "softmax_scale": scene.scale, "causal": True}
        return attend(q, scene.k, scene.v, cache_seqlens=scene.lens, page_table=scene.table, **more)[:, 0]

    return [run]


def _xqa(scene: Scene) -> list[Callable[[], torch.Tensor]]:
    """Runs FlashInfer's XQA, which implements TensorRT-LLM's interface on Hopper."""
    attend = _attribute(("flashinfer.decode",), "trtllm_batch_decode_with_kv_cache")
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=scene.q.device)
    lens, most = scene.lens.to(torch.uint32), max(scene.lengths)

    def run() -> torch.Tensor:
        more = {"bmm1_scale": scene.scale, "bmm2_scale": 1.0, "kv_layout": "NHD", "out_dtype": torch.bfloat16}
        return attend(scene.q, (scene.k, scene.v), workspace, scene.table, lens, most, backend="xqa", **more)

    return [run]


def _triton(scene: Scene) -> list[Callable[[], torch.Tensor]]:
    """Runs SGLang's Triton kernel with several numbers of splits."""
    attend = _attribute(("sglang.kernels.ops.attention.decode_attention",), "decode_attention_fwd")
    batch, heads, d = scene.q.shape
    slots = (scene.table.long()[..., None] * PAGE + torch.arange(PAGE, device=scene.q.device)).flatten(1)
    indices = torch.cat([row[:length] for row, length in zip(slots, scene.lengths)])
    indptr = torch.zeros(batch + 1, dtype=torch.int32, device=scene.q.device)
    indptr[1:] = scene.lens.cumsum(0)
    k, v = scene.k.flatten(0, 1), scene.v.flatten(0, 1)

    def with_splits(splits: int) -> Callable[[], torch.Tensor]:
        out = torch.empty_like(scene.q)
        partial = torch.empty(batch, heads, splits, d, dtype=torch.float32, device=scene.q.device)
        lse = torch.empty(batch, heads, splits, dtype=torch.float32, device=scene.q.device)
        counts = torch.full((batch,), splits, dtype=torch.int32, device=scene.q.device)

        def run() -> torch.Tensor:
            attend(scene.q, k, v, out, indptr, indices, partial, lse, counts, splits, scene.scale, 1.0, 1.0)
            return out

        return run

    return [with_splits(splits) for splits in SPLITS]


#: Kernels by their names in the columns ``fp8_NAME_us``; each returns ways to run one step.
KERNELS: dict[str, Callable[[Scene], list[Callable[[], torch.Tensor]]]] = {"fa3": _fa3, "xqa": _xqa, "triton": _triton}


def measure(scene: Scene, name: str, timer: Timing) -> tuple[float, float]:
    """Returns the microseconds of a kernel's fastest way, after each way is checked, and the largest relative error.

    Raises:
        Unavailable: the kernel is missing, does not run, or is wrong.
    """
    times, errors = [], []
    try:
        for run in KERNELS[name](scene):
            got = run()
            for row in {0, len(scene.lengths) - 1}:
                want = scene.exact(row)
                error = ((got[row].float() - want).norm() / want.norm()).item()
                if not error <= BOUND:
                    raise Unavailable(f"its result is wrong by {error:.2f}")
                errors.append(error)
            times.append(timer(run))
    except Unavailable:
        raise
    except Exception as error:  # foreign kernels: whatever they raise, ours are still measured
        raise Unavailable(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}") from error
    return min(times), max(errors)


def columns(
    timer: Timing, q: torch.Tensor, lengths: Sequence[int], kv_heads: int, names: Sequence[str]
) -> dict[str, float | str | None]:
    """Returns ``fp8_NAME_us`` and ``fp8_NAME_error`` of each kernel; ``fp8_skipped`` says why some have none."""
    found: dict[str, float | str | None] = {}
    skipped = []
    scene = Scene.make(q, lengths, kv_heads) if names else None
    for name in names:
        assert scene is not None
        try:
            us, error = measure(scene, name, timer)
            found |= {f"fp8_{name}_us": round(us, 2), f"fp8_{name}_error": round(error, 3)}
        except Unavailable as reason:
            found[f"fp8_{name}_us"] = None
            skipped.append(f"{name}: {reason}")
    return found | ({"fp8_skipped": "; ".join(skipped)} if skipped else {})


def compared(row: dict, bound: float) -> dict:
    """Returns a row's summary of its FP8 kernels: the fastest, and our speed relative to it and to the bound.

    Args:
        row: with ``ours_us``, ``flashinfer_fp8_us`` and the fields that ``columns`` returns.
        bound: as ``bound_us`` returns it.
    """
    times = {name: row.get(f"fp8_{name}_us") for name in KERNELS} | {"flashinfer": row.get("flashinfer_fp8_us")}
    known = {name: us for name, us in times.items() if us}
    best = min(known, key=known.__getitem__) if known else None
    return {
        "fp8_best": best,
        "fp8_best_us": best and known[best],
        "ratio_fp8_best": best and round(known[best] / row["ours_us"], 3),
        "fp8_bound_us": round(bound, 2),
        "ratio_fp8_bound": round(bound / row["ours_us"], 3),
    }
