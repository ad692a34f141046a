"""Measures divergence and copies of every window in one pass each, with several windows of a method in one batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, zip_longest
from typing import Any

import torch

from benchmarks.windows import copies
from benchmarks.windows.cases import BF16, Case, Row
from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.evaluation.tasks.statistics import clustered, mean_and_error
from sglang_kvq.formats.record import RecordFormat
from sglang_kvq.rotations.calibration.hf_attention import attention_hook, positions
from sglang_kvq.rotations.inspection.candidates import Candidate
from sglang_kvq.rotations.inspection.divergence import FakeQuantAttention, compare, log_probs
from sglang_kvq.rotations.maths.fake_quant import RotatedContext, page_round_trip

#: Pages of queries that attend together on a GPU.
PAGES = 8
KL = "kl_contexts"


@dataclass(frozen=True)
class Unit:
    """The input of one pass.

    Attributes:
        field: name of a list in each row; a pass adds one entry to it.
        number: the entry's place in the list.
        ids: int64 ``[T]``.
        first: position from which on log-probabilities of the next token are wanted.
        judge: turns a case's and BF16's log-probabilities ``[T - first, vocab]`` into an entry.
        of_bf16: whether BF16 gets an entry too.
    """

    field: str
    number: int
    ids: torch.Tensor
    first: int
    judge: Callable[[torch.Tensor, torch.Tensor], list[float]]
    of_bf16: bool = False


def kl_units(contexts: Iterable[torch.Tensor], measured: int) -> list[Unit]:
    """Returns units that measure the divergence of the last ``measured`` tokens of each context."""

    def judge(logp: torch.Tensor, reference: torch.Tensor) -> list[float]:
        found = compare(logp, reference)
        return [round(float(found.kl.mean()), 7), round(float(found.agrees.double().mean()), 7)]

    return [Unit(KL, number, ids, len(ids) - measured, judge) for number, ids in enumerate(contexts)]


def copy_units(prompts: Iterable[copies.Prompt], field: str) -> list[Unit]:
    """Returns units that measure the copies of each prompt."""

    def judged(prompt: copies.Prompt) -> Callable[[torch.Tensor, torch.Tensor], list[float]]:
        return lambda logp, reference: copies.judge(prompt, logp)

    return [
        Unit(field, number, prompt.ids, prompt.first, judged(prompt), of_bf16=True)
        for number, prompt in enumerate(prompts)
    ]


def in_turns(*lists: Sequence[Unit]) -> list[Unit]:
    """Returns the units of all lists alternately, so that a stopped run has about equally many of each list."""
    return [unit for unit in chain.from_iterable(zip_longest(*lists)) if unit is not None]


@dataclass(frozen=True)
class BatchedWindows:
    """A hook of ``attention_hook(batched=True)``: ``FakeQuantAttention`` with a window for each sequence.

    The batch's keys and values pass through their records together. The arithmetic of ``transform`` consists of a
    thousand small operations, which a GPU runs for many sequences in the time of one.
    """

    formats: Sequence[RecordFormat]
    rotations: LayerRotations
    windows: Sequence[tuple[int, int]]
    pages: int = 1

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        contexts = [
            RotatedContext.of(self.rotations, layer, *one, scale, sink=sink, recent=recent, round_queries=True)
            for *one, (sink, recent) in zip(q, k, v, self.windows, strict=True)
        ]
        stored = (torch.cat([getattr(context, name) for context in contexts]) for name in "kv")
        old = page_round_trip(self.formats[layer], *stored)
        outputs = [
            context.to_model_basis(context.output(old_k, old_v, self.pages))
            for context, old_k, old_v in zip(contexts, *(x.chunk(len(contexts)) for x in old), strict=True)
        ]
        return torch.stack(outputs)


@torch.inference_mode()
def batched_log_probs(model: Any, ids: torch.Tensor, hook: BatchedWindows, first: int) -> Iterator[torch.Tensor]:
    """Yields ``log_probs`` of each window, float32 ``[T - first, vocab]``."""
    with attention_hook(model, hook, batched=True):
        ids = ids.to(model.device)
        batch = ids.expand(len(hook.windows), -1)
        out = model(batch, position_ids=positions(ids, 0), use_cache=False, logits_to_keep=len(ids) - first)
    for logits in out.logits[:, first - len(ids) :]:  # one by one: a vocabulary of 150,000 takes much memory
        yield logits.float().log_softmax(-1)


@torch.inference_mode()
def measure(
    model: Any,
    units: Sequence[Unit],
    cases: Sequence[Case],
    methods: dict[str, Candidate],
    rows: dict[str, Row],
    save: Callable[[], None],
    *,
    batch: int = 5,
    deadline: float = float("inf"),
) -> bool:
    """Adds missing results to rows, unit by unit and ``batch`` windows at a time; False if the deadline ended it.

    Args:
        rows: by the cases' names, and ``BF16``; the lists named ``Unit.field`` hold results of earlier runs.
        batch: windows of a method that are read together.
        save: called when rows changed.
    """
    pages = PAGES if model.device.type == "cuda" else 1
    ready = {name: candidate.rotations.to(model.device) for name, candidate in methods.items()}
    for done, unit in enumerate(units):
        names = [case.name for case in cases] + [BF16] * unit.of_bf16
        lacking = {name for name in names if len(rows[name].setdefault(unit.field, [])) <= unit.number}
        if not lacking:
            continue
        if time.monotonic() > deadline:
            return False
        began = time.monotonic()
        reference = log_probs(model, unit.ids, FakeQuantAttention(None), unit.first)
        if BF16 in lacking:
            rows[BF16][unit.field].append(unit.judge(reference, reference))
        for group in groups([case for case in cases if case.name in lacking], batch):
            if time.monotonic() > deadline:
                return False
            method = group[0].method
            windows = [(case.sink, case.recent) for case in group]
            hook = BatchedWindows(methods[method].formats, ready[method], windows, pages)
            for case, logp in zip(group, batched_log_probs(model, unit.ids, hook, unit.first), strict=True):
                rows[case.name][unit.field].append(unit.judge(logp, reference))
            summarize(rows, cases)
            save()
        print(f"{done + 1} of {len(units)}: {unit.field}, {time.monotonic() - began:.1f} s", flush=True)
    return True


def groups(cases: Sequence[Case], batch: int) -> Iterator[list[Case]]:
    """Divides cases into groups of one method each."""
    for _, found in groupby(cases, key=lambda case: case.method):
        mine = list(found)
        yield from (mine[at : at + batch] for at in range(0, len(mine), batch))


def summarize(rows: dict[str, Row], cases: Sequence[Case]) -> None:
    """Writes means and standard errors into rows, over the contexts and prompts that all cases have.

    A stopped run thus compares windows on the same text.
    """
    mine = [rows[case.name] for case in cases]
    for field in sorted({field for row in mine for field in row if field == KL or field.endswith("_prompts")}):
        count = min(len(row.get(field, [])) for row in mine)
        for row in [*mine, *([rows[BF16]] if field != KL else [])]:
            found = row[field][:count]
            if not found:
                continue
            if field == KL:
                columns = zip(("kl", "top1"), map(mean_and_error, zip(*found)))
            else:
                copied, asked, nats, tokens = zip(*found)
                name = field.removesuffix("_prompts")
                columns = zip((name, f"{name}_nats"), (clustered(copied, asked), clustered(nats, tokens)))
            for column, (mean, error) in columns:
                row[column], row[f"{column}_se"] = round(mean, 6), None if error is None else round(error, 6)
            row[f"{field}_used"] = len(found)
