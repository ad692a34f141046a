"""Measures quantized pages in host memory and storage: answers, savings and costs, compared with SGLang's own HiCache.

    python benchmarks/hicache.py answers --out FILE --model FOLDER --methods int2,transform:2.5 --text FILE
    python benchmarks/hicache.py traffic --out benchmarks/results/hicache_h100.json --layers 12 \\
        --mem-fraction-static 0.14 --conversations 256 --host-gb 40
    python benchmarks/hicache.py restart --out benchmarks/results/hicache_h100.json --layers 12 \\
        --mem-fraction-static 0.2 --tokens 200000

A file keeps its rows; ``--again`` measures them again. Each part needs SGLang 0.5.22 or newer.

``answers``: a server with one request reads a prompt's last tokens after its cached pages, four times. First the pages
stayed with their BF16 copies. Then they stayed, but other prompts took those copies. Then they came from the host, and
finally from files. ``host_apart`` and ``storage_apart`` are the largest differences of a log-probability from the
second reading. ``kl_…`` is the divergence from the first in nats per token, a lower bound from ``--top`` tokens. With
``--late-loads``, layers that do not wait for a load read wrong bytes.

``traffic``: conversations whose turns are so far apart that the GPU's cache has evicted them. Each method runs with
HiCache; with ``--kv-quant`` it also runs without. ``working_set`` is the size of all conversations relative to the
GPU's cache. ``device_share`` and ``host_share`` are the shares of all prompt tokens that were cached there.

``restart``: a prompt of ``--tokens`` goes to files, the server restarts, and the prompt comes again with a few more
tokens. ``storage_ms`` is the time to its first token, ``compute_ms`` that of another prompt of the same length. Before
the restart, the files' pages are dropped from the system's memory. ``disk_bytes_per_token`` counts the files' bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks import record
from benchmarks.bench_serving import servers
from benchmarks.bench_serving.sampler import parse
from benchmarks.bench_serving.workloads import TINY, WORKLOADS, Workload
from benchmarks.capacity import MODEL, existing_folder, name_of
from benchmarks.tiny_server import body
from benchmarks.workloads import measure
from launch.server import Server
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.specs import REFERENCE, MethodSpec
from sglang_kvq.evaluation.tasks.statistics import Distributions, compare
from sglang_kvq.rotations.calibration.settings import read_text

Row = dict[str, Any]
POLICIES = ("write_through", "write_back")
#: SGLang's variable for tests: GPU cycles that each layer of a load waits.
LATE = "SGLANG_TEST_HICACHE_H2D_DELAY_CYCLES"
#: Tokens of a prompt beyond those that its first reading cached: a turn.
TURN = 200
#: Prompts of ``answers`` that only occupy room, enough for the pages of ``POOL`` prompts and for all BF16 pages.
OTHERS = range(1000, 1008)
POOL = 4


def host_flags(policy: str = POLICIES[0]) -> tuple[str, ...]:
    """Returns flags of a server that keeps pages in host memory."""
    return ("--enable-hierarchical-cache", "--hicache-write-policy", policy)


def storage_flags(folder: Path, policy: str = POLICIES[0]) -> tuple[str, ...]:
    """Returns flags of a server that keeps pages in files, and waits for all of a prompt's before it begins."""
    config = json.dumps({"file_storage_path": str(folder)})
    waits = ("--hicache-storage-prefetch-policy", "wait_complete", "--hicache-storage-backend", "file")
    return (*host_flags(policy), *waits, "--hicache-storage-backend-extra-config", config)


def cached(meta: dict[str, Any]) -> dict[str, int]:
    """Returns an answer's cached tokens by place."""
    found = meta.get("cached_tokens_details") or {}
    return {place: found.get(place) or 0 for place in ("device", "host", "storage")}


def files_of(folder: Path) -> tuple[int, int]:
    """Returns the number of stored files, and their bytes."""
    sizes = [file.stat().st_size for file in folder.glob("*.bin")]
    return len(sizes), sum(sizes)


def settled(folder: Path) -> tuple[int, int]:
    """Returns the result of ``files_of`` once no file was added for a second."""
    found = files_of(folder)
    while True:
        time.sleep(1.0)
        if (now := files_of(folder)) == found:
            return found
        found = now


