"""CUDA graphs of whole prefills of new prompts.

SGLang's graphs of a prefill leave attention out, so the host launches each layer's attention between two of them. For a
short prompt this takes the host as long as the GPU needs, and longer on a slow or busy host. If no request of a batch
has a stored prefix, attention needs only the bounds of the requests, which the device can read. So such batches run in
one graph, which is captured once more for each of SGLang's sizes up to ``MOST_TOKENS``.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from sglang_kvq.attention.planning.new_tokens import direct_tokens
from sglang_kvq.sglang.attention.backend import KVQuantBackend
from sglang_kvq.sglang.types import Original

#: Most tokens of a batch that is captured whole. For more tokens, the GPU takes longer than the host for all launches.
MOST_TOKENS = 2048
#: Most requests of such a batch.
MOST_REQUESTS = 32


class PromptGraph:
    """Takes the place of SGLang's graphs of one size: runs new prompts in one graph, and other batches in SGLang's.

    Padding tokens are a request of their own. So every row of attention's result has a value.

    Args:
        tokens: the size, padding included.
        parts: SGLang's graphs of this size.
    """

    def __init__(self, backend: KVQuantBackend, tokens: int, parts: Any) -> None:
        tiers = backend.tiers
        pages = len(direct_tokens([0], [tokens], tiers.sink_pages, tiers.recent_pages))  # one long prompt has the most
        device = tiers.pool.device
        self._backend, self._tokens, self._parts = backend, tokens, parts
        self._bounds = torch.zeros(MOST_REQUESTS + 2, dtype=torch.int32, device=device)
        self._direct = torch.zeros(2, pages, dtype=torch.int64, device=device)
        self._replay: Callable[[], None] = parts.replay

    def capture(self, run: Callable[[], None], pool: Any, stream: torch.cuda.Stream) -> None:
        """Captures ``run``, which runs the model over ``tokens`` tokens, after one run that compiles kernels."""
        self._backend.plan_graph(self._tokens, self._bounds, self._direct)
        self._write_bounds([self._tokens])
        run()
        with self._backend.ops.own_buffers():
            self._replay = captured(run, pool, stream)

    def replay(self) -> None:
        """Runs the batch that the backend has planned."""
        backend = self._backend
        if not backend.fresh or backend.decoding is not None or len(backend.batch.new_lens) > MOST_REQUESTS:
            self._parts.replay()
            return
        self._write_bounds(backend.batch.new_lens)
        if self._direct.shape[1]:
            self._direct.zero_()  # padding: the first tokens once more, for the padding page
            for target, pages in zip(self._direct, (backend.batch.direct_tokens, backend.direct_pages)):
                target[: pages.shape[0]] = pages
        self._replay()

    def _write_bounds(self, lens: list[int]) -> None:
        ends = [0, *accumulate(lens)]
        ends += [self._tokens] * (MOST_REQUESTS + 2 - len(ends))
        host = torch.tensor(ends, dtype=torch.int32, pin_memory=self._bounds.is_cuda)
        self._bounds.copy_(host, non_blocking=True)


def captured(run: Callable[[], None], pool: Any, stream: torch.cuda.Stream) -> Callable[[], None]:
    """Captures a function in a CUDA graph, and returns the function that replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        run()
    return graph.replay


def around_capture_one(
    original: Original,
    self: Any,
    shape_key: Any,
    forward_fn: Callable[[], Any],
    capture_inputs: Any = None,
    post_warmup_hook: Any = None,
) -> None:
    """AROUND ``BreakableCudaGraphBackend.capture_one``: also captures new prompts whole, if only attention is left out.

    Only our own attention on a GPU with FlashAttention 3 can be captured, for up to ``MOST_TOKENS`` tokens.

    Args:
        capture_inputs: not None with data-parallel attention. Its ranks have different batches, but their collectives
            require that all of them replay the same graph.
    """
    from sglang.srt.model_executor.runner_utils.pool import graph_pool_capture_scope  # NEW_TREE only

    original(self, shape_key, forward_fn, capture_inputs, post_warmup_hook)
    backend, tokens, parts = self._model_runner.attn_backend, shape_key.size, self._graphs[shape_key]
    if type(backend) is not KVQuantBackend or not backend.ops.in_graphs or capture_inputs is not None:
        return
    only_attention = len(parts._break_fns) == len(backend.index_of) and not self._debug_eager
    if tokens > MOST_TOKENS or shape_key.variant_label is not None or not only_attention:
        return

    def run() -> None:
        output = forward_fn()
        self._copy_output_to_buffer(output, self._outputs[shape_key], self._output_rows(output, tokens))

    graph = PromptGraph(backend, tokens, parts)
    with graph_pool_capture_scope():
        graph.capture(run, self._pool, self._capture_stream)
    self._graphs[shape_key] = graph
