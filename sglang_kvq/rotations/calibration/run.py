"""OSCAR's calibration (arXiv 2605.17757): rotations, clip ratios and sensitivities from a model's own activations.

1. "moments" of queries, keys and values (``maths.moments``), from which the rotations follow (``maths.compose``);
2. "clips": each layer's attention-output error for every clip ratio on a grid (``calibration.clips``);
3. "sensitivity": the model's loss when one layer's keys or values are quantized (``calibration.sensitivity``).

For transform coding, moments are weighted by attention, the second pass is left out, and sensitivities become
importances (``calibration.transform``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from sglang_kvq.rotations.base import RotationMeta, Rotations
from sglang_kvq.rotations.calibration.checkpoint import Checkpoint
from sglang_kvq.rotations.calibration.clips import ClipErrors
from sglang_kvq.rotations.calibration.hf_attention import AttentionHook, attention_hook, positions
from sglang_kvq.rotations.calibration.hf_model import one_thread
from sglang_kvq.rotations.calibration.rope import (
    check_turn,
    mean_over_positions,
    roped_layers,
    turn_of,
)
from sglang_kvq.rotations.calibration.sensitivity import (
    UNIT,
    LayerQuantizer,
    Quantizer,
    fisher_sums,
    sensitivity_table,
)
from sglang_kvq.rotations.calibration.settings import (
    CalibrationSettings,
    check_head_dim,
    check_length,
    draw_contexts,
    first_positions,
)
from sglang_kvq.rotations.calibration.transform import (
    PlaneQuantizer,
    output_weights,
    transform_rotations,
    with_importance,
)
from sglang_kvq.rotations.identity import geometry_of, identity
from sglang_kvq.rotations.maths.compose import OBJECTIVES, compose_keys, compose_values
from sglang_kvq.rotations.maths.moments import Moments, MomentSums, attended_moments

#: Number of first positions that moments are averaged over. Even the farthest of them are less than a context apart.
SPREAD = 64

#: Number of tokens that are run at the farthest of these positions, to check that keys turn as predicted.
CHECKED = 128

#: Function that is called with a pass's name, its number of finished contexts, and the number of all its contexts.
Progress = Callable[[str, int, int], None]


def silent(name: str, done: int, total: int) -> None:
    """A ``Progress`` that prints nothing."""


def calibrate(
    model: Any,
    ids: torch.Tensor,
    settings: CalibrationSettings,
    progress: Progress = silent,
    *,
    checkpoint: Callable[[Any, torch.Tensor, CalibrationSettings], Checkpoint] | None = None,
) -> Rotations:
    """Computes rotations, clip ratios and sensitivities for ``model``.

    Args:
        model: a transformers causal language model; it runs on its own device and in its own dtype.
        ids: int64 ``[tokens]``, the tokenized corpus.
        checkpoint: makes the checkpoint that keeps finished contexts, from model, contexts and settings.

    Returns:
        rotations on the CPU; the caller adds the names of corpus and model.

    Raises:
        KVQuantError: corpus too short; contexts longer than the model's positions; activations not finite; layers
            without plain attention, or for transform coding without a plain output projection; head_dim not supported;
            a checkpoint of another run.
    """
    head_dim = geometry_of(model.config).head_dim
    check_head_dim(head_dim)
    check_length("--context", settings.context, model.config)
    contexts = draw_contexts(ids, settings)
    progress("looking at the model", 0, 1)
    run = _Run(model, contexts, settings, progress, checkpoint(model, contexts, settings) if checkpoint else None)
    sums = MomentSums(settings.sink)
    farthest = first_positions(settings, SPREAD, model.config)[-1]
    if farthest:
        check_turn(model, contexts[0, :CHECKED], turn_of(model.config, head_dim), farthest)
    weights = output_weights(model, contexts[0]) if settings.composition == "transform" else None

    @torch.no_grad()
    def add(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
        if weights is None:
            sums.add(layer, q, k, v)
        else:
            moments = attended_moments(q, k, v, scale, sink=settings.sink, recent=settings.recent)
            sums.add_moments(layer, moments)

    # All contexts begin at position 0; ``averaged`` computes the moments at other positions from these.
    run.through("moments", [0] * len(contexts), 1, add, sums.state)
    progress("rotations", 0, 1)
    if weights is not None:
        moments = averaged(sums, model.config, settings, len(contexts))
        rotations = transform_rotations(moments, weights, _meta(model.config, settings, len(contexts)))
        return run.with_importance(rotations) if settings.sensitivity_contexts else rotations
    rotations = rotations_from(sums, model.config, settings, len(contexts))
    rotations = run.with_clips(rotations)
    return run.with_sensitivity(rotations) if settings.sensitivity_contexts else rotations


def rotations_from(sums: MomentSums, hf_config: Any, settings: CalibrationSettings, contexts: int) -> Rotations:
    """Computes rotations, without clip ratios, from the sums over ``contexts`` contexts that began at position 0."""
    moments = averaged(sums, hf_config, settings, contexts)
    with one_thread():
        k, q, k_eigenvalues = compose_keys(settings.composition, moments.qq, moments.kk)
        v, v_eigenvalues = compose_values(settings.composition, moments.vv)
    return Rotations(k, v, _meta(hf_config, settings, contexts), k_eigenvalues, v_eigenvalues, q)


def averaged(sums: MomentSums, hf_config: Any, settings: CalibrationSettings, contexts: int) -> Moments:
    """Computes moments of the prompts that will be served, from the sums over contexts that began at position 0."""
    layers, _, head_dim = geometry_of(hf_config)
    moments = sums.mean(layers, contexts, shared=settings.granularity == "per-layer")
    spread = first_positions(settings, SPREAD, hf_config)
    if spread[-1]:
        turn, roped = turn_of(hf_config, head_dim), roped_layers(hf_config, layers)
        for moment in (moments.qq, moments.kk):
            moment[roped] = mean_over_positions(moment[roped], turn, spread)
        moments.k_mean[roped] = moments.k_mean[roped] @ (sum(map(turn, spread)) / len(spread))
    return moments


def _meta(hf_config: Any, settings: CalibrationSettings, contexts: int) -> RotationMeta:
    return RotationMeta(
        objective=OBJECTIVES[settings.composition],
        model=identity(hf_config),
        tokens=contexts * settings.context,
        seed=settings.seed,
    )


class _Run:
    """The passes of one calibration over one model."""

    def __init__(
        self,
        model: Any,
        contexts: torch.Tensor,
        settings: CalibrationSettings,
        progress: Progress,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.model, self.contexts, self.settings, self.checkpoint = model, contexts, settings, checkpoint
        self.positions = first_positions(settings, len(contexts), model.config)
        self.progress = progress

    def with_clips(self, rotations: Rotations) -> Rotations:
        step, count = self._some(self.settings.clip_contexts)
        errors = ClipErrors(rotations, self.settings)
        self.through("clips", self.positions[::step][:count], step, errors.add, errors.state)
        return errors.chosen(count)

    def with_sensitivity(self, rotations: Rotations) -> Rotations:
        quantizer = LayerQuantizer(rotations, self.settings.sink, self.settings.recent)
        table = sensitivity_table(self._nats(quantizer, len(rotations.k)), quantizer.variants)
        return replace(rotations, meta=replace(rotations.meta, sensitivity=table, sensitivity_unit=UNIT))

    def with_importance(self, rotations: Rotations) -> Rotations:
        quantizer = PlaneQuantizer(rotations, self.settings.sink, self.settings.recent)
        return with_importance(rotations, self._nats(quantizer, len(rotations.k)))

    def _nats(self, quantizer: Quantizer, layers: int) -> torch.Tensor:
        """Runs the sensitivity pass; returns the nats per token of each variant, float64 ``[layers, variants]``."""
        s = self.settings
        length, first = min(s.sensitivity_context, s.context), s.sink + s.recent
        step, count = self._some(s.sensitivity_contexts)
        sums = {"total": torch.zeros(layers, len(quantizer.variants), dtype=torch.float64)}
        done = self._restore("sensitivity", sums)
        gradients = [p for p in self.model.parameters() if p.requires_grad]
        self.model.requires_grad_(False)  # only the activations' gradients are wanted
        try:
            for i in range(count):
                self.progress("sensitivity", i, count)
                if i < done:
                    continue
                sums["total"] += fisher_sums(
                    self.model,
                    self.contexts[i * step, :length],
                    layers,
                    quantizer,
                    position=self.positions[i * step],
                    first=first,
                    draws=s.sensitivity_draws,
                    seed=i,
                )
                self._keep("sensitivity", i + 1, count, sums)
        finally:
            for p in gradients:
                p.requires_grad_(True)
        self.progress("sensitivity", count, count)
        return sums["total"] / (count * (length - first))

    @torch.inference_mode()
    def through(
        self, name: str, first: list[int], step: int, hook: AttentionHook, sums: dict[str, torch.Tensor]
    ) -> None:
        """Runs every ``step``-th context through the decoder layers; ``first`` has the positions where they begin."""
        body, done, count = self.model.base_model, self._restore(name, sums), len(first)
        with attention_hook(self.model, hook):
            for i, position in enumerate(first):
                self.progress(name, i, count)
                if i >= done:
                    ids = self.contexts[i * step].to(self.model.device)
                    body(ids[None], position_ids=positions(ids, position), use_cache=False)
                    self._keep(name, i + 1, count, sums)
        self.progress(name, count, count)

    def _some(self, wanted: int) -> tuple[int, int]:
        """Returns the step between ``wanted`` contexts spread over all contexts, and how many of them there are."""
        return max(len(self.contexts) // wanted, 1), min(wanted, len(self.contexts))

    def _restore(self, name: str, sums: dict[str, torch.Tensor]) -> int:
        done, state = self.checkpoint.load(name) if self.checkpoint else (0, {})
        sums.update(state)
        return done

    def _keep(self, name: str, done: int, total: int, sums: dict[str, torch.Tensor]) -> None:
        if self.checkpoint:
            self.checkpoint.save(name, done, sums, last=done == total)