def wait_for_files(folder: Path, count: int, seconds: float = 120) -> None:
    """Waits until ``count`` files are stored.

    Raises:
        KVQuantError: there are fewer files after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while (found := files_of(folder)[0]) < count:
        if time.monotonic() > deadline:
            raise KVQuantError(
                f"{folder}: only {found} of {count} pages were stored within {seconds:.0f} s. Read the server's log."
            )
        time.sleep(0.1)


def forget_files(folder: Path) -> None:
    """Drops the files' content from the system's memory, so that a server reads the disk."""
    os.sync()
    for file in folder.glob("*.bin"):
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# -- answers ----------------------------------------------------------------------------------------------


class Answers:
    """Asks one server for the last tokens of prompts, and reports where their pages came from."""

    def __init__(self, running: Server, length: int, top: int, other: Callable[[int], list[int]]) -> None:
        self.running, self.length, self.top, self.other = running, length, top, other

    def ask(self, ids: list[int]) -> tuple[Distributions, dict[str, int]]:
        more = {"return_logprob": True, "logprob_start_len": self.length, "top_logprobs_num": self.top}
        meta = self.running.json("/generate", body(ids, 1, **more))["meta_info"]
        tokens = {name: meta[name][1:] for name in ("input_token_logprobs", "input_top_logprobs")}
        return Distributions.from_meta(tokens), cached(meta)

    def others(self, numbers: range, turn: int) -> None:
        """Asks new prompts, so that their windows take BF16 pages; pages that come from files would take none."""
        for number in numbers:
            ids = self.other(number)
            first = turn % len(ids)
            self.running.json("/generate", body(ids[first:] + ids[:first], 1))

    def found(self, ids: list[int], place: str) -> Distributions:
        """Asks the prompt, and checks that its pages came from ``place``.

        Raises:
            KVQuantError: they came from elsewhere.
        """
        answer, where = self.ask(ids)
        whole = self.length // PAGE_SIZE * PAGE_SIZE
        if where[place] != whole or sum(where.values()) != whole:
            raise KVQuantError(
                f"{whole} tokens should come from the {place}, but the cached tokens are {where}. Change --host-gb or "
                "--mem-fraction-static."
            )
        return answer

    def row(self, ids: list[int], turn: int) -> Row:
        """Returns the figures of one prompt, which is the server's ``turn``-th."""
        self.running.drain()
        self.running.json("/generate", body(ids[: self.length], 1))
        kept = self.found(ids, "device")
        self.others(OTHERS[:2], 2 * turn)
        stayed = self.found(ids, "device")
        self.others(OTHERS, 2 * turn + 1)
        host = self.found(ids, "host")
        self.running.drain()
        storage = self.found(ids, "storage")

        def apart(one: Distributions) -> float:
            return float(np.abs(one.own_logprob - stayed.own_logprob).max())

        figures = {"host_apart": apart(host), "storage_apart": apart(storage)}
        named = {"kl_stayed": stayed, "kl_host": host, "kl_storage": storage}
        return figures | {name: float(compare(kept, one, self.top).kl.mean()) for name, one in named.items()}


def text_ids(args: argparse.Namespace, count: int, length: int) -> list[list[int]]:
    """Returns pieces of a text as tokens, or random tokens if there is no text."""
    if not args.text:
        generator = np.random.default_rng(1)
        vocabulary = json.loads((args.model / "config.json").read_text())["vocab_size"]
        return generator.integers(10, vocabulary, (count, length)).tolist()  # type: ignore[no-any-return]
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(args.model)(read_text(args.text))["input_ids"]
    if len(ids) < count * length:
        raise KVQuantError(f"--text {args.text}: {len(ids)} tokens, {count * length} are needed.")
    return [ids[n * length : (n + 1) * length] for n in range(count)]


def answers_name(args: argparse.Namespace, spec: MethodSpec) -> str:
    policy = "" if args.write_policy == POLICIES[0] else f", {args.write_policy}"
    late = f", loads {args.late_loads} cycles late" if args.late_loads else ""
    return name_of(args.model, args.layers, f"answers, {spec.label}{policy}{late}")


def small_flags(spec: MethodSpec, pages: int) -> tuple[str, ...]:
    """Returns flags of a server of ``pages`` pages with BF16 pages for one request, which the next prompt takes over.

    In a memory that BF16 pages share, prompts of a whole prefill batch would keep theirs.
    """
    small = ("--max-total-tokens", str(pages * PAGE_SIZE), "--max-running-requests", "1", "--enable-cache-report")
    budget = ("--kv-quant-bf16-budget", "0.1") if spec.method != REFERENCE else ()
    return (*small, *budget, "--hicache-ratio", "4")


