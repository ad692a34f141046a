"""Formats the recommended budget for ``kvq calibrate`` and ``kvq inspect``: a table of at most 80 columns, and text.

If ``kvq calibrate`` wrote a folder without a recommended budget, run

    python -m sglang_kvq.rotations.inspection.recommend MODEL FOLDER --text CORPUS [--contexts 2] [--length 1024]

with the corpus of its calibration.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from sglang_kvq.arguments import check_device, check_dtype
from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.base import check_rotations
from sglang_kvq.rotations.calibration.hf_model import embedding_rows, load_model, tokenize
from sglang_kvq.rotations.calibration.settings import CalibrationSettings, read_corpus
from sglang_kvq.rotations.identity import geometry_of
from sglang_kvq.rotations.inspection.budgets import (
    REFERENCE,
    SMALL,
    TOLERANCE,
    BudgetDivergence,
    HeldOut,
    measure_held_out,
)
from sglang_kvq.rotations.storage.files import read_local

#: ``python -m MODULE`` measures the budgets of a folder that has none.
MODULE = "sglang_kvq.rotations.inspection.recommend"

#: A recommendation that was measured on fewer tokens has a caveat.
FEW_TOKENS = 4096


def divergence_table(found: BudgetDivergence) -> Table:
    """Builds a table with a row per budget and one for the reference; marks the recommended budget."""
    table = frameless(title=f"Divergence from the unquantized model, {found.contexts} x {found.length} tokens held out")
    for name in ("--kv-quant-\nbits", "allocated\nbits", "tokens a\nGPU holds", "KL, nats\nper token", "top-1", ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in (*found.budgets, found.reference):
        recommended = row.budget is not None and row.budget == found.recommended
        table.add_row(
            row.method if row.budget is None else f"{row.budget:g}",
            f"{row.bits:.2f}",
            f"{row.capacity:.1f}x",
            f"{row.kl:.4f} ± {row.kl_error:.4f}",
            f"{row.top1:.1%} ± {row.top1_error:.1%}",
            "recommended" if recommended else "",
            style="bold" if recommended else None,
        )
    return table


def recommendation(found: BudgetDivergence) -> str:
    """Returns the recommended budget with the rule behind it, as one line of text."""
    chosen, caveat = found.recommended, few_tokens(found)
    limit = f"{found.limit:.3g} nats (the larger of {TOLERANCE:g} times {REFERENCE}'s and {SMALL:g})"
    if chosen is None:
        most = max(found.budgets, key=lambda row: row.bits).budget
        return (
            f"no budget is recommended: not even at {most:g} bits is the divergence plus one standard error at most "
            f"{limit}; --kv-quant {REFERENCE} is closer to the unquantized model.{caveat}"
        )
    return (
        f"recommended: --kv-quant-bits {chosen:g}, the least budget at which the divergence plus one standard error is "
        f"at most {limit}, as it is at every larger one. Measured on contexts of {found.length} tokens; longer ones "
        f"lose more, which kvq eval measures.{caveat}"
    )


def few_tokens(found: BudgetDivergence) -> str:
    """Returns the caveat of a recommendation from little text, after a space; empty from ``FEW_TOKENS`` tokens on."""
    if found.tokens >= FEW_TOKENS:
        return ""
    contexts = -(-FEW_TOKENS * found.contexts // max(found.tokens, 1))
    return (
        f" It rests on {found.tokens:,} tokens only, so another text may give another budget: --held-out-contexts "
        f"{contexts} measures {FEW_TOKENS:,}."
    )


def frameless(gap: int = 1, **options: Any) -> Table:
    """Builds a table without a frame and with ``gap`` spaces between columns, of which the box makes one."""
    return Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, gap - 1, 0, 0),
        title_justify="left",
        **options,
    )


def main() -> None:
    """Measures the budgets of an existing folder, prints them, and adds them to the folder."""
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
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that comes with the model")
    args = parser.parse_args()
    try:
        _measure(args)
    except KVQuantError as error:
        sys.exit(f"error: {error}")


def _measure(args: argparse.Namespace) -> None:
    check_device(args.device)
    check_dtype(args.dtype)
    rotations, _ = read_local(args.folder)
    meta = rotations.meta
    if not rotations.is_transform or meta.tokens is None:
        raise KVQuantError(
            f"{args.folder}: not what `kvq calibrate --composition transform` writes. Give such a folder."
        )
    settings = CalibrationSettings(
        tokens=meta.tokens, context=args.context, seed=meta.seed or 0, composition="transform"
    )
    held_out = HeldOut(args.contexts, args.length)
    corpus, _ = read_corpus(args.text, args.text_share)
    model, tokenizer = load_model(
        args.model, device=args.device, dtype=args.dtype, trust_remote_code=args.trust_remote_code
    )
    check_rotations(rotations, **geometry_of(model.config)._asdict())
    ids = tokenize(tokenizer, corpus, embedding_rows(model))
    found = measure_held_out(model, ids, rotations, args.folder, settings, held_out)
    Console(emoji=False).print(divergence_table(found))
    print(recommendation(found))


if __name__ == "__main__":
    main()
