"""Recommends a bit budget for a model's transform coding, measured on text that calibration has not seen.

A model runs a few contexts exactly, with its history in the records of each of ``BUDGETS``, and with ``REFERENCE``,
which is nearly lossless. ``kvq calibrate`` writes the result to the folder's ``config.json`` as ``divergence``.

A budget is acceptable if its divergence plus one standard error is within a limit. The recommendation is the least
budget that is acceptable together with every larger one. The standard error and the larger budgets guard against lucky
measurements. The limit is ``TOLERANCE`` times the reference's divergence or ``SMALL``, whichever is larger. The curve
has no bend that could be the limit: at high rates, half a bit less doubles the error everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError, first_line
from sglang_kvq.rotations.base import Rotations
from sglang_kvq.rotations.calibration.run import Progress, silent
from sglang_kvq.rotations.calibration.settings import CalibrationSettings, draw_contexts
from sglang_kvq.rotations.inspection.candidates import Candidate, candidate_of
from sglang_kvq.rotations.inspection.divergence import FakeQuantAttention, TokenDivergence, divergences
from sglang_kvq.rotations.storage.schema import CONFIG_FILE, dumps, first_problem

#: Values of ``--kv-quant-bits`` that are measured.
BUDGETS = (1.25, 1.6, 2.0, 2.25, 2.5, 3.0, 3.5)
#: The method that budgets are compared with.
REFERENCE = "int4"
#: A divergence is acceptable up to this factor of the reference's, or up to this many nats per token.
TOLERANCE, SMALL = 1.5, 0.02

#: Field of ``config.json`` that holds a ``BudgetDivergence``.
FIELD = "divergence"


@dataclass(frozen=True)
class HeldOut:
    """The text to measure on: contexts of ``length`` tokens, whose ``sink`` first and ``recent`` last ones are BF16.

    Only a context's second half counts, because the first is mostly BF16.
    """

    contexts: int = 2
    length: int = 1024
    sink: int = 64
    recent: int = 256

    def __post_init__(self) -> None:
        least = self.sink + self.recent + 3 * PAGE_SIZE
        if self.contexts < 1:
            raise KVQuantError(f"--held-out-contexts {self.contexts}: must be at least 1. Or pass --no-recommend.")
        if self.length < least or self.length % PAGE_SIZE:
            raise KVQuantError(
                f"--held-out-length {self.length}: must be a multiple of {PAGE_SIZE}, and at least {least}, or no "
                "history is quantized in it."
            )

    @property
    def first(self) -> int:
        """First position that counts: the middle, or the first with a quantized page of history."""
        return max(self.length // 2 // PAGE_SIZE * PAGE_SIZE, self.sink + self.recent + PAGE_SIZE)


@dataclass(frozen=True)
class Measured:
    """Measurements of one method at one width.

    Attributes:
        budget: value of --kv-quant-bits; None for the method's only width.
        bits: allocated bits per element of a page without BF16 copy, everything counted.
        capacity: tokens in the memory of one BF16 token, without the memory of BF16 pages at the default
            --kv-quant-bf16-budget.
        kl, kl_error: mean divergence in nats per token, and its standard error.
        top1, top1_error: share of tokens where both predict the same most likely successor, and its standard error.
    """

    method: str
    budget: float | None
    bits: FiniteFloat
    capacity: FiniteFloat
    kl: FiniteFloat
    kl_error: FiniteFloat
    top1: FiniteFloat
    top1_error: FiniteFloat


@dataclass(frozen=True)
class BudgetDivergence:
    """The measured divergences of a model, over ``tokens`` tokens in all; budgets ascend."""

    budgets: Annotated[tuple[Measured, ...], Field(min_length=1)]
    reference: Measured
    contexts: int
    length: int
    tokens: int

    @property
    def limit(self) -> float:
        """Acceptable divergence in nats per token."""
        return max(SMALL, TOLERANCE * self.reference.kl)

    @cached_property
    def recommended(self) -> float | None:
        """The recommended budget, by the rule in the module's docstring; None if not even the largest is acceptable."""
        found = None
        for row in sorted(self.budgets, key=lambda row: row.bits, reverse=True):
            if not row.kl + row.kl_error <= self.limit:
                break
            found = row.budget
        return found

    def to_json(self) -> dict[str, Any]:
        """Returns the content for ``config.json`` and ``--json``."""
        return {"recommended_bits": self.recommended, "limit": self.limit, **asdict(self)}


def measure_held_out(
    model: Any,
    ids: torch.Tensor,
    rotations: Rotations,
    folder: Path,
    settings: CalibrationSettings,
    held_out: HeldOut,
    progress: Progress = silent,
) -> BudgetDivergence:
    """Measures budgets on the part of a corpus, int64 ``[tokens]``, that calibration did not draw.

    It adds the measurements to ``folder``, which holds the rotations.

    Raises:
        KVQuantError: an error of ``held_out_starts``, ``measure_budgets`` or ``store``; not enough GPU memory.
    """
    starts = held_out_starts(len(ids), settings, held_out)
    contexts = [ids[start : start + held_out.length] for start in starts]
    try:
        found = measure_budgets(model, contexts, rotations, held_out, progress=progress)
    except torch.OutOfMemoryError as error:
        raise KVQuantError(
            f"--held-out-length {held_out.length}: not enough GPU memory for contexts of that length "
            f"({first_line(error)}). The rotations in {folder} are complete: serve them with a budget that you choose, "
            f"or measure shorter contexts with `python -m {__package__}.recommend`."
        ) from error
    store(found, folder)
    return found


