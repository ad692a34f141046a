"""Measures how much a compressed or selected history keeps of a conversation's worth, in plain transformers.

    python -m benchmarks.research.episodes --model .models/Qwen2.5-Coder-0.5B-Instruct --embedder FOLDER/model \\
        --data FOLDER --out benchmarks/results/episodes_qwen2.5-coder-0.5b-instruct.json

This is the oracle of episodes. --data holds locomo/, longchat/ and shakespeare/; --embedder is a folder of
all-MiniLM-L6-v2. Runs on a GPU in BF16, or on a CPU in float32. Needs `pip install 'sglang-kvq[episodes]'`.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.research.episodes.case import Case, Embeds, Settings
from benchmarks.research.episodes.conversations import Writer
from benchmarks.research.episodes.datasets import DATASETS, conversations
from benchmarks.research.episodes.measure import Measured, comparisons, measure_case, rows
from benchmarks.research.episodes.policies import NAMES, VARIANTS, known_names
from benchmarks.research.episodes.quant import bits_per_element, round_trip_of
from benchmarks.research.episodes.runner import Runner
from benchmarks.research.episodes.sensitivity import SHARPNESS, layer_budgets, similarities
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.embedding import Embedder

#: Positions after a history for prompts and questions.
ROOM = 1152
#: Longest history by default.
LONGEST = 24576
SAMPLE = "shakespeare"
#: Policies to measure with quantized pages, unless --quant-policies names others.
QUANT_POLICIES = "full,retrieve,epicache"


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.research.episodes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="folder or hub id of a chat model")
    parser.add_argument("--embedder", required=True, type=Path, help="folder of a sentence-transformers model")
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--datasets", default=",".join(DATASETS))
    parser.add_argument(
        "--policies",
        default=",".join(NAMES),
        help=f"{', '.join(VARIANTS)} are measured at the first compression only",
    )
    parser.add_argument("--compressions", default="4,6")
    parser.add_argument("--kv-quant", default="none", help="none first, then methods: none,oscar,transform:2")
    parser.add_argument(
        "--quant-policies", default=QUANT_POLICIES, help=f"policies measured with quantized pages ({QUANT_POLICIES})"
    )
    parser.add_argument("--limit", type=int, default=8, help="conversations of each dataset")
    parser.add_argument("--questions", type=int, default=40, help="questions about each conversation")
    parser.add_argument("--limit-seconds", type=float, help="start no conversation later")
    parser.add_argument("--history-tokens", type=int, help=f"longest history (context - {ROOM}, at most {LONGEST})")
    parser.add_argument(
        "--sample-tokens", type=int, default=8192, help="tokens of the text from which layer budgets follow"
    )
    parser.add_argument("--block", type=int, default=Settings.block)
    parser.add_argument("--batch", type=int, default=Settings.batch)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="")
    parser.add_argument("--dtype", default="", help="bfloat16 on a GPU and float32 on a CPU by default")
    return parser.parse_args(words)


def load(args: argparse.Namespace) -> tuple[Runner, Writer]:
    from sglang_kvq.rotations.calibration.hf_model import load_model

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = args.dtype or ("float32" if device == "cpu" else "bfloat16")
    model, tokenizer = load_model(args.model, device=device, dtype=dtype)
    return Runner(model), Writer(tokenizer)


class LayerBudgets:
    """Layer budgets by sensitivity, which is measured on first use."""

    def __init__(self, runner: Runner, writer: Writer, data: Path, tokens: int) -> None:
        self.runner, self.writer, self.data, self.tokens = runner, writer, data, min(tokens, runner.context)

    @cached_property
    def similarities(self) -> Any:
        files = sorted((self.data / SAMPLE).glob("*.txt"))
        if not files:
            raise KVQuantError(f"{self.data / SAMPLE}: no text to measure sensitivities on; leave epicache_layers out.")
        ids = self.writer.tokens(files[0].read_text()[: self.tokens * 8])[: self.tokens]
        return similarities(self.runner, ids, window=max(1, len(ids) // 4), sinks=2 * PAGE_SIZE)

    def __call__(self, tokens: int, pinned: int) -> tuple[int, ...]:
        sharpness = SHARPNESS.get(self.runner.model.config.model_type, 1.0)
        return layer_budgets(self.similarities, tokens, sharpness=sharpness, unit=PAGE_SIZE, least=pinned + PAGE_SIZE)


def run(args: argparse.Namespace, runner: Runner, writer: Writer, embedder: Embeds) -> tuple[Measured, dict[str, Any]]:
    """Measures everything that the arguments name; also returns the file's further fields."""
    start = time.perf_counter()
    policies, quant_policies = (known_names(text.split(",")) for text in (args.policies, args.quant_policies))
    kinds, compressions = args.kv_quant.split(","), _numbers(args.compressions)
    if kinds[0] != "none":
        raise KVQuantError(
            f"--kv-quant {args.kv_quant}: must begin with none, because the other methods are compared with it."
        )
    if min(compressions) <= 1:
        raise KVQuantError(f"--compressions {args.compressions}: give numbers above 1, such as 4,6.")
    if args.block < PAGE_SIZE or args.block % PAGE_SIZE:
        raise KVQuantError(f"--block {args.block}: give a multiple of the page, {PAGE_SIZE} tokens.")
    for name in ("limit", "questions", "batch"):
        if getattr(args, name) < 1:
            raise KVQuantError(f"--{name} {getattr(args, name)}: give 1 or more.")
    if unknown := set(args.datasets.split(",")) - DATASETS.keys():
        raise KVQuantError(f"--datasets {', '.join(sorted(unknown))}: choose some of {', '.join(DATASETS)}.")
    room = runner.context - ROOM
    most = min(args.history_tokens or LONGEST, room)
    if most < ROOM:
        raise KVQuantError(f"histories of {most} tokens in a context of {runner.context}: too short to compress.")
    trips = {kind: round_trip_of(kind, args.model, runner.model.config, runner.device) for kind in kinds}
    layers_of = LayerBudgets(runner, writer, args.data, args.sample_tokens)
    settings = replace(Settings(), block=args.block, batch=args.batch, seed=args.seed)
    options = {"most_tokens": most, "limit": args.limit, "questions": args.questions}
    loaded = {name: conversations(name, args.data, writer, **options) for name in args.datasets.split(",")}
    # Alternates between datasets, so that an interrupted run has some conversations of each.
    turns = [(name, of[n]) for n in range(args.limit) for name, of in loaded.items() if n < len(of)]
    measured, done = Measured(), 0
    for dataset, conversation in turns:
        if args.limit_seconds and time.perf_counter() - start > args.limit_seconds:
            break
        case = Case(runner, writer, embedder, conversation, settings)
        for kind in kinds:
            chosen = policies if kind == "none" else quant_policies
            case = case.stored_as(trips[kind], with_mass="h2o" in chosen)
            measure_case(measured, dataset, case, kind, compressions, chosen, layers_of)
        done += 1
        print(f"{time.perf_counter() - start:6.1f} s  {conversation.name}", flush=True)
    if not done:
        raise KVQuantError(f"--limit-seconds {args.limit_seconds}: over before the first conversation; give more.")
    more = {
        "model": Path(args.model).name,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "settings": {name: getattr(settings, name) for name in settings.__dataclass_fields__},
        "history_tokens_at_most": most,
        "conversations_left_out": len(turns) - done,
        "seconds": {name: round(seconds, 1) for name, seconds in measured.seconds.items()},
    }
    return measured, more


