"""Messages reach the scheduler unchanged, and each one has exactly one meaning."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.messages import _PART, NAME_PREFIX, Fold, FoldedPrefix, Selection

HISTORY = np.arange(5 * P)


def test_a_selection_survives_its_way() -> None:
    selection = Selection(HISTORY, "name\u00e9", [0, 2, 3], "me")
    got = Selection.decode(selection.encode())
    np.testing.assert_array_equal(got.history, HISTORY)
    assert (got.pages.tolist(), got.namespace, got.owner) == ([0, 2, 3], "name\u00e9", "me")
    assert got.name == selection.name and got.name.startswith(NAME_PREFIX)
    assert got.tokens.tolist() == [*range(P), *range(2 * P, 4 * P)] and got.offset == 2 * P


def test_a_long_history_survives_in_parts() -> None:
    history = np.arange(2 * _PART + P)
    got = Selection.decode(Selection(history, None, [len(history) // P - 1]).encode())
    np.testing.assert_array_equal(got.history, history)


def test_names_differ_where_anything_does() -> None:
    other = HISTORY.copy()
    other[-1] += 1
    selections = [
        Selection(HISTORY, None, [0, 2]),
        Selection(HISTORY, None, [0, 3]),
        Selection(HISTORY[: 4 * P], None, [0, 2]),
        Selection(other, None, [0, 2]),
        Selection(HISTORY, "", [0, 2]),
        Selection(HISTORY, "x", [0, 2]),
        Selection(HISTORY, None, [0, 2], "x"),
    ]
    assert len({selection.name for selection in selections}) == len(selections)


@pytest.mark.parametrize("pages", [[], [1, 1], [2, 1], [-1, 2], [0, 5]], ids=repr)
def test_pages_that_are_none_of_the_history_are_refused(pages: list[int]) -> None:
    with pytest.raises(KVQuantError, match="must be ascending indices below 5, at least one"):
        Selection(HISTORY, None, pages)


def test_a_history_that_ends_within_a_page_is_refused() -> None:
    with pytest.raises(KVQuantError, match=r"shape \[319\]: must be whole pages of 64"):
        Selection(HISTORY[:-1], None, [0])


NO_SELECTIONS = ("", "{}", "[]", 7, json.dumps({"history": "?", "pages": "", "namespace": None}))


@pytest.mark.parametrize("text", [*NO_SELECTIONS, Selection(HISTORY, None, [0]).encode() + "!"])
def test_what_is_no_selection_is_refused(text: object) -> None:
    with pytest.raises(KVQuantError, match="not a selection of pages"):
        Selection.decode(text)


def test_a_fold_survives_its_way() -> None:
    fold = Fold("kvq-epi-1", 640, 128, 128)
    assert Fold.decode(fold.encode()) == fold


@pytest.mark.parametrize("pinned", [-1, 129])
def test_a_fold_pins_no_more_than_it_keeps(pinned: int) -> None:
    with pytest.raises(KVQuantError, match=f"keeps 128 tokens, {pinned} of them pinned"):
        Fold("name", 640, 128, pinned)


def test_an_episode_survives_its_way() -> None:
    for prefix in (FoldedPrefix(P, 0), FoldedPrefix(2 * P, 5)):
        assert FoldedPrefix.decode(prefix.encode()) == prefix
    for tokens, offset in ((0, 0), (-P, 0), (P + 1, 0), (P, -1)):
        with pytest.raises(KVQuantError, match=f"an episode of {tokens} tokens at offset {offset}"):
            FoldedPrefix(tokens, offset)
    with pytest.raises(KVQuantError, match="kvq_prefix: not a prefix"):
        FoldedPrefix.decode("{}")


@pytest.mark.parametrize(("length", "kept"), [(640, 0), (640, 100), (600, 128), (128, 192), (-64, -64)])
def test_only_whole_pages_and_no_more_than_there_are(length: int, kept: int) -> None:
    with pytest.raises(KVQuantError, match=f"a fold of {length} tokens into {kept}: both must be multiples of 64"):
        Fold("name", length, kept)
    with pytest.raises(KVQuantError, match="multiples of 64"):
        Fold.decode(f'{{"name": "name", "length": {length}, "kept": {kept}}}')


def test_a_fold_has_a_name() -> None:
    with pytest.raises(KVQuantError, match="a fold without a name"):
        Fold("", 64, 64)


@pytest.mark.parametrize("text", ["", "[]", '{"name": "n", "length": 64}', '{"name": "n", "length": "x", "kept": 64}'])
def test_what_is_no_fold_is_refused(text: str) -> None:
    with pytest.raises(KVQuantError, match=r"kvq_fold: not a fold .*only the router sets it"):
        Fold.decode(text)
