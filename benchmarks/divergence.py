"""Compares calibrations: mean KL divergence per token of a model with a fake-quantized history.

    python -m benchmarks.divergence MODEL TEXT [--rotations FOLDER ...] [--skip 0.8] [--contexts 4]

``sglang_kvq.rotations.inspection.divergence`` documents the measurement.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from sglang_kvq.methods import RotationKind, get_method
from sglang_kvq.rotations import load_rotations
from sglang_kvq.rotations.calibration.hf_model import embedding_rows, load_model, tokenize
from sglang_kvq.rotations.calibration.settings import read_text
from sglang_kvq.rotations.identity import geometry_of, layer_numbers
from sglang_kvq.rotations.inspection.candidates import candidate_of, takes
from sglang_kvq.rotations.inspection.divergence import FakeQuantAttention, divergences


def main() -> None:
    """Prints the mean KL of every method, with each ``--rotations`` folder if the method uses learned rotations."""
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
    for name, found in divergences(model, contexts, candidates).items():
        print(f"{float(found.kl.mean()):.4f} nats per token  {name}")


if __name__ == "__main__":
    main()
