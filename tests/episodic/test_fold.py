"""What the router may ask of a request's end."""

from __future__ import annotations

import pytest

from sglang_kvq.episodic.fold import Fold
from sglang_kvq.errors import KVQuantError


def test_a_fold_survives_its_way() -> None:
    fold = Fold("kvq-epi-1", 640, 128)
    assert Fold.decode(fold.encode()) == fold


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
