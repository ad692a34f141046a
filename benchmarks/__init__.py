"""Benchmarks. Importing this makes a checkout work that is not installed: its kernels' folder has another name."""

import importlib.util
import sys
from pathlib import Path

import sglang_kvq

if importlib.util.find_spec("sglang_kvq.kernels") is None:
    _init = Path(__file__).resolve().parent.parent / "triton_kernels" / "__init__.py"
    _spec = importlib.util.spec_from_file_location(
        "sglang_kvq.kernels", _init, submodule_search_locations=[str(_init.parent)]
    )
    sglang_kvq.kernels = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sglang_kvq.kernels)
