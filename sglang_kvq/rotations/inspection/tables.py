"""Output of ``kvq inspect``: tables of at most the terminal's width, or the same as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table

from sglang_kvq.methods import get_method
from sglang_kvq.rotations.base import Rotations
from sglang_kvq.rotations.inspection.budgets import stored
from sglang_kvq.rotations.inspection.foreseen import Foreseen, foreseen
from sglang_kvq.rotations.inspection.layer_errors import Measured
from sglang_kvq.rotations.inspection.recommend import divergence_table, frameless, recommendation
from sglang_kvq.rotations.resolve import plane_formats
from sglang_kvq.rotations.storage.card import coding_gains, describe_clips, describe_gains


def report(
    rotations: Rotations, kv_heads: int | None, measured: Measured | None, *, width: int = 80, verbose: bool = False
) -> Iterator[RenderableType]:
    """Yields tables for a terminal of ``width`` columns; ``verbose`` adds long texts and the columns' meanings."""
    yield _facts(rotations, kv_heads, verbose)
    yield _layers(rotations)
    if verbose:
        if rotations.is_transform:
            at = f"at {_default_bits():g} bits per element"
            yield f"gain: bits by energy compared with equal bits. weight: importance. bits: of each plane {at}."
        else:
            parts = "error: relative, of the attention output. nats: sensitivity at 2 and 4 bits."
            yield f"{parts} top 8: share of the 8 largest eigenvalues."
    if rotations.is_transform:
        yield foreseen_table(foreseen(rotations), rotations.meta.sensitivity is not None)
        divergence = stored(rotations)
        if divergence:
            yield divergence_table(divergence)
            yield recommendation(divergence)
    if measured:
        for part, name in enumerate(("keys", "values")):
            yield from _errors(measured, part, name, width)
        if verbose:
            text = f"{measured.contexts} contexts of {measured.length} tokens"
            yield f"Errors are those of the attention output, on {text}; worst head of {list(measured.errors)[-1]}."


def to_json(rotations: Rotations, kv_heads: int | None, measured: Measured | None) -> dict[str, Any]:
    """Returns all that ``report`` shows, unrounded: lists by layer; measured errors by method, layer and KV head."""
    meta, (layers, _, head_dim, _) = rotations.meta, rotations.k.shape
    spectra = {"k": rotations.k_eigenvalues, "v": rotations.v_eigenvalues}
    divergence = stored(rotations)
    return {
        "source": meta.source,
        "sha256": meta.sha256,
        "base_model": meta.base_model,
        "revision": meta.revision,
        "geometry": {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim},
        "granularity": rotations.granularity,
        "objective": meta.objective,
        "clip_k": meta.clip_k,
        "clip_v": meta.clip_v,
        "corpus": meta.corpus,
        "tokens": meta.tokens,
        "seed": meta.seed,
        "importance": meta.importance,
        "coding_gain_db": coding_gains(rotations),
        "widths": plane_widths(rotations) if rotations.is_transform else None,
        "foreseen": [{**asdict(row), "gap_db": row.gap_db} for row in foreseen(rotations)]
        if rotations.is_transform
        else None,
        "divergence": divergence and divergence.to_json(),
        "errors": meta.errors,
        "sensitivity": meta.sensitivity,
        "sensitivity_unit": meta.sensitivity_unit,
        "top_8_share": {part: None if x is None else top_share(x).tolist() for part, x in spectra.items()},
        "measured": measured
        and {
            "contexts": measured.contexts,
            "length": measured.length,
            "errors": {
                name: {part: _finite(errors[i].tolist()) for i, part in enumerate("kv")}
                for name, errors in measured.errors.items()
            },
        },
    }


def plane_widths(rotations: Rotations) -> dict[str, list[list[int]]]:
    """Returns the bits of each plane of every layer's keys and values at the default ``--kv-quant-bits``."""
    formats = plane_formats(rotations, _default_bits())
    return {"k": [list(f.k.widths) for f in formats], "v": [list(f.v.widths) for f in formats]}


def _default_bits() -> float:
    return get_method("transform").widths[0]


def top_share(eigenvalues: torch.Tensor, count: int = 8) -> torch.Tensor:
    """Returns the share of the ``count`` largest eigenvalues ``[layers, heads, D]``, mean over heads: ``[layers]``."""
    sizes = eigenvalues.double().clamp(min=0).sort(-1, descending=True).values
    return (sizes[..., :count].sum(-1) / sizes.sum(-1).clamp(min=1e-30)).mean(-1)


def foreseen_table(rows: Sequence[Foreseen], measured: bool) -> Table:
    """Builds a table of the predicted error at each budget, and its lower bound.

    Args:
        measured: True if importances were measured, so that errors are in nats.
    """
    table = frameless(title="Foreseen error, and the bound for Gaussian channels")
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


