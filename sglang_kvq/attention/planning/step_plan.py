"""Division of a decode step's batch among programs; layers that divide it equally share a plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_kvq.cache.pool import PagePool
from sglang_kvq.kernels.decode.decode_attention import DecodeLaunch
from sglang_kvq.kernels.decode.split_work import FIELDS, split_work


class StepPlans:
    """Plans and output buffers for the decode kernel's launches of all layers.

    Args:
        launches: one per layer; those with equal programs per SM and equal costs share a plan.
        programs, sms, max_batch: see ``StepPlan``.
        heads: number of heads for which an item has results.

    Attributes:
        plans: the distinct plans; layers: the plan of each layer.
        partial: float32 ``[items, heads, head_dim]``, and lse: float32 ``[items, heads]``.
    """

    def __init__(
        self,
        launches: Sequence[DecodeLaunch],
        programs: int,
        sms: int,
        max_batch: int,
        heads: int,
        head_dim: int,
        device: torch.device,
    ) -> None:
        kinds = [(launch.programs_per_sm, launch.costs) for launch in launches]
        plans = {
            kind: StepPlan(launch, programs, sms, max_batch, device)
            for kind, launch in dict(zip(kinds, launches)).items()
        }
        self.plans, self.layers = list(plans.values()), [plans[kind] for kind in kinds]
        shape = (max(plan.most for plan in self.plans), heads, head_dim)
        self.partial = torch.empty(shape, dtype=torch.float32, device=device)
        self.lse = torch.empty(shape[:2], dtype=torch.float32, device=device)


class StepPlan:
    """Items of work, computed on the device once per step. Their buffers keep their addresses for CUDA graphs.

    Args:
        launch: has the number of programs that an SM holds at once, and the costs of their work.
        programs: programs per item.
        sms: number of the device's streaming multiprocessors.
        max_batch: the most requests in one decode batch.

    Attributes:
        most: the most items of any batch.
        spans: int32 ``[max_batch, 2]``, each request's first item and number of items.
    """

    def __init__(self, launch: DecodeLaunch, programs: int, sms: int, max_batch: int, device: torch.device) -> None:
        self.launch, self.programs, self.sms = launch, programs, sms
        self.most = max(self.count(batch) for batch in range(1, max_batch + 1))
        self._items = torch.empty(self.most, FIELDS.value, dtype=torch.int32, device=device)
        self.spans = torch.empty(max_batch, 2, dtype=torch.int32, device=device)

    def count(self, batch: int) -> int:
        """Returns the number of items for a batch of ``batch`` requests."""
        items: int = self.launch.items(batch, self.programs, self.sms)
        return items

    def items(self, batch: int) -> torch.Tensor:
        """Returns the items, int32 ``[count(batch), FIELDS]``, one ``plan.Item`` per row."""
        return self._items[: self.count(batch)]

    def make(self, rows: torch.Tensor, seq_lens: torch.Tensor, pool: PagePool) -> None:
        tables = (pool.row_pages, pool.row_sink_end, pool.row_history_end)
        split_work(self.items(len(rows)), self.spans[: len(rows)], rows, seq_lens, *tables, self.launch.costs)
