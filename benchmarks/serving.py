"""Measures the gain of ``--kv-quant oscar``: step times, prefill speed, output of long contexts, latencies.

    python benchmarks/serving.py --out benchmarks/results/serving_h200.json

    python benchmarks/serving.py --model benchmarks/models/qwen3-30b-a3b --scenarios tokens,decode --out FILE
    python benchmarks/serving.py --model benchmarks/models/qwen3-next-80b-a3b --layers 24 \\
        --scenarios tokens,decode --out FILE
    python benchmarks/serving.py --model benchmarks/models/gpt-oss-120b --layers 12 --plain-backend fa3 \\
        --scenarios tokens,decode --out FILE
    python benchmarks/serving.py --tp-size 2 --scenarios tokens,decode --out FILE

Uses Qwen3-8B's geometry (``--model`` takes another of ``benchmarks/models``) with dummy weights and random rotations,
so that nothing is downloaded. Two servers run one after the other. They differ only in ``--kv-quant`` and the attention
backend (the plugin brings its own). All prompts are random token ids, the same for both servers, and no two share a
prefix.

Takes at most 9 minutes. Filling the larger cache for ``output`` takes longer than that leaves. For its full figure run
``--scenarios output --servers none``, then ``--scenarios output --servers oscar``, each with its own 9 minutes, at the
same commit.

A *cached context* of L tokens is one whose KV is in the server's prefix tree when its request arrives: an earlier
request with the same L tokens has ended, and the measured one repeats them with one more token. Its prefill is
therefore one token. A run stops with an error if a server reports fewer cached tokens than L - 64 (L - 320 for hybrids,
whose recurrent states are kept every 256 tokens).

decode_SxL    ms per decode step of S concurrent streams with cached contexts of L tokens: the median time
              between events of a stream, divided by the tokens that an event brings, while all S run; the
              better of two such runs.
prefill_L     tokens/s of new L-token prompts, one at a time, in chunks of 8K: L over the median time to the
              first token.
wave_NxL      tokens/s of N new L-token prompts that arrive at once: the median of three waves. With --profile, SGLang's
              profiler watches one more wave. Not measured by default.
tokens        tokens that the server's cache holds with the flags of these scenarios (capacity.py's are leaner).
output_NxL    output tokens/s while as many of N contexts of L tokens are decoded at once as the server holds
              (``none_resident``, ``oscar_resident``), all distinct and all cached. This is the rate within a
              wave: a server that holds fewer contexts needs more waves for the N. Each later wave begins with a
              prefill, which is counted for neither server. If time runs out before a server's cache is full
              (``--minutes``), its rate is that of its contexts so far (``none_fits`` and ``oscar_fits`` count those
              that it could hold).
profile_*     with --profile: us per step in which kernels run, while the streams of ``decode_*`` at its longest context
              or of ``output_*`` are decoded once more under SGLang's profiler; also the time between kernels (``idle``)
              and each kernel's own time (us, launches per step).
spec_SxL_N    with --speculation N: ms per output token as in ``decode_SxL``, while each step verifies N drafts, of
              which SGLang pretends to accept 2.5 on average (SGLANG_SIMULATE_ACC_LEN); ``*_step_ms``, a step's time,
              is 2.5 times that. The draft model (STANDALONE) has one layer of the same shapes with dummy weights, the
              same on both servers.
ttft_, tpot_  ms to the first token and per later token, means over requests with new prompts at the same
              concurrency on both servers (closed loop).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp
import numpy as np

from benchmarks import record, traces
from benchmarks.capacity import FLAGS, MODEL, existing_folder, geometry_and_flags, name_of, random_rotations
from launch.server import Server, ServerError
from sglang_kvq.evaluation import provenance

GROUPS = ("decode", "prefill", "latency", "output", "wave", "tokens", "spec")
#: Groups that run without --speculation or --scenarios.
PLAIN = GROUPS[:-3]
SERVERS = ("none", "oscar")
FAILED: list[str] = []  # groups that failed so far
PROFILED = 8  # steps
SIMULATED = 2.5  # mean accepted tokens of a verification
EVENT = 8  # tokens of a stream's event: the server's Python must not dominate the measurement


@dataclass(frozen=True)
class Scale:
    """Sizes, in tokens."""

    chunk: int
    decode: tuple[tuple[int, int], ...]  # streams, context
    measured: int  # output tokens of a stream
    prefill: int
    prompts: int
    latency: tuple[int, int, int, int]  # requests, requests at once, prompt, output
    output: tuple[int, int, int]  # requests, context, output
    wave: tuple[int, int]  # requests, prompt

    @property
    def longest(self) -> int:
        return max(*(context for _, context in self.decode), self.prefill, self.output[1]) + 1024


SCALES = {
    "full": Scale(
        8192,
        ((4, 1024), (4, 4096), (4, 8192), (4, 16384), (4, 32768), (64, 1024)),
        256,
        32768,
        3,
        (16, 8, 8192, 128),
        (96, 65536, 256),
        (1024, 200),
    ),
    "tiny": Scale(128, ((2, 64), (2, 256)), 17, 256, 2, (3, 2, 100, 9), (3, 256, 65), (6, 40)),
}


def size(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


@dataclass
class Stream:
    """The answer to one request, as received.

    Attributes:
        begin: ``time.perf_counter()`` when it was sent.
        events: (seconds, output tokens so far).
        forward: when the server's prefill began and when its result was ready, in seconds since the epoch; None if the
            server does not report it, which needs ``--enable-metrics``.
    """

    begin: float
    cached: int = 0
    events: list[tuple[float, int]] = field(default_factory=list)
    forward: tuple[float, float] | None = None

    @property
    def ttft(self) -> float:
        return self.events[0][0] - self.begin

    @property
    def stages(self) -> tuple[float, float, float] | None:
        """Seconds until the prefill begins, until its result is ready, and until the first token is received."""
        if self.forward is None:
            return None
        sent = self.begin + time.time() - time.perf_counter()  # since the epoch, like the server's times
        entered, left = self.forward
        return entered - sent, left - entered, sent + self.ttft - left

    @property
    def tpot(self) -> float:
        (t0, n0), (t1, n1) = self.events[0], self.events[-1]
        return (t1 - t0) / (n1 - n0)


class Failed(RuntimeError):
    """A scenario gave no figure; others still may."""


class Client:
    """Sends requests to one server, in its own asyncio loop."""

    def __init__(
        self, server: Server, vocabulary: int, layers: int, profiled: bool = False, uncached: int = 64
    ) -> None:
        """Creates a client.

        Args:
            layers: layers that attend over the KV cache; a profile counts launches per layer.
            uncached: tokens of a cached context that may be computed again.
        """
        self.uncached = uncached
        self.server, self.vocabulary, self.layers = server, vocabulary, layers
        self.profiled = profiled
        self.streams: list[Stream] = []  # streams begun since the last profile

    def prompt(self, kind: str, index: int, tokens: int) -> list[int]:
        generator = np.random.default_rng([*kind.encode(), index])
        return generator.integers(10, self.vocabulary - 10, tokens).tolist()

    def run(self, prompts: list[list[int]], tokens: int, at_once: int | None = None) -> list[Stream]:
        """Returns greedy answers of exactly ``tokens`` tokens."""
        bodies = [json.dumps(self._body(prompt, tokens)).encode() for prompt in prompts]
        return asyncio.run(self._run(bodies, tokens, at_once or len(bodies)))

    def cache(self, prompts: list[list[int]], deadline: float = float("inf")) -> int:
        """Puts contexts into the prefix tree, two at a time, until the deadline. Returns how many are in it."""
        done = 0
        while done < len(prompts) and time.monotonic() < deadline:
            done += len(self.run(prompts[done : done + 2], 1))
        return done

    def decode(self, prompts: list[list[int]], tokens: int) -> list[Stream]:
        """Returns streams over contexts that are in the tree.

        Raises:
            Failed: a context was not in the tree.
        """
        streams = self.run([[*prompt, 5] for prompt in prompts], tokens)
        for prompt, stream in zip(prompts, streams):
            if stream.cached < len(prompt) - self.uncached:
                raise Failed(f"only {stream.cached} of a context's {len(prompt)} tokens were cached")
        return streams

    def profile(self, prompts: list[list[int]], tokens: int, prefills: bool = False) -> dict:
        """Returns ``traces.per_step`` for steps in which all the streams run, or for prefills from the first one on.

        Raises:
            Failed: the profiler recorded nothing.
        """
        self.streams = []
        answers, begun = (self.run, any) if prefills else (self.decode, all)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(answers, prompts, tokens)
            while not running.done() and (
                len(self.streams) < len(prompts) or not begun(s.events for s in self.streams)
            ):
                time.sleep(0.02)
            return self.trace(running.result)

    def trace(self, work: Callable[[], object]) -> dict:
        """Returns ``traces.per_step`` for the first ``PROFILED`` steps that the server makes during some work.

        Raises:
            Failed: the profiler recorded nothing.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.server.request("/start_profile", {"output_dir": folder, "num_steps": PROFILED, "activities": ["GPU"]})
            work()
            try:
                return traces.per_step(traces.read_trace(Path(folder), wait=60), PROFILED, self.layers)
            except FileNotFoundError as error:
                raise Failed(str(error)) from None

    @staticmethod
    def _body(prompt: list[int], tokens: int) -> dict:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        return {"input_ids": prompt, "sampling_params": sampling, "stream": True}

    async def _run(self, bodies: list[bytes], tokens: int, at_once: int) -> list[Stream]:
        places = asyncio.Semaphore(at_once)
        options = {
            "connector": aiohttp.TCPConnector(limit=0),
            "timeout": aiohttp.ClientTimeout(total=600),
            "headers": {"Content-Type": "application/json"},
            "read_bufsize": 1 << 20,
        }

        async def one(session, body: bytes) -> Stream:
            async with places:
                stream = Stream(time.perf_counter())
                self.streams.append(stream)
                async with session.post(f"{self.server.url}/generate", data=body) as response:
                    response.raise_for_status()
                    async for line in response.content:
                        if not line.startswith(b"data: {"):
                            continue
                        now, event = time.perf_counter(), json.loads(line[6:])
                        if "error" in event:
                            raise Failed(f"the server refused a request: {event['error']}")
                        meta = event["meta_info"]
                        stream.cached = meta.get("cached_tokens", stream.cached)
                        if "prefill_finished_time" in meta:
                            stream.forward = meta["forward_entry_time"], meta["prefill_finished_time"]
                        if not stream.events or meta["completion_tokens"] > stream.events[-1][1]:
                            stream.events.append((now, meta["completion_tokens"]))
                if not stream.events or stream.events[-1][1] != tokens:
                    raise Failed(f"a request ended early: {stream.events[-1:]}\n{self.server.log_tail()}")
                return stream

        async with aiohttp.ClientSession(**options) as session:
            return await asyncio.gather(*(one(session, body) for body in bodies))


