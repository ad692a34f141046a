"""Division of a prefill batch into slabs of stored pages that fit the workspace, and tiles of queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from sglang_kvq.cache.transfer import to_device
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.kernels.extend.flash_attention import Tile
from sglang_kvq.kernels.extend.gather_pages import PageRead

PlanTiles = Callable[[list[int], list[tuple[int, int]]], list[Tile]]


@dataclass(frozen=True)
class Slab:
    """Work of one launch of the gather kernel and one of attention.

    Attributes:
        pages: int32 ``[n, 4]`` on the device, one ``gather.PageRead`` per row.
        tiles: int32 ``[tiles, fields]`` on the device, one ``flash.Tile`` per row.
    """

    pages: torch.Tensor
    tiles: torch.Tensor


def plan_slabs(
    prefix_lens: list[int], new_lens: list[int], slab_pages: int, plan_tiles: PlanTiles, device: torch.device
) -> list[Slab]:
    """Returns the slabs in order, at least one, of at most ``slab_pages`` stored pages each.

    All tables reach the device in one copy.
    """
    prefixes = np.array(prefix_lens, np.int64)
    counts = -(-prefixes // PAGE_SIZE)
    bounds = np.concatenate([[0], np.cumsum(counts)])  # each request's range in the list of all pages
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
        first, last = np.clip(begin, bounds[:-1], bounds[1:]), np.clip(end, bounds[:-1], bounds[1:])  # pages of each
        tokens = np.minimum((last - bounds[:-1]) * PAGE_SIZE, prefixes) - (first - bounds[:-1]) * PAGE_SIZE
        stored = list(zip(((first - begin) * PAGE_SIZE).tolist(), np.maximum(tokens, 0).tolist()))
        parts += [pages[begin:end], np.array(plan_tiles(new_lens, stored))]
    flat = to_device([part.ravel() for part in parts], device, torch.int32)
    tensors = [x.view(part.shape) for x, part in zip(flat, parts)]
    return [Slab(*pair) for pair in zip(tensors[::2], tensors[1::2])]
