"""Scores past keys with a patched prompt, as the building of an episode does: records, a block, the prompt."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton

from benchmarks import baseline
from benchmarks.kernel_bench import oracle
from benchmarks.kernel_bench.rows import row_of
from benchmarks.kernel_bench.shapes import KV_HEADS, Q_HEADS, D, checked, make_pool
from benchmarks.kernel_bench.timer import Timer
from sglang_kvq.attention.base import ExtendBatch, LayerRotations
from sglang_kvq.attention.scores import paged_scores
from sglang_kvq.attention.scores.scoring import KeyScores, plan_scoring
from sglang_kvq.attention.triton_ops import TritonOps
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.kernels.extend.key_scores import ScoreLaunch

#: Stored prefix, tokens of the block, tokens of the prompt.
SCORES = [(4096, 2048, 1024), (4096, 2048, 256), (0, 2048, 1024), (6144, 0, 1024), (16384, 4096, 1024)]
#: Launches that --sweep-scores compares: owned, read, warps, stages.
LAUNCHES = [(128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3), (64, 128, 4, 3)]


class ScoreShape:
    """One request's chunk, all keys that it scores, and exact scores for its first and last head."""

    def __init__(self, prefix: int, block: int, prompt: int) -> None:
        self.past, self.prompt, new = prefix + block, prompt, block + prompt
        pool = make_pool([max(prefix, PAGE_SIZE)])
        self.q, self.k = (torch.randn(new, n, D, device="cuda").bfloat16() for n in (Q_HEADS, KV_HEADS))
        none = torch.empty(0, dtype=torch.int64, device="cuda")
        rows, loc = torch.tensor([1], device="cuda"), torch.arange(new, device="cuda")
        self.batch = ExtendBatch(rows, [prefix], [new], loc, none)
        self.scores = KeyScores(1, KV_HEADS, self.past, "cuda")
        (self.part,) = plan_scoring([prefix], [new], {0: self.scores})
        self.ops = TritonOps(pool, LayerRotations(), Q_HEADS, 1)
        self.want = {}
        for head in (0, KV_HEADS - 1):
            stored, _ = oracle.stored(pool, 0, 1, prefix, slice(head, head + 1))
            keys = torch.cat([stored[0], self.k[:block, head].double()])
            group = slice(head * Q_HEADS // KV_HEADS, (head + 1) * Q_HEADS // KV_HEADS)
            shares = [(q.double() @ keys.T * D**-0.5).softmax(-1).amax(0) for q in self.q[block:, group].unbind(1)]
            self.want[head] = torch.stack(shares).amax(0)

    def measure(self, timer: Timer) -> tuple[float, float]:
        """Returns microseconds and the relative error."""
        run = lambda: self.ops.score_keys(0, self.q, self.k, self.batch, self.part, D**-0.5)  # noqa: E731
        self.scores.values.zero_()
        run()
        error = max(
            checked(f"scores of {self.past} keys by {self.prompt} queries", self.scores.values[0, head], want)
            for head, want in self.want.items()
        )
        return timer(run), error


def score_rows(timer: Timer) -> Iterator[dict]:
    """Yields rows, with FlashInfer's time for the attention of the same chunk over BF16."""
    for prefix, block, prompt in SCORES:
        shape = ScoreShape(prefix, block, prompt)
        us, error = shape.measure(timer)
        theirs = baseline.prefill_us(timer, shape.q, shape.past + prompt, KV_HEADS)
        tflops = round(2 * 2 * Q_HEADS * D * prompt * shape.past / us / 1e6)
        more = {"prompt": prompt, "block": block, "tflop_per_s": tflops}
        yield row_of("scores of keys", 1, shape.past, us, theirs, error, None, **more)


def sweep_scores(timer: Timer) -> None:
    """Prints microseconds by launch."""
    print(f"{'owned, read, warps, stages':>28}" + "".join(f"{','.join(map(str, x)):>16}" for x in LAUNCHES))
    chosen = paged_scores.score_launch
    try:
        for prefix, block, prompt in SCORES:
            shape, times = ScoreShape(prefix, block, prompt), []
            for launch in LAUNCHES:
                paged_scores.score_launch = lambda head_dim, launch=launch: ScoreLaunch(*launch)
                try:
                    times.append(f"{shape.measure(timer)[0]:16.1f}")
                except triton.runtime.errors.OutOfResources:
                    times.append(f"{'does not fit':>16}")
            print(f"{f'{prefix} + {block}, by {prompt}':>28}" + "".join(times), flush=True)
    finally:
        paged_scores.score_launch = chosen
