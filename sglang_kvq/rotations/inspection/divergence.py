"""Quality cost of a method: per-token KL divergence of a model with a fake-quantized history.

    python -m sglang_kvq.rotations.inspection.divergence MODEL TEXT [--rotations FOLDER ...] [--skip 0.8] [--contexts 4]

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

    Attributes:
        format: record layout and clipping, one for all layers or one each; None rounds to BF16 only (the baseline).
        rotations: per layer and KV head.
        sink, recent: BF16 tokens at both ends, multiples of ``PAGE_SIZE``.
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

    Attributes:
        kl: float64 ``[tokens]``, KL(BF16 || candidate) in nats.
        agrees: bool ``[tokens]``: True if both predict the same most likely token.
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
    """Measures the divergence of every token from position ``first`` on.

    Args:
        model: a transformers causal language model, best in float32 (only the cache is rounded to BF16).
        contexts: token ids int64 ``[T]`` each, T > first.
        first: earlier positions are left out, because little of their history is quantized.
        progress: called with the number of finished passes over a context, and the total.

    Returns:
        the divergences of each candidate, by name, on the CPU.
    """
    found: dict[str, list[TokenDivergence]] = {name: [] for name in candidates}
    report, total = progress or (lambda done, total: None), len(contexts) * (1 + len(candidates))
    for i, ids in enumerate(contexts):
        done = i * (1 + len(candidates))
        report(done, total)
        reference = _log_probs(model, ids, FakeQuantAttention(None), first)
        for j, (name, attention) in enumerate(candidates.items()):
            report(done + 1 + j, total)
            found[name].append(_compare(_log_probs(model, ids, attention, first), reference))
    report(total, total)
    return {
        name: TokenDivergence(torch.cat([d.kl for d in each]), torch.cat([d.agrees for d in each]))
        for name, each in found.items()
    }


def mean_kl(
    model: Any, contexts: list[torch.Tensor], candidates: dict[str, FakeQuantAttention], *, first: int = 500
) -> dict[str, float]:
    """Averages the KL of ``divergences`` over tokens, by name of the candidate; same arguments."""
    found = divergences(model, contexts, candidates, first=first)
    return {name: float(divergence.kl.mean()) for name, divergence in found.items()}


def _compare(logp: torch.Tensor, reference: torch.Tensor) -> TokenDivergence:
    """Compares log-probabilities ``[tokens, vocab]``, in parts: a whole difference would need as much memory again."""
    kl = torch.cat(
        [
            torch.nn.functional.kl_div(a, b, reduction="none", log_target=True).sum(-1, dtype=torch.float64)
            for a, b in zip(logp.split(PAGE_SIZE), reference.split(PAGE_SIZE))
        ]
    )
    return TokenDivergence(kl.cpu(), (logp.argmax(-1) == reference.argmax(-1)).cpu())


def _log_probs(model: Any, ids: torch.Tensor, attention: FakeQuantAttention, first: int) -> torch.Tensor:
    """Returns log-probabilities, float32 ``[T - first, vocab]``."""
    with attention_hook(model, attention):
        ids = ids.to(model.device)
        out = model(ids[None], position_ids=positions(ids, 0), use_cache=False, logits_to_keep=len(ids) - first)
    logits: torch.Tensor = out.logits[0, first - len(ids) :]  # some models keep all
    return logits.float().log_softmax(-1)


def main() -> None:
    """Prints the mean KL of every method, with each ``--rotations`` folder if the method uses learned rotations."""
    import argparse
    from pathlib import Path

    from sglang_kvq.methods import RotationKind, get_method
    from sglang_kvq.rotations.calibration.hf_model import embedding_rows, load_model, tokenize
    from sglang_kvq.rotations.calibration.text import read_text
    from sglang_kvq.rotations.identity import geometry_of, layer_numbers
    from sglang_kvq.rotations.inspection.candidates import candidate_of, takes
    from sglang_kvq.rotations.storage.files import load_rotations

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--rotations", nargs="*", default=[], help="rotation folders to compare")
    parser.add_argument("--methods", nargs="*", default=["int2", "hadamard", "oscar"], help="NAME or NAME:BITS")
    parser.add_argument("--skip", type=float, default=0.0, help="share of the text to leave out: what calibration used")
    parser.add_argument("--contexts", type=int, default=4)
    parser.add_argument("--length", type=int, default=1536, help="tokens per context")
    args = parser.parse_args()

    model, tokenizer = load_model(args.model)
    geometry, numbers = geometry_of(model.config)._asdict(), layer_numbers(model.config)
    text = read_text(args.text)
    ids = tokenize(tokenizer, text[int(len(text) * args.skip) :], embedding_rows(model))
    count = min(args.contexts, len(ids) // args.length)
    if count == 0:
        parser.error(f"{args.text}: {len(ids)} tokens, one context needs {args.length}")
    starts = torch.linspace(0, len(ids) - args.length, count).long().tolist()

    candidates = {}
    for spec in args.methods:
        learned = get_method(spec.partition(":")[0]).rotation is RotationKind.LEARNED
        for folder in args.rotations if learned else [None]:
            rotations = load_rotations(folder, **geometry, numbers=numbers) if folder else None
            if rotations and not takes(spec, rotations):
                continue
            candidate = candidate_of(spec, rotations, model.config)
            name = f"{spec} {folder}" if folder else spec
            candidates[name] = FakeQuantAttention(candidate.formats, candidate.rotations.to(model.device))
    contexts = [ids[start : start + args.length] for start in starts]
    for name, value in mean_kl(model, contexts, candidates).items():
        print(f"{value:.4f} nats per token  {name}")


if __name__ == "__main__":
    main()