def _facts(rotations: Rotations, kv_heads: int | None, verbose: bool) -> Table:
    meta = rotations.meta
    (layers, _, dim, _), transform = rotations.k.shape, rotations.is_transform
    table = frameless(3, title=str(meta.source), show_header=False)
    table.add_column()
    table.add_column(no_wrap=not verbose, overflow="fold" if verbose else "ellipsis")
    rows = (
        ("model", meta.base_model),
        ("revision", meta.revision),
        ("geometry", f"{layers} layers, {kv_heads or 'unknown'} KV heads, head_dim {dim}"),
        ("rotations", f"{rotations.granularity}, objective {meta.objective}"),
        ("clip ratios", not transform and f"K {describe_clips(meta.clip_k)}, V {describe_clips(meta.clip_v)}"),
        ("coding gain", transform and describe_gains(rotations)),
        ("calibrated", meta.corpus and f"{meta.tokens} tokens, seed {meta.seed}"),
        ("corpus", verbose and meta.corpus),
        ("sensitivity", verbose and meta.sensitivity_unit),
    )
    for name, value in rows:
        if value:
            table.add_row(name, str(value))
    return table


def _layers(rotations: Rotations) -> Table:
    """Builds a table per layer: clips, calibration's errors, sensitivities, and how unequal the directions are.

    For transform coding: coding gains, importances and the resulting widths.
    """
    meta, layers = rotations.meta, rotations.k.shape[0]
    table = frameless(1, title="Per layer")
    columns: list[Sequence[str]] = []

    def add(name: str, values: Sequence[str]) -> None:
        table.add_column(name, justify="right", no_wrap=True)
        columns.append(values)

    add("layer", [str(layer) for layer in range(layers)])
    for name, clips in zip("KV", meta.clips(layers)):
        if clips[0] is not None:
            add(f"clip\n{name}", [f"{c:g}" for c in clips])
    for part, errors in (meta.errors or {}).items():
        add(f"error\n{part.upper()}", [f"{e:.4f}" for e in errors])
    if rotations.is_transform:
        for part, gains in (coding_gains(rotations) or {}).items():
            add(f"gain\n{part.upper()} dB", [f"{x:.1f}" for x in gains])
        for part, weights in (meta.importance or {}).items():
            add(f"weight\n{part.upper()}", [f"{x:.2g}" for x in weights])
        for part, planes in plane_widths(rotations).items():
            add(f"bits\n{part.upper()}", ["+".join(map(str, widths)) for widths in planes])
    for part, widths in ({} if rotations.is_transform else meta.sensitivity or {}).items():
        for bits, values in widths.items():
            add(f"nats\n{part.upper()}{bits}", [f"{x:.2g}" for x in values])
    for name, eigenvalues in (("K", rotations.k_eigenvalues), ("V", rotations.v_eigenvalues)):
        if eigenvalues is not None:
            add(f"top 8\n{name}", [f"{x:.0%}" for x in top_share(eigenvalues).tolist()])
    for row in zip(*columns):
        table.add_row(*row)
    return table


def _errors(measured: Measured, part: int, name: str, width: int) -> list[Table]:
    """Builds tables of each method's error per layer over all heads, and of the last method's worst head.

    Methods that do not fit the width go to further tables.
    """
    methods = list(measured.errors)
    last = measured.errors[methods[-1]][part]
    worst = [f"{(head := int(row.argmax()))}: {row[head]:.4f}" for row in last]
    columns = []
    for method, errors in measured.errors.items():
        by_layer = errors[part].mean(-1)
        columns.append((method, [f"{x:.4f}" for x in (*by_layer.tolist(), float(by_layer.mean()))]))
    columns.append(("worst head", [*worst, ""]))
    labels = [*map(str, range(len(worst))), "mean"]
    groups = _groups([max(map(len, (header, *cells))) for header, cells in columns], width - len("layer"))
    tables = []
    for i, group in enumerate(groups):
        number = f" ({i + 1} of {len(groups)})" if len(groups) > 1 else ""
        table = frameless(2, title=f"Error, quantized {name}{number}")
        shown = [columns[j] for j in group]
        for header in ("layer", *(header for header, _ in shown)):
            table.add_column(header, justify="right", no_wrap=True)
        for row, label in enumerate(labels):
            table.add_row(label, *(cells[row] for _, cells in shown), style="bold" if label == "mean" else None)
        tables.append(table)
    return tables


def _groups(widths: Sequence[int], most: int) -> list[list[int]]:
    """Groups columns, in order, to fit ``most`` with two spaces before each; returns indices, at least one a group."""
    groups: list[list[int]] = [[]]
    left = most
    for i, width in enumerate(widths):
        if groups[-1] and width + 2 > left:
            groups.append([])
            left = most
        groups[-1].append(i)
        left -= width + 2
    return groups


def _finite(values: Any) -> Any:
    """Replaces NaN and infinity, which JSON lacks, by None in nested lists of numbers."""
    if isinstance(values, list):
        return [_finite(value) for value in values]
    return values if isfinite(values) else None
