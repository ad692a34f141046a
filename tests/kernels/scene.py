"""Builds a pool in the state that a running batch would leave, and the two backends over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.kernel_bench import oracle
from sglang_kvq.attention.base import ExtendBatch, LayerRotations
from sglang_kvq.attention.reference import ReferenceOps
from sglang_kvq.attention.triton_ops import TritonOps
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.shared.arena import Arena, padded
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.record import RecordFormat
from tests import pairs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"
LAYERS = 2


@dataclass(frozen=True)
class Heads:
    """Geometry of one attention layer; prints as a test id."""

    head_dim: int
    group: int
    kv: int
    gqa_group: int  # query heads per KV head
    clip_k: float = 0.96
    clip_v: float = 0.92

    def __str__(self) -> str:
        return f"d{self.head_dim}g{self.group}-{self.q}q{self.kv}kv"

    @property
    def q(self) -> int:
        return self.kv * self.gqa_group

    @property
    def format(self) -> PageFormat:
        return PageFormat(self.head_dim, self.group, self.clip_k, self.clip_v)


HEADS = [
    Heads(64, 64, 3, 3),  # SmolLM2-135M
    Heads(128, 128, 2, 4),  # Qwen3-8B's group
    Heads(96, 96, 2, 1),
    Heads(96, 32, 1, 6),
    Heads(64, 32, 1, 2),
    Heads(128, 64, 1, 8),
    Heads(128, 32, 1, 16),
    Heads(256, 128, 1, 5),
    Heads(256, 64, 2, 2),
]
#: Heads for the interpreter without ``--all``: every head_dim, and all kinds of groups.
SOME_HEADS = HEADS if pairs.everything else [HEADS[i] for i in (1, 0, 3, 5, 7)]


@dataclass
class Scene:
    """One batch: request i uses row ``rows[i]``; row 0 is padding."""

    heads: Heads
    pool: PagePool
    rows: torch.Tensor
    seq_lens: torch.Tensor

    def ops(self, rotations: LayerRotations | None = None, max_batch: int = 8) -> tuple[TritonOps, ReferenceOps]:
        rotations = rotations or LayerRotations()
        return TritonOps(self.pool, rotations, self.heads.q, max_batch), ReferenceOps(self.pool, rotations)

    def queries(self, tokens: int) -> torch.Tensor:
        return randn(tokens, self.heads.q, self.heads.head_dim) * 2

    @property
    def scale(self) -> float:
        return self.heads.head_dim**-0.5


#: Lengths of the prefix and of the new tokens, for each request of a prefill.
Lens = Sequence[tuple[int, int]]


def make_batch(rows: torch.Tensor, lens: Lens) -> ExtendBatch:
    prefix, new = ([int(x) for x in column] for column in zip(*lens))
    return ExtendBatch(rows, prefix, new, int64(*range(sum(new))), int64())


def activations(heads: Heads, tokens: int) -> list[torch.Tensor]:
    """Returns q, k and v as views of one projection's output, as a model passes them."""
    sizes = [heads.q, heads.kv, heads.kv]
    return list(randn(tokens, sum(sizes), heads.head_dim).split(sizes, dim=1))


def check_extend(
    scene: Scene,
    lens: Lens,
    bound: float | Callable[[TritonOps], float],
    *,
    layers: Sequence[int] = range(LAYERS),
    size: float = 1.0,
    sinks: torch.Tensor | None = None,
    **more,
) -> TritonOps:
    """Compares a prefill on rows 1, 2, ... with float64.

    Args:
        bound: relative error, or a function that returns it once the batch is planned.
        size: factor of the queries.
        more: further arguments of ``TritonOps``.
    """
    ops = TritonOps(scene.pool, LayerRotations(), scene.heads.q, 1, **more)
    batch = make_batch(torch.arange(1, len(lens) + 1, device=DEVICE), lens)  # here a prefix of 0 does not mean padding
    q, k, v = activations(scene.heads, sum(batch.new_lens))
    q = q * size
    for layer in layers:
        got = ops.extend(layer, q, k, v, batch, scene.scale, sinks)
        assert got.dtype == torch.bfloat16
        want = oracle.extend(scene.pool, layer, q, k, v, batch, scene.scale, sinks)
        assert_close(f"extend, layer {layer}", got.double(), want, bound if isinstance(bound, float) else bound(ops))
    return ops


