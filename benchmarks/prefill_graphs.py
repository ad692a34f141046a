"""Checks that CUDA graphs for prefill change no answer.

    python benchmarks/prefill_graphs.py --out benchmarks/results/prefill_graphs_h100.json
    python benchmarks/prefill_graphs.py --tp-size 2 --out benchmarks/results/prefill_graphs_h100.json

Compares log-probabilities of a tiny model's prompts with ``--kv-quant``, with and without graphs. ``difference`` and
``largest`` are the mean and the largest difference; ``noise`` is the mean between two servings without graphs. The
command fails if the difference is above three times the noise and above the effect of rounding.
``benchmarks/first_tokens.py --eager`` measures the time that graphs save.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import record
from benchmarks.answers import Bound, Difference, input_logprobs, token_difference
from benchmarks.tiny_models import MODELS, VOCABULARY
from benchmarks.tiny_server import TinyServer, body, plugin_path

#: Flags with which prefills run in CUDA graphs, and flags with which they do not.
GRAPHS, NO_GRAPHS = ("--cuda-graph-backend-prefill", "breakable"), ("--disable-prefill-cuda-graph",)
#: Lengths of the prompts: within windows, and with a history; several also run at once.
CHECKED = (70, 300, 1000, 1500)
ROUNDING = 0.04


def logprobs(folder: Path, *flags: str) -> list[list[float]]:
    """Returns a tiny model's log-probabilities of its prompts: each prompt alone, then all at once."""
    model, env = MODELS["qwen3"].write(folder), plugin_path(folder)
    log = folder / f"tiny{''.join(flags)}.log"
    more = ("--kv-quant", "int4", "--chunked-prefill-size", "512", "--context-length", "2048")
    with TinyServer(model, [*more, *flags], cpu=False, log=log, env=env) as server:
        ids = [[2 + (7 * i + 31 * n) % (VOCABULARY - 2) for i in range(tokens)] for n, tokens in enumerate(CHECKED)]
        asked = [body(each, 1, return_logprob=True, logprob_start_len=0) for each in ids]
        alone = [input_logprobs(server.json("/generate", each)) for each in asked]
        server.drain()
        together = server.json("/generate", body(ids, 1, return_logprob=True, logprob_start_len=0))
        return alone + [input_logprobs(reply) for reply in together]


def compare(folder: Path, gpus: int) -> dict:
    """Returns the row ``logprobs``, of servers on so many GPUs."""
    both = ("--tp-size", str(gpus))
    graphs, eager = logprobs(folder, *GRAPHS, *both), logprobs(folder, *NO_GRAPHS, *both)
    half = len(CHECKED)
    noise = _difference(eager[:half], eager[half:])
    found, bound = _difference(graphs, eager), Bound.above([noise], 3, ROUNDING)
    return {
        "scenario": "logprobs" if gpus == 1 else f"logprobs, {gpus} GPUs",
        "unit": "nats",
        "difference": round(found.mean, 5),
        "largest": round(found.max, 4),
        "noise": round(noise.mean, 5),
        "passed": bound.holds(found),
    }


def _difference(a: list[list[float]], b: list[list[float]]) -> Difference:
    return token_difference([x for each in a for x in each], [x for each in b for x in each])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path, help="JSON file; its rows of other scenarios stay")
    parser.add_argument("--tp-size", type=int, default=1, help="GPUs of each server; default %(default)s")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        row = compare(Path(temporary), args.tp_size)
    print(row, flush=True)
    record.merge(args.out, "prefill_graphs", [row], key="scenario")
    if not row["passed"]:
        raise SystemExit("log-probabilities with graphs differ from those without by more than rounding")


if __name__ == "__main__":
    main()
