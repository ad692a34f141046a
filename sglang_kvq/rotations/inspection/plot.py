"""The picture of ``kvq inspect --plot``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.base import Rotations

if TYPE_CHECKING:
    from sglang_kvq.rotations.inspection.layer_errors import Measured


def need_matplotlib() -> None:
    """
    Raises:
        KVQuantError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise KVQuantError(
            "--plot needs matplotlib: pip install 'sglang-kvq[plot]', or leave --plot out for tables only."
        ) from error


def draw(rotations: Rotations, measured: Measured | None, path: Path) -> None:
    """Per layer for keys (left) and values (right): errors of each method, of each head, sensitivities, spectra.

    Rows for which there are no data are left out.

    Raises:
        KVQuantError: nothing to draw, or the file cannot be written.
    """
    need_matplotlib()
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    rows = []
    if measured:
        rows += [_by_method, _by_head]
    if rotations.meta.sensitivity:
        rows.append(_sensitivities)
    if rotations.k_eigenvalues is not None and rotations.v_eigenvalues is not None:
        rows.append(_spectra)
    if not rows:
        raise KVQuantError(f"{rotations.meta.source}: no eigenvalues or sensitivities to draw; add --model and --text.")
    figure = Figure(figsize=(12, 3.6 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), 2, squeeze=False)
    for row, panel in zip(axes, rows):
        for part, axis in enumerate(row):
            panel(figure, axis, part, rotations, measured)
    figure.suptitle(f"{rotations.meta.base_model or rotations.meta.source}: keys left, values right")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise KVQuantError(
            f"--plot {path}: cannot write this picture ({error}); give a .png in a folder that exists."
        ) from error


def _by_method(figure, axis, part: int, rotations: Rotations, measured: Measured) -> None:
    for name, errors in measured.errors.items():
        axis.semilogy(errors[part].mean(-1).tolist(), marker=".", label=name)
    axis.set(xlabel="layer", ylabel="relative error of the output", title="error of each method")
    axis.legend()


def _by_head(figure, axis, part: int, rotations: Rotations, measured: Measured) -> None:
    name, errors = list(measured.errors.items())[-1]
    image = axis.imshow(errors[part].T.clamp(min=1e-12).log10().tolist(), aspect="auto", cmap="viridis")
    axis.set(xlabel="layer", ylabel="KV head", title=f"log10 error of {name} by head")
    figure.colorbar(image, ax=axis)


def _sensitivities(figure, axis, part: int, rotations: Rotations, measured: Measured | None) -> None:
    for bits, values in rotations.meta.sensitivity["kv"[part]].items():
        axis.semilogy(values, marker=".", label=f"{bits} bits")
    axis.set(xlabel="layer", ylabel="nats per token", title="sensitivity: the model's loss by this layer alone")
    axis.legend()


def _spectra(figure, axis, part: int, rotations: Rotations, measured: Measured | None) -> None:
    from matplotlib import colormaps

    eigenvalues = (rotations.k_eigenvalues, rotations.v_eigenvalues)[part].double().clamp(min=0)
    spectra = eigenvalues.sort(-1, descending=True).values.mean(1)
    spectra = spectra / spectra.sum(-1, keepdim=True).clamp(min=1e-30)
    for layer, spectrum in enumerate(spectra):
        colour = colormaps["viridis"](layer / max(len(spectra) - 1, 1))
        axis.semilogy(spectrum.clamp(min=1e-12).tolist(), color=colour, lw=0.8)
    axis.set(xlabel="direction", ylabel="share", title="eigenvalues of the importance (dark: first layers)")
