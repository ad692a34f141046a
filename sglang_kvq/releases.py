"""The SGLang releases that are served.

This is the only source of release numbers. Code imports them, and ``./demo`` asks Python for them.
``tests/packaging/test_releases.py`` compares README, docs, Dockerfile and pyproject.toml, which cannot import. This
module uses only the standard library, because it is imported before anything is installed.
"""

from __future__ import annotations

#: Releases against which every change is reviewed, by the generation of their prefix cache; ``./test`` runs ``OLDEST``
#: and ``NEWEST``.
OLD_TREE_RELEASES = ("0.5.16", "0.5.17", "0.5.18")
NEW_TREE_RELEASES = ("0.5.22", "0.5.23")
RELEASES = (*OLD_TREE_RELEASES, *NEW_TREE_RELEASES)
OLDEST, NEWEST = RELEASES[0], RELEASES[-1]

#: Releases between the generations, which are not served: neither set of tree hooks fits their prefix tree.
EXCLUDED = ("0.5.19", "0.5.20", "0.5.21")

#: Releases with which we refuse models with recurrent states, and models with sliding windows. These releases build the
#: caches of such models differently, and no test covers that.
WITHOUT_STATES = ("0.5.17", "0.5.18")
WITHOUT_WINDOWS = ("0.5.17", "0.5.18", "0.5.22")

#: Version specifiers of the two generations.
OLD_TREE, NEW_TREE = f"<{EXCLUDED[0]}", f">={NEW_TREE_RELEASES[0]}"

#: Releases that keep the compiled kernels of all libraries below ``SGLANG_CACHE_DIR``.
ONE_CACHE = f">={OLD_TREE_RELEASES[-1]}"

#: Version specifiers; a release must match one of them. A release newer than ``NEWEST`` is accepted if every symbol of
#: ``hooks.TABLE`` is as expected.
SUPPORTED = (f">={OLDEST},{OLD_TREE}", NEW_TREE)


def described(last: str = "or") -> str:
    """Returns ``RELEASES`` in words; ``last`` is the conjunction before the last release."""
    return f"{OLD_TREE_RELEASES[0]} to {OLD_TREE_RELEASES[-1]}, {', '.join(NEW_TREE_RELEASES[:-1])} {last} {NEWEST}"


def requirement() -> str:
    """Returns the requirement for pip of the extra ``sglang-kvq[sglang]``."""
    return ",".join([f"sglang>={OLDEST}", *(f"!={release}.*" for release in EXCLUDED)])
