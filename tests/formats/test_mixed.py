"""Mixed precision uses its exact budget of allocated bits where the error falls most."""

from __future__ import annotations

import itertools
import random

import pytest

from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.mixed import mixed_formats
from sglang_kvq.formats.page import PageFormat

LAYERS = 8


def sensitivity(seed: int = 0, layers: int = LAYERS) -> dict:
    draw = random.Random(seed)
    two = {part: [draw.uniform(1, 9) for _ in range(layers)] for part in "kv"}
    return {part: {"2": two[part], "4": [x * draw.uniform(0.01, 0.5) for x in two[part]]} for part in "kv"}


def bits(formats) -> float:
    return sum(f.bits_per_element for f in formats) / len(formats)


@pytest.mark.parametrize(
    "head_dim,target", [(128, 2.25), (128, 2.5), (128, 2.6), (128, 3.17), (128, 4.25), (64, 2.6), (96, 3)]
)
def test_budget_is_used_and_never_exceeded(head_dim, target):
    base = [PageFormat(head_dim, head_dim, 0.9, 0.95)] * LAYERS
    formats = mixed_formats(base, sensitivity(), target, "x")
    step = 1 / (2 * LAYERS)  # one more bit for one layer's keys or values
    assert target - step < bits(formats) <= target + 1e-9


@pytest.mark.parametrize("added", [1, 3, 6])
def test_widths_minimise_the_total_error(added):
    """The widths have the least error among all choices that spend as many bits."""
    base, rises = [PageFormat(128, 128)] * 3, sensitivity(3, layers=3)
    for part in "kv":
        rises[part]["3"] = [(a * b) ** 0.5 for a, b in zip(rises[part]["2"], rises[part]["4"])]
    parts = [(i, p) for i in range(3) for p in "kv"]
    error = lambda widths: sum(rises[p][str(w)][i] for (i, p), w in zip(parts, widths))  # noqa: E731
    best = min((w for w in itertools.product((2, 3, 4), repeat=6) if sum(w) == 12 + added), key=error)
    for table in (rises, {p: {w: rises[p][w] for w in ("2", "4")} for p in "kv"}):  # with 3 bits measured, or not
        formats = mixed_formats(base, table, 2.25 + added / 6, "x")
        assert tuple(getattr(formats[i], p).bits for i, p in parts) == best


def test_only_widened_codes_lose_their_clip():
    formats = mixed_formats([PageFormat(128, 128, 0.9, 0.95)] * LAYERS, sensitivity(), 3.0, "x")
    assert {(f.k.bits, f.clip_k) for f in formats} <= {(2, 0.9), (3, 1.0), (4, 1.0)}
    assert {(f.v.bits, f.clip_v) for f in formats} <= {(2, 0.95), (3, 1.0), (4, 1.0)}
    assert len({f.k.bits for f in formats} | {f.v.bits for f in formats}) > 1


def test_nothing_is_widened_that_would_not_gain():
    rises = sensitivity()
    rises["v"]["3"] = rises["v"]["4"] = [x + 1 for x in rises["v"]["2"]]
    formats = mixed_formats([PageFormat(128, 128)] * LAYERS, rises, 4.25, "x")
    assert {f.k.bits for f in formats} == {4} and {f.v.bits for f in formats} == {2}


@pytest.mark.parametrize("target", [2.0, 2.24, 4.26, 5])
def test_target_out_of_reach_names_the_range(target):
    with pytest.raises(KVQuantError, match=f"auto:{target:g}.*allocate 2.25 bits.*and 4.25.*head_dim 128"):
        mixed_formats([PageFormat(128, 128)] * LAYERS, sensitivity(), target, "x")


@pytest.mark.parametrize("broken", ["missing", "short", "nan"])
def test_sensitivities_that_do_not_fit_are_refused(broken):
    rises = sensitivity()
    if broken == "missing":
        del rises["v"]["4"]
    elif broken == "short":
        rises["k"]["2"].pop()
    else:
        rises["v"]["2"][3] = float("nan")
    with pytest.raises(KVQuantError, match=r"folder: its sensitivities of [kv] at \d bits.*8 layers.*kvq calibrate"):
        mixed_formats([PageFormat(128, 128)] * LAYERS, rises, 3.0, "folder")
