"""The SGLang releases that are served.

Whatever names a release takes it from here: code imports it, ``./demo`` asks Python for it, and
``tests/packaging/test_releases.py`` compares what cannot (README, docs, Dockerfile, pyproject.toml). Standard library
only: it is imported before anything is installed.
"""

from __future__ import annotations

#: Releases that every change is reviewed against, by the generation of their prefix cache; ``./test`` runs ``OLDEST``
#: and ``NEWEST``.
OLD_TREE_RELEASES = ("0.5.16", "0.5.17", "0.5.18")
NEW_TREE_RELEASES = ("0.5.22", "0.5.23")
RELEASES = (*OLD_TREE_RELEASES, *NEW_TREE_RELEASES)
OLDEST, NEWEST = RELEASES[0], RELEASES[-1]

#: Releases between the generations: they keep prefixes in a tree that neither set of tree hooks knows.
EXCLUDED = ("0.5.19", "0.5.20", "0.5.21")

#: Releases that refuse models with recurrent states, and with sliding windows. SGLang builds their caches differently
#: there, and no test covers that.
WITHOUT_STATES = ("0.5.17", "0.5.18")
WITHOUT_WINDOWS = ("0.5.17", "0.5.18", "0.5.22")

#: Version specifiers of the two generations.
OLD_TREE, NEW_TREE = f"<{EXCLUDED[0]}", f">={NEW_TREE_RELEASES[0]}"

#: Specifiers of which a release must match one. A newer one than ``NEWEST`` is accepted when every symbol of
#: ``hooks.TABLE`` is as expected.
SUPPORTED = (f">={OLDEST},{OLD_TREE}", NEW_TREE)


def described(last: str = "or") -> str:
    """``RELEASES`` in words."""
    return f"{OLD_TREE_RELEASES[0]} to {OLD_TREE_RELEASES[-1]}, {', '.join(NEW_TREE_RELEASES[:-1])} {last} {NEWEST}"


def requirement() -> str:
    """Returns the version specifier that pip may install for the extra ``sglang-kvq[sglang]``."""
    return ",".join([f"sglang>={OLDEST}", *(f"!={release}.*" for release in EXCLUDED)])
