"""Draws the plot of ``kvq inspect --plot``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.base import Rotations
from sglang_kvq.rotations.inspection.layer_errors import Measured

#: File suffixes that ``--plot`` takes.
SUFFIXES = (".png", ".pdf", ".svg")

#: Function ``(figure, axes, part)`` that plots the data of keys (part 0) or values (part 1) into matplotlib's axes.
_Panel = Callable[[Any, Any, int], None]


def need_matplotlib() -> None:
    """Checks that matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401 (only tests the import)
    except ImportError as error:
        raise KVQuantError(
            "--plot needs matplotlib: pip install 'sglang-kvq[plot]', or leave --plot out for tables only."
        ) from error


def check_name(path: Path) -> None:
    """Refuses a file for the plot that matplotlib would write under another name, or not at all."""
    if path.suffix.lower() not in SUFFIXES or path.is_dir():
        raise KVQuantError(f"--plot {path}: must be a file whose name ends in {', '.join(SUFFIXES)}.")


def draw(rotations: Rotations, measured: Measured | None, path: Path) -> None:
    """Plots, per layer, for keys (left) and values (right): errors by method and head, sensitivities, spectra.

    Rows without data are left out.
    """
    need_matplotlib()
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    rows: list[_Panel] = []
    if measured:
        rows += [partial(_by_method, measured.errors), partial(_by_head, measured.errors)]
    if rotations.meta.sensitivity:
        rows.append(partial(_sensitivities, rotations.meta.sensitivity))
    if rotations.k_eigenvalues is not None and rotations.v_eigenvalues is not None:
        of = "eigenvalues of the importance"
        rows.append(partial(_spectra, (rotations.k_eigenvalues, rotations.v_eigenvalues), of))
    if rotations.k_energies is not None and rotations.v_energies is not None:
        rows.append(partial(_spectra, (rotations.k_energies, rotations.v_energies), "energies of the channels"))
    if not rows:
        raise KVQuantError(f"{rotations.meta.source}: no eigenvalues or sensitivities to draw. Add --model and --text.")
    figure = Figure(figsize=(12, 3.6 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), 2, squeeze=False)
    for row, panel in zip(axes, rows):
        for part, axis in enumerate(row):
            panel(figure, axis, part)
    figure.suptitle(f"{rotations.meta.base_model or rotations.meta.source}: keys left, values right")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise KVQuantError(
            f"--plot {path}: cannot write this picture ({error}). Give a .png in a folder that exists."
        ) from error


def _by_method(errors: Mapping[str, torch.Tensor], figure: Any, axis: Any, part: int) -> None:
    for name, of_method in errors.items():
        axis.semilogy(of_method[part].mean(-1).tolist(), marker=".", label=name)
    axis.set(xlabel="layer", ylabel="relative error of the output", title="error of each method")
    axis.legend()


def _by_head(errors: Mapping[str, torch.Tensor], figure: Any, axis: Any, part: int) -> None:
    name, last = list(errors.items())[-1]
    image = axis.imshow(last[part].T.clamp(min=1e-12).log10().tolist(), aspect="auto", cmap="viridis")
    axis.set(xlabel="layer", ylabel="KV head", title=f"log10 error of {name} by head")
    figure.colorbar(image, ax=axis)


def _sensitivities(table: Mapping[str, Mapping[str, Sequence[float]]], figure: Any, axis: Any, part: int) -> None:
    widths = table.get("kv"[part], {})
    for bits, values in widths.items():
        axis.semilogy(values, marker=".", label=f"{bits} bits")
    axis.set(xlabel="layer", ylabel="nats per token", title="sensitivity: the model's loss by this layer alone")
    if widths:
        axis.legend()


def _spectra(eigenvalues: tuple[torch.Tensor, torch.Tensor], of: str, figure: Any, axis: Any, part: int) -> None:
    from matplotlib import colormaps

    spectra = eigenvalues[part].double().clamp(min=0).sort(-1, descending=True).values.mean(1)
    spectra = spectra / spectra.sum(-1, keepdim=True).clamp(min=1e-30)
    for layer, spectrum in enumerate(spectra):
        color = colormaps["viridis"](layer / max(len(spectra) - 1, 1))
        axis.semilogy(spectrum.clamp(min=1e-12).tolist(), color=color, lw=0.8)
    axis.set(xlabel="direction", ylabel="share", title=f"{of} (dark: first layers)")
