"""Short extends over long prefixes: when the kernel that reads stored pages directly serves a batch, and its plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sglang_kvq.attention.base import ExtendBatch
from sglang_kvq.cache.transfer import upload
from sglang_kvq.kernels.decode import value_dims
from sglang_kvq.kernels.extend import FIELDS, ExtendLaunch, extend_launch, plan_extend


@dataclass(frozen=True)
class ShortExtends:
    """What counts as one. Long chunks pay for a workspace once and attend faster; without a prefix there is none to pay.

    ``benchmarks/kernels.py --extend --short`` compares both: on an H200, with 4 query heads to a KV head, 128 new tokens of a
    request are still served faster from the pages and 256 no more. Batches larger than the ones compared go the other way.

    Attributes:
        most_tokens: new tokens in the batch; most_per_request: in a request, each at most.
        most_rows_unpacked: new tokens times query heads of a KV head in a request, at most, of records that take more to
            dequantise than uniform 2-bit ones: every tile of rows does it again.
        least_prefix: stored tokens in the batch, at least.
        launch: of the kernel; None chooses by head_dim.
    """

    most_tokens: int = 1024
    most_per_request: int = 128
    most_rows_unpacked: int = 128
    least_prefix: int = 512
    launch: ExtendLaunch | None = None

    def suits(self, prefix_lens: list[int], new_lens: list[int], shared: int, two_bit: bool) -> bool:
        """shared: query heads of a KV head; two_bit: whether ``decode.is_two_bit`` of the layer's records."""
        longest = max(new_lens)
        return (
            0 < sum(new_lens) <= self.most_tokens
            and longest <= self.most_per_request
            and (two_bit or longest * shared <= self.most_rows_unpacked)
            and sum(prefix_lens) >= self.least_prefix
        )


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


def plan_short(
    batch: ExtendBatch, short: ShortExtends, q_heads: int, kv_heads: int, head_dim: int, sms: int, device: torch.device
) -> PlannedExtend:
    """Plan on the host; one copy to the device, which nothing waits for."""
    shared = q_heads // kv_heads
    launch = short.launch or extend_launch(head_dim)
    wave = max(sms * launch.programs_per_sm // (kv_heads * (head_dim // value_dims(head_dim))), 1)
    plan = plan_extend(batch.prefix_lens, batch.new_lens, shared, launch.rows, wave)
    tables = np.concatenate([plan.items.ravel(), plan.spans.ravel()])
    items, spans = upload(tables, device).split([plan.items.size, plan.spans.size])
    return PlannedExtend(launch, items.view(-1, FIELDS.value), spans.view(-1, 2), plan.partials)
