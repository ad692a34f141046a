"""Short extends over long prefixes: chooses the batches whose stored pages a kernel reads directly, and plans them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sglang_kvq.attention.base import ExtendBatch
from sglang_kvq.attention.planning.extend_costs import H200, ExtendCosts, Geometry
from sglang_kvq.attention.planning.graph_tables import PlannedExtend
from sglang_kvq.cache.transfer import to_device
from sglang_kvq.kernels.extend.extend_attention import FIELDS, ExtendLaunch, extend_launch, plan_extend


@dataclass(frozen=True)
class ShortExtends:
    """Chooses the batches for the direct kernel: those for which it is predicted to be faster than dequantizing first.

    Attributes:
        costs: predict the times of both ways; with None, predicted time is no criterion.
        most_rows_unpacked: most new tokens times query heads per KV head in a request, if records are not cheap to
            dequantize (``extend.is_cheap``). Every tile of rows dequantizes them again.
        least_prefix: fewest stored tokens of a batch that the direct kernel serves.
        launch: the kernel's launch parameters; None chooses by head_dim.
    """

    costs: ExtendCosts | None = H200
    most_rows_unpacked: int = 128
    least_prefix: int = 512
    launch: ExtendLaunch | None = None

    def suits(
        self,
        prefix_lens: list[int],
        new_lens: list[int],
        geometry: Geometry,
        cheap: bool,
        capacity: int = 65536,
        flashinfer: bool = True,
    ) -> bool:
        """Returns whether the direct kernel serves a batch; see ``slower_us`` for the arguments."""
        if sum(new_lens) == 0 or sum(prefix_lens) < self.least_prefix:
            return False
        return self.slower_us(prefix_lens, new_lens, geometry, cheap, capacity, flashinfer) <= 0

    def slower_us(
        self,
        prefix_lens: list[int],
        new_lens: list[int],
        geometry: Geometry,
        cheap: bool,
        capacity: int = 65536,
        flashinfer: bool = True,
    ) -> float:
        """Predicts how many microseconds longer the direct kernel takes than dequantizing first.

        It is infinite if the kernel may not serve the batch, and minus infinity without ``costs``.

        cheap: whether the layer's records are cheap (``extend.is_cheap``); capacity: tokens of the workspace;
        flashinfer: whether FlashInfer would attend to the workspace.
        """
        if not cheap and max(new_lens) * geometry.gqa_group > self.most_rows_unpacked:
            return math.inf
        if self.costs is None:
            return -math.inf
        direct = self.costs.direct_us(prefix_lens, new_lens, geometry, cheap, self.launch)
        return direct - self.costs.dequantized_us(prefix_lens, new_lens, geometry, capacity, flashinfer)


#: The choice by the model of measured times in ``extend_costs``.
AS_MEASURED = ShortExtends()


def plan_short(batch: ExtendBatch, short: ShortExtends, geometry: Geometry, device: torch.device) -> PlannedExtend:
    """Plans a batch on the host and copies the plan to the device once; the host does not wait for the copy."""
    launch = short.launch or extend_launch(geometry.head_dim)
    wave = geometry.concurrent_items(launch)
    plan = plan_extend(batch.prefix_lens, batch.new_lens, geometry.gqa_group, launch.rows, wave)
    items, spans = to_device([plan.items.ravel(), plan.spans.ravel()], device, torch.int32)
    return PlannedExtend(launch, items.view(-1, FIELDS.value), spans.view(-1, 2), plan.partials)
