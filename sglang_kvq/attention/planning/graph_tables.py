"""Plans of short extends: for one batch, and in tables that a CUDA graph reads for any batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sglang_kvq.attention.planning.extend_costs import Geometry
from sglang_kvq.kernels.extend.extend_attention import FIELDS, ExtendLaunch, Item, most_items, plan_extend


@dataclass(frozen=True)
class PlannedExtend:
    """A batch's plan on the device, for all layers.

    Attributes:
        launch: the launch parameters for which the plan was made.
        items, spans: see ``kernels.extend.ExtendPlan``.
        partials: number of partial results that the items leave.
    """

    launch: ExtendLaunch
    items: torch.Tensor
    spans: torch.Tensor
    partials: int


class GraphTables:
    """The plan of a batch in tables of fixed size and place, for a CUDA graph that runs any such batch later.

    Items that a batch does not need have no tokens. Padding tokens see no keys, so their results are 0.

    Args:
        tokens: new tokens of every batch, padding included.
        requests: most requests of a batch.

    Attributes:
        plan: the plan, on the device; ``fill`` changes what it contains.
        rows: int64 ``[requests]`` on the device: the requests' rows, and then those of an earlier batch.
    """

    def __init__(
        self, tokens: int, requests: int, geometry: Geometry, launch: ExtendLaunch, device: torch.device
    ) -> None:
        self._tokens, self._group, self._wave = tokens, geometry.gqa_group, geometry.concurrent_items(launch)
        tiles_of_padding = -(-tokens * self._group // launch.rows)
        items = most_items(tokens, requests, self._group, launch.rows, self._wave) + tiles_of_padding
        self._items = items * FIELDS.value
        self._table = torch.zeros(self._items + 2 * tokens, dtype=torch.int32, device=device)
        tables = self._table[: self._items].view(-1, FIELDS.value), self._table[self._items :].view(-1, 2)
        # A tile has at most this many tokens, and an item leaves one partial result for each.
        self.plan = PlannedExtend(launch, *tables, items * -(-launch.rows // self._group))
        self.rows = torch.zeros(requests, dtype=torch.int64, device=device)

    def fill(self, rows: torch.Tensor, prefix_lens: list[int], new_lens: list[int]) -> None:
        """Replaces the batch; the host does not wait for the device.

        Args:
            rows: int ``[batch]`` on the device, of ``req_to_token``.
            prefix_lens, new_lens: stored and new tokens of each request.
        """
        rows_of_tile, count = self.plan.launch.rows, sum(new_lens)
        plan = plan_extend(prefix_lens, new_lens, self._group, rows_of_tile, self._wave)
        host = torch.zeros(len(self._table), dtype=torch.int32, pin_memory=self._table.is_cuda)
        table: np.ndarray = host.numpy()  # shares the memory
        items, spans = table[: self._items].reshape(-1, FIELDS.value), table[self._items :].reshape(-1, 2)
        items[: len(plan.items)], spans[:count] = plan.items, plan.spans
        padding = {"request": 0, "start": count, "new": self._tokens - count, "prefix": 0}
        no_keys = {"first": 0, "last": 0, "begin": 0, "parts": 1, "part": 0}
        for number, row in enumerate(range(0, padding["new"] * self._group, rows_of_tile), len(plan.items)):
            items[number] = Item(**padding, **no_keys, first_row=row)
        self._table.copy_(host, non_blocking=True)
        self.rows[: len(rows)] = rows
