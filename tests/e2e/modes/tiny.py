"""A tiny model whose answers depend on the cache, for modes of SGLang that ``--kv-quant`` merely allows.

Every such server is compared with one that has SGLang's own cache in that mode, or with itself at rest. Bounds are
those of ``tests.gpu.families``: BF16 alone moves a log-probability by 0.04 on average, a wrong page by 0.8.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.answers import Difference, input_logprobs, token_difference
from benchmarks.tiny_models import MODELS
from benchmarks.tiny_server import body
from launch.server import Server

#: Flags of every server. A prompt of 190 tokens fits sinks and window, one of 520 does not.
FLAGS = (
    *("--skip-tokenizer-init", "--skip-server-warmup", "--random-seed", "0"),
    *("--chunked-prefill-size", "128", "--context-length", "1024", "--max-total-tokens", "4096"),
)
#: Four bits are nearly lossless, so a wrong page stands out; the rotation of values must be undone somewhere.
OURS = ("--kv-quant", "turboquant", "--kv-quant-bits", "4", "--kv-quant-prefill-window", "0")
SHORT, LONG = 190, 520
#: Tokens of a long prompt that read no history: sinks, window and a chunk.
BEFORE = 448


def write(folder: Path) -> Path:
    """Writes the model and returns its folder."""
    return MODELS["llama"].write(folder)


def read(server: Server, ids: list[int], start: int = 0, **options) -> list[float]:
    """Returns the log-probabilities of a prompt's tokens after ``start``."""
    asked = body(ids, 1, return_logprob=True, logprob_start_len=start, **options)
    return input_logprobs(server.json("/generate", asked))


def after_windows(ours: list[float], theirs: list[float]) -> Difference:
    """Returns the difference of a long prompt's tokens that read a history."""
    return token_difference(ours[BEFORE:], theirs[BEFORE:])
