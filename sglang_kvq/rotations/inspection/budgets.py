"""Recommends a bit budget for a model's transform coding, measured on text that calibration has not seen.

``kvq calibrate`` runs a few contexts of its corpus that it did not draw. It runs each exactly, with history through the
records of each of ``BUDGETS``, and with ``int4``, a nearly lossless reference. It writes the result to the folder's
``config.json`` as ``divergence``, for ``kvq inspect`` and for servers. For a folder that has none, run

    python -m sglang_kvq.rotations.inspection.budgets MODEL FOLDER --text CORPUS [--contexts 2] [--length 1024]

with the corpus of its calibration. ``inspection.foreseen`` predicts the errors of the same budgets from theory.

The recommendation is the least budget whose divergence plus one standard error is within a limit. Every larger budget
must be within the limit too. The limit is ``TOLERANCE`` times int4's divergence or ``SMALL``, whichever is larger.
int4's loss has been acceptable. Below 0.02 nats, text that the model writes itself becomes at most 2% more perplexing
to it. The standard error, and the condition on larger budgets, guard against lucky measurements. The rule looks for no
bend in the curve: at high rates, half a bit less doubles the error everywhere, so there is none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.base import Rotations, check_rotations
from sglang_kvq.rotations.calibration.run import Progress
from sglang_kvq.rotations.calibration.settings import CalibrationSettings, draw_contexts
from sglang_kvq.rotations.identity import geometry_of
from sglang_kvq.rotations.inspection.candidates import Candidate, candidate_of
from sglang_kvq.rotations.inspection.divergence import FakeQuantAttention, TokenDivergence, divergences
from sglang_kvq.rotations.storage.config_file import CONFIG_FILE

#: Values of ``--kv-quant-bits`` that are measured.
BUDGETS = (1.25, 1.6, 2.0, 2.25, 2.5, 3.0, 3.5)
#: The method that budgets are compared with.
REFERENCE = "int4"
#: A divergence is acceptable up to this factor of the reference's, or up to this many nats per token.
TOLERANCE, SMALL = 1.5, 0.02

#: ``python -m MODULE`` measures the budgets of a folder that has none.
MODULE = "sglang_kvq.rotations.inspection.budgets"

#: Field of ``config.json`` that holds a ``BudgetDivergence``.
FIELD = "divergence"


@dataclass(frozen=True)
class HeldOut:
    """The amount of text to measure on.

    Attributes:
        contexts: number of contexts from the corpus; they overlap neither each other nor calibration's.
        length: tokens per context, a multiple of ``PAGE_SIZE``. Only the second half counts; the first is mostly BF16.
        sink, recent: BF16 tokens at both ends.

    Raises:
        KVQuantError: there are too few contexts or tokens to measure anything.
    """

    contexts: int = 2
    length: int = 1024
    sink: int = 64
    recent: int = 256

    def __post_init__(self) -> None:
        least = self.sink + self.recent + 3 * PAGE_SIZE
        if self.contexts < 1:
            raise KVQuantError(f"--held-out-contexts {self.contexts}: must be at least 1; or pass --no-recommend.")
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
    """One method at one width.

    Attributes:
        method: "transform" or ``REFERENCE``.
        budget: value of --kv-quant-bits; None for the method's only width.
        bits: allocated bits per element of a page without BF16 copy, everything counted.
        capacity: tokens per BF16 token at equal memory, minus BF16 pages at the default --kv-quant-bf16-budget.
        kl, kl_error: mean divergence in nats per token, and its standard error.
        top1, top1_error: share of tokens where both predict the same most likely successor, and its standard error.
    """

    method: str
    budget: float | None
    bits: float
    capacity: float
    kl: float
    kl_error: float
    top1: float
    top1_error: float


@dataclass(frozen=True)
class BudgetDivergence:
    """The measured divergences of a model.

    Attributes:
        budgets: transform coding at each budget, ascending.
        reference: ``REFERENCE``.
        contexts, length, tokens: number of held-out contexts, tokens of each, and tokens that counted in total.
    """

    budgets: tuple[Measured, ...]
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
        """The least budget within the limit, see the module; None if not even the largest is."""
        found = None
        for row in sorted(self.budgets, key=lambda row: row.bits, reverse=True):
            if not row.kl + row.kl_error <= self.limit:
                break
            found = row.budget
        return found

    def to_json(self) -> dict[str, Any]:
        """Returns the content for ``config.json`` and ``--json``."""
        return {"recommended_bits": self.recommended, "limit": self.limit, **asdict(self)}


class BudgetPass:
    """Last step of ``kvq calibrate``, after it wrote its folder: measures budgets and adds them to the folder.

    Attributes:
        found: the measurements; None before ``run``.
        started: True once the folder was written.
    """

    def __init__(self, held_out: HeldOut, settings: CalibrationSettings, progress: Progress | None = None) -> None:
        self._held_out, self._settings, self._progress = held_out, settings, progress
        self.found: BudgetDivergence | None = None
        self.started = False

    def check(self, ids: torch.Tensor) -> None:
        """Checks, before anything runs, that the corpus has room for held-out contexts.

        Raises:
            KVQuantError: the corpus is too short, see ``held_out_starts``.
        """
        held_out_starts(len(ids), self._settings, self._held_out)

    def run(self, model: Any, ids: torch.Tensor, rotations: Rotations, folder: Path) -> BudgetDivergence:
        """Measures budgets and stores them in ``folder``, which holds the rotations."""
        self.started = True
        starts = held_out_starts(len(ids), self._settings, self._held_out)
        contexts = [ids[start : start + self._held_out.length] for start in starts]
        self.found = measure_budgets(model, contexts, rotations, self._held_out, progress=self._progress)
        store(self.found, folder)
        return self.found


def held_out_starts(tokens: int, settings: CalibrationSettings, held_out: HeldOut) -> list[int]:
    """Returns the first tokens of contexts that calibration does not draw, spread over the corpus.

    Raises:
        KVQuantError: there is no room for enough contexts.
    """
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
            "needed: give more text, lower --tokens, --held-out-contexts or --held-out-length, or pass --no-recommend."
        )
    return [room[(2 * i + 1) * len(room) // (2 * held_out.contexts)] for i in range(held_out.contexts)]


def measure_budgets(
    model: Any,
    contexts: Sequence[torch.Tensor],
    rotations: Rotations,
    held_out: HeldOut,
    *,
    budgets: Sequence[float] = BUDGETS,
    progress: Progress | None = None,
) -> BudgetDivergence:
    """Runs the model over every context exactly, with ``REFERENCE``, and with transform coding at each budget.

    Args:
        model: see ``divergences``.
        contexts: int64 ``[held_out.length]`` each.
        rotations: for transform coding.

    Raises:
        KVQuantError: a divergence is not finite.
    """
    report = progress or (lambda name, done, total: None)
    report("choosing widths", 0, 1)
    named = {budget: f"transform:{budget:g}" for budget in sorted(budgets)}
    candidates = {name: candidate_of(name, rotations, model.config) for name in (REFERENCE, *named.values())}
    attention = {
        name: FakeQuantAttention(c.formats, c.rotations.to(model.device), held_out.sink, held_out.recent)
        for name, c in candidates.items()
    }
    found = divergences(
        model, contexts, attention, first=held_out.first, progress=lambda *done: report("divergence", *done)
    )
    for name, divergence in found.items():
        if not torch.isfinite(divergence.kl).all():
            raise KVQuantError(
                f"{name}: the model's divergence is not finite: it overflows in its dtype; pass --dtype float32. "
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
    capacity = 16 / bits * (1 - KVQuantConfig(method).bf16_budget)
    kl, kl_error = _mean(divergence.kl)
    return Measured(method, budget, bits, capacity, kl, kl_error, *_mean(divergence.agrees.double()))


def _mean(values: torch.Tensor) -> tuple[float, float]:
    """Returns the mean of ``[pages * PAGE_SIZE]`` and its standard error between pages: neighbors fail together."""
    pages = values.unflatten(0, (-1, PAGE_SIZE)).mean(1)
    return float(pages.mean()), float(pages.std() / len(pages) ** 0.5)


def store(found: BudgetDivergence, folder: Path) -> None:
    """Adds measurements to the folder's ``config.json``, replacing earlier ones.

    Raises:
        KVQuantError: the file cannot be written.
    """
    path = folder / CONFIG_FILE
    temporary = path.with_suffix(".tmp")
    try:
        config = json.loads(path.read_text())
        temporary.write_text(_text({**config, FIELD: found.to_json()}) + "\n")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise KVQuantError(f"cannot write {path}: {error.strerror or error}; its rotations are complete.") from error


def stored(rotations: Rotations) -> BudgetDivergence | None:
    """Reads the budgets stored in the folder that rotations were loaded from; None if there are none.

    Raises:
        KVQuantError: the field is malformed.
    """
    path = Path(rotations.meta.source or "") / CONFIG_FILE
    if not rotations.is_transform or rotations.meta.source is None or not path.is_file():
        return None
    found = json.loads(path.read_text()).get(FIELD)
    if found is None:
        return None
    try:
        rows = [Measured(**row) for row in (*found["budgets"], found["reference"])]
        numbers = [x for row in rows for x in (row.bits, row.capacity, row.kl, row.kl_error, row.top1, row.top1_error)]
        counts = [found[name] for name in ("contexts", "length", "tokens")]
        if not all(isfinite(x) for x in (*numbers, *counts)):
            raise ValueError("a number is not finite")
        return BudgetDivergence(tuple(rows[:-1]), rows[-1], *counts)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise KVQuantError(
            f"{path}: {FIELD} is not what `kvq calibrate` writes ({error!r}); delete that field, or recreate the "
            "folder."
        ) from error


def _text(value: Any, indent: int = 0) -> str:
    """Formats JSON with a line per field and per row of a table; lists of numbers stay on one line."""
    if isinstance(value, dict) and (indent < 4 or any(isinstance(x, (dict, list, tuple)) for x in value.values())):
        items = [f"{json.dumps(name)}: {_text(x, indent + 2)}" for name, x in value.items()]
        opening, closing = "{}"
    elif isinstance(value, (list, tuple)) and any(isinstance(x, dict) for x in value):
        items = [_text(x, indent + 2) for x in value]
        opening, closing = "[]"
    else:
        return json.dumps(value)
    lines = [f"\n{' ' * (indent + 2)}{item}" for item in items]
    return f"{opening}{','.join(lines)}\n{' ' * indent}{closing}" if items else opening + closing


def main() -> None:
    """Measures the budgets of an existing folder, prints them, and adds them to the folder."""
    import argparse

    from rich.console import Console

    from sglang_kvq.rotations.calibration.hf_model import embedding_rows, load_model, tokenize
    from sglang_kvq.rotations.calibration.text import read_corpus
    from sglang_kvq.rotations.inspection.budget_tables import divergence_table, recommendation
    from sglang_kvq.rotations.storage.files import read_local

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, action="append", required=True, help="the corpus of its calibration")
    parser.add_argument("--text-share", type=float, default=1.0, help="the --text-share of its calibration")
    parser.add_argument("--context", type=int, default=CalibrationSettings.context, help="the --context of calibration")
    parser.add_argument("--contexts", type=int, default=HeldOut.contexts)
    parser.add_argument("--length", type=int, default=HeldOut.length, help="tokens per context")
    parser.add_argument("--device", default="")
    parser.add_argument("--dtype", default="")
    args = parser.parse_args()

    rotations, _ = read_local(args.folder)
    meta = rotations.meta
    if not rotations.is_transform or meta.tokens is None:
        parser.error(f"{args.folder}: not what `kvq calibrate --composition transform` wrote")
    settings = CalibrationSettings(
        tokens=meta.tokens, context=args.context, seed=meta.seed or 0, composition="transform"
    )
    measuring = BudgetPass(HeldOut(args.contexts, args.length), settings)
    corpus, _ = read_corpus(args.text, args.text_share)
    model, tokenizer = load_model(args.model, device=args.device, dtype=args.dtype)
    check_rotations(rotations, **geometry_of(model.config)._asdict())
    ids = tokenize(tokenizer, corpus, embedding_rows(model))
    measuring.check(ids)
    found = measuring.run(model, ids, rotations, args.folder)
    Console(emoji=False).print(divergence_table(found))
    print(recommendation(found))


if __name__ == "__main__":
    main()
