"""Builds the Hugging Face hub's cache by hand, for servers without a network."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

#: The commit that every repository is stored at and that ``refs/main`` names.
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def lay_out(cache: Path, repository: str, folder: str, source: Path) -> None:
    """Adds the files of ``source`` to a hub cache, as if a download had put them there.

    Args:
        cache: the folder that ``HF_HUB_CACHE`` names; made if it does not exist.
        repository: ``org/name`` of a model repository. Calls for one repository add to one snapshot.
        folder: the files' folder in the repository; "" for its root.
        source: a local folder; its files are copied, its subfolders are not.
    """
    root = cache / f"models--{repository.replace('/', '--')}"
    target = root / "snapshots" / COMMIT / folder
    for made in (root / "refs", root / "blobs", target):
        made.mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text(COMMIT)
    for file in (path for path in sorted(source.iterdir()) if path.is_file()):
        blob = root / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copyfile(file, blob)
        (target / file.name).unlink(missing_ok=True)
        (target / file.name).symlink_to(os.path.relpath(blob, target))
