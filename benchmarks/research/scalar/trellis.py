"""Trellis-coded quantization of a whole row, with widths that change along it (Marcellin and Fischer 1990).

The row is one circular string of bits. Value t is ``tables[w_t][state]``, where the state is the last ``memory`` bits
up to and including the w_t bits of value t (a bit-shift trellis, as in QTIP, arXiv 2406.11235). The string is
tail-biting, so no bits are lost at the ends. Channels of 0 bits are left out. The encoder runs Viterbi's algorithm
twice: first on the row rotated by half, which gives the state between end and beginning, and then with this state at
both ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from benchmarks.research.scalar.uniform import row_gain, with_best_gain

#: Rows that are coded at a time.
ROWS = 1024


@dataclass(frozen=True)
class Trellis:
    """A coder of rows; ``tables`` by width, float32 ``[2^memory]`` each, in units of a row's gain."""

    memory: int
    tables: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def trained(cls, samples: torch.Tensor, memory: int, most: int, rounds: int = 4) -> Trellis:
        """Trains tables for 1 to ``most`` bits on rows ``[n, N]`` in units of their gain: Lloyd's rounds on paths."""
        size, generator = 1 << memory, torch.Generator().manual_seed(1)
        start = samples.flatten().quantile((torch.arange(size) + 0.5) / size)
        tables = {}
        for width in range(1, most + 1):
            table = start[torch.randperm(size, generator=generator)]
            widths = [width] * samples.shape[1]
            for _ in range(rounds):
                states = paths(samples, widths, {width: table}, memory)
                sums = torch.zeros(size).index_add_(0, states.flatten(), samples.flatten())
                counts = torch.zeros(size).index_add_(0, states.flatten(), torch.ones(samples.numel()))
                table = torch.where(counts > 3, sums / counts.clamp(min=1), table)
            tables[width] = table
        return cls(memory, tables)

    def __call__(self, x: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
        gain, coded = row_gain(x, widths), (widths > 0).nonzero()[:, 0]
        z, of = (x / gain)[:, coded], widths[coded].tolist()
        read = torch.zeros_like(x)
        for start in range(0, len(x), ROWS):
            part = slice(start, start + ROWS)
            states = circular_paths(z[part], of, self.tables, self.memory)
            values = torch.stack([self.tables[w][states[:, t]] for t, w in enumerate(of)], 1)
            read[part, coded] = values
        return with_best_gain(x, read)


def circular_paths(x: torch.Tensor, widths: list[int], tables: dict[int, torch.Tensor], memory: int) -> torch.Tensor:
    """Returns states int64 ``[n, N]`` of a tail-biting string."""
    half = x.shape[1] // 2
    turned = paths(torch.cat([x[:, half:], x[:, :half]], 1), widths[half:] + widths[:half], tables, memory)
    seam = turned[:, x.shape[1] - half - 1]
    return paths(x, widths, tables, memory, seam)


def paths(
    x: torch.Tensor, widths: list[int], tables: dict[int, torch.Tensor], memory: int, seam: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the states of least squared error, int64 ``[n, N]``; ``seam`` ``[n]`` is the state at both ends."""
    n, size = len(x), 1 << memory
    cost = torch.zeros(n, size)
    if seam is not None:
        cost.fill_(torch.inf).scatter_(1, seam[:, None], 0.0)
    before = []
    for t, width in enumerate(widths):
        before.append(cost)
        best = cost.view(n, 1 << width, size >> width).amin(1)  # over the bits that leave the window
        error = (x[:, t, None] - tables[width]).square_().view(n, size >> width, 1 << width)
        cost = error.add_(best[:, :, None]).view(n, size)
    state = cost.argmin(1) if seam is None else seam
    states = torch.empty(x.shape, dtype=torch.int64)
    for t in range(len(widths) - 1, -1, -1):
        states[:, t] = state
        width = widths[t]
        kept = (state >> width)[:, None]
        candidates = kept | (torch.arange(1 << width) << (memory - width))
        state = candidates.gather(1, before[t].gather(1, candidates).argmin(1, keepdim=True))[:, 0]
    return states
