"""Division of a prefill batch: slabs of stored pages that fit the workspace, and tiles of queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from sglang_kvq.cache.transfer import upload
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.kernels.extend.flash_attention import Tile
from sglang_kvq.kernels.extend.gather_pages import PageRead

PlanTiles = Callable[[list[int], list[tuple[int, int]]], list[Tile]]


@dataclass(frozen=True)
class Slab:
    """One launch of the gather kernel and of attention.

    Attributes:
        pages: int32 ``[n, 4]`` on the device, a ``gather.PageRead`` each.
        tiles: int32 ``[tiles, fields]`` on the device, a ``flash.Tile`` each.
    """

    pages: torch.Tensor
    tiles: torch.Tensor


def plan_slabs(
    prefix_lens: list[int], new_lens: list[int], slab_pages: int, plan_tiles: PlanTiles, device: torch.device
) -> list[Slab]:
    """Returns at least one slab, ``slab_pages`` stored pages each, in order. Copies to the device once."""
    counts = np.array([-(-prefix // PAGE_SIZE) for prefix in prefix_lens])
    bounds = np.concatenate([[0], np.cumsum(counts)])  # each request's range in all pages
    request = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(request))
    reads = PageRead(
        request=request,
        index=number - bounds[request],
        first=number % slab_pages * PAGE_SIZE,
        count=np.full_like(number, PAGE_SIZE),
    )
    pages = np.stack(reads, axis=1)
    parts = []
    for begin in range(0, max(len(pages), 1), slab_pages):
        end = min(begin + slab_pages, len(pages))
        stored = []
        for i, prefix in enumerate(prefix_lens):
            a, b = np.clip([begin, end], bounds[i], bounds[i + 1])
            last = min((b - bounds[i]) * PAGE_SIZE, prefix)
            stored.append((int(a - begin) * PAGE_SIZE, max(int(last - (a - bounds[i]) * PAGE_SIZE), 0)))
        parts += [pages[begin:end], np.array(plan_tiles(new_lens, stored))]
    flat = upload(np.concatenate([part.ravel() for part in parts]), device).split([part.size for part in parts])
    tensors = [x.view(part.shape) for x, part in zip(flat, parts)]
    return [Slab(*pair) for pair in zip(tensors[::2], tensors[1::2])]
