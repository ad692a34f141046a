"""Writes the texts that rotations are calibrated on and that divergences are measured on, which share nothing.

    python -m benchmarks.texts valid.txt texts

This writes ``wikitext2_valid_first80.txt`` and ``python_stdlib.txt`` for calibration, and
``wikitext2_valid_last20.txt`` and ``python_sklearn.txt`` for measuring. Code comes from this machine's packages; result
files record the texts' hashes.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import sysconfig
from pathlib import Path

#: Interval between modules in order of path, so that no subject is missing, and most characters of a text.
EVERY, MOST = 4, 1_500_000
#: Folders without code that people write for use.
LEFT_OUT = {"test", "tests", "site-packages", "__pycache__"}


def split(text: str, share: float) -> tuple[str, str]:
    """Returns the first share of a text's characters, and the rest."""
    at = int(len(text) * share)
    return text[:at], text[at:]


def modules(folder: Path) -> str:
    """Returns every fourth Python module of a folder, without tests."""
    paths = sorted(path for path in folder.rglob("*.py") if not LEFT_OUT & set(path.relative_to(folder).parts))
    if not paths:
        raise SystemExit(f"{folder}: no Python modules.")
    return "\n".join(path.read_text(errors="replace") for path in paths[::EVERY])[:MOST]


def package(name: str) -> Path:
    """Returns the folder of an installed package."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise SystemExit(f"{name} is not installed: pip install 'sglang-kvq[episodes]'")
    return Path(found.origin).parent


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the texts of calibration and measurement.")
    parser.add_argument("wikitext", type=Path, help="WikiText-2's validation split, one file of plain text")
    parser.add_argument("out", type=Path, help="folder to write to")
    chosen = parser.parse_args()
    seen, held_out = split(chosen.wikitext.read_text(), 0.8)
    texts = {
        "wikitext2_valid_first80.txt": seen,
        "wikitext2_valid_last20.txt": held_out,
        "python_stdlib.txt": modules(Path(sysconfig.get_paths()["stdlib"])),
        "python_sklearn.txt": modules(package("sklearn")),
    }
    chosen.out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (chosen.out / name).write_text(text)
        print(f"{hashlib.sha256(text.encode()).hexdigest()[:12]}  {len(text):>9,} characters  {chosen.out / name}")


if __name__ == "__main__":
    main()
