"""Families of methods and their style in plots: one color and one marker each, unique to the family."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Methods that differ only in width, calibration or chunks, or that need no calibration.

    Attributes:
        name: text in the legend.
        color, marker: matplotlib's.
        labelled: True if its points are different methods, each labelled, and not one method at several widths.
    """

    name: str
    color: str
    marker: str
    labelled: bool = False


#: Hues that color-blind readers can distinguish (Okabe and Ito); two have a lighter shade for mixed precision.
FAMILIES = {
    "fixed": Family("hadamard, int2, int4", "#7f7f7f", "s", labelled=True),
    "kivi": Family("kivi", "#e69f00", "D"),
    "turboquant": Family("turboquant", "#cc79a7", "^"),
    "oscar": Family("oscar", "#0072b2", "o"),
    "oscar auto": Family("oscar auto", "#56b4e9", "P"),
    "oscar-lloyd-max": Family("oscar-lloyd-max", "#009e73", "v"),
    "oscar-lloyd-max auto": Family("oscar-lloyd-max auto", "#8fd19e", "X"),
    "transform": Family("transform", "#d55e00", "*"),
    "other": Family("other", "#000000", "h", labelled=True),
}
#: Methods drawn as horizontal lines: name, color and line style.
REFERENCES = {"none": ("BF16", "#000000", ":"), "fp8": ("FP8", "#000000", "--")}
_FIXED = ("hadamard", "int2", "int4")


def reference_of(method: str) -> tuple[str, str, str] | None:
    """Returns name, color and line style of a method that is drawn as a line; None for other methods."""
    return REFERENCES.get(_head(method))


def _head(method: str) -> str:
    return method.split(" ")[0].partition(":")[0]


def family_of(method: str) -> Family | None:
    """Returns the family of a method, named as by ``specs.method_of``; None for methods drawn as lines.

    ``oscar:auto:2.6`` is in ``oscar auto``; a name from ``--name`` is in ``other``.
    """
    head, width = _head(method), method.split(" ")[0].partition(":")[2]
    if head in REFERENCES:
        return None
    if head in _FIXED:
        return FAMILIES["fixed"]
    name = f"{head} auto" if width.startswith("auto") and f"{head} auto" in FAMILIES else head
    return FAMILIES.get(name, FAMILIES["other"])
