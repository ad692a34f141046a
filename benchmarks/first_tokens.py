"""Measures the time to the first token of short prompts on several servers, which take turns on one GPU.

    python benchmarks/first_tokens.py --out benchmarks/results/first_tokens_h100.json
    python benchmarks/first_tokens.py --after 4096 --out benchmarks/results/first_tokens_after_h100.json
    python benchmarks/first_tokens.py --methods none,oscar --eager --layers 12 --out FILE
    python benchmarks/first_tokens.py --profile 512,1024 --out FILE
    python benchmarks/first_tokens.py --table --out FILE

The servers run at the same time and differ only in their cache. ``--eager`` adds a server of each method that prefills
without CUDA graphs. In a round each server gets new prompts while the others are idle, so a slow spell of the host
meets all servers. The prefix caches are emptied now and then; the round after that does not count. With ``--after N``
all prompts begin with the same N tokens, which are cached. Row ``first tokens, METHOD``:

ttft_TxN_ms     of N prompts of T new tokens that arrive at once: the median over rounds, of each round's slowest prompt
quartiles_ms    first and third quartile of the same
stages_ms       median ms until the prefill begins, until its result is ready, and until the first token is received
profile_us      with ``--profile T``: for lone prompts of T new tokens, us of a prefill in which kernels run (``busy``)
                and in which none runs (``idle``), and us and launches of each kernel
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import record
from benchmarks.bench_serving import servers
from benchmarks.bench_serving.tables import first_tokens
from benchmarks.capacity import MODEL, existing_folder, geometry_and_flags, name_of
from benchmarks.serving import PROFILED, Client, Failed, Stream
from sglang_kvq.errors import KVQuantError

TOKENS, AT_ONCE = (64, 128, 256, 512, 1024), (1, 8)
#: Rounds from one emptied cache to the next, of which the first does not count; blocks of such rounds that count unless
#: ``--blocks`` says otherwise, and blocks before them.
ROUNDS, BLOCKS, BEFORE = 6, 8, 1
#: Longest request, and the flags of all servers: several fit on one GPU.
LONGEST = 2048
SHARED = ("--mem-fraction-static", "0.9", "--max-running-requests", "16")
CACHE = ROUNDS * max(AT_ONCE) * max(TOKENS) + 8192  # tokens
EAGER = "--disable-prefill-cuda-graph"
Row = dict[str, Any]


def rounds(clients: Sequence[Client], after: int = 0, blocks: int = BLOCKS) -> Iterator[tuple[str, list[list[Stream]]]]:
    """Yields each ``ttft_TxN`` with, for each client, the slowest request of every round that counts.

    Args:
        after: cached tokens with which all prompts begin.
        blocks: blocks of rounds that count.

    Raises:
        Failed: they were not cached.
    """
    for tokens in TOKENS:
        for count in AT_ONCE:
            found: list[list[Stream]] = [[] for _ in clients]
            for block in range(-BEFORE, blocks):
                stored = [client.prompt("stored", 0, after) for client in clients] if after else []
                for client in clients:
                    client.server.drain()
                for client, begin in zip(clients, stored):
                    client.cache([begin])
                for turn in range(ROUNDS):
                    name = f"{tokens}x{count} {block * ROUNDS + turn}"
                    for number, (client, streams) in enumerate(zip(clients, found)):
                        prompts = [client.prompt(name, i, tokens) for i in range(count)]
                        if after:
                            prompts = [stored[number] + prompt for prompt in prompts]
                        slowest = max(client.run(prompts, 1), key=lambda stream: stream.ttft)
                        if after and slowest.cached < after - client.uncached:
                            raise Failed(f"only {slowest.cached} of {after} tokens were cached")
                        if block >= 0 and turn > 0:
                            streams.append(slowest)
            yield f"ttft_{tokens}x{count}", found


def lengths(words: str | None) -> list[int]:
    """Parses ``--profile``.

    Raises:
        KVQuantError: it is no list of numbers of tokens.
    """
    if words is None:
        return []
    found = [int(word) if word.isdecimal() else 0 for word in words.split(",")]
    if not all(0 < tokens <= LONGEST for tokens in found):
        raise KVQuantError(f"--profile {words}: give numbers of tokens up to {LONGEST}, such as 512,1024.")
    return found


def profile(client: Client, tokens: int, after: int = 0) -> Row:
    """Returns ``traces.per_step`` of a server's prefills of lone prompts; empty if the profiler recorded nothing.

    Args:
        after: as for ``rounds``.
    """
    client.server.drain()
    stored = client.prompt("stored", 0, after)
    prompts = [stored + client.prompt(f"profile {tokens}", turn, tokens) for turn in range(PROFILED + 2)]
    if after:
        client.cache([stored])
    client.run(prompts[:1], 1)
    try:
        return client.trace(lambda: client.run(prompts[1:], 1, at_once=1))
    except Failed as error:  # what was measured before is worth keeping
        print(f"no profile of {tokens} tokens: {error}", flush=True)
        return {}


def figures(named: dict[str, list[Stream]]) -> Row:
    """Returns a row's figures from the streams of each ``ttft_TxN``."""
    row: Row = {}
    quartiles, stages = {}, {}
    for name, streams in named.items():
        low, median, high = statistics.quantiles([1e3 * stream.ttft for stream in streams], n=4)
        row[f"{name}_ms"], quartiles[name] = round(median, 2), [round(low, 2), round(high, 2)]
        parts = zip(*(stream.stages or () for stream in streams))
        stages[name] = [round(1e3 * statistics.median(each), 2) for each in parts]
    return {**row, "quartiles_ms": quartiles, "stages_ms": stages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path, help="JSON file; it keeps its other rows")
    parser.add_argument("--methods", default="none,oscar,transform:2.5", help="NAME[:BITS]; default %(default)s")
    parser.add_argument("--eager", action="store_true", help="each method also without CUDA graphs for prefill")
    parser.add_argument("--model", type=existing_folder, default=MODEL, help="a folder with a config.json")
    parser.add_argument("--layers", type=int, help="use only the model's first N layers")
    parser.add_argument("--after", type=int, default=0, metavar="N", help="cached tokens before each prompt; default 0")
    parser.add_argument(
        "--blocks", type=int, default=BLOCKS, metavar="N", help=f"times {ROUNDS - 1} rounds; default %(default)s"
    )
    parser.add_argument("--profile", metavar="TOKENS", help="lengths of prompts, such as 512,1024, that are profiled")
    parser.add_argument("--cpu", action="store_true", help="servers on the CPU engine: only shows that this works")
    parser.add_argument("--logs", type=Path, help="folder for logs; default a temporary one")
    parser.add_argument("--table", action="store_true", help="only print the table of --out")
    args = parser.parse_args()
    if args.table:
        print(first_tokens(record.read_rows(args.out)))
        return
    try:
        if args.blocks < 1:
            raise KVQuantError(f"--blocks {args.blocks}: it must be at least 1.")
        profiled = lengths(args.profile)
        if profiled and args.cpu:
            raise KVQuantError("--profile: only a GPU's kernels are recorded. Leave it or --cpu out.")
        specs = servers.specs_of(args.methods)
    except KVQuantError as error:
        parser.error(str(error))
    shared = (*SHARED, "--max-total-tokens", str(CACHE + 2 * args.after))
    graphs = servers.Setup(args.model, args.layers, shared, (), None, args.cpu)
    eager = replace(graphs, shared=(*shared, EAGER))
    jobs = [(spec, setup) for setup in ([graphs, eager] if args.eager else [graphs]) for spec in specs]
    labels = [servers.label(spec, setup) + (f" {EAGER}" if setup is eager else "") for spec, setup in jobs]
    layers = geometry_and_flags(args.model, args.layers)[0].layers
    # The servers end with the threads that start them.
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(len(jobs)) as pool, ExitStack() as stack:
        folder = args.logs or Path(temporary)
        tokenizer = graphs.tokenizer(folder)
        made = [
            servers.server(spec, setup, tokenizer, LONGEST + args.after, folder / str(number))
            for number, (spec, setup) in enumerate(jobs)
        ]
        for server in made:
            stack.callback(server.stop)
        running = [job.result() for job in [pool.submit(server.start) for server in made]]
        clients = [Client(server, graphs.config["vocab_size"], layers) for server in running]
        facts = [servers.facts(server, spec) for server, (spec, _) in zip(running, jobs)]
        print(f"{len(running)} servers: {', '.join(labels)}", flush=True)
        streams: list[dict[str, list[Stream]]] = [{} for _ in jobs]
        for name, found in rounds(clients, args.after, args.blocks):
            for of_server, mine in zip(streams, found):
                of_server[name] = mine
            medians = [statistics.median(1e3 * stream.ttft for stream in mine) for mine in found]
            print(f"{name:14}" + "".join(f"{ms:9.2f}" for ms in medians) + " ms", flush=True)
        profiles = [{str(tokens): profile(client, tokens, args.after) for tokens in profiled} for client in clients]
    rows = [
        {
            "scenario": name_of(args.model, args.layers, f"first tokens, {label}"),
            "unit": "ms",
            "method": label,
            "after": args.after,
            "rounds": args.blocks * (ROUNDS - 1),
            **figures(named),
            **({"profile_us": kernels} if kernels else {}),
            **fact,
        }
        for label, named, fact, kernels in zip(labels, streams, facts, profiles)
    ]
    record.merge(args.out, "first_tokens", rows, key="scenario")


if __name__ == "__main__":
    main()