def prefix_scene(heads: Heads, lens: Lens, *windows: int, **more) -> Scene:
    """Returns a scene in which each request has stored its prefix."""
    return make_scene(heads, [prefix for prefix, _ in lens], *windows, **more)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).bfloat16()


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def make_scene(
    heads: Heads,
    lengths: list[int],
    sink: int = 64,
    recent: int = 128,
    margin: int = 2,
    formats: Sequence[RecordFormat] | None = None,
    shared: bool = False,
) -> Scene:
    """Returns requests of the given lengths (0: a padding row) on shuffled pages; ``margin`` pages stay free.

    ``formats`` has one format per layer; by default ``LAYERS`` layers have the format of ``heads``.

    All pages of a request are records, except its sinks and its window (the last ``recent`` tokens, in whole pages, and
    the page being filled). Memory that no request owns is poisoned with NaN.

    shared: records and BF16 pages share one memory, and page ids differ from page numbers.
    """
    counts = [-(-length // PAGE_SIZE) for length in lengths]
    pages, slots = sum(counts) + margin, sum(counts) + margin
    table = torch.zeros(len(lengths) + 1, (max(counts) + margin) * PAGE_SIZE, dtype=torch.int32, device=DEVICE)
    formats = formats or [heads.format] * LAYERS
    arena, first_slot = None, 1
    if shared:
        page_bytes = padded(heads.kv * sum(format.record_bytes for format in formats))
        slot_bytes = len(formats) * heads.kv * 2 * PAGE_SIZE * heads.head_dim * 2
        arena = Arena.smallest(page_bytes, slot_bytes, slots, pages)
        first_slot, slots = arena.first_slot(pages), arena.slots
    sizes = {"pages": pages, "slots": slots, "arena": arena}
    pool = PagePool.allocate(formats, kv_heads=heads.kv, req_to_token=table, **sizes)
    pool.bf16_pages.fill_(float("nan"))
    pool.bf16_pages[:, 0] = 0  # read for padding
    for records in pool.records:
        records.fill_(0xFF)
    free_pages = (torch.randperm(pages) + 1).tolist()
    free_slots = (torch.randperm(slots - first_slot + 1) + first_slot).tolist()
    ids = torch.arange(pages + 1)
    if shared:
        ids[1:] = torch.randperm(pages) + 1
        pool.places[ids] = torch.arange(pages + 1, dtype=torch.int32, device=DEVICE)
    offsets = torch.arange(PAGE_SIZE, device=DEVICE)
    rows = []
    for row, (length, count) in enumerate(zip(lengths, counts), start=1):
        rows.append(row if length else 0)
        sink_end = min(sink, length)
        history_end = max(sink_end, (length - recent) // PAGE_SIZE * PAGE_SIZE)
        pool.row_sink_end[row], pool.row_history_end[row] = sink_end, history_end
        for index in range(count):
            page, start = free_pages.pop(), index * PAGE_SIZE
            table[row, start : start + PAGE_SIZE] = int(ids[page]) * PAGE_SIZE + offsets
            content = randn(len(formats), 2, heads.kv, PAGE_SIZE, heads.head_dim)
            content[:, 1] += 0.5  # values with a mean, so that outputs are not all near zero
            if sink_end <= start < history_end:
                for layer, (k, v) in enumerate(content):
                    pool.records[layer][page] = pool.formats[layer].quantize_pages(k, v)
            else:
                pool.page_slot[page] = slot = free_slots.pop()
                live = min(length - start, PAGE_SIZE)
                pool.bf16_pages[:, slot, :, :, :live] = content[:, :, :, :live]
    pool.read_rows()
    return Scene(heads, pool, int64(*rows), int64(*(max(n, 1) for n in lengths)))


def rotations(kind: str, heads: Heads) -> LayerRotations:
    """Returns random orthogonal matrices; for ``balanced``, those of keys are not orthogonal.

    kind: ``shared``, ``per-head``, ``keys-only``, ``identity`` or ``balanced``.
    """
    if kind == "identity":
        return LayerRotations()
    count = heads.kv if kind in ("per-head", "balanced") else 1

    def draw() -> torch.Tensor:
        return torch.linalg.qr(torch.randn(LAYERS, count, heads.head_dim, heads.head_dim, device=DEVICE))[
            0
        ].contiguous()

    if kind == "balanced":
        scale = torch.logspace(-0.5, 0.5, heads.head_dim, device=DEVICE)
        return LayerRotations((draw() * scale).contiguous(), draw(), (draw() / scale).contiguous())
    return LayerRotations(draw(), None if kind == "keys-only" else draw())


def assert_close(label: str, got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    """Checks the relative error in the 2-norm, of all and of the worst row ``[..., D]`` (8 times the bound)."""
    assert got.shape == want.shape and got.dtype == want.dtype, f"{label}: {got.shape} {got.dtype}"
    got, want = got.double(), want.double()
    assert not got.isnan().any(), f"{label}: NaN in {got.isnan().any(-1).nonzero().tolist()[:8]}"
    error = ((got - want).norm() / want.norm().clamp(min=1e-30)).item()
    worst = ((got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-3)).max().item()
    assert error <= bound and worst <= 8 * bound, (
        f"{label}: relative error {error:.2e}, worst row {worst:.2e} (bound {bound})"
    )
