"""Scores past keys on a GPU: dequantizes keys to a BF16 workspace, then passes over them twice.

A prompt has hundreds to thousands of query rows per KV head. A kernel that reads pages directly would dequantize them
again for every tile of rows. Here each page is dequantized at most once per pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from sglang_kvq.attention.scores.scoring import ScoringPart
from sglang_kvq.cache.transfer import to_device
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.kernels.extend.gather_pages import FIELDS, PageRead
from sglang_kvq.kernels.extend.key_scores import merged, past_lse, raise_scores, score_launch, splits_of

#: A function ``(keys, pages)`` that fills rows of keys, BF16 ``[n, kv_heads, D]``, from pages.
GatherKeys = Callable[[torch.Tensor, torch.Tensor], object]


@dataclass(frozen=True)
class Stretch:
    """Past keys that are in the workspace at the same time.

    Attributes:
        first: index of the stretch's first token among all past tokens.
        stored: number of tokens read from pages; new: number of the batch's tokens after them.
        pages: int32 ``[n, 4]`` on the device, one ``gather.PageRead`` per row.
    """

    first: int
    stored: int
    new: int
    pages: torch.Tensor

    @property
    def size(self) -> int:
        return self.stored + self.new


@dataclass(frozen=True)
class PlannedScores:
    """Scoring of one ``ScoringPart``, planned on the host for all layers.

    Planning takes one copy to the device, and the host does not wait for it.
    """

    part: ScoringPart
    stretches: list[Stretch]

    @classmethod
    def of(cls, part: ScoringPart, most_pages: int, device: torch.device) -> PlannedScores:
        """Plans stretches of at most ``most_pages`` stored pages; the batch's own keys join the last one."""
        pages = -(-part.stored // PAGE_SIZE)
        index = np.arange(pages)
        start = index * PAGE_SIZE
        reads = PageRead(
            request=np.full_like(index, part.request),
            index=index,
            first=start % (most_pages * PAGE_SIZE),
            count=np.minimum(part.stored - start, PAGE_SIZE),
        )
        (flat,) = to_device([np.stack(reads, axis=1).ravel()], device, torch.int32)
        table = flat.view(-1, FIELDS.value)
        stretches = []
        for begin in range(0, max(pages, 1), most_pages):
            end = min(begin + most_pages, pages)
            stored = min(end * PAGE_SIZE, part.stored) - begin * PAGE_SIZE
            new = part.past - part.stored if end == pages else 0
            stretches.append(Stretch(begin * PAGE_SIZE, stored, new, table[begin:end]))
        return cls(part, stretches)

    def run(
        self, values: torch.Tensor, q: torch.Tensor, k: torch.Tensor, scale: float, sms: int, gather: GatherKeys
    ) -> None:
        """Scores the past keys in one layer; keeps the maximum in ``values``, float32 ``[kv_heads, past]``.

        Args:
            q, k: see ``AttentionOps.score_keys``.
            sms: number of the device's streaming multiprocessors.
        """
        queries, new_past = self.part.scoring(q), self.part.new_past(k)
        (prompt, q_heads, d), kv_heads = queries.shape, k.shape[1]
        launch = score_launch(d)
        sizes = [stretch.size for stretch in self.stretches]
        splits = [splits_of(prompt, q_heads, kv_heads, size, sms, launch) for size in sizes]
        space = torch.empty(max(sizes), *k.shape[1:], dtype=k.dtype, device=k.device)

        def keys_of(stretch: Stretch) -> torch.Tensor:
            keys = space[: stretch.size]
            if stretch.stored:
                gather(keys, stretch.pages)
            if stretch.new:
                keys[stretch.stored :] = new_past
            return keys

        lse = torch.empty(sum(splits), prompt, q_heads, dtype=torch.float32, device=q.device)
        for stretch, part in zip(self.stretches, lse.split(splits)):
            past_lse(part, queries, keys_of(stretch), scale, launch=launch)
        total = merged(lse)
        for stretch in self.stretches:
            keys = space[: stretch.size] if len(self.stretches) == 1 else keys_of(stretch)
            mine = values[:, stretch.first : stretch.first + stretch.size]
            raise_scores(mine, queries, keys, total, scale, launch=launch)
