"""Formats the output of ``kvq inspect``: tables of at most the terminal's width, or the same as JSON."""

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
from sglang_kvq.rotations.storage.card import coding_gains, describe_clips, describe_gains, layer_columns


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
    """Returns everything that ``report`` shows, unrounded, as lists by layer; errors by method, layer and KV head."""
    meta, (layers, _, head_dim, _) = rotations.meta, rotations.k.shape
    spectra = {"k": rotations.k_eigenvalues, "v": rotations.v_eigenvalues}
    divergence, transform = stored(rotations), rotations.is_transform
    described = ("source", "sha256", "base_model", "revision", "objective", "clip_k", "clip_v", "corpus", "tokens")
    values = ("seed", "importance", "sensitivity", "sensitivity_unit")
    return {
        **{name: getattr(meta, name) for name in (*described, *values)},
        "errors": meta.errors and {part: _finite(errors) for part, errors in meta.errors.items()},
        "geometry": {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim},
        "granularity": rotations.granularity,
        "coding_gain_db": coding_gains(rotations),
        "widths": plane_widths(rotations) if transform else None,
        "foreseen": [{**asdict(row), "gap_db": row.gap_db} for row in foreseen(rotations)] if transform else None,
        "divergence": divergence and divergence.to_json(),
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
    """Builds a table of the error at each budget, in nats if importances were ``measured``, and its lower bound."""
    unit = "foreseen,\nnats" if measured else "foreseen,\nrelative"
    cells = {
        "--kv-quant-\nbits": [f"{row.budget:g}" for row in rows],
        "allocated\nbits": [f"{row.bits:.2f}" for row in rows],
        unit: [f"{row.nats:.4g}" for row in rows],
        "bound": [f"{row.bound:.4g}" for row in rows],
        "gap, dB": [f"{row.gap_db:.1f}" for row in rows],
        "gap, bits": [f"{row.gap_bits:.2f}" for row in rows],
    }
    return _filled(frameless(title="Foreseen error, and the bound for Gaussian channels"), list(cells.items()))


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
    """Builds a table with a row per layer: measurements, widths of planes, and shares of the largest eigenvalues."""
    columns = [("layer", [str(layer) for layer in range(rotations.k.shape[0])])]
    for _, name, cells in layer_columns(rotations):
        if not (rotations.is_transform and name.startswith("nats")):  # they do not fit in 80 columns
            columns.append((name, cells))
    if rotations.is_transform:
        for part, planes in plane_widths(rotations).items():
            columns.append((f"bits\n{part.upper()}", ["+".join(map(str, widths)) for widths in planes]))
    for name, eigenvalues in (("K", rotations.k_eigenvalues), ("V", rotations.v_eigenvalues)):
        if eigenvalues is not None:
            columns.append((f"top 8\n{name}", [f"{x:.0%}" for x in top_share(eigenvalues).tolist()]))
    return _filled(frameless(1, title="Per layer"), columns)


def _filled(table: Table, columns: Sequence[tuple[str, Sequence[str]]]) -> Table:
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in zip(*(cells for _, cells in columns)):
        table.add_row(*row)
    return table


def _errors(measured: Measured, part: int, name: str, width: int) -> list[Table]:
    """Builds tables of each method's error per layer, averaged over heads, and of the last method's worst head.

    Methods that do not fit in ``width`` go to further tables.
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
        tables.append(_filled(table, [("layer", labels), *(columns[j] for j in group)]))
        table.rows[-1].style = "bold"
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
