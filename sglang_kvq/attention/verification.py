"""Verifies drafts as additional query heads of the decode kernel: each page is read once for all drafts of a request.

All query heads of all drafts that read one KV head are columns of the same matrix product. A program holds
``MOST_COLUMNS`` columns. If drafts times heads exceed that, drafts are divided into *chunks*. Neighboring programs
process a request's chunks at about the same time, so pages are read from memory once and then from the L2 cache.
"""

from __future__ import annotations

import torch

from sglang_kvq.attention.drafts import DraftBatch
from sglang_kvq.attention.planning.step_plan import StepPlans
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.kernels.decode.decode_attention import DecodeLaunch, Drafts, decode, decode_launch
from sglang_kvq.kernels.decode.merge import merge_splits
from sglang_kvq.kernels.device.arguments import Stored
from sglang_kvq.kernels.device.codes import PlaneRecord, Record
from sglang_kvq.kernels.device.shape import value_dims

#: Most query heads, over all drafts, that a program handles at once; ``TritonOps`` allows as many for one token.
MOST_COLUMNS = 16


def drafts_of_chunk(count: int, gqa_group: int) -> int:
    """Returns the drafts per chunk: as many as fit a program, spread evenly over the fewest chunks."""
    chunks = -(-count // (MOST_COLUMNS // gqa_group))
    return -(-count // chunks)


class Verification:
    """Plans and buffers for batches of ``count`` drafts per request; CUDA graphs keep their addresses.

    Args:
        records: one per layer.
        q_heads: query heads of this worker.
        sms: number of the device's streaming multiprocessors.
        count: number of drafts per request.
        batch: the most requests in a batch.
        launches: launch parameters of each layer's decode kernel; None chooses by geometry.
    """

    def __init__(
        self,
        pool: PagePool,
        records: list[Record | PlaneRecord],
        q_heads: int,
        sms: int,
        count: int,
        batch: int,
        launches: list[DecodeLaunch] | None = None,
    ) -> None:
        self.pool, self.records, self.count, self.batch = pool, records, count, batch
        self.group = q_heads // pool.kv_heads
        self.of_chunk = drafts_of_chunk(count, self.group)
        self.chunks = -(-count // self.of_chunk)
        heads, d = self.chunks * self.of_chunk * q_heads, pool.head_dim
        columns = self.of_chunk * self.group
        self.launches = launches or [decode_launch(d, columns, record, pool.kv_heads) for record in records]
        programs = pool.kv_heads * (d // value_dims(d)) * self.chunks
        made = StepPlans(self.launches, programs, sms, batch, heads, d, pool.device)
        self.plans, self.layer_plans, self.partial, self.lse = made.plans, made.layers, made.partial, made.lse

    def plan(self, drafts: DraftBatch) -> None:
        """Implements ``AttentionOps.plan_drafts``."""
        for plan in self.plans:
            plan.make(drafts.rows, drafts.seq_lens, self.pool)

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        drafts: DraftBatch,
        scale: float,
        stored: Stored,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Implements ``AttentionOps.verify``."""
        batch, plan = len(drafts.rows), self.layer_plans[layer]
        items = plan.items(batch)
        partial, lse = self.partial[: len(items)], self.lse[: len(items)]
        columns = self.to_columns(q)
        given = Drafts(drafts.seen, drafts.seen.stride(0), self.count, self.of_chunk)
        decode(
            partial, lse, columns, items, scale, self.records[layer], stored, launch=self.launches[layer], drafts=given
        )
        out = torch.empty(batch, *partial.shape[1:], dtype=q.dtype, device=q.device)
        if sinks is not None:  # repeat each head's sink for each of its columns
            columns_of = (self.chunks, self.pool.kv_heads, self.of_chunk, self.group)
            sinks = sinks.view(1, self.pool.kv_heads, 1, self.group).expand(columns_of).flatten()
            sinks = sinks.contiguous()  # with one head in all, ``flatten`` copies nothing
        merge_splits(out, partial, lse, plan.spans[:batch], sinks=sinks)
        return self.from_columns(out)

    def to_columns(self, q: torch.Tensor) -> torch.Tensor:
        """Reorders ``[batch * count, q_heads, D]`` to ``[batch * chunks, kv_heads * of_chunk * group, D]``."""
        kv_heads, d = self.pool.kv_heads, q.shape[-1]
        x = q.reshape(-1, self.count, kv_heads, self.group, d)
        if missing := self.chunks * self.of_chunk - self.count:
            x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 0, 0, missing))
        x = x.unflatten(1, (self.chunks, self.of_chunk)).transpose(2, 3)
        columns: torch.Tensor = x.reshape(-1, kv_heads * self.of_chunk * self.group, d)
        return columns

    def from_columns(self, out: torch.Tensor) -> torch.Tensor:
        """Inverts ``to_columns`` for ``[batch, chunks * kv_heads * of_chunk * group, D]``."""
        x = out.view(len(out), self.chunks, self.pool.kv_heads, self.of_chunk, self.group, out.shape[-1])
        x = x.transpose(2, 3).flatten(1, 2)[:, : self.count]
        return x.reshape(-1, self.pool.kv_heads * self.group, out.shape[-1])
