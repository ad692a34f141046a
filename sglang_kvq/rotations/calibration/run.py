"""OSCAR's calibration (arXiv 2605.17757): rotations, clip ratios and sensitivities from a model's own activations.

Passes over the text, each layer keeping only a few ``[kv_heads, D, D]`` sums or a row of errors:

1. "moments": QᵀQ of the queries that read each KV head, KᵀK, Vᵀ diag(w) V and VᵀV (``rotations.maths.moments``); the rotations
   follow from these (``rotations.maths.compose``);
2. "clips": over a few contexts, each layer's attention-output error for every clip ratio on a grid, with the real
   quantizer (``rotations.calibration.clips``);
3. "sensitivity": over a few short contexts, what quantizing one layer's keys or values costs the model
   (``rotations.calibration.sensitivity``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from sglang_kvq.config import HEAD_DIMS, PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.base import RotationMeta, Rotations
from sglang_kvq.rotations.calibration.checkpoint import Checkpoint
from sglang_kvq.rotations.calibration.clips import choose_clips, clip_errors, query_blocks
from sglang_kvq.rotations.calibration.hf_attention import attention_hook, positions
from sglang_kvq.rotations.calibration.sensitivity import UNIT, VARIANTS, LayerQuantizer, fisher_sums, sensitivity_table
from sglang_kvq.rotations.maths.compose import OBJECTIVES, compose_keys, compose_values
from sglang_kvq.rotations.maths.moments import MomentSums
from sglang_kvq.rotations.maths.rope import check_turn, over_places, roped_layers, turn_of
from sglang_kvq.rotations.storage.zoo import identity

#: Positions that contexts are spread over at most, unless ``CalibrationSettings.positions`` says more.
MOST_POSITIONS = 32768

#: Places that moments are averaged over: among the farthest of them, less than a context apart.
PLACES = 64

#: Tokens that are run at the farthest place, to see that keys turn as foreseen.
CHECKED = 128

#: Called with a pass's name, the contexts of it that are done, and how many there are.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class CalibrationSettings:
    """How to calibrate.

    Attributes:
        tokens: tokens of text to use, in contexts of ``context`` tokens that do not overlap.
        context: tokens per context; more than sink + recent, so that some history is quantized.
        positions: RoPE turns keys with their position, but attention sees only differences of positions: so the moments are
            averaged over contexts at places spread over this many positions, and so are clips and sensitivities. 0 means
            as many as the model was made for, up to ``MOST_POSITIONS``.
        seed: 0 spreads the contexts evenly over the corpus; any other number draws them at random places.
        granularity: "per-head" (one rotation per layer and KV head) or "per-layer" (shared by a layer's heads).
        composition: one of ``compose.COMPOSITIONS``.
        clips: "per-layer", or "global" for one ratio for the keys of all layers and one for the values.
        clip_grid: clip quantiles to try.
        clip_contexts: contexts that the grid is measured on, ``clip_blocks`` pages of queries in each.
        sensitivity_contexts: contexts of at most ``sensitivity_context`` tokens that sensitivities are measured on;
            0 leaves them out.
        sensitivity_draws: backward passes over each of these.
        sink, recent: BF16 tokens at both ends, as the server will have.
    """

    tokens: int = 32768
    context: int = 2048
    positions: int = 0
    seed: int = 0
    granularity: str = "per-head"
    composition: str = "balanced"
    clips: str = "per-layer"
    clip_grid: tuple[float, ...] = (0.80, 0.84, 0.86, 0.88, 0.90, 0.92, 0.94, 0.96, 1.0)
    clip_contexts: int = 4
    clip_blocks: int = 2
    sensitivity_contexts: int = 3
    sensitivity_context: int = 768
    sensitivity_draws: int = 2
    sink: int = 64
    recent: int = 256

    def __post_init__(self) -> None:
        if self.granularity not in ("per-head", "per-layer"):
            raise KVQuantError(f"--granularity {self.granularity}: unknown; choose per-head or per-layer.")
        if self.composition not in OBJECTIVES:
            raise KVQuantError(f"--composition {self.composition}: unknown; choose one of {', '.join(OBJECTIVES)}.")
        if self.clips not in ("per-layer", "global"):
            raise KVQuantError(f"--clips {self.clips}: unknown; choose per-layer or global.")
        if self.seed < 0:
            raise KVQuantError(f"--seed {self.seed}: must be 0 (evenly spaced contexts) or more.")
        if self.positions and self.positions < self.context:
            raise KVQuantError(f"--positions {self.positions}: must be at least one --context, {self.context}.")
        least = self.sink + self.recent + 2 * PAGE_SIZE
        if self.context < least:
            raise KVQuantError(f"--context {self.context}: must be at least {least}, or no history is quantized in it.")
        if self.tokens < self.context:
            raise KVQuantError(f"--tokens {self.tokens}: must be at least one context of {self.context} tokens.")


def calibrate(
    model: torch.nn.Module,
    ids: torch.Tensor,
    settings: CalibrationSettings,
    progress: Progress | None = None,
    *,
    checkpoint: Callable[[torch.nn.Module, torch.Tensor, object], Checkpoint] | None = None,
) -> Rotations:
    """Rotations, clip ratios and sensitivities for ``model``.

    Args:
        model: a transformers causal language model; it runs where it lies and in its own dtype.
        ids: int64 ``[tokens]``, the tokenised corpus.
        checkpoint: makes the place where finished contexts are kept, from model, contexts and settings; None keeps
            nothing.

    Returns:
        k, v float32 ``[layers, heads, D, D]`` on the CPU; ``meta`` has all that was measured and the model's identity;
        corpus and model name are the caller's to add.

    Raises:
        KVQuantError: corpus too short; activations not finite; layers without plain attention; head_dim not
            supported; a checkpoint of another run.
    """
    shape = identity(model.config)
    check_shape(shape)
    contexts = draw_contexts(ids, settings)
    run = _Run(model, contexts, settings, progress, checkpoint(model, contexts, settings) if checkpoint else None)
    sums = MomentSums(settings.sink)
    farthest = place_contexts(settings, PLACES, model.config)[-1]
    if farthest:
        check_turn(model, contexts[0, :CHECKED], turn_of(model.config, shape["head_dim"]), farthest)
    run.through("moments", 1, len(contexts), sums.add, sums)
    rotations = rotations_from(sums, model.config, settings, len(contexts))
    rotations = run.with_clips(rotations)
    return run.with_sensitivity(rotations) if settings.sensitivity_contexts else rotations


def check_shape(shape: dict) -> None:
    """Refuse a head_dim that ``--kv-quant`` cannot serve.

    Raises:
        KVQuantError: it names the supported ones.
    """
    if shape["head_dim"] not in HEAD_DIMS:
        raise KVQuantError(
            f"head_dim {shape['head_dim']} is not supported by --kv-quant; supported: {', '.join(map(str, HEAD_DIMS))}."
        )


def draw_contexts(ids: torch.Tensor, settings: CalibrationSettings) -> torch.Tensor:
    """Contexts of the corpus without overlap, int64 ``[n, context]``: evenly spread (seed 0) or at random places."""
    count, slack = (
        settings.tokens // settings.context,
        ids.numel() - settings.tokens // settings.context * settings.context,
    )
    if slack < 0:
        raise KVQuantError(
            f"the corpus has {ids.numel()} tokens, calibration needs {count * settings.context}; give more text, or lower "
            f"--tokens (to at least {settings.context}, one --context)."
        )
    if settings.seed == 0:
        starts = torch.linspace(0, ids.numel() - settings.context, count).long()
    else:  # sorted gaps that share the slack: every placement without overlap is as likely
        generator = torch.Generator().manual_seed(settings.seed)
        gaps = torch.randint(slack + 1, (count,), generator=generator).sort().values
        starts = gaps + torch.arange(count) * settings.context
    return torch.stack([ids[start : start + settings.context] for start in starts.tolist()])


def place_contexts(settings: CalibrationSettings, count: int, hf_config: object) -> list[int]:
    """The positions of ``count`` contexts' first tokens, from 0; doubling a prompt's length brings as many more of them.

    Short prompts have only the first positions, so evenly spread ones would be about the longest prompts alone.
    """
    most = max(settings.positions or positions_of(hf_config), settings.context) / settings.context
    return [round(settings.context * (most ** (i / max(count - 1, 1)) - 1)) for i in range(count)]


def positions_of(hf_config: object) -> int:
    """As many as the model was made for, up to ``MOST_POSITIONS``; 0 if it does not say.

    Where RoPE itself changes beyond the length that it was trained with (longrope, dynamic), no more than those.
    """
    text = hf_config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    known = getattr(text, "max_position_embeddings", None) or 0
    if rope.get("rope_type") in ("longrope", "dynamic"):
        known = min(known, rope.get("original_max_position_embeddings") or known)
    return min(known, MOST_POSITIONS)


def rotations_from(sums: MomentSums, hf_config: object, settings: CalibrationSettings, contexts: int) -> Rotations:
    """Rotations from finished sums over ``contexts`` contexts that began at position 0; no clip ratios yet."""
    shape = identity(hf_config)
    layers = shape["num_hidden_layers"]
    qq, kk, vwv, _ = sums.mean(layers, contexts, shared=settings.granularity == "per-layer")
    places = place_contexts(settings, PLACES, hf_config)
    if places[-1]:
        turn, roped = turn_of(hf_config, shape["head_dim"]), roped_layers(hf_config, layers)
        qq[roped], kk[roped] = (over_places(moment[roped], turn, places) for moment in (qq, kk))
    k, q, k_eigenvalues = compose_keys(settings.composition, qq, kk)
    v, v_eigenvalues = compose_values(settings.composition, vwv)
    meta = RotationMeta(
        objective=OBJECTIVES[settings.composition],
        model=shape,
        tokens=contexts * settings.context,
        seed=settings.seed,
    )
    return Rotations(k, v, meta, k_eigenvalues, v_eigenvalues, q)


class ClipErrors:
    """Attention-output errors of every clip ratio, summed over contexts; each relative to its layer's output.

    ``add`` takes activations in the model's own basis.
    """

    def __init__(self, rotations: Rotations, settings: CalibrationSettings) -> None:
        s = settings
        self.rotations, self.settings = rotations, s
        self.errors = torch.zeros(rotations.k.shape[0], 2, len(s.clip_grid), dtype=torch.float64)
        self.starts = query_blocks(s.context, s.sink, s.recent, s.clip_blocks)

    @torch.no_grad()
    def add(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
        s = self.settings
        r = self.rotations
        rq, rk, rv = (x[layer].to(k.device) for x in (r.queries, r.k, r.v))
        rq = rq if rq.shape[0] == 1 else rq.repeat_interleave(q.shape[0] // k.shape[0], 0)
        errors, size = clip_errors(
            q.float() @ rq, k.float() @ rk, v.float() @ rv, scale,
            grid=s.clip_grid, starts=self.starts, sink=s.sink, recent=s.recent,
        )  # fmt: skip
        self.errors[layer] += errors / size

    def state(self) -> dict[str, torch.Tensor]:
        return {"errors": self.errors}

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        self.errors = state["errors"]

    def chosen(self, contexts: int) -> Rotations:
        """The rotations with the best clip ratios in their meta."""
        grid = self.settings.clip_grid
        best = choose_clips(self.errors, grid, per_layer=self.settings.clips == "per-layer")
        at_best = (self.errors / contexts).gather(-1, best[..., None])[..., 0]
        clips = [tuple(grid[i] for i in best[:, part].tolist()) for part in (0, 1)]
        if self.settings.clips == "global":
            clips = [c[0] for c in clips]
        errors = {name: [round(e, 6) for e in at_best[:, part].tolist()] for part, name in enumerate("kv")}
        meta = replace(self.rotations.meta, clip_k=clips[0], clip_v=clips[1], errors=errors)
        return replace(self.rotations, meta=meta)


class _Run:
    """The passes of one calibration over one model."""

    def __init__(self, model, contexts, settings: CalibrationSettings, progress, checkpoint: Checkpoint | None) -> None:
        self.model, self.contexts, self.settings, self.checkpoint = model, contexts, settings, checkpoint
        self.places = place_contexts(settings, len(contexts), model.config)
        self.progress = progress or (lambda name, done, total: None)

    def with_clips(self, rotations: Rotations) -> Rotations:
        s = self.settings
        step = max(len(self.contexts) // s.clip_contexts, 1)
        count = min(s.clip_contexts, len(self.contexts))
        errors = ClipErrors(rotations, s)
        self.through("clips", step, count, lambda layer, q, k, v, scale: errors.add(layer, q, k, v, scale), errors)
        return errors.chosen(count)

    def with_sensitivity(self, rotations: Rotations) -> Rotations:
        s, layers = self.settings, rotations.k.shape[0]
        length = min(s.sensitivity_context, s.context)
        step = max(len(self.contexts) // s.sensitivity_contexts, 1)
        contexts = self.contexts[::step][: s.sensitivity_contexts, :length]
        quantizer = LayerQuantizer(rotations, *rotations.meta.clips(layers), s.sink, s.recent)
        first = s.sink + s.recent
        sums = _Sums(torch.zeros(layers, len(VARIANTS), dtype=torch.float64))
        done = self._restore("sensitivity", sums)
        gradients = [p for p in self.model.parameters() if p.requires_grad]
        self.model.requires_grad_(False)  # only the activations' gradients are wanted
        try:
            for i, ids in enumerate(contexts):
                self.progress("sensitivity", i, len(contexts))
                if i < done:
                    continue
                generator = torch.Generator().manual_seed(i)
                sums.total += fisher_sums(
                    self.model,
                    ids,
                    layers,
                    quantizer,
                    place=self.places[i * step],
                    first=first,
                    draws=s.sensitivity_draws,
                    generator=generator,
                )
                self._keep("sensitivity", i + 1, len(contexts), sums)
        finally:
            for p in gradients:
                p.requires_grad_(True)
        self.progress("sensitivity", len(contexts), len(contexts))
        table = sensitivity_table(sums.total / (len(contexts) * (length - first)))
        return replace(rotations, meta=replace(rotations.meta, sensitivity=table, sensitivity_unit=UNIT))

    @torch.inference_mode()
    def through(self, name: str, step: int, count: int, hook: Callable, sums) -> None:
        """Run ``count`` contexts, every ``step``-th, through the decoder layers; the vocabulary projection is not needed."""
        body, done = self.model.base_model, self._restore(name, sums)

        def called(layer, q, k, v, scale):
            hook(layer, q, k, v, *([scale] if name == "clips" else []))

        with attention_hook(self.model, called):
            for i in range(count):
                self.progress(name, i, count)
                if i >= done:
                    ids = self.contexts[i * step].to(self.model.device)
                    place = 0 if name == "moments" else self.places[i * step]
                    body(ids[None], position_ids=positions(ids, place), use_cache=False)
                    self._keep(name, i + 1, count, sums)
        self.progress(name, count, count)

    def _restore(self, name: str, sums) -> int:
        done, state = self.checkpoint.load(name) if self.checkpoint else (0, {})
        if done:
            sums.restore(state)
        return done

    def _keep(self, name: str, done: int, total: int, sums) -> None:
        if self.checkpoint:
            self.checkpoint.save(name, done, sums.state(), last=done == total)


@dataclass
class _Sums:
    """A tensor of sums, as ``MomentSums`` is for a checkpoint."""

    total: torch.Tensor

    def state(self) -> dict[str, torch.Tensor]:
        return {"total": self.total}

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        self.total = state["total"]