def answers(args: argparse.Namespace, spec: MethodSpec, folder: Path) -> Iterator[Row]:
    """Yields a method's row with the mean and the maximum over several prompts."""
    length = args.tokens or 2048
    name = answers_name(args, spec)
    if kept(args, name):
        return
    pieces = text_ids(args, args.prompts + len(OTHERS), length + TURN)
    prompts, rest = pieces[: args.prompts], pieces[args.prompts :]
    pages = POOL * -(-(length + TURN) // PAGE_SIZE)
    setup = setup_of(args, *small_flags(spec, pages), *storage_flags(folder / "pages", args.write_policy))
    os.environ[LATE] = str(args.late_loads)
    with servers.server(spec, setup, setup.tokenizer(folder), length + TURN, folder) as running:
        servers.facts(running, spec)
        asking = Answers(running, length, args.top, lambda number: rest[number - OTHERS[0]])
        rows = [asking.row(ids, turn) for turn, ids in enumerate(prompts)]
        servers.check_errors(running)
        yield {
            "scenario": name, "unit": "nats",
            "method": spec.label, "prompts": len(rows), "tokens": length, "scored": (TURN - 1) * len(rows),
            "top": args.top,
            **{name: round(max(row[name] for row in rows), 6) for name in ("host_apart", "storage_apart")},
            **{name: round(float(np.mean([row[name] for row in rows])), 6) for name in rows[0] if "kl" in name},
        }  # fmt: skip


# -- traffic ----------------------------------------------------------------------------------------------


def conversations(args: argparse.Namespace) -> Workload:
    """Returns a workload with all conversations at once: the next turn of one comes after a turn of every other one."""
    base = (TINY if args.tiny else WORKLOADS)["chats"]
    (load,) = base.loads
    load = replace(load, clients=args.conversations, requests=args.conversations)
    title = f"{args.conversations} chats to {load.longest:,} tokens"
    return replace(base, name=f"chats{args.conversations}", title=title, loads=(load,), seconds=args.seconds)


def prompt_tokens(running: Server) -> dict[str, float]:
    """Returns the prompt tokens since the start: all of them, and the cached ones by place."""
    text = running.request("/metrics").decode()
    found = {"all": parse(text).get("sglang:prompt_tokens_total", 0.0)}
    lines = [line for line in text.splitlines() if line.startswith("sglang:cached_tokens_total")]
    for place in ("device", "host", "storage"):
        found[place] = sum(float(line.split()[-1]) for line in lines if f'cache_source="{place}' in line)
    return found


def traffic(args: argparse.Namespace, spec: MethodSpec, folder: Path) -> Iterator[Row]:
    """Yields a method's row with HiCache and, with ``--kv-quant``, another row without."""
    workload = conversations(args)
    size = ("--hicache-size", str(args.host_gb)) if args.host_gb else ("--hicache-ratio", "4")
    for tier in (host_flags(), ()) if spec.method != REFERENCE else (host_flags(),):
        label = spec.label + (" with HiCache" if tier else "")
        name = name_of(args.model, args.layers, f"traffic, {label}")
        if kept(args, name):
            continue
        setup = setup_of(args, *((*tier, *size, "--enable-cache-report") if tier else ()))
        tokenizer = setup.tokenizer(folder)
        with servers.server(spec, setup, tokenizer, workload.longest, folder) as running:
            servers.facts(running, spec)
            lengths = [load.prompt for load in workload.loads]
            servers.warm_up(running, lengths, setup.config["vocab_size"])
            before = prompt_tokens(running)
            row = measure(running, spec, workload, setup, tokenizer, folder)
            after = prompt_tokens(running)
        read = {name: after[name] - before[name] for name in after}
        tokens = sum(load.requests * load.longest for load in workload.loads)
        yield {
            **row, "scenario": name, "method": label,
            "working_set": round(tokens / row["cache_tokens"], 2), "host_gb": args.host_gb if tier else 0,
            "device_share": round(read["device"] / read["all"], 4), "host_share": round(read["host"] / read["all"], 4),
        }  # fmt: skip


# -- restart ----------------------------------------------------------------------------------------------


def first_token_ms(running: Server, ids: list[int]) -> tuple[float, dict[str, int]]:
    """Returns the time of an answer of one token in ms, and where its prompt was cached."""
    begin = time.perf_counter()
    meta = running.json("/generate", body(ids, 1), timeout=600)["meta_info"]
    return 1e3 * (time.perf_counter() - begin), cached(meta)


def restart(args: argparse.Namespace, spec: MethodSpec, folder: Path) -> Iterator[Row]:
    """Yields one row for a method."""
    length, pages = args.tokens or 200_000, folder / f"pages-{spec.slug}"
    name = name_of(args.model, args.layers, f"restart, {spec.label}, {length} tokens")
    if kept(args, name):
        return
    pages.mkdir()
    whole = length // PAGE_SIZE * PAGE_SIZE
    size = ("--hicache-size", str(args.host_gb)) if args.host_gb else ("--hicache-ratio", "4")
    setup = setup_of(args, "--enable-cache-report", *size, *storage_flags(pages))
    tokenizer = setup.tokenizer(folder)
    generator = np.random.default_rng(5)
    vocabulary = setup.config["vocab_size"]
    first, second = generator.integers(10, vocabulary, (2, length + TURN)).tolist()

    def start() -> Server:
        return servers.server(spec, setup, tokenizer, length + TURN, folder)

    with start() as running:
        facts = servers.facts(running, spec)
        servers.warm_up(running, [TURN], vocabulary)
        before = settled(pages)
        first_token_ms(running, first[:length])
        wait_for_files(pages, before[0] + whole // PAGE_SIZE)
        after = settled(pages)
        servers.check_errors(running)
    forget_files(pages)
    with start() as running:
        servers.warm_up(running, [TURN], vocabulary)
        for ids in (second[-length // 8 :], second[-length // 8 :] + first[-TURN:]):  # compiles a turn after a prefix
            first_token_ms(running, ids)
        computed, where = first_token_ms(running, second)
        if sum(where.values()):
            raise KVQuantError(f"{where}: a new prompt should not be cached.")
        forget_files(pages)
        stored, where = first_token_ms(running, first)
        if where["storage"] < whole:
            raise KVQuantError(f"{where}: {whole} tokens should come from storage.")
        servers.check_errors(running)
    yield {
        "scenario": name, "unit": "ms",
        "method": spec.label, "tokens": length, "layers": args.layers, **facts,
        "storage_ms": round(stored, 1), "compute_ms": round(computed, 1), "from_storage": where["storage"],
        "disk_bytes_per_token": round((after[1] - before[1]) / whole, 1), "files": after[0] - before[0],
    }  # fmt: skip


# -- the command ------------------------------------------------------------------------------------------


def kept(args: argparse.Namespace, name: str) -> bool:
    """Returns whether the file has this row already, and prints a line if so."""
    found = not args.again and any(row["scenario"] == name for row in record.read_rows(args.out))
    if found:
        print(f"{name}: kept", flush=True)
    return found


def setup_of(args: argparse.Namespace, *flags: str) -> servers.Setup:
    memory = () if args.cpu else ("--mem-fraction-static", args.mem_fraction_static)
    backend = () if args.cpu else ("--attention-backend", args.plain_backend)
    # Pages of the same length; SGLang's default is one token.
    plain = (*backend, "--page-size", str(PAGE_SIZE))
    return servers.Setup(args.model, args.layers, (*memory, *flags), plain, None, args.cpu)


PARTS: dict[str, tuple[Callable[[argparse.Namespace, MethodSpec, Path], Iterator[Row]], tuple[str, ...]]] = {
    "answers": (answers, ("method", "host_apart", "storage_apart", "kl_stayed", "kl_host", "kl_storage")),
    "traffic": (traffic, ("method", "output_tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "device_share", "host_share")),
    "restart": (restart, ("method", "tokens", "storage_ms", "compute_ms", "disk_bytes_per_token")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", required=True, type=Path, help="JSON file; it keeps its other rows")
    parser.add_argument("--methods", default="none,oscar", help="NAME[:BITS]; default %(default)s")
    parser.add_argument("--model", type=existing_folder, default=MODEL, help="a folder with a config.json")
    parser.add_argument("--layers", type=int, help="use only the model's first N layers")
    parser.add_argument("--mem-fraction-static", default="0.85")
    parser.add_argument("--plain-backend", default="triton", help="--attention-backend of none; default %(default)s")
    parser.add_argument("--host-gb", type=int, help="host memory of the cache; default 4 times the GPU's tokens")
    parser.add_argument("--tokens", type=int, help="tokens of a prompt; default 2,048 for answers, 200,000 for restart")
    parser.add_argument(
        "--conversations", type=int, default=256, help="number of conversations in traffic; default %(default)s"
    )
    parser.add_argument(
        "--seconds", type=float, default=90, help="time limit of traffic in seconds; default %(default)s"
    )
    parser.add_argument("--prompts", type=int, default=8, help="prompts of answers; default %(default)s")
    parser.add_argument(
        "--top", type=int, default=64, help="likeliest tokens that answers compare; default %(default)s"
    )
    parser.add_argument(
        "--write-policy", choices=POLICIES, default=POLICIES[0], help="when answers' pages go to the host; %(default)s"
    )
    parser.add_argument(
        "--late-loads", type=int, default=0, metavar="CYCLES", help="GPU cycles that each layer of answers' loads waits"
    )
    parser.add_argument("--text", type=Path, help="text of answers' prompts; without it, random tokens")
    parser.add_argument("--again", action="store_true", help="measure what the file has, too")
    parser.add_argument("--tiny", action="store_true", help="small conversations")
    parser.add_argument("--cpu", action="store_true", help="servers on the CPU engine")
    parser.add_argument("--logs", type=Path, help="folder for logs; default a temporary one")
    args = parser.parse_args()
    part, columns = PARTS[args.part]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.logs or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for spec in servers.specs_of(args.methods):
                for row in part(args, spec, folder):
                    record.merge(args.out, "hicache", [row], key="scenario")
                    print("  ".join(f"{name} {row[name]}" for name in columns), flush=True)
        except KVQuantError as error:
            parser.error(str(error))


if __name__ == "__main__":
    main()
