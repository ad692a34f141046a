"""Measures prefill and decode on two servers: bytes on the wire, and time to the first token.

    python benchmarks/disaggregation.py --out benchmarks/results/disaggregation_h100.json --layers 12
    python benchmarks/disaggregation.py --out FILE --cpu --model FOLDER --methods none,hadamard --lengths 300

Runs two servers on one machine, on one GPU or with ``--gpus 2``, which transfer pages by Mooncake over TCP. Each prompt
goes to both servers, as SGLang's router does. A row is one method and length:

wire_mb, wire_bytes_per_token   bytes on the loopback interface from a request until its answer, requests included
first_token_ms                  time until both servers answered a request of one token, median of ``--repeats``
alone_ms                        the same on one server with the method, without a transfer (``--alone``)
equal                           answers of 16 tokens, of ``--repeats``, that equal those of one server (``--alone``)
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import record
from benchmarks.bench_serving import servers
from benchmarks.capacity import MODEL, existing_folder, name_of
from benchmarks.pair_server import PairServer, mode, on_a_cpu
from benchmarks.tiny_server import body
from launch.server import Server
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.specs import MethodSpec
from sglang_kvq.server_process import free_port

Row = dict[str, Any]
#: Tokens of a pool beyond two prompts: answers, and rounding to whole pages.
ROOM = 4096
#: Fields of a row that are printed.
SHOWN = ("method", "tokens", "first_token_ms", "wire_mb", "wire_bytes_per_token", "alone_ms", "equal")
#: Tokens of the answers that are compared.
ANSWER = 16


def loopback_bytes() -> int:
    """Returns the bytes that the loopback interface has received since the machine started."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise KVQuantError("/proc/net/dev: no interface lo. Run on Linux with a loopback interface.")


def ask(pair: PairServer, ids: list[int], tokens: int) -> tuple[list[int], float, int]:
    """Returns the answer's tokens, its time in ms, and the bytes that the loopback interface carried."""
    before, begin = loopback_bytes(), time.perf_counter()
    answer = pair.json("/generate", body(ids, tokens))
    spent = 1e3 * (time.perf_counter() - begin)
    return answer["output_ids"], spent, loopback_bytes() - before


def setup_of(args: argparse.Namespace, *flags: str) -> servers.Setup:
    memory = () if args.cpu else ("--mem-fraction-static", args.mem_fraction_static)
    plain = ("--page-size", str(PAGE_SIZE), *(() if args.cpu else ("--attention-backend", "triton")))
    # Small pools, so that all servers fit on one GPU.
    room = ("--max-total-tokens", str(2 * (max(args.lengths) + ROOM)), "--max-running-requests", "8")
    shared = (*memory, *room, "--disable-radix-cache", *flags)
    return servers.Setup(args.model, args.layers, shared, plain, None, args.cpu)


def make(spec: MethodSpec, args: argparse.Namespace, folder: Path, role: str, gpu: int, *flags: str) -> Server:
    """Returns a server with its own folder, not yet started."""
    setup, own = setup_of(args, *flags), folder / f"{role}-{spec.slug}"
    own.mkdir(parents=True, exist_ok=True)
    server = servers.server(spec, setup, setup.tokenizer(own), max(args.lengths) + ANSWER, own)
    if args.cpu:
        server.env["PYTHONPATH"] = on_a_cpu(own, server.env.get("PYTHONPATH", ""))
    else:
        server.env["CUDA_VISIBLE_DEVICES"] = str(gpu)
    return server


def pair_rows(spec: MethodSpec, args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Yields a row for each length."""
    port = free_port()
    prefill = make(spec, args, folder, "prefill", 0, *mode(), "prefill", "--disaggregation-bootstrap-port", str(port))
    decode = make(spec, args, folder, "decode", args.gpus - 1, *mode(), "decode")
    vocabulary = setup_of(args).config["vocab_size"]
    prompts = {n: [_ids(n + seed, n, vocabulary) for seed in range(args.repeats)] for n in args.lengths}
    alone = [make(spec, args, folder, "alone", 0)] if args.alone else []
    with ExitStack() as stack:
        pair, every = PairServer(prefill, decode, port), (prefill, decode, *alone)
        starters = stack.enter_context(ThreadPoolExecutor(2))  # servers end with the threads that started them
        for server in (pair, *alone):
            stack.callback(server.stop)
        for job in [starters.submit(server.start) for server in (pair, *alone)]:
            job.result()
        facts = servers.facts(decode, spec)
        for n in args.lengths:  # compiles kernels and opens connections
            ask(pair, _ids(99 + n, n, vocabulary), ANSWER)
        found = {n: [ask(pair, ids, 1) for ids in prompts[n]] for n in args.lengths}
        answers = {n: [ask(pair, ids, ANSWER)[0] for ids in prompts[n]] for n in args.lengths}
        known = one_server(alone[0], prompts) if alone else {}
        for server in every:
            servers.check_errors(server)
    for n in args.lengths:
        wire = statistics.median(carried for _, _, carried in found[n])
        yield {
            "scenario": name_of(args.model, args.layers, f"pair, {spec.label}, {n} tokens"), "unit": "ms",
            "method": spec.label, "tokens": n, "layers": args.layers, "gpus": args.gpus, "repeats": args.repeats,
            "first_token_ms": round(statistics.median(spent for _, spent, _ in found[n]), 1),
            "wire_mb": round(wire / 1e6, 2), "wire_bytes_per_token": round(wire / n, 1),
            **({
                "alone_ms": round(statistics.median(spent for _, spent in known[n]), 1),
                "equal": sum(one == other for one, (other, _) in zip(answers[n], known[n], strict=True)),
            } if known else {}),
            **facts,
        }  # fmt: skip


def one_server(server: Server, prompts: dict[int, list[list[int]]]) -> dict[int, list[tuple[list[int], float]]]:
    """Returns the answers of one server, and its milliseconds to the first token."""
    found: dict[int, list[tuple[list[int], float]]] = {}
    for n, many in prompts.items():
        server.json("/generate", body(many[0], ANSWER))
        found[n] = []
        for ids in many:
            begin = time.perf_counter()
            server.json("/generate", body(ids, 1))
            spent = 1e3 * (time.perf_counter() - begin)
            found[n].append((server.json("/generate", body(ids, ANSWER))["output_ids"], spent))
    return found


def _ids(seed: int, length: int, vocabulary: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, vocabulary) for _ in range(length)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path, help="JSON file; it keeps its other rows")
    parser.add_argument("--methods", default="none,oscar", help="NAME[:BITS]; default %(default)s")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768], help="tokens; default %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="default %(default)s")
    parser.add_argument("--model", type=existing_folder, default=MODEL, help="a folder with a config.json")
    parser.add_argument("--layers", type=int, help="use only the model's first N layers")
    parser.add_argument("--mem-fraction-static", default="0.85")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1, help="default %(default)s")
    parser.add_argument("--alone", action="store_true", help="also ask one server, and compare its answers")
    parser.add_argument("--cpu", action="store_true", help="servers on the CPU engine")
    parser.add_argument("--logs", type=Path, help="folder for logs; default a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.logs or Path(temporary)).resolve()
        try:
            for spec in servers.specs_of(args.methods):
                for row in pair_rows(spec, args, folder):
                    record.merge(args.out, "disaggregation", [row], key="scenario")
                    print("  ".join(f"{name} {row[name]}" for name in SHOWN if name in row), flush=True)
        except KVQuantError as error:
            parser.error(str(error))


if __name__ == "__main__":
    main()
