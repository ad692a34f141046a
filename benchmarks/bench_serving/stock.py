"""Runs SGLang's own serving benchmark, ``sglang.benchmark.serving`` (formerly ``sglang.bench_serving``), in children.

SGLang's code samples the prompts, sends the requests, limits how many run and reads the streams; none of it is copied
or replaced. Two kinds of its functions are wrapped. The function that makes the prompts waits until other loads have
theirs, so that all loads begin together. The functions that send a request also record it, and send none when the time
is over. Requests still running then are aborted on the server, which ends their streams with the tokens so far.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import importlib.util
import json
import multiprocessing
import os
import sys
import time
import types
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_kvq.errors import KVQuantError
from sglang_kvq.server_process import OPENER

#: Seconds that a load may take to make its prompts, and to end its last streams.
PREPARING, ENDING = 300.0, 60.0


@dataclass(frozen=True)
class Request:
    """One request as its client saw it. Times are in seconds, on one clock for all processes of a machine.

    Attributes:
        ttft: time until the first token; 0 if none came.
        tokens: tokens of the answer.
        prompt: tokens of the prompt. For all turns of a conversation, SGLang 0.5.16's benchmark reports the first
            turn's length.
        cut: whether the request was still running, or waiting, when the time was over.
        error: why it has no answer; empty if it has one.
    """

    begin: float
    ttft: float
    latency: float
    tokens: int
    asked: int
    prompt: int
    cut: bool
    error: str

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 if there is none."""
        return (self.latency - self.ttft) / (self.tokens - 1) if self.tokens > 1 else 0.0


@dataclass(frozen=True)
class Measured:
    """Results of one load.

    Attributes:
        requests: requests that were sent.
        unsent: number of requests that were not sent, because the time was over.
        summary: the last line of the benchmark's own result file.
    """

    requests: list[Request]
    unsent: int
    summary: dict[str, Any]