def _numbers(text: str) -> list[float]:
    """Parses a list with commas; a word that is not a number becomes 0, which no option accepts."""
    return [float(word) if word.replace(".", "", 1).isdigit() else 0.0 for word in text.split(",")]


def rounded(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: float(f"{x:.5g}") if isinstance(x, float) else x for k, x in row.items()} for row in found]


def table(found: list[dict[str, Any]]) -> str:
    """Returns a text table with a line for each row."""
    lines = [
        f"{'dataset':10} {'x':>4} {'kv_quant':8} {'policy':16} {'matching':9}  gain kept      recall  hot  less full"
    ]
    for row in found:
        error = "" if row["gain_kept_se"] is None else f" ± {row['gain_kept_se']:.2f}"
        cells = [
            f"{row['dataset']:10}",
            f"{row['compression'] or '':>4}",
            f"{row['kv_quant']:8}",
            f"{row['policy']:16}",
        ]
        cells += [f"{row['matching'] or '':9}", f"{row['gain_kept']:6.2f}{error:7}", f"{row['evidence_recall']:6.2f}"]
        lines.append(" ".join([*cells, f"{row['hot_tokens']:7.0f}", f"{row['less_full']:+.3f}"]))
    return "\n".join(lines)


def main() -> None:
    args = arguments()
    runner, writer = load(args)
    embedder = Embedder.load(args.embedder, device=runner.device.type)
    if runner.device.type == "cuda":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        # cuDNN makes a new plan for every shape, and there are many shapes.
        backends: Any = sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    else:
        backends = nullcontext()
    with backends:
        measured, more = run(args, runner, writer, embedder)
    element_bytes = 2 * runner.layers * runner.kv_heads * runner.head_dim / 8
    bits = {kind: bits_per_element(kind, args.model, runner.model.config) for kind in args.kv_quant.split(",")}
    found = rounded(rows(measured, {kind: element_bytes * of for kind, of in bits.items()}))
    compared = rounded(comparisons(measured))
    print(table(found))
    for one in compared:
        print("  ".join(str(value) for value in one.values()))
    print(more["seconds"])
    record.write(args.out, f"episodes_{more['model'].lower()}", found, comparisons=compared, **more)


if __name__ == "__main__":
    main()
