"""Fewer cases than all combinations of values: pairs, or each value once.

With ``--all`` and on a GPU all combinations run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

import pytest
import torch
from allpairspy import AllPairs

#: True if all cases run: on a GPU, or with ``--all``, which ``tests/conftest.py`` reads before any test is collected.
everything = torch.cuda.is_available()


def few(values: Iterable, count: int) -> list:
    """Returns the first ``count`` values; with ``--all`` and on a GPU all."""
    return list(values) if everything else list(values)[:count]


def label(value: object) -> str:
    """Returns a value's part of a test id: a tuple's parts are joined, its integers without separators."""
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
    """Pairs lists side by side and repeats shorter ones."""
    columns = [list(x) for x in lists]
    return ([column[n % len(column)] for column in columns] for n in range(max(map(len, columns))))
