"""Tables of budgets, for ``kvq calibrate`` and ``kvq inspect``: at most 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from sglang_kvq.rotations.inspection.budgets import REFERENCE, SMALL, TOLERANCE, BudgetDivergence
from sglang_kvq.rotations.inspection.foreseen import Foreseen

#: A recommendation from fewer tokens has a caveat.
FEW_TOKENS = 4096


def divergence_table(found: BudgetDivergence) -> Table:
    """Builds a table with a row per budget and one for the reference; marks the recommended budget."""
    table = _table(f"Divergence from the unquantized model, {found.contexts} x {found.length} tokens held out")
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
    """The caveat of a recommendation from little text, with a space before it; nothing from ``FEW_TOKENS`` on."""
    if found.tokens >= FEW_TOKENS:
        return ""
    contexts = -(-FEW_TOKENS * found.contexts // max(found.tokens, 1))
    return (
        f" It rests on {found.tokens:,} tokens only, so another text may give another budget: --held-out-contexts "
        f"{contexts} measures {FEW_TOKENS:,}."
    )


def foreseen_table(rows: Sequence[Foreseen], measured: bool) -> Table:
    """Builds a table of the predicted error at each budget, and its lower bound.

    Args:
        measured: True if importances were measured, so that errors are in nats.
    """
    table = _table("Foreseen error, and the bound for Gaussian channels")
    unit = "foreseen,\nnats" if measured else "foreseen,\nrelative"
    for name in ("--kv-quant-\nbits", "allocated\nbits", unit, "bound", "gap, dB", "gap, bits"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.budget:g}",
            f"{row.bits:.2f}",
            f"{row.nats:.4g}",
            f"{row.bound:.4g}",
            f"{row.gap_db:.1f}",
            f"{row.gap_bits:.2f}",
        )
    return table


def _table(title: str) -> Table:
    return Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left"
    )
