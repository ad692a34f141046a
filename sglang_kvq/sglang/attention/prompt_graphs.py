"""CUDA graphs of whole prefills of short prompts.

SGLang's graphs of a prefill leave attention out, so the host launches each layer's attention between two of them. For a
short prompt this takes the host as long as the GPU needs, and longer on a slow or busy host. So SGLang's sizes are
captured again, attention included:

- For new prompts of up to ``MOST_TOKENS`` tokens. If no request has a stored prefix, attention needs only the bounds of
  the requests, which the device can read.
- For such tokens after stored prefixes. Attention reads stored pages directly, or dequantizes them first; its kernels
  take their work from tables of fixed size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from sglang_kvq.attention.base import ExtendBatch
from sglang_kvq.attention.planning.graph_tables import GraphTables
from sglang_kvq.attention.planning.new_tokens import direct_tokens
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.sglang.attention.backend import KVQuantBackend
from sglang_kvq.sglang.types import Original

#: Most tokens of a batch that is captured whole. For more tokens, the GPU takes longer than the host for all launches.
MOST_TOKENS = 2048
#: Most requests of such a batch.
MOST_REQUESTS = 32


class WholeGraph(ABC):
    """One CUDA graph that runs batches of a kind, for one of SGLang's sizes.

    Every row of attention's result gets a value, those of padding too.

    Args:
        tokens: the size, padding included.
        sinks: first tokens of a request that are stored before.
    """

    def __init__(self, backend: KVQuantBackend, tokens: int, sinks: int) -> None:
        tiers = backend.tiers
        # One long prompt has the most pages that are quantized directly.
        pages = len(direct_tokens([sinks], [tokens], tiers.sink_pages, tiers.recent_pages))
        self.backend, self.tokens = backend, tokens
        self._direct = torch.zeros(2, pages, dtype=torch.int64, device=tiers.pool.device)
        self._replay: Callable[[], None] | None = None

    @abstractmethod
    def suits(self) -> bool:
        """Returns whether the graph can run the batch that the backend has planned."""

    @abstractmethod
    def fill(self, batch: ExtendBatch) -> None:
        """Writes a batch's lengths where the graph reads them."""

    @abstractmethod
    def batch_of(self, rows: torch.Tensor, loc: torch.Tensor, direct: torch.Tensor) -> ExtendBatch:
        """Returns a batch of one padding request, whose layers read what ``fill`` wrote last."""

    def capture(self, run: Callable[[], None], pool: Any, stream: torch.cuda.Stream) -> None:
        """Captures ``run``, which runs the model over ``tokens`` tokens, after one run that compiles kernels.

        SGLang has prepared a batch of padding of this size, whose locations are in the buffer that it fills later.
        """
        backend = self.backend
        batch = self.batch_of(backend.batch.rows[:1], backend.batch.loc, self._direct[0])
        self.fill(batch)
        backend.plan_graph(batch, self._direct[1])
        run()
        with backend.ops.in_capture():
            self._replay = captured(run, pool, stream)

    def replay(self) -> None:
        """Runs the batch that the backend has planned."""
        assert self._replay is not None, "not captured"
        backend = self.backend
        self.fill(backend.batch)
        if self._direct.shape[1]:
            self._direct.zero_()  # padding: the first tokens once more, for the padding page
            for target, pages in zip(self._direct, (backend.batch.direct_tokens, backend.direct_pages)):
                target[: pages.shape[0]] = pages
        self._replay()


class NewPrompts(WholeGraph):
    """Runs batches without a stored prefix; padding tokens are a request of their own."""

    def __init__(self, backend: KVQuantBackend, tokens: int) -> None:
        super().__init__(backend, tokens, sinks=0)
        self._bounds = torch.zeros(MOST_REQUESTS + 2, dtype=torch.int32, device=backend.tiers.pool.device)

    def suits(self) -> bool:
        return self.backend.fresh

    def fill(self, batch: ExtendBatch) -> None:
        ends = [0, *accumulate(batch.new_lens)]
        ends += [self.tokens] * (MOST_REQUESTS + 2 - len(ends))
        host = torch.tensor(ends, dtype=torch.int32, pin_memory=self._bounds.is_cuda)
        self._bounds.copy_(host, non_blocking=True)

    def batch_of(self, rows: torch.Tensor, loc: torch.Tensor, direct: torch.Tensor) -> ExtendBatch:
        return ExtendBatch(rows, [0], [self.tokens], loc, direct, bounds=self._bounds)


class ContinuedPrompts(WholeGraph):
    """Runs batches in which new tokens follow stored prefixes, in the way to attend that ``tables`` are for."""

    def __init__(self, backend: KVQuantBackend, tokens: int, tables: GraphTables) -> None:
        super().__init__(backend, tokens, sinks=backend.tiers.sink_pages * PAGE_SIZE)
        self._tables = tables

    def suits(self) -> bool:
        return not self.backend.scored and self.backend.ops.suits_graph(self.backend.batch, self._tables)

    def fill(self, batch: ExtendBatch) -> None:
        self._tables.fill(batch.rows, batch.prefix_lens, batch.new_lens)

    def batch_of(self, rows: torch.Tensor, loc: torch.Tensor, direct: torch.Tensor) -> ExtendBatch:
        return ExtendBatch(self._tables.rows, [0], [self.tokens], loc, direct, tables=self._tables)

    def replay(self) -> None:
        self.backend.wait_for_pages(len(self.backend.index_of) - 1)
        super().replay()


class PromptGraph:
    """Takes the place of SGLang's graphs of one size: runs batches that suit in one graph, and others in SGLang's.

    Args:
        parts: SGLang's graphs of this size.
    """

    def __init__(self, backend: KVQuantBackend, graphs: Sequence[WholeGraph], parts: Any) -> None:
        self.backend, self.graphs, self._parts = backend, graphs, parts

    def replay(self) -> None:
        """Runs the batch that the backend has planned."""
        backend = self.backend
        whole = backend.decoding is None and len(backend.batch.new_lens) <= MOST_REQUESTS
        chosen = next((graph for graph in self.graphs if whole and graph.suits()), self._parts)
        chosen.replay()


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
    """AROUND ``BreakableCudaGraphBackend.capture_one``: also captures prompts whole, if only attention is left out.

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
        backend.ops.join()

    graphs: list[WholeGraph] = [NewPrompts(backend, tokens)]
    for tables in backend.ops.graph_tables(tokens, MOST_REQUESTS):
        graphs.append(ContinuedPrompts(backend, tokens, tables))
    with graph_pool_capture_scope():
        for graph in graphs:
            graph.capture(run, self._pool, self._capture_stream)
    self._graphs[shape_key] = PromptGraph(backend, graphs, parts)
