"""What a method costs in quality: per-token KL divergence of a model with a fake-quantized history.

    python -m sglang_kvq.rotations.inspection.divergence MODEL TEXT [--rotations FOLDER ...] [--skip 0.8] [--contexts 4]

The model runs whole contexts through transformers. For every query, keys and values past the sink and
older than the recent window go through the real ``PageFormat`` in the rotated basis; the rest are BF16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.config import PAGE_SIZE
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.rotations.calibration.hf_attention import attention_hook, causal_attention
from sglang_kvq.rotations.maths.fake_quant import segmented_attention

GEOMETRY = ("num_hidden_layers", "num_key_value_heads", "head_dim")


@dataclass(frozen=True)
class FakeQuantAttention:
    """An ``AttentionHook``: causal attention over a quantized history and a BF16 sink and window.

    Attributes:
        format: record layout and clipping, one for all layers or one each; None rounds to BF16 only (the baseline).
        rotations: per layer and KV head, on the model's device.
        sink, recent: BF16 tokens at both ends, multiples of ``PAGE_SIZE``.
    """

    format: PageFormat | Sequence[PageFormat] | None
    rotations: LayerRotations = LayerRotations()
    sink: int = 64
    recent: int = 256

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        group = q.shape[0] // k.shape[0]
        q, k, v = q.float(), k.float(), v.float()
        if self.rotations.k is not None:
            q, k = q @ self.rotations.queries[layer].repeat_interleave(group, 0), k @ self.rotations.k[layer]
        if self.rotations.v is not None:
            v = v @ self.rotations.v[layer]
        q, k, v = (x.bfloat16().float() for x in (q, k, v))
        if self.format is None:
            out = causal_attention(q, k, v, scale)
        else:
            old_k, old_v = self._quantized(layer, k, v)
            blocks = (
                segmented_attention(
                    q[:, i : i + PAGE_SIZE], i, k, v, old_k, old_v, scale, sink=self.sink, recent=self.recent
                )
                for i in range(0, q.shape[1], PAGE_SIZE)
            )
            out = torch.cat(list(blocks), dim=1)
        if self.rotations.v is not None:
            out = out @ self.rotations.v[layer].transpose(-1, -2).repeat_interleave(group, 0)
        return out

    def _quantized(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whole pages through records and back, float32 ``[kv_heads, T, D]``; a last partial page stays as it is."""
        whole = k.shape[1] // PAGE_SIZE * PAGE_SIZE
        pages = (x[:, :whole].unflatten(1, (-1, PAGE_SIZE)) for x in (k, v))
        format = self.format[layer] if isinstance(self.format, Sequence) else self.format
        back = format.dequantize_pages(format.quantize_pages(*pages))
        # Rounded to BF16, as the reference backend reads them.
        return tuple(torch.cat([b.flatten(1, 2).bfloat16().float(), x[:, whole:]], 1) for b, x in zip(back, (k, v)))


@torch.inference_mode()
def mean_kl(
    model: torch.nn.Module,
    contexts: list[torch.Tensor],
    candidates: dict[str, FakeQuantAttention],
    *,
    first: int = 500,
) -> dict[str, float]:
    """Mean over tokens of KL(BF16 || candidate), in nats.

    Args:
        model: a transformers causal language model, best in float32 (only the cache is rounded to BF16).
        contexts: token ids int64 ``[T]`` each, T > first.
        first: positions below it are left out: their history is hardly quantized.

    Returns:
        the mean of each candidate, by name.
    """
    sums, count = dict.fromkeys(candidates, 0.0), 0
    for ids in contexts:
        reference = _log_probs(model, ids, FakeQuantAttention(None), first)
        count += reference.shape[0]
        for name, attention in candidates.items():
            logp = _log_probs(model, ids, attention, first)
            sums[name] += float(torch.nn.functional.kl_div(logp, reference, reduction="sum", log_target=True))
    return {name: total / count for name, total in sums.items()}


def _log_probs(model: torch.nn.Module, ids: torch.Tensor, attention: FakeQuantAttention, first: int) -> torch.Tensor:
    """Float32 ``[T - first, vocab]``."""
    with attention_hook(model, attention):
        logits = model(ids[None].to(model.device), use_cache=False, logits_to_keep=len(ids) - first).logits
    return logits[0].float().log_softmax(-1)


def main() -> None:
    """Print the mean KL of every method, and of every ``--rotations`` folder with the methods that take rotations."""
    import argparse
    from pathlib import Path

    from sglang_kvq.methods import RotationKind, get_method
    from sglang_kvq.rotations.calibration.hf_model import load_model, tokenize
    from sglang_kvq.rotations.calibration.text import read_text
    from sglang_kvq.rotations.inspection.candidates import candidate_of
    from sglang_kvq.rotations.storage.files import load_rotations
    from sglang_kvq.rotations.storage.zoo import identity

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--rotations", nargs="*", default=[], help="rotation folders to compare")
    parser.add_argument("--methods", nargs="*", default=["int2", "hadamard", "oscar"], help="NAME or NAME:BITS")
    parser.add_argument("--skip", type=float, default=0.0, help="share of the text to leave out: what calibration used")
    parser.add_argument("--contexts", type=int, default=4)
    parser.add_argument("--length", type=int, default=1536, help="tokens per context")
    args = parser.parse_args()

    model, tokenizer = load_model(args.model)
    shape = identity(model.config)
    geometry = dict(zip(("layers", "kv_heads", "head_dim"), (shape[n] for n in GEOMETRY)))
    text = read_text(args.text)
    ids = tokenize(tokenizer, text[int(len(text) * args.skip) :])
    count = min(args.contexts, len(ids) // args.length)
    if count == 0:
        parser.error(f"{args.text}: {len(ids)} tokens, one context needs {args.length}")
    starts = torch.linspace(0, len(ids) - args.length, count).long().tolist()

    candidates = {}
    for spec in args.methods:
        learned = get_method(spec.partition(":")[0]).rotation is RotationKind.LEARNED
        for folder in args.rotations if learned else [None]:
            rotations = load_rotations(folder, **geometry) if folder else None
            candidate = candidate_of(spec, rotations, model.config)
            name = f"{spec} {folder}" if folder else spec
            candidates[name] = FakeQuantAttention(candidate.formats, candidate.rotations.to(model.device))
    contexts = [ids[start : start + args.length] for start in starts]
    for name, value in mean_kl(model, contexts, candidates).items():
        print(f"{value:.4f} nats per token  {name}")


if __name__ == "__main__":
    main()
