"""The router shares this package with processes that have loaded neither torch nor SGLang."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT

PROBE = """
import importlib, pkgutil, sys
import sglang_kvq.sessions as package
names = [one.name for one in pkgutil.iter_modules(package.__path__)]
for name in names:
    importlib.import_module(f"{package.__name__}.{name}")
loaded = {"torch", "sglang", "sklearn", "sentence_transformers", "transformers"} & set(sys.modules)
print(len(names), *sorted(loaded))
"""


def test_neither_torch_nor_sglang() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, check=True)
    count, *loaded = done.stdout.split()
    assert int(count) >= 6 and loaded == []
