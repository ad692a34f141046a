"""Short extends over long prefixes: when the kernel that reads stored pages directly serves a batch, and its plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sglang_kvq.attention.base import ExtendBatch
from sglang_kvq.attention.extend_costs import H200, ExtendCosts, Geometry
from sglang_kvq.cache.transfer import upload
from sglang_kvq.kernels.extend.extend_attention import FIELDS, ExtendLaunch, extend_launch, plan_extend


@dataclass(frozen=True)
class ShortExtends:
    """Which batches the kernel serves: those that it is expected to serve sooner than a workspace.

    Attributes:
        costs: what both ways take; None: whatever they take.
        most_rows_unpacked: new tokens times query heads of a KV head in a request, at most, of records that are not
            cheap to dequantize (``extend.is_cheap``): every tile of rows does it again.
        least_prefix: stored tokens in the batch, at least.
        launch: of the kernel; None chooses by head_dim.
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
        """Whether it serves a batch.

        cheap: whether ``extend.is_cheap`` of the layer's records; capacity: the workspace in tokens; flashinfer:
        whether it would attend to one.
        """
        if sum(new_lens) == 0 or sum(prefix_lens) < self.least_prefix:
            return False
        if not cheap and max(new_lens) * geometry.gqa_group > self.most_rows_unpacked:
            return False
        if self.costs is None:
            return True
        direct = self.costs.direct_us(prefix_lens, new_lens, geometry, cheap, self.launch)
        return direct <= self.costs.dequantized_us(prefix_lens, new_lens, geometry, capacity, flashinfer)


#: As ``extend_costs`` models what was measured.
AS_MEASURED = ShortExtends()


@dataclass(frozen=True)
class PlannedExtend:
    """A batch's plan on the device, for all layers.

    Attributes:
        launch: what it was made for.
        items, spans: of ``kernels.extend.ExtendPlan``.
        partials: results that the items leave.
    """

    launch: ExtendLaunch
    items: torch.Tensor
    spans: torch.Tensor
    partials: int


def plan_short(batch: ExtendBatch, short: ShortExtends, geometry: Geometry, device: torch.device) -> PlannedExtend:
    """Plan on the host; one copy to the device, which nothing waits for."""
    launch = short.launch or extend_launch(geometry.head_dim)
    wave = geometry.concurrent_items(launch)
    plan = plan_extend(batch.prefix_lens, batch.new_lens, geometry.gqa_group, launch.rows, wave)
    tables = np.concatenate([plan.items.ravel(), plan.spans.ravel()])
    items, spans = upload(tables, device).split([plan.items.size, plan.spans.size])
    return PlannedExtend(launch, items.view(-1, FIELDS.value), spans.view(-1, 2), plan.partials)
