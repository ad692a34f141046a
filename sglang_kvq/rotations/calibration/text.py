"""The text that a calibration runs over."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sglang_kvq.errors import KVQuantError

#: Files that a folder given as text contributes.
SUFFIXES = (".txt", ".md", ".rst", ".py")


def read_corpus(paths: Sequence[Path], share: float = 1.0) -> tuple[str, str]:
    """The texts of files and folders, one after another, and the name to record.

    Args:
        paths: text files; a folder stands for every file below it that ends in one of ``SUFFIXES``, in order of names.
        share: how much of each, from its beginning, to take.

    Raises:
        KVQuantError: nothing there or in it, not UTF-8, or a share that is none.
    """
    if not 0 < share <= 1:
        raise KVQuantError(f"--text-share {share}: must be above 0 and at most 1.")
    texts = []
    for path in paths:
        text = read_folder(path) if path.is_dir() else read_text(path)
        if not text.strip():
            raise KVQuantError(f"--text {path}: no text in it; give a text like what will be served.")
        texts.append(text[: int(len(text) * share)])
    name = ", ".join(f"{path.parent.name}/{path.name}" if path.parent.name else path.name for path in paths)
    return "\n\n".join(texts), name if share == 1 else f"{name}, first {share:.0%} of its characters"


def read_folder(folder: Path) -> str:
    """Every text file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    if not files:
        raise KVQuantError(f"--text {folder}: no {', '.join(SUFFIXES)} file in this folder; give a text file.")
    return "\n\n".join(read_text(path) for path in files)


def read_text(path: Path) -> str:
    """The file as UTF-8.

    Raises:
        KVQuantError: it does not exist or is not text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise KVQuantError(
            f"--text {path}: {error.strerror or error}; give a text file that this user may read."
        ) from error
    except UnicodeDecodeError as error:
        raise KVQuantError(f"--text {path}: not UTF-8 text ({error}); convert it, or give another file.") from error
