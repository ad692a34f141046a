"""Measures a server under load, with ``--kv-quant`` and without, by SGLang's own serving benchmark.

    python benchmarks/workloads.py --out benchmarks/results/serving_h100.json
    python benchmarks/workloads.py --methods none,oscar --workloads 1k,8k@2 --seconds 45 --out FILE
    python benchmarks/workloads.py --plot --out FILE
    python benchmarks/workloads.py --table --out FILE
    python benchmarks/workloads.py --cpu --model FOLDER --tiny --methods none,hadamard --out FILE

``sglang.benchmark.serving`` (formerly ``sglang.bench_serving``) makes the prompts, sends them and reads the streams.
Its data sets are ``random-ids`` and, for conversations, ``generated-shared-prefix`` with turns. One server per method
serves all workloads, one after the other, each from an empty prefix cache and with the same prompts and arrivals.

A model without weights gets dummy weights, random rotations, and a tokenizer of words in which text and token ids
correspond exactly (``bench_serving/words.py``), so nothing is downloaded.

A workload ends when all its requests are answered, or after its time (``--seconds``). Requests still running then are
aborted and count with the tokens that they have. ``--minutes`` limits the time of the whole command. Running the same
command again measures what is left, and keeps the rows that the file has. ``--rehearse`` serves the first workload once
without measuring, so that no row includes the time in which kernels compile. Row ``bench WORKLOAD, METHOD``:

output_tokens_per_s, input_tokens_per_s   of all requests, from the first one's begin to the last one's end
ttft_pN_ms, tpot_pN_ms     percentiles of the time to the first token, and of the time per later token
decoding                   most requests at once that were between their first and last token
running, queued            most requests in these states by the server's metrics, which it updates only now and then
lost_window_pages          the most window pages at once that running requests read in few bits, not in BF16
goodput_per_s              requests per second whose whole answer met both limits
late_kernels               Triton kernels, the plugin's or SGLang's, that were loaded meanwhile; left out if none
completed, cut, waited, unsent   requests with a whole answer; cut by the time; of these without a token; never sent
each                       with ``--repeat``: tokens/s and times to the first token of each time

``--repeat`` measures a workload several times, each with other prompts. The row's figures are of all requests together.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import record
from benchmarks.bench_serving import servers, stock
from benchmarks.bench_serving.figure import plot
from benchmarks.bench_serving.rows import measurements, one_after_another, scenario
from benchmarks.bench_serving.sampler import Sampler
from benchmarks.bench_serving.tables import HEAD, bench_rows, line, markdown
from benchmarks.bench_serving.workloads import TINY, WORKLOADS, Workload, chosen
from benchmarks.capacity import MODEL, existing_folder, name_of
from benchmarks.late_kernels import late_kernels
from launch.server import Server, ServerError
from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.provenance import without_paths
from sglang_kvq.evaluation.specs import MethodSpec

#: Seconds that a workload takes besides its time: making prompts, ending the last streams, emptying the cache.
BESIDES = 20.0
#: The least seconds that a server takes to start.
STARTING = 30.0
#: Figures that a row has of each repetition.
EACH = ("output_tokens_per_s", "ttft_p50_ms", "ttft_p99_ms")
Row = dict[str, Any]


def settings(workload: Workload, setup: servers.Setup) -> Row:
    """Returns the settings that must be equal for two rows of a scenario to be the same measurement."""
    flags = [*setup.shared, *(f"plain: {flag}" for flag in setup.plain)]
    more = {"repeat": workload.repeat} if workload.repeat > 1 else {}
    loads = [asdict(load) for load in workload.loads]
    for load in loads:
        if load["least"] == 1:  # as in rows that are older than this field
            del load["least"]
    return {"loads": loads, "limit": workload.seconds, "flags": flags, **more}


def missing(
    out: Path, spec: MethodSpec, workloads: Sequence[Workload], setup: servers.Setup, again: bool
) -> list[Workload]:
    """Returns a method's workloads that have no row in the file.

    Raises:
        KVQuantError: the file has a row with other settings.
    """
    found = {row["scenario"]: row for row in record.read_rows(out)}
    wanted = []
    for workload in workloads:
        name = name_of(setup.model, setup.layers, scenario(workload.name, servers.label(spec, setup)))
        row = None if again else found.get(name)
        if row is None:
            wanted.append(workload)
        elif row["settings"] != settings(workload, setup):
            raise KVQuantError(f"--out {out}: its row {name!r} has other settings. Give --again, or another file.")
        else:
            print(f"{name}: kept, measured at commit {row.get('commit', 'of the file')[:10]}", flush=True)
    return wanted


def measure(
    running: Server, spec: MethodSpec, workload: Workload, setup: servers.Setup, tokenizer: Path, folder: Path
) -> Row:
    """Returns one row.

    Raises:
        KVQuantError: a request failed, the cache reports errors, or it holds pages when nothing runs.
    """
    begin, turns = len(running.log()), []
    with Sampler(running.url) as sampler:
        for turn in range(workload.repeat):
            running.drain()
            loads = workload.arguments(turn)
            turns.append(stock.run(loads, running.url, tokenizer, workload.seconds, folder / workload.name))
    figures = measurements(workload, one_after_another(turns))
    if workload.repeat > 1:
        each = [measurements(workload, turn) for turn in turns]
        figures["each"] = {name: [one[name] for one in each] for name in EACH}
    if sampler.errors or "running" not in sampler.most:
        problem = f"{sampler.errors:.0f} errors of the cache" if sampler.errors else "no metrics of the server"
        raise KVQuantError(f"{workload.name}: {problem}; no figure is kept. {running.log_tail()}")
    if left := servers.held(running):
        raise KVQuantError(f"{workload.name}: an idle server holds {left}; no figure is kept.")
    late = late_kernels(running.log()[begin:])
    if late:
        print(f"{workload.name}: kernels were loaded meanwhile: {', '.join(late)}", flush=True)
    label = servers.label(spec, setup)
    return {
        "scenario": name_of(setup.model, setup.layers, scenario(workload.name, label)),
        "unit": "tokens/s",
        "workload": workload.name,
        "title": workload.title,
        "method": label,
        **figures,
        **sampler.most,
        **servers.facts(running, spec),
        **({"late_kernels": late} if late else {}),
        "settings": settings(workload, setup),
    }


def options() -> tuple[argparse.ArgumentParser, argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="Words after -- are flags of all servers."
    )
    parser.add_argument("--out", required=True, type=Path, help="JSON file; it keeps its other rows")
    parser.add_argument("--methods", default="none,fp8,oscar,transform:2.5", help="NAME[:BITS]; default %(default)s")
    parser.add_argument(
        "--workloads", help=f"some of {', '.join(WORKLOADS)}, each with @RATE for requests a second; default all"
    )
    parser.add_argument("--seconds", type=float, help="seconds of each workload; default its own limit")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="times to measure each; default once")
    parser.add_argument("--minutes", type=float, default=9.5, help="minutes of the whole command; default %(default)s")
    parser.add_argument("--kv-quant-recent-min", type=int, metavar="N", help="flag of servers with --kv-quant")
    parser.add_argument("--mem-fraction-static", default="0.85")
    parser.add_argument("--plain-backend", help="--attention-backend of none and fp8; default SGLang's choice")
    parser.add_argument("--model", type=existing_folder, default=MODEL, help="a folder with a config.json")
    parser.add_argument("--layers", type=int, help="use only the model's first N layers")
    parser.add_argument("--again", action="store_true", help="measure what the file has, too")
    parser.add_argument(
        "--rehearse",
        type=float,
        metavar="SECONDS",
        help="seconds of the first workload before anything is measured, so that all is compiled",
    )
    parser.add_argument("--tiny", action="store_true", help="workloads in small")
    parser.add_argument("--cpu", action="store_true", help="servers on the CPU engine: only shows that this works")
    parser.add_argument("--logs", type=Path, help="folder for logs; default a temporary one")
    parser.add_argument("--plot", action="store_true", help="only draw the figure of --out")
    parser.add_argument("--table", action="store_true", help="only print the tables of docs/performance.md from --out")
    return parser, *record.parse(parser)


def main() -> None:
    begin = time.monotonic()
    parser, args, flags = options()
    if args.table:
        print(markdown(record.read_rows(args.out)), end="")
        return
    if args.plot:
        print(f"plot: {plot(args.out)}")
        return
    try:
        known = TINY if args.tiny else WORKLOADS
        if args.repeat < 1:
            raise KVQuantError(f"--repeat {args.repeat}: it must be at least 1.")
        found = chosen(args.workloads or ",".join(known), known, args.seconds)
        workloads = [replace(workload, repeat=args.repeat) for workload in found]
        specs = servers.specs_of(args.methods)
        memory = () if args.cpu else ("--mem-fraction-static", args.mem_fraction_static)
        plain = ("--attention-backend", args.plain_backend) if args.plain_backend else ()
        setup = servers.Setup(args.model, args.layers, (*memory, *flags), plain, args.kv_quant_recent_min, args.cpu)
        jobs = [(spec, missing(args.out, spec, workloads, setup, args.again)) for spec in specs]
    except KVQuantError as error:
        parser.error(str(error))
    deadline = begin + 60 * args.minutes
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        context = max(workload.longest for workload in known.values())  # the same for every choice of workloads
        left = [name for job in jobs for name in serve(*job, setup, context, args, folder, deadline)]
    rows = bench_rows(record.read_rows(args.out))
    print("\n".join([HEAD, *map(line, rows)]))
    if rows:
        print(f"plot: {plot(args.out)}")
    if left:
        print(f"left, for the same command again: {', '.join(left)}")
    if FAILED:
        raise SystemExit("\n".join(f"FAILED: {text}" for text in FAILED))


FAILED: list[str] = []


def failed(text: str) -> None:
    FAILED.append(text)
    print(f"FAILED: {text}", flush=True)


def serve(
    spec: MethodSpec,
    wanted: Sequence[Workload],
    setup: servers.Setup,
    context: int,
    args: argparse.Namespace,
    folder: Path,
    deadline: float,
) -> list[str]:
    """Measures workloads on one method's server; returns the names of those that there was no time for."""
    label = servers.label(spec, setup)

    def fits(workload: Workload, more: float = 0.0) -> bool:
        return time.monotonic() + workload.repeat * (workload.seconds + BESIDES) + more < deadline

    left = [f"{workload.name} of {label}" for workload in wanted]
    if not any(fits(workload, STARTING) for workload in wanted):
        return left
    begin = time.monotonic()
    try:
        tokenizer = setup.tokenizer(folder)
        lengths = [load.prompt for workload in wanted for load in workload.loads]
        with servers.server(spec, setup, tokenizer, context, folder) as running:
            stock.benchmark()  # imported before anything is measured
            servers.facts(running, spec)
            servers.warm_up(running, lengths, setup.config["vocab_size"])
            command = shlex.join(map(without_paths, running.command))
            print(f"{label}: ready after {time.monotonic() - begin:.0f} s: {command}")
            if args.rehearse:
                stock.run(
                    wanted[0].rehearsal(args.rehearse), running.url, tokenizer, args.rehearse, folder / "rehearsal"
                )
                running.drain()
                print(f"{label}: rehearsed after {time.monotonic() - begin:.0f} s", flush=True)
            print(HEAD, flush=True)
            for workload in wanted:
                if not fits(workload):
                    continue
                try:
                    row = measure(running, spec, workload, setup, tokenizer, folder)
                except (KVQuantError, ServerError) as error:
                    failed(f"{workload.name} of {label}: {error}")
                    running.check_alive()
                else:
                    # Written after every figure, so that an interrupted run keeps its rows.
                    record.merge(args.out, "serving", [row], key="scenario")
                    print(line(row), flush=True)
                left.remove(f"{workload.name} of {label}")
    except (KVQuantError, ServerError, OSError) as error:
        failed(f"{label}: {error}")
    return left


if __name__ == "__main__":
    main()
