"""Measures the gain of CUDA graphs for prefill: the time to the first token of short prompts, with and without them.

    python benchmarks/prefill_graphs.py --out benchmarks/results/prefill_graphs_h100.json
    python benchmarks/prefill_graphs.py --layers 8 --out FILE     # a small model: launches are most of the time
    python benchmarks/prefill_graphs.py --plain-backend triton --out FILE

Uses Qwen3-8B's geometry (``--model`` takes another of ``benchmarks/models``) with dummy weights, so that nothing is
downloaded. Servers run one after the other on one GPU and differ only in the flags of ``SERVERS``. Prompts are random
and share no prefix.

ttft_TxN        ms to the first token of N prompts of T tokens that arrive at once: the median over rounds, of each
                round's slowest. Its first and third quartile are in ``quartiles_ms`` of ``workloads.py``'s row.
logprobs        mean and largest difference of log-probabilities of a tiny model's prompts with ``--kv-quant``, with and
                without graphs (``difference``), and between two servings without (``noise``). The command fails if
                the difference is above three times the noise and above the effect of rounding.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import record
from benchmarks.answers import Bound, Difference, input_logprobs, token_difference
from benchmarks.capacity import FLAGS, MODEL, existing_folder, geometry_and_flags, random_rotations
from benchmarks.serving import Client, Stream
from benchmarks.tiny_models import MODELS, VOCABULARY
from benchmarks.tiny_server import TinyServer, body, plugin_path
from launch.server import Server

TOKENS, AT_ONCE = (64, 128, 256, 512, 1024), (1, 8)
#: Rounds that count, and rounds before them.
ROUNDS, BEFORE = 50, 10
#: A server's flags by its name; servers with ``oscar`` also have rotations.
GRAPHS, NO_GRAPHS = ("--cuda-graph-backend-prefill", "breakable"), ("--disable-prefill-cuda-graph",)
SERVERS = {"plain": GRAPHS, "plain_eager": NO_GRAPHS, "oscar": GRAPHS, "oscar_eager": NO_GRAPHS}
#: Lengths of the tiny model's prompts: within windows, and with a history; several also run at once.
CHECKED = (70, 300, 1000, 1500)
ROUNDING = 0.04


def rounds(client: Client) -> Iterator[tuple[str, list[Stream]]]:
    """Yields each ``ttft_TxN`` with the slowest request of each round that counts."""
    client.run([client.prompt("warm", i, 300) for i in range(max(AT_ONCE))], 2)
    for tokens in TOKENS:
        for count in AT_ONCE:
            slowest = []
            for turn in range(BEFORE + ROUNDS):
                prompts = [client.prompt(f"{tokens}x{count} {turn}", i, tokens) for i in range(count)]
                slowest.append(max(client.run(prompts, 1), key=lambda stream: stream.ttft))
            yield f"ttft_{tokens}x{count}", slowest[BEFORE:]


def quartiles(slowest: Sequence[Stream]) -> list[float]:
    """Returns the first quartile, the median and the third quartile of the times to the first token, in ms."""
    return statistics.quantiles([1e3 * stream.ttft for stream in slowest], n=4)


def logprobs(folder: Path, flags: tuple[str, ...]) -> list[list[float]]:
    """Returns a tiny model's log-probabilities of its prompts: each prompt alone, then all at once."""
    model, env = MODELS["qwen3"].write(folder), plugin_path(folder)
    log = folder / f"tiny-{len(flags)}.log"
    more = ("--kv-quant", "int4", "--chunked-prefill-size", "512", "--context-length", "2048")
    with TinyServer(model, [*more, *flags], cpu=False, log=log, env=env) as server:
        ids = [[2 + (7 * i + 31 * n) % (VOCABULARY - 2) for i in range(tokens)] for n, tokens in enumerate(CHECKED)]
        asked = [body(each, 1, return_logprob=True, logprob_start_len=0) for each in ids]
        alone = [input_logprobs(server.json("/generate", each)) for each in asked]
        server.drain()
        together = server.json("/generate", body(ids, 1, return_logprob=True, logprob_start_len=0))
        return alone + [input_logprobs(reply) for reply in together]


def compare(folder: Path) -> dict:
    """Returns the row ``logprobs``."""
    graphs, eager = logprobs(folder, GRAPHS), logprobs(folder, NO_GRAPHS)
    half = len(CHECKED)
    noise = _difference(eager[:half], eager[half:])
    found, bound = _difference(graphs, eager), Bound.above([noise], 3, ROUNDING)
    return {
        "scenario": "logprobs",
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
    parser.add_argument("--model", type=existing_folder, default=MODEL, help="another of benchmarks/models")
    parser.add_argument("--layers", type=int, help="use only the model's first N layers")
    parser.add_argument("--only", choices=("times", "logprobs"), help="one of both; each takes minutes")
    parser.add_argument("--plain-backend", default="flashinfer", help="--attention-backend of plain SGLang")
    args = parser.parse_args()
    geometry, cut = geometry_and_flags(args.model, args.layers)
    flags = [*FLAGS, *cut, "--context-length", "4096", "--chunked-prefill-size", "8192", "--mem-fraction-static", "0.7"]
    flags += ["--cuda-graph-max-bs-decode", str(max(AT_ONCE))]
    rows: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rotations = random_rotations(folder / "rotations", *geometry)
        env = plugin_path(folder)
        for name, own in SERVERS.items() if args.only != "logprobs" else ():
            if name.startswith("plain"):
                more = ("--attention-backend", args.plain_backend)
            else:
                more = ("--kv-quant", "oscar", "--kv-quant-rotations", str(rotations))
            with Server(args.model, *flags, *own, *more, cpu=False, log_path=folder / f"{name}.log", env=env) as server:
                client = Client(server, VOCABULARY, geometry.layers)
                for scenario, slowest in rounds(client):
                    _, ms, _ = quartiles(slowest)
                    rows.setdefault(scenario, {"scenario": scenario, "unit": "ms"})[name] = round(ms, 3)
                    print(f"{name:12} {scenario:14} {ms:8.2f} ms", flush=True)
        if args.only != "times":
            rows["logprobs"] = compare(folder)
            print(rows["logprobs"], flush=True)
    record.merge(args.out, "prefill_graphs", list(rows.values()), key="scenario")
    if not rows.get("logprobs", {"passed": True})["passed"]:
        raise SystemExit("log-probabilities with graphs differ from those without by more than rounding")


if __name__ == "__main__":
    main()