def held_out_starts(tokens: int, settings: CalibrationSettings, held_out: HeldOut) -> list[int]:
    """Returns the indices where held-out contexts begin, which calibration does not draw, spread over the corpus."""
    drawn = draw_contexts(torch.arange(tokens), settings)
    begins = [0, *(drawn[:, -1] + 1).tolist()]
    room = []
    for begin, end in zip(begins, [*drawn[:, 0].tolist(), tokens]):
        count = (end - begin) // held_out.length
        spare = end - begin - count * held_out.length
        room += [begin + i * held_out.length + spare * (i + 1) // (count + 1) for i in range(count)]
    if len(room) < held_out.contexts:
        raise KVQuantError(
            f"the corpus has {tokens} tokens; besides the {drawn.numel()} that calibration draws it has room for "
            f"{len(room)} contexts of {held_out.length} tokens, but to recommend a budget {held_out.contexts} are "
            "needed. Give more text, lower --tokens, --held-out-contexts or --held-out-length, or pass --no-recommend."
        )
    return [room[(2 * i + 1) * len(room) // (2 * held_out.contexts)] for i in range(held_out.contexts)]


def measure_budgets(
    model: Any,
    contexts: Sequence[torch.Tensor],
    rotations: Rotations,
    held_out: HeldOut,
    *,
    budgets: Sequence[float] = BUDGETS,
    progress: Progress = silent,
) -> BudgetDivergence:
    """Runs the model over every context exactly, with ``REFERENCE``, and with transform coding at each budget.

    Raises:
        KVQuantError: a divergence is not finite.
    """
    progress("choosing widths", 0, 1)
    named = {budget: f"transform:{budget:g}" for budget in sorted(budgets)}
    candidates = {name: candidate_of(name, rotations, model.config) for name in (REFERENCE, *named.values())}
    attention = {
        name: FakeQuantAttention(c.formats, c.rotations.to(model.device), held_out.sink, held_out.recent)
        for name, c in candidates.items()
    }
    found = divergences(
        model, contexts, attention, first=held_out.first, progress=lambda *done: progress("divergence", *done)
    )
    for name, divergence in found.items():
        if not torch.isfinite(divergence.kl).all():
            raise KVQuantError(
                f"{name}: the model's divergence is not finite: it overflows in its dtype. Pass --dtype float32. "
                "The rotations are complete and can be served with a budget that you choose."
            )
    return BudgetDivergence(
        tuple(_measured(candidates[name], budget, found[name]) for budget, name in named.items()),
        _measured(candidates[REFERENCE], None, found[REFERENCE]),
        len(contexts),
        held_out.length,
        len(found[REFERENCE].kl),
    )


def _measured(candidate: Candidate, budget: float | None, divergence: TokenDivergence) -> Measured:
    method = candidate.name.partition(":")[0]
    bits = sum(f.bits_per_element for f in candidate.formats) / len(candidate.formats)
    capacity = 16 / bits * (1 - KVQuantConfig(method).bf16_share)
    kl, kl_error = _mean(divergence.kl)
    return Measured(method, budget, bits, capacity, kl, kl_error, *_mean(divergence.agrees.double()))


def _mean(values: torch.Tensor) -> tuple[float, float]:
    """Returns the mean of ``[pages * PAGE_SIZE]`` and its standard error between pages: tokens are not independent."""
    pages = values.unflatten(0, (-1, PAGE_SIZE)).mean(1)
    return float(pages.mean()), float(pages.std() / len(pages) ** 0.5)


def store(found: BudgetDivergence, folder: Path) -> None:
    """Adds measurements to the folder's ``config.json``, replacing earlier ones."""
    path = folder / CONFIG_FILE
    temporary = path.with_suffix(".tmp")
    try:
        config = json.loads(path.read_text())
        temporary.write_text(dumps({**config, FIELD: found.to_json()}) + "\n")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise KVQuantError(f"cannot write {path}: {error.strerror or error}; its rotations are complete.") from error


def stored(rotations: Rotations) -> BudgetDivergence | None:
    """Reads the budgets stored in the folder that rotations were loaded from; None if there are none."""
    path = Path(rotations.meta.source or "") / CONFIG_FILE
    if not rotations.is_transform or rotations.meta.source is None or not path.is_file():
        return None
    found = json.loads(path.read_text()).get(FIELD)
    if found is None:
        return None
    try:
        return TypeAdapter(BudgetDivergence).validate_python(found)
    except ValidationError as error:
        raise KVQuantError(
            f"{path}: {FIELD} is not what `kvq calibrate` writes ({first_problem(error)}). Delete that field, or "
            "recreate the folder."
        ) from error
