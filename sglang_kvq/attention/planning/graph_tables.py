"""Plans of attention over stored prefixes, in tables of fixed size and place: a CUDA graph reads them for any batch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_kvq.attention.planning.extend_costs import Geometry
from sglang_kvq.attention.planning.ragged_calls import one_call
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.kernels.extend import gather_pages
from sglang_kvq.kernels.extend.extend_attention import FIELDS, ExtendLaunch, Item, most_items, plan_extend

#: Rows behind a call's last key that a library may read as values: at most a tile of keys of FlashAttention 3.
_READ_BEHIND = 256


@dataclass(frozen=True)
class PlannedExtend:
    """A short extend's plan on the device, for all layers.

    Attributes:
        launch: the launch parameters for which the plan was made.
        items, spans: see ``kernels.extend.ExtendPlan``.
        partials: number of partial results that the items leave.
    """

    launch: ExtendLaunch
    items: torch.Tensor
    spans: torch.Tensor
    partials: int


class GraphTables(ABC):
    """The plan of a batch in int32 tables of fixed shape and place.

    Args:
        tokens: new tokens of every batch, padding included.
        requests: most requests of a batch.
        shapes: the tables' shapes.

    Attributes:
        rows: int64 ``[requests]`` on the device: the requests' rows, and then those of an earlier batch.
    """

    def __init__(self, tokens: int, requests: int, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        self.tokens, self._shapes = tokens, shapes
        self._flat = torch.zeros(sum(map(math.prod, shapes)), dtype=torch.int32, device=device)
        self._tables = self._views(self._flat)
        self.rows = torch.zeros(requests, dtype=torch.int64, device=device)

    def fill(self, rows: torch.Tensor, prefix_lens: list[int], new_lens: list[int]) -> None:
        """Replaces the batch; the host does not wait for the device.

        Args:
            rows: int ``[batch]`` on the device, of ``req_to_token``.
            prefix_lens, new_lens: stored and new tokens of each request.
        """
        host = torch.zeros(len(self._flat), dtype=torch.int32, pin_memory=self._flat.is_cuda)
        self._plan([table.numpy() for table in self._views(host)], prefix_lens, new_lens)
        self._flat.copy_(host, non_blocking=True)
        self.rows[: len(rows)] = rows

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = flat.split([math.prod(shape) for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes)]

    @abstractmethod
    def _plan(self, tables: list[np.ndarray], prefix_lens: list[int], new_lens: list[int]) -> None:
        """Writes a batch's plan into tables of zeros."""


class DirectTables(GraphTables):
    """Tables of the kernel that reads stored pages directly.

    Items that a batch does not need have no tokens. Padding tokens see no keys, so their results are 0.

    Attributes:
        plan: the plan, on the device; ``fill`` changes what it contains.
    """

    def __init__(
        self, tokens: int, requests: int, geometry: Geometry, launch: ExtendLaunch, device: torch.device
    ) -> None:
        self._group, self._wave = geometry.gqa_group, geometry.concurrent_items(launch)
        tiles_of_padding = -(-tokens * self._group // launch.rows)
        items = most_items(tokens, requests, self._group, launch.rows, self._wave) + tiles_of_padding
        super().__init__(tokens, requests, [(items, FIELDS.value), (tokens, 2)], device)
        # A tile has at most this many tokens, and an item leaves one partial result for each.
        partials = items * -(-launch.rows // self._group)
        self.plan = PlannedExtend(launch, self._tables[0], self._tables[1], partials)

    def _plan(self, tables: list[np.ndarray], prefix_lens: list[int], new_lens: list[int]) -> None:
        rows_of_tile, count = self.plan.launch.rows, sum(new_lens)
        plan = plan_extend(prefix_lens, new_lens, self._group, rows_of_tile, self._wave)
        items, spans = tables
        items[: len(plan.items)], spans[:count] = plan.items, plan.spans
        padding = {"request": 0, "start": count, "new": self.tokens - count, "prefix": 0}
        no_keys = {"first": 0, "last": 0, "begin": 0, "parts": 1, "part": 0}
        for number, row in enumerate(range(0, padding["new"] * self._group, rows_of_tile), len(plan.items)):
            items[number] = Item(**padding, **no_keys, first_row=row)


class DequantizedTables(GraphTables):
    """Tables of one library call over dequantized prefixes.

    Page reads that a batch does not need have no tokens. Padding tokens are a request of their own, without a prefix.

    Attributes:
        space: BF16 ``[2, N, kv_heads, D]``: keys and values of a batch, which share the N rows with other graphs.
        pages: int32 ``[pages, 4]`` on the device, one ``gather_pages.PageRead`` per row.
        positions: int32 ``[tokens]`` on the device: rows of the new tokens in the workspace.
        bounds: int32 ``[requests + 2]`` twice on the device: bounds of the requests' queries, and of their keys.
    """

    def __init__(self, tokens: int, requests: int, space: torch.Tensor) -> None:
        pages = (space.shape[1] - tokens) // PAGE_SIZE, gather_pages.FIELDS.value
        super().__init__(tokens, requests, [pages, (tokens,), *[(requests + 2,)] * 2], space.device)
        self.space = space
        self.pages, self.positions, *bounds = self._tables
        self.bounds = bounds[0], bounds[1]

    def fill(self, rows: torch.Tensor, prefix_lens: list[int], new_lens: list[int]) -> None:
        """Replaces the batch. The library multiplies values behind the last key by 0, so they must be finite."""
        super().fill(rows, prefix_lens, new_lens)
        end = sum(prefix_lens) + self.tokens
        self.space[:, end : end + _READ_BEHIND].zero_()

    def hold(self, prefix_lens: list[int]) -> bool:
        """Returns whether the stored pages of a batch are few enough."""
        return sum(-(-prefix // PAGE_SIZE) for prefix in prefix_lens) <= len(self.pages)

    def _plan(self, tables: list[np.ndarray], prefix_lens: list[int], new_lens: list[int]) -> None:
        call = one_call([*prefix_lens, 0], [*new_lens, self.tokens - sum(new_lens)])
        pages, positions, *bounds = tables
        pages[: len(call.pages)], positions[:] = call.pages, call.positions
        for bound, lens in zip(bounds, (call.q_lens, call.kv_lens)):
            ends = np.cumsum(lens)
            bound[1 : 1 + len(ends)], bound[1 + len(ends) :] = ends, ends[-1]