def together(streams: list[Stream]) -> list[list[tuple[float, int]]]:
    """Returns each stream's events during the time when all of them run.

    Raises:
        Failed: they never ran at once.
    """
    begin, end = max(s.events[0][0] for s in streams), min(s.events[-1][0] for s in streams)
    inside = [[event for event in s.events if begin <= event[0] <= end] for s in streams]
    if min(map(len, inside)) < 2:
        raise Failed(
            "the streams did not run at the same time: too few output tokens, or too many for the pool; the last began "
            f"{begin - min(s.events[0][0] for s in streams):.1f} s after the first, which took "
            f"{max(s.events[-1][0] - s.events[0][0] for s in streams):.1f} s at most"
        )
    return inside


def step_ms(streams: list[Stream]) -> float:
    steps = [(t1 - t0) / (n1 - n0) for events in together(streams) for (t0, n0), (t1, n1) in pairwise(events)]
    return 1e3 * statistics.median(steps)


def tokens_per_second(streams: list[Stream]) -> float:
    return sum((e[-1][1] - e[0][1]) / (e[-1][0] - e[0][0]) for e in together(streams))


def decode(client: Client, scale: Scale, deadline: float):
    for streams, context in scale.decode:
        prompts = [client.prompt(f"decode{context}", i, context) for i in range(streams)]
        client.cache(prompts)
        ms = min(step_ms(client.decode(prompts, scale.measured)) for _ in range(2))
        name = f"decode_{streams}x{size(context)}"
        yield name, "ms per step", ms, {}, {"streams": streams, "context": context}
        if client.profiled and context == max(length for _, length in scale.decode):
            yield profile_row(name, client.profile(prompts, scale.measured))


