"""Quality cost of a method: per-token KL divergence of a model with a fake-quantized history.

The model runs whole contexts through transformers. For every query, keys and values between the sink and the recent
window go through the real records in the rotated basis. The rest are BF16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.formats.record import RecordFormat
from sglang_kvq.rotations.calibration.hf_attention import attention_hook, positions
from sglang_kvq.rotations.maths.fake_quant import RotatedContext, page_round_trip


@dataclass(frozen=True)
class FakeQuantAttention:
    """An ``AttentionHook``: causal attention over a quantized history and a BF16 sink and window.

    ``format`` is one for all layers or a sequence with one per layer; None only rounds to BF16 (the baseline).
    ``sink`` and ``recent`` are multiples of ``PAGE_SIZE``.
    """

    format: RecordFormat | Sequence[RecordFormat] | None
    rotations: LayerRotations = field(default_factory=LayerRotations)
    sink: int = 64
    recent: int = 256

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        context = RotatedContext.of(
            self.rotations, layer, q, k, v, scale, sink=self.sink, recent=self.recent, round_queries=True
        )
        if self.format is None:
            return context.to_model_basis(context.exact())
        format = self.format[layer] if isinstance(self.format, Sequence) else self.format
        return context.to_model_basis(context.output(*page_round_trip(format, context.k, context.v)))


@dataclass(frozen=True)
class TokenDivergence:
    """Change of the model's next-token distributions, token by token, contexts one after another.

    ``kl`` is KL(BF16 || candidate) in nats, float64 ``[tokens]``; ``agrees`` is True where the most likely token is the
    same, bool ``[tokens]``.
    """

    kl: torch.Tensor
    agrees: torch.Tensor


@torch.inference_mode()
def divergences(
    model: Any,
    contexts: Sequence[torch.Tensor],
    candidates: Mapping[str, FakeQuantAttention],
    *,
    first: int = 500,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, TokenDivergence]:
    """Measures the divergence of every token from position ``first`` on; returns results on the CPU, by candidate.

    Args:
        model: a transformers causal language model, best in float32 (only the cache is rounded to BF16).
        contexts: token ids int64 ``[T]`` each, T > first.
        progress: called with the number of finished passes over a context, and the total.
    """
    found: dict[str, list[TokenDivergence]] = {name: [] for name in candidates}
    report, total = progress or (lambda done, total: None), len(contexts) * (1 + len(candidates))
    for i, ids in enumerate(contexts):
        done = i * (1 + len(candidates))
        report(done, total)
        reference = log_probs(model, ids, FakeQuantAttention(None), first)
        for j, (name, attention) in enumerate(candidates.items()):
            report(done + 1 + j, total)
            found[name].append(compare(log_probs(model, ids, attention, first), reference))
    report(total, total)
    return {
        name: TokenDivergence(torch.cat([d.kl for d in each]), torch.cat([d.agrees for d in each]))
        for name, each in found.items()
    }


def compare(logp: torch.Tensor, reference: torch.Tensor) -> TokenDivergence:
    """Compares log-probabilities ``[tokens, vocab]`` in parts: the whole difference would need as much memory again."""
    kl = torch.cat(
        [
            torch.nn.functional.kl_div(a, b, reduction="none", log_target=True).sum(-1, dtype=torch.float64)
            for a, b in zip(logp.split(PAGE_SIZE), reference.split(PAGE_SIZE))
        ]
    )
    return TokenDivergence(kl.cpu(), (logp.argmax(-1) == reference.argmax(-1)).cpu())


def log_probs(model: Any, ids: torch.Tensor, attention: FakeQuantAttention, first: int) -> torch.Tensor:
    """Returns next-token log-probabilities at each position from ``first`` on, float32 ``[T - first, vocab]``."""
    with attention_hook(model, attention):
        ids = ids.to(model.device)
        out = model(ids[None], position_ids=positions(ids, 0), use_cache=False, logits_to_keep=len(ids) - first)
    logits: torch.Tensor = out.logits[0, first - len(ids) :]  # some models return all positions
    return logits.float().log_softmax(-1)
