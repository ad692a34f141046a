"""Servers with LoRA adapters: each adapter's log-probabilities with ``--kv-quant`` against those of plain BF16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks import tiny_adapters
from benchmarks.answers import Bound, Difference, another_page, input_logprobs, token_difference
from benchmarks.tiny_models import VOCABULARY, TinyModel
from benchmarks.tiny_server import TinyServer, body
from tests.gpu.families import ROUNDING, Scale, prompt

NAMES = (None, "first", "second")
#: Flags of the quantizing server: it rotates values by a matrix per head, at run time.
OURS = ("--kv-quant", "turboquant", "--kv-quant-bits", "4", "--kv-quant-prefill-window", "0")


def flags(folder: Path, model: TinyModel, cpu: bool) -> list[str]:
    """Returns the flags of both servers."""
    adapters = [(name, tiny_adapters.write(folder / name, model, seed)) for seed, name in enumerate(NAMES) if name]
    paths = [f"{name}={path}" for name, path in adapters]
    return [*tiny_adapters.FLAGS, *(["--lora-backend", "torch_native"] if cpu else []), "--lora-paths", *paths]


def ask(server: TinyServer, scale: Scale) -> dict[tuple[str | None, str], list[float]]:
    """Returns log-probabilities by adapter and prompt."""
    short, long = prompt("adapter short", scale.short[-1]), prompt("adapter long", scale.long[0])
    prompts = {"short": short, "long": long, "wrong": another_page(long, 2, 0, VOCABULARY)}
    return {
        (name, kind): input_logprobs(
            server.json("/generate", body(ids, 1, return_logprob=True, logprob_start_len=0, lora_path=name))
        )
        for name in NAMES
        for kind, ids in prompts.items()
    }


def compare(ours: dict, plain: dict, scale: Scale) -> Iterator[tuple[str, bool, Difference, Bound, str]]:
    """Yields (case, passed, difference, bound, more) for each adapter."""
    bound, begin = Bound(ROUNDING, 10 * ROUNDING), scale.recent + 64 + scale.chunk
    for name in NAMES:
        found = token_difference(ours[name, "short"], plain[name, "short"])
        other = token_difference(ours[name, "short"], plain[NAMES[name is None], "short"])
        passed = bound.holds(found) and other.mean > 5 * bound.mean
        yield f"adapter {name}: all in BF16", passed, found, bound, f"another adapter: {other}"
        wrong = token_difference(plain[name, "wrong"][begin:], plain[name, "long"][begin:])
        near = Bound(wrong.mean / 2, max(wrong.max, 1.0))
        found = token_difference(ours[name, "long"][begin:], plain[name, "long"][begin:])
        yield f"adapter {name}: with a history", near.holds(found), found, near, f"a wrong page: {wrong}"