def spec(client: Client, scale: Scale, deadline: float):
    """Yields ``decode`` for a server that verifies drafts, where SGLang runs fewer requests at once."""
    info = client.server.info()
    drafts = info["speculative_num_draft_tokens"]
    most = info["internal_states"][0]["effective_max_running_requests_per_dp"]
    for streams, context in scale.decode:
        if streams > most:
            print(f"{streams} streams: left out, the server runs {most} at most", flush=True)
            continue
        prompts = [client.prompt(f"decode{context}", i, context) for i in range(streams)]
        client.cache(prompts)
        ms = min(step_ms(client.decode(prompts, scale.measured)) for _ in range(2))
        own = {"step_ms": round(ms * SIMULATED, 3)}
        common = {"streams": streams, "context": context, "drafts": drafts, "simulated": SIMULATED}
        yield f"spec_{streams}x{size(context)}_{drafts}", "ms per token", ms, own, common


def draft_model(model: Path, folder: Path) -> Path:
    """Writes a checkpoint's config with one layer to ``folder``; its weights are dummies like the target's."""
    config = json.loads((model / "config.json").read_text())
    config["num_hidden_layers"] = 1
    for path in model.iterdir():
        if path.is_file() and path.suffix in (".json", ".txt", ".model"):
            (folder / path.name).write_bytes(path.read_bytes())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def profile_row(name: str, profile: dict):
    return f"profile_{name}", "us per step", profile.pop("busy"), profile, {}