@functools.cache
def benchmark() -> types.ModuleType:
    """Imports SGLang's benchmark; call it before the first ``run``, because it takes seconds.

    Raises:
        KVQuantError: this SGLang has no such module.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if importlib.util.find_spec("datasets") is None:  # imported for one image data set, which is not used here
        stand_in = types.ModuleType("datasets")
        stand_in.load_dataset = None  # the only name that SGLang uses
        sys.modules["datasets"] = stand_in
    try:
        return importlib.import_module("sglang.benchmark.serving")
    except ImportError as error:
        raise KVQuantError(f"sglang.benchmark.serving: {error}. Install SGLang 0.5.16 or newer.") from error


def run(loads: Sequence[Sequence[str]], url: str, tokenizer: Path, seconds: float, folder: Path) -> list[Measured]:
    """Runs loads on a server at the same time, each in its own process.

    Args:
        loads: arguments of the benchmark for each load.
        seconds: time limit from the first request on.
        folder: for the benchmark's own result files and its output: ``load0.jsonl``, ``load0.log`` and so on.

    Raises:
        KVQuantError: a load ended with an error.
    """
    benchmark()
    folder.mkdir(parents=True, exist_ok=True)
    # Forked, because a new interpreter would import SGLang for longer than some loads run.
    context = multiprocessing.get_context("fork")
    ready = context.Barrier(len(loads))
    children = []
    for number, words in enumerate(loads):
        place = folder / f"load{number}"
        for suffix in (".jsonl", ".json", ".log"):
            place.with_suffix(suffix).unlink(missing_ok=True)
        # The model is named, because otherwise the benchmark asks the hub for one that it does not find.
        own = ["--model", str(tokenizer), "--served-model-name", "default", "--tokenizer", str(tokenizer)]
        own += ["--base-url", url, "--disable-tqdm", "--output-details"]
        argv = [*words, *own, "--output-file", str(place.with_suffix(".jsonl"))]
        children.append(context.Process(target=_child, args=(argv, url, seconds, ready, place), daemon=True))
    for child in children:
        child.start()
    deadline = time.monotonic() + PREPARING + seconds + ENDING
    try:
        for child in children:
            child.join(max(0.0, deadline - time.monotonic()))
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
                child.join()
    return [_read(folder / f"load{number}", child.exitcode) for number, child in enumerate(children)]


def _read(place: Path, status: int | None) -> Measured:
    if status != 0 or not place.with_suffix(".json").exists():
        log = place.with_suffix(".log")
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:]) if log.exists() else ""
        raise KVQuantError(f"sglang.benchmark.serving ended with status {status}:\n{tail}")
    found = json.loads(place.with_suffix(".json").read_text())
    summary = json.loads(place.with_suffix(".jsonl").read_text().splitlines()[-1])
    return Measured([Request(**one) for one in found["requests"]], found["unsent"], summary)


def _child(argv: list[str], url: str, seconds: float, ready: Any, place: Path) -> None:
    """Runs one load and writes ``place.json``."""
    with place.with_suffix(".log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads do not survive a fork
    module = benchmark()
    watch = Watch(module, url, seconds)
    make = module.get_dataset

    def get_dataset(arguments: Any, tokenizer: Any, *more: Any) -> Any:
        rows = make(arguments, tokenizer, *more)
        watch.tokenizer = tokenizer
        ready.wait(PREPARING)
        return rows

    module.get_dataset = get_dataset
    for name, send in list(module.ASYNC_REQUEST_FUNCS.items()):
        module.ASYNC_REQUEST_FUNCS[name] = watch.over(send)
    sys.argv = ["sglang.benchmark.serving", *argv]
    module.cli_main()
    found = {"requests": [asdict(one) for one in watch.requests], "unsent": watch.unsent}
    place.with_suffix(".json").write_text(json.dumps(found))


class Watch:
    """Records requests, and ends them when the time is over.

    Args:
        module: SGLang's benchmark.
        seconds: time limit from the first request on.
    """

    def __init__(self, module: types.ModuleType, url: str, seconds: float) -> None:
        self.module, self.url, self.seconds = module, url, seconds
        self.tokenizer: Any = None
        self.requests: list[Request] = []
        self.unsent = self.running = 0
        self.end: float | None = None
        self._ending: asyncio.Task[None] | None = None

    def over(self, send: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function that sends a request."""

        async def watched(request_func_input: Any, pbar: Any = None) -> Any:
            begin = time.perf_counter()
            if self.end is None:
                self.end = begin + self.seconds
                self._ending = asyncio.create_task(self._stop())
            if begin >= self.end:
                self.unsent += 1
                output = self.module.RequestFuncOutput.init_new(request_func_input)
                output.error = "not sent: the time is over"
                return output
            self.running += 1
            try:
                output = await send(request_func_input=request_func_input, pbar=pbar)
            finally:
                self.running -= 1
            self.note(request_func_input, output, begin)
            return output

        return watched

    def note(self, asked: Any, output: Any, begin: float) -> None:
        """Records a request; the tokens of an answer that was cut are counted from its text."""
        ended = time.perf_counter()
        cut = self.end is not None and ended >= self.end
        error = "" if output.success or cut else (output.error or "no answer")[-500:]
        if not output.ttft:
            tokens = 0
            error = error or ("" if cut else "an answer without a token")
        elif cut:
            tokens = len(self.tokenizer.encode(output.generated_text, add_special_tokens=False))
        else:
            tokens = output.output_len
        latency = output.latency if output.success else ended - begin
        self.requests.append(
            Request(begin, output.ttft, latency, tokens, asked.output_len, output.prompt_len, cut, error)
        )

    async def _stop(self) -> None:
        """Aborts running requests when the time is over, repeatedly, because more may have been on their way."""
        assert self.end is not None
        await asyncio.sleep(self.end - time.perf_counter())
        while self.running:
            with contextlib.suppress(OSError):  # tries again in a second
                await asyncio.to_thread(_abort_all, self.url)
            await asyncio.sleep(1.0)


def _abort_all(url: str) -> None:
    body = json.dumps({"rid": "", "abort_all": True}).encode()
    with OPENER.open(
        urllib.request.Request(f"{url}/abort_request", body, {"Content-Type": "application/json"}), timeout=10
    ):
        pass
