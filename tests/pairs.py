"""Fewer cases than every value with every other: pairs, or each value once. ``--all`` and a GPU take them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

import pytest
import torch
from allpairspy import AllPairs

#: Whether ``--all`` was given; ``tests/conftest.py`` says so before any test is collected.
everything = torch.cuda.is_available()


def few(values: Iterable, count: int) -> list:
    """The first of these values; with ``--all`` and on a GPU all."""
    return list(values) if everything else list(values)[:count]


def label(value: object) -> str:
    """A value in a test's id: its keys where it came from a dictionary, widths of planes as digits."""
    if isinstance(value, tuple):
        return ("" if all(isinstance(x, int) for x in value) else "-").join(map(label, value))
    return f"{value:g}" if isinstance(value, float) else getattr(value, "__name__", str(value))


def _parametrize(rows: Iterable[Sequence], names: Sequence[str], tables: Sequence[dict]) -> pytest.MarkDecorator:
    cases = [
        pytest.param(*(table[key] for table, key in zip(tables, row)), id="-".join(map(label, row))) for row in rows
    ]
    return pytest.mark.parametrize(tuple(names), cases)


def _tables(values: dict[str, Iterable]) -> list[dict]:
    return [dict(given) if isinstance(given, dict) else {value: value for value in given} for given in values.values()]


def pairwise(**values: Iterable) -> pytest.MarkDecorator:
    """Parametrizes a test so that any two values of different parameters meet; a dictionary's keys are ids."""
    tables = _tables(values)
    return _parametrize((product if everything else _pairs)(*tables), tuple(values), tables)


def _pairs(*lists: Iterable) -> Iterable[Sequence]:
    return AllPairs([list(x) for x in lists])


def each(**values: Iterable) -> pytest.MarkDecorator:
    """Parametrizes a test so that it gets every value at least once."""
    tables = _tables(values)
    return _parametrize((product if everything else _once)(*tables), tuple(values), tables)


def _once(*lists: Iterable) -> Iterable[Sequence]:
    """Values side by side, shorter lists repeated."""
    columns = [list(x) for x in lists]
    return ([column[n % len(column)] for column in columns] for n in range(max(map(len, columns))))