def prefill(client: Client, scale: Scale, deadline: float):
    prompts = [client.prompt("prefill", i, scale.prefill) for i in range(scale.prompts)]
    seconds = statistics.median(client.run([prompt], 1)[0].ttft for prompt in prompts)
    yield f"prefill_{size(scale.prefill)}", "tokens/s", scale.prefill / seconds, {}, {"chunk": scale.chunk}


def wave(client: Client, scale: Scale, deadline: float):
    requests, context = scale.wave
    waves = [[client.prompt("wave", turn * requests + i, context) for i in range(requests)] for turn in range(4)]
    seconds = []
    for prompts in waves[:3]:
        streams = client.run(prompts, 1)
        seconds.append(max(s.events[-1][0] for s in streams) - min(s.begin for s in streams))
        client.server.drain()
    name = f"wave_{requests}x{size(context)}"
    yield name, "tokens/s", requests * context / statistics.median(seconds), {}, {"chunk": scale.chunk}
    if client.profiled:
        yield profile_row(name, client.profile(waves[3], 1, prefills=True))


def latency(client: Client, scale: Scale, deadline: float):
    requests, at_once, context, tokens = scale.latency
    prompts = [client.prompt("latency", i, context) for i in range(requests)]
    streams = client.run(prompts, tokens, at_once)
    shape = f"{at_once}x{size(context)}"
    yield f"ttft_{shape}", "ms", 1e3 * statistics.mean(s.ttft for s in streams), {}, {"requests": requests}
    yield f"tpot_{shape}", "ms", 1e3 * statistics.mean(s.tpot for s in streams), {}, {"requests": requests}


def tokens(client: Client, scale: Scale, deadline: float):
    yield "tokens", "tokens", client.server.info()["max_total_num_tokens"], {}, {}


