"""Many threads may read the material that methods share."""

from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sglang_kvq.evaluation.material import Material

ARRAYS = {"tokens": np.arange(12, dtype=np.int32).reshape(4, 3), "logprobs": np.linspace(-9, 0, 4, dtype=np.float32)}


def test_what_is_stored_is_what_is_read(tmp_path):
    material = Material(tmp_path / "material", "fake")
    assert material.load("reference", {"length": 5}) is None and not material.has("reference")
    material.store("reference", {"length": 5}, ARRAYS)
    assert material.has("reference") and not material.has("tokens")
    found = material.load("reference", {"length": 5})
    assert found is not None and sorted(found) == sorted(ARRAYS)
    for name, want in ARRAYS.items():
        assert found[name].dtype == want.dtype and np.array_equal(found[name], want)
    assert Material(tmp_path / "material", "another").load("reference", {"length": 5}) is None


def test_reading_parses_no_python(tmp_path, monkeypatch):
    """Reading must not parse Python: CPython 3.11's parser sometimes fails if two threads use it at once."""
    material = Material(tmp_path / "material", "fake")
    material.store("reference", 1, ARRAYS)
    monkeypatch.setattr(ast, "parse", lambda *args, **kwargs: pytest.fail("Python's parser is not for many threads"))
    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(lambda _: material.load("reference", 1), range(16)):
            assert found is not None and np.array_equal(found["tokens"], ARRAYS["tokens"])
