"""Stand-in for the package sentence_transformers in test servers: texts that share words are near each other.

``install`` puts this file where a server imports it under that name.
"""

from __future__ import annotations

import re
import shutil
import zlib
from pathlib import Path

import numpy as np

WIDTH = 512
#: Words that carry no meaning.
COMMON = {"the", "a", "an", "of", "to", "is", "in", "and", "or", "it", "that", "user", "assistant", "system", "what"}


class SentenceTransformer:
    """Embeds a text as counts of its words, by their hash."""

    def __init__(self, folder: str, device: str) -> None:
        assert (Path(folder) / "modules.json").exists() and device == "cpu"

    def encode(self, sentences: list[str], **options: object) -> np.ndarray:
        rows = np.full((len(sentences), WIDTH), 1e-6, np.float32)
        for row, text in zip(rows, sentences):
            for word in re.findall(r"\w+", text.lower()):
                row[zlib.crc32(word.encode()) % WIDTH] += word not in COMMON
        return rows


def install(folder: Path) -> tuple[str, str]:
    """Returns the path to put on PYTHONPATH, and the "model" folder."""
    package, model = folder / "path" / "sentence_transformers", folder / "model"
    package.mkdir(parents=True)
    model.mkdir()
    shutil.copy(__file__, package / "__init__.py")
    (model / "modules.json").write_text("[]")
    return str(package.parent), str(model)
