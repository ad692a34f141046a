"""OSCAR's calibration (arXiv 2605.17757): rotations and clip ratios from a model's own activations.

Three passes over the text, each layer keeping only a few ``[kv_heads, D, D]`` sums:

1. QᵀQ of the queries that read each KV head, and KᵀK;
2. Vᵀ diag(w) V with w_t = k_tᵀ (QᵀQ/n) k_t, normalised to mean 1: how much attention scores vary with a token;
   and VᵀV. It is a pass of its own because w needs the whole of pass 1;
3. over a few contexts, the attention-output error of every clip ratio on a grid, with the real quantiser.

The first ``sink`` tokens of a context are left out of the sums: they are never quantised, and their keys are unlike
all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import torch

from sglang_kvq.config import HEAD_DIMS, PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.quantise import clip_rank, dequantise_rows, quantise_rows
from sglang_kvq.rotations.base import RotationMeta, Rotations
from sglang_kvq.rotations.capture import attention_hook, group_queries
from sglang_kvq.rotations.compose import OBJECTIVES, compose
from sglang_kvq.rotations.segments import segmented_attention
from sglang_kvq.rotations.zoo import identity

#: Called with a pass's name and the share of it that is done, in [0, 1].
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class CalibrationSettings:
    """How to calibrate.

    Attributes:
        tokens: tokens of text to use, in contexts of ``context`` tokens spread over the whole corpus.
        context: tokens per context; more than sink + recent, so that some history is quantised. RoPE turns the
            keys: calibrate at lengths like those that will be served (SmolLM2, KL at 6K tokens: 0.110 calibrated
            at 2K, 0.092 at 6K).
        granularity: "per-head" (one rotation per layer and KV head) or "per-layer" (shared by a layer's heads).
        composition: one of ``compose.COMPOSITIONS``.
        clip_grid: clip quantiles to try; the best for keys and for values are stored.
        clip_contexts: contexts that the grid is measured on, two pages of queries in each.
        sink, recent: BF16 tokens at both ends, as the server will have.
    """

    tokens: int = 32768
    context: int = 4096
    granularity: str = "per-head"
    composition: str = "offset"
    clip_grid: tuple[float, ...] = (0.80, 0.84, 0.86, 0.88, 0.90, 0.92, 0.94, 0.96, 1.0)
    clip_contexts: int = 4
    sink: int = 64
    recent: int = 256

    def __post_init__(self) -> None:
        if self.granularity not in ("per-head", "per-layer"):
            raise KVQuantError(f"--granularity {self.granularity}: unknown; choose per-head or per-layer.")
        if self.composition not in OBJECTIVES:
            raise KVQuantError(f"--composition {self.composition}: unknown; choose one of {', '.join(OBJECTIVES)}.")
        least = self.sink + self.recent + 2 * PAGE_SIZE
        if self.context < least:
            raise KVQuantError(f"--context {self.context}: must be at least {least}, or no history is quantised in it.")
        if self.tokens < self.context:
            raise KVQuantError(f"--tokens {self.tokens}: must be at least one context of {self.context} tokens.")


@torch.inference_mode()
def calibrate(
    model: torch.nn.Module, ids: torch.Tensor, settings: CalibrationSettings, progress: Progress | None = None
) -> Rotations:
    """Rotations and clip ratios for ``model``.

    Args:
        model: a transformers causal language model; it runs where it lies and in its own dtype.
        ids: int64 ``[tokens]``, the tokenised corpus.

    Returns:
        k, v float32 ``[layers, heads, D, D]`` on the CPU; ``meta`` has the objective, clips, tokens and the model's
        identity; corpus and model name are the caller's to add.

    Raises:
        KVQuantError: corpus too short; activations not finite; layers without plain attention; head_dim not
            supported.
    """
    model_identity = identity(model.config)
    if model_identity["head_dim"] not in HEAD_DIMS:
        raise KVQuantError(
            f"head_dim {model_identity['head_dim']} is not supported by --kv-quant; supported: {', '.join(map(str, HEAD_DIMS))}."
        )
    run = _Run(model, _contexts(ids, settings), settings, progress or (lambda name, done: None))
    importance_k, energy_k, importance_v, energy_v = run.moments()
    k, k_eigenvalues = compose(settings.composition, importance_k, energy_k)
    v, v_eigenvalues = compose(settings.composition, importance_v, importance_v)
    clip_k, clip_v = run.best_clips(k, v)
    meta = RotationMeta(
        objective=OBJECTIVES[settings.composition],
        model=model_identity,
        clip_k=clip_k,
        clip_v=clip_v,
        tokens=run.contexts.numel(),
    )
    return Rotations(k.cpu(), v.cpu(), meta, k_eigenvalues.cpu(), v_eigenvalues.cpu())


def _contexts(ids: torch.Tensor, settings: CalibrationSettings) -> torch.Tensor:
    """Contexts spread evenly over the corpus without overlap, int64 ``[n, context]``."""
    count = settings.tokens // settings.context
    if ids.numel() < count * settings.context:
        raise KVQuantError(
            f"the corpus has {ids.numel()} tokens, calibration needs {count * settings.context}; give more text, or lower "
            f"--tokens (to at least {settings.context}, one --context)."
        )
    starts = torch.linspace(0, ids.numel() - settings.context, count).long().tolist()
    return torch.stack([ids[start : start + settings.context] for start in starts])


class _Run:
    """The passes of one calibration over one model."""

    def __init__(
        self, model: torch.nn.Module, contexts: torch.Tensor, settings: CalibrationSettings, progress: Progress
    ) -> None:
        self.model, self.contexts, self.settings, self.progress = model, contexts, settings, progress
        self.layers = identity(model.config)["num_hidden_layers"]

    def moments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean QᵀQ, KᵀK, Vᵀ diag(w) V and VᵀV: float64 ``[layers, kv_heads or 1, D, D]`` each."""
        sums: dict[int, list[torch.Tensor]] = {}
        skip, shared = self.settings.sink, self.settings.granularity == "per-layer"

        def add(layer: int, *moments: torch.Tensor) -> None:
            held = sums.setdefault(layer, [])
            for i, moment in enumerate(moments):
                moment = moment.mean(0, keepdim=True) if shared else moment
                held[i : i + 1] = [held[i] + moment if i < len(held) else moment]

        def first(layer, q, k, v, scale):
            q = group_queries(q[:, skip:], k.shape[0]).double()
            k = k[:, skip:].double()
            add(layer, q.mT @ q / q.shape[1], k.mT @ k / k.shape[1])

        self._pass("queries and keys", self.contexts, first)
        importance_k, energy_k = self._collect(sums, "queries or keys")

        def second(layer, q, k, v, scale):
            k, v = k[:, skip:].double(), v[:, skip:].double()
            w = ((k @ importance_k[layer]) * k).sum(-1, keepdim=True)
            w = w / w.mean(1, keepdim=True)
            add(layer, v.mT @ (w * v) / v.shape[1], v.mT @ v / v.shape[1])

        sums.clear()
        self._pass("values", self.contexts, second)
        return importance_k, energy_k, *self._collect(sums, "keys or values")

    def best_clips(self, k_rotations: torch.Tensor, v_rotations: torch.Tensor) -> tuple[float, float]:
        """The grid's ratios with the least attention-output error, summed over layers relative to each one's output."""
        grid, s = self.settings.clip_grid, self.settings
        errors = torch.zeros(2, len(grid), dtype=torch.float64)
        step = max(len(self.contexts) // s.clip_contexts, 1)
        contexts = self.contexts[::step][: s.clip_contexts]
        last = (s.context - PAGE_SIZE) // PAGE_SIZE * PAGE_SIZE
        starts = {last, (s.sink + s.recent + PAGE_SIZE + last) // 2 // PAGE_SIZE * PAGE_SIZE}

        def measure(layer, q, k, v, scale):
            rk, rv = k_rotations[layer], v_rotations[layer]
            rq = rk if rk.shape[0] == 1 else rk.repeat_interleave(q.shape[0] // k.shape[0], 0)
            q = q.float() @ rq
            k, v = (k.float() @ rk).bfloat16().float(), (v.float() @ rv).bfloat16().float()
            for start in starts:
                block = q[:, start : start + PAGE_SIZE]

                def attend(old_k, old_v):
                    return segmented_attention(block, start, k, v, old_k, old_v, scale, sink=s.sink, recent=s.recent)

                exact = attend(k, v)
                size = exact.square().sum()
                for i, ratio in enumerate(grid):
                    rank = clip_rank(k.shape[-1], ratio)
                    errors[0, i] += float((attend(_round_trip(k, rank), v) - exact).square().sum() / size)
                    errors[1, i] += float((attend(k, _round_trip(v, rank)) - exact).square().sum() / size)

        self._pass("clip ratios", contexts, measure)
        return tuple(grid[i] for i in errors.argmin(1).tolist())

    def _pass(self, name: str, contexts: torch.Tensor, hook: Callable) -> None:
        """Run every context through the decoder layers; the vocabulary projection is not needed."""
        body = self.model.base_model
        with attention_hook(self.model, hook):
            for i, ids in enumerate(contexts):
                self.progress(name, i / len(contexts))
                body(ids[None].to(self.model.device), use_cache=False)
        self.progress(name, 1.0)

    def _collect(self, sums: dict[int, list[torch.Tensor]], what: str) -> tuple[torch.Tensor, ...]:
        """Means over contexts, stacked by layer; refuses gaps and non-finite numbers."""
        missing = [layer for layer in range(self.layers) if layer not in sums]
        if missing:
            raise KVQuantError(
                f"layers {missing} of the model have no standard attention; --kv-quant needs it in every layer "
                "(hybrid models are not supported)."
            )
        for layer in range(self.layers):
            if not all(torch.isfinite(moment).all() for moment in sums[layer]):
                raise KVQuantError(
                    f"layer {layer}: {what} hold NaN or infinity; the model overflows in {self.model.dtype}: "
                    "pass --dtype float32, and check the model's weights."
                )
        return tuple(
            torch.stack(moments) / len(self.contexts) for moments in zip(*(sums[i] for i in range(self.layers)))
        )


def _round_trip(x: torch.Tensor, rank: int) -> torch.Tensor:
    """Quantise and dequantise rows with the server's arithmetic, one group of min(head_dim, 128)."""
    return dequantise_rows(*quantise_rows(x, min(x.shape[-1], 128), rank)).bfloat16().float()
