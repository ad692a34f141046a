"""Sensitivity of each layer's keys and values: the model's loss when only they are quantized.

The loss is the KL divergence of the next-token distributions from the unquantized model's, to second order ½ E[(gᵀδ)²]
(the Fisher information). δ is the change of a layer's attention output. g is the gradient, at that output, of the
log-probability of tokens drawn from the model's own distributions. One forward pass gives every δ, one backward pass
every g. Products of different tokens are treated as independent, which adds a little bias and removes much noise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, ClassVar, TypeAlias

import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.errors import KVQuantError, first_line
from sglang_kvq.rotations.base import Rotations
from sglang_kvq.rotations.calibration.hf_attention import attention_hook, positions
from sglang_kvq.rotations.calibration.settings import check_finite
from sglang_kvq.rotations.maths.fake_quant import RotatedContext, causal_attention, round_trip

#: The quantized part, "k" or "v", and its bits per element, or in the quantizer's own unit.
Variant: TypeAlias = tuple[str, int]

#: Widths measured, in bits.
WIDTHS = (2, 4)
#: Variants of ``LayerQuantizer``.
VARIANTS: tuple[Variant, ...] = tuple((part, bits) for bits in WIDTHS for part in ("k", "v"))

#: Unit of the numbers of ``sensitivity_table``.
UNIT = "nats per token: KL divergence to second order (Fisher information); 2-bit codes clipped, 4-bit codes not"


class Quantizer(ABC):
    """Computes the change of a layer's attention output when its history keys or values are quantized.

    Attributes:
        variants: order of the second dimension of every result.
        sink, recent: BF16 tokens at both ends.
    """

    variants: ClassVar[tuple[Variant, ...]]

    def __init__(self, sink: int, recent: int) -> None:
        self.sink, self.recent = sink, recent

    @abstractmethod
    def matrices(self, bits: int) -> LayerRotations:
        """Returns the basis in which rows are quantized at a width."""

    @abstractmethod
    def read(self, rows: torch.Tensor, layer: int, part: str, bits: int) -> torch.Tensor:
        """Quantizes and dequantizes rows of keys or values, float32 ``[kv_heads, T, D]`` in the basis ``matrices``."""

    def delta(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, variants: Sequence[Variant]
    ) -> list[torch.Tensor]:
        """Returns for each variant the output's change in the model's own basis, float32 ``[q_heads, T, D]``."""
        result = []
        for bits, group in groupby(variants, key=itemgetter(1)):
            context = RotatedContext.of(self.matrices(bits), layer, q, k, v, scale, sink=self.sink, recent=self.recent)
            exact = context.exact()
            for part, _ in group:
                old = self.read(context.k if part == "k" else context.v, layer, part, bits)
                out = context.output(k=old) if part == "k" else context.output(v=old)
                result.append(context.to_model_basis(out - exact))
        return result


class LayerQuantizer(Quantizer):
    """The ``Quantizer`` of codes with a scale and an offset; it clips 2-bit codes."""

    variants = VARIANTS

    def __init__(self, rotations: Rotations, sink: int, recent: int) -> None:
        super().__init__(sink, recent)
        self._rotations, self._clips = rotations.whole(), dict(zip("kv", rotations.meta.clips(rotations.k.shape[0])))

    def matrices(self, bits: int) -> LayerRotations:
        return self._rotations

    def read(self, rows: torch.Tensor, layer: int, part: str, bits: int) -> torch.Tensor:
        # Clip ratios are measured for 2 bits; wider codes lose more by clipping than they gain.
        clip = self._clips[part][layer] if bits == 2 else None
        return round_trip(rows, bits, 1.0 if clip is None else clip)


def fisher_sums(
    model: Any,
    ids: torch.Tensor,
    layers: int,
    quantizer: Quantizer,
    *,
    position: int = 0,
    first: int,
    draws: int,
    seed: int,
) -> torch.Tensor:
    """Computes ½ Σ (g_tᵀδ_t)² over the tokens t of one context; only losses of the tokens from ``first`` on count.

    Args:
        ids: int64 ``[T]``; the first token is at ``position``.
        draws: backward passes, each with newly drawn tokens.
        seed: seed of these tokens. They are drawn on the model's device, because a CPU takes seconds for each context.

    Returns:
        float64 ``[layers, len(quantizer.variants)]`` on the CPU.

    Raises:
        KVQuantError: probabilities are not numbers; the model gives no gradients here, or there is not enough memory
            for them.
    """
    held: dict[int, torch.Tensor] = {}
    deltas: dict[int, list[torch.Tensor]] = {}

    def hook(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        with torch.no_grad():
            deltas[layer] = quantizer.delta(layer, q, k, v, scale, quantizer.variants)
        out = causal_attention(q, k, v, scale)
        held[layer] = torch.zeros_like(out, requires_grad=True)
        return out + held[layer]

    with torch.enable_grad(), attention_hook(model, hook):
        ids = ids.to(model.device)
        out = model(ids[None], position_ids=positions(ids, position), use_cache=False, logits_to_keep=len(ids) - first)
        logits = out.logits[0, first - len(ids) :].float()  # some models keep all
        logp = logits.log_softmax(-1)
    if logp.isnan().any():
        raise KVQuantError(
            "the model's next-token probabilities hold NaN: it overflows in its dtype. Pass --dtype float32, and check "
            "the model's weights; or --no-sensitivity to do without."
        )
    order = range(layers)
    sums = torch.zeros(layers, len(quantizer.variants), dtype=torch.float64)
    generator = torch.Generator(logp.device).manual_seed(seed)
    for draw in range(draws):
        with torch.no_grad():
            drawn = torch.multinomial(logp.exp(), 1, generator=generator)
        score = logp.gather(-1, drawn).sum()
        try:
            grads = torch.autograd.grad(score, [held[i] for i in order], retain_graph=draw + 1 < draws)
        except RuntimeError as error:  # also out of memory; quantized weights may have no backward pass
            raise KVQuantError(
                "sensitivities need gradients of the activations, and the model gives none here "
                f"({first_line(error)}). Pass --no-sensitivity to do without, or calibrate the unquantized model."
            ) from error
        for layer, g in zip(order, grads):
            for j, delta in enumerate(deltas[layer]):
                sums[layer, j] += float((g.float() * delta).sum((0, 2)).double().square().sum()) / (2 * draws)
    return sums


def sensitivity_table(values: torch.Tensor, variants: Sequence[Variant]) -> dict[str, dict[str, list[float]]]:
    """Converts values ``[layers, len(variants)]`` to ``RotationMeta.sensitivity``.

    Raises:
        KVQuantError: a value is not finite.
    """
    check_finite(values, "its sensitivity", ", or --no-sensitivity to do without")
    table: dict[str, dict[str, list[float]]] = {"k": {}, "v": {}}
    for j, (part, bits) in enumerate(variants):
        table[part][str(bits)] = [float(f"{x:.4g}") for x in values[:, j].tolist()]
    return table