def output(client: Client, scale: Scale, deadline: float):
    requests, context, answer = scale.output
    room = client.server.info()["max_total_num_tokens"]
    # Each context needs its tokens, the answer, and two partly filled pages. Two percent of the pages stay free.
    fits = min(requests, int(room * 0.98) // (context + answer + 128))
    client.server.drain()
    prompts = [client.prompt("output", i, context) for i in range(fits)]
    prompts = prompts[: client.cache(prompts, deadline)]
    rate = tokens_per_second(client.decode(prompts, answer))
    own = {"fits": fits, "resident": len(prompts)}
    name = f"output_{requests}x{size(context)}"
    yield name, "tokens/s", rate, own, {"requests": requests, "context": context}
    if client.profiled:
        yield profile_row(name, client.profile(prompts, answer))


def measure(client: Client, scale: Scale, groups: list[str], deadline: float):
    """Yields (scenario, unit, value, fields of this server, fields of the scenario), as they are measured."""
    # Compiles kernels at their first use: a chunk after a chunk, short prompts, a few streams.
    client.run([client.prompt("warm", 0, 2 * scale.chunk + 70)], 2)
    client.run([client.prompt("warm", 1 + i, 70 + 30 * i) for i in range(scale.decode[0][0])], 70)
    for group in groups:
        try:
            yield from globals()[group](client, scale, deadline)
        except (Failed, ServerError, OSError, aiohttp.ClientError) as error:
            FAILED.append(group)
            print(f"{group}: FAILED: {error}", flush=True)


def graph_flags(scale: Scale, groups: list[str]) -> list[str]:
    """Returns flags for only the CUDA graphs that these groups replay, because capturing takes long."""
    decode = max(streams for streams, _ in scale.decode)
    most = {"decode": decode, "spec": decode, "latency": scale.latency[1], "output": scale.output[0]}
    flags = ["--cuda-graph-max-bs-decode", str(max(most.get(group, 1) for group in groups))]
    return flags if {"prefill", "latency", "wave"} & set(groups) else [*flags, "--disable-prefill-cuda-graph"]


def better(unit: str, none: float | None, oscar: float | None) -> float | None:
    if none is None or oscar is None:
        return None
    return round(oscar / none if unit.startswith("tokens") else none / oscar, 3)


def show(row: dict) -> None:
    values = (f"{row.get(name):12.2f}" if row.get(name) is not None else f"{'-':>12}" for name in SERVERS)
    ratio = f"{row['ratio']:8.2f}x" if row.get("ratio") else f"{'-':>9}"
    more = ", ".join(f"{k} {v}" for k, v in row.items() if k.endswith(("_fits", "_resident")))
    print(f"{row['scenario']:16} {row['unit']:12} {' '.join(values)} {ratio}  {more}", flush=True)


def show_kernels(row: dict, name: str) -> None:
    """Prints the kernels of one server's profiled steps; does nothing for other rows."""
    if kernels := row.get(f"{name}_kernels"):
        print(f"  {row[f'{name}_idle']} us without a kernel; us and launches per step of")
        print(
            "\n".join(f"    {us:9.1f} {launches:7.2f}  {kernel}" for kernel, (us, launches) in kernels.items()),
            flush=True,
        )


def plot(out: Path) -> None:
    """Plots step time against context length from the result file; does nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print(f"no plot: matplotlib is not installed. Elsewhere: python benchmarks/serving.py --plot --out {out}")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    result = json.loads(out.read_text())
    streams = min(r["streams"] for r in result["rows"] if r["scenario"].startswith("decode_"))
    rows = [r for r in result["rows"] if r["scenario"].startswith("decode_") and "GPUs" not in r["scenario"]]
    rows = [r for r in rows if r["streams"] == streams]
    rows.sort(key=lambda r: r["context"])
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name, label in zip(SERVERS, ("BF16", "--kv-quant oscar")):
        points = [(r["context"], r[name]) for r in rows if r.get(name)]
        if points:
            axes.plot(*zip(*points), marker="o", label=label)
    title = f"{streams} streams, {result['device']}"
    axes.set(xlabel="context, tokens", ylabel="ms per decode step", ylim=(0, None), title=title)
    axes.legend()
    target = out.with_name(f"{out.stem}_steps.png")
    figure.savefig(target, dpi=150, bbox_inches="tight")
    print(f"plot: {target}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="Words after -- are flags of both servers."
    )
    parser.add_argument("--out", required=True, type=Path, help="JSON file; its rows of other scenarios stay")
    parser.add_argument("--scenarios", help=f"some of {', '.join(GROUPS)}; default all but the last three")
    parser.add_argument("--speculation", type=int, metavar="N", help="only spec_*: servers that verify N drafts a step")
    parser.add_argument(
        "--servers",
        default=",".join(SERVERS),
        help="%(default)s, or one of them: the other's figures are read from --out",
    )
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="when to stop filling caches for output_NxL; default %(default)s"
    )
    parser.add_argument("--mem-fraction-static", default="0.85")
    parser.add_argument("--plain-backend", default="flashinfer", help="--attention-backend of the BF16 server")
    parser.add_argument(
        "--model", type=existing_folder, default=MODEL, help="another of benchmarks/models, with its own --out"
    )
    parser.add_argument("--layers", type=int, help="use only the model's first N layers, if not all fit")
    parser.add_argument("--tp-size", type=int, default=1, help="GPUs of each server; default %(default)s")
    parser.add_argument("--scale", choices=SCALES, default="full")
    parser.add_argument("--profile", action="store_true", help="also show what steps are made of")
    parser.add_argument(
        "--cpu", action="store_true", help="servers on the CPU engine: only shows that this script works"
    )
    parser.add_argument("--plot", action="store_true", help="only draw the plot of --out")
    args, more = record.parse(parser)
    if args.plot:
        plot(args.out)
        return
    default = "spec" if args.speculation else ",".join(PLAIN)
    scale, groups, servers = SCALES[args.scale], (args.scenarios or default).split(","), args.servers.split(",")
    if ("spec" in groups) != (groups == ["spec"] and bool(args.speculation)):
        parser.error("spec and --speculation N belong together, and other scenarios are measured without drafts")
    for given, known in ((groups, GROUPS), (servers, SERVERS)):
        if unknown := set(given) - set(known):
            parser.error(f"{', '.join(unknown)}: not one of {', '.join(known)}")
    deadline = time.monotonic() + 60 * args.minutes - 60  # leaves time for the last contexts, the wave and the exit
    config = json.loads((args.model / "config.json").read_text())
    geometry, cut = geometry_and_flags(args.model, args.layers)
    flags = [*FLAGS, *cut, "--chunked-prefill-size", str(scale.chunk), "--context-length", str(scale.longest)]
    flags += ["--stream-interval", str(EVENT)]
    flags += [] if args.cpu else ["--mem-fraction-static", args.mem_fraction_static]
    flags += graph_flags(scale, groups)
    flags += ["--tp-size", str(args.tp_size), *more]
    rows: dict[str, dict] = {r["scenario"]: r for r in record.read_rows(args.out)} if len(servers) == 1 else {}
    for row in rows.values():  # a row measured again gets a new source
        for name in record.SOURCE:
            row.pop(name, None)
    measured = []
    with tempfile.TemporaryDirectory() as temporary:
        rotations = random_rotations(Path(temporary) / "rotations", *geometry)
        own = {
            "none": [] if args.cpu else ["--attention-backend", args.plain_backend],
            "oscar": ["--kv-quant", "oscar", "--kv-quant-rotations", str(rotations)],
        }
        env = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
        if args.speculation:
            (Path(temporary) / "draft").mkdir()
            flags += [
                *("--speculative-algorithm", "STANDALONE", "--speculative-eagle-topk", "1"),
                *("--speculative-draft-model-path", str(draft_model(args.model, Path(temporary) / "draft"))),
                *("--speculative-num-steps", str(args.speculation - 1)),
                *("--speculative-num-draft-tokens", str(args.speculation)),
            ]
            env |= {"SGLANG_SIMULATE_ACC_LEN": str(SIMULATED)}
        for name in servers:
            begin = time.monotonic()
            log = Path(temporary) / f"{name}.log"
            with Server(args.model, *flags, *own[name], cpu=args.cpu, env=env, log_path=log) as server:
                print(f"{name}: started in {time.monotonic() - begin:.0f} s", flush=True)
                hybrid = "full_attention_interval" in config
                client = Client(server, config["vocab_size"], geometry.layers, args.profile, 320 if hybrid else 64)
                for measured_as, unit, value, mine, common in measure(client, scale, groups, deadline):
                    scenario = name_of(args.model, args.layers, measured_as)
                    scenario += f", {args.tp_size} GPUs" if args.tp_size > 1 else ""
                    row = rows.setdefault(scenario, {"scenario": scenario, "unit": unit, "none": None, "oscar": None})
                    mine["commit"], _ = provenance.commit()
                    row |= {name: round(value, 3), **common, **{f"{name}_{k}": v for k, v in mine.items()}}
                    row["ratio"] = better(unit, row["none"], row["oscar"])
                    measured += [scenario] if scenario not in measured else []
                    show(row)
                    show_kernels(row, name)
                    # Written after every figure, so that an interrupted run keeps its rows.
                    record.merge(args.out, "serving", [rows[s] for s in measured], key="scenario")
            print(f"{name}: {time.monotonic() - begin:.0f} s in all", flush=True)
    print(f"\n{'scenario':16} {'unit':12} {'none':>12} {'oscar':>12} {'ratio':>9}")
    for scenario in measured:
        show(rows[scenario])
    if args.tp_size == 1 and any(scenario.startswith("decode_") for scenario in measured):
        plot(args.out)
    if FAILED:
        raise SystemExit(f"no figure from: {', '.join(FAILED)}")


if __name__ == "__main__":
    main()
