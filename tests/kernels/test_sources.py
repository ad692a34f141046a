"""Kernels' sources avoid constructs that work in tests but fail in a server."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import sglang_kvq.kernels

FILES = sorted(Path(sglang_kvq.kernels.__path__[0]).rglob("*.py"))


def is_jitted(function: ast.FunctionDef) -> bool:
    decorators = [d.func if isinstance(d, ast.Call) else d for d in function.decorator_list]
    return any(ast.unparse(d) in ("triton.jit", "jit") for d in decorators)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kernels_compute_no_power_of_two_themselves(path):
    """SGLang replaces ``triton.next_power_of_2`` with a function that Triton cannot call in a kernel."""
    found = [
        f"{path.name}:{node.lineno}"
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef) and is_jitted(function)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "triton.next_power_of_2"
    ]
    assert not found


def test_some_files_were_read():
    assert len(FILES) > 15 and any(
        is_jitted(f) for f in ast.walk(ast.parse(FILES[5].read_text())) if isinstance(f, ast.FunctionDef)
    )
