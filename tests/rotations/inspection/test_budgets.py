"""The recommended budget: its choice on given tables, its text, and how it is measured, stored and shown."""

import json
from dataclasses import replace

import pytest
import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations import save_rotations
from sglang_kvq.rotations.calibration.run import calibrate
from sglang_kvq.rotations.calibration.settings import CalibrationSettings, draw_contexts
from sglang_kvq.rotations.inspection import budgets as module
from sglang_kvq.rotations.inspection.budgets import (
    BudgetDivergence,
    HeldOut,
    Measured,
    held_out_starts,
    measure_budgets,
    store,
    stored,
)
from sglang_kvq.rotations.inspection.candidates import candidate_of
from sglang_kvq.rotations.inspection.divergence import FakeQuantAttention
from sglang_kvq.rotations.inspection.recommend import recommendation
from sglang_kvq.rotations.storage.files import read_local
from tests.rotations.helpers import mean_kl, random_rotations, random_transform

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = CalibrationSettings(
    tokens=512, context=512, positions=512, composition="transform", sensitivity_contexts=0, sensitivity_draws=1
)


def planted(kl, error=0.0, int4=0.001):
    """Returns a table with budgets 1, 2, ... and these divergences."""
    errors = error if isinstance(error, list) else [error] * len(kl)
    rows = [
        Measured("transform", i + 1.0, i + 1.0, 16 / (i + 1), x, e, 0.9, 0.01)
        for i, (x, e) in enumerate(zip(kl, errors))
    ]
    return BudgetDivergence(tuple(rows), Measured("int4", None, 4.6, 3.1, int4, 0.0, 0.99, 0.001), 2, 1024, 1024)


@pytest.mark.parametrize(
    "kl, error, int4, expected",
    [
        ([0.5, 0.1, 0.019, 0.005], 0.0, 0.001, 3),  # 0.02 nats are little enough, whatever int4 costs
        ([0.5, 0.1, 0.021, 0.005], 0.0, 0.001, 4),
        ([0.5, 0.1, 0.06, 0.02], 0.0, 0.04, 3),  # 1.5 times int4's, which is more than 0.02
        ([0.5, 0.1, 0.061, 0.02], 0.0, 0.04, 4),
        ([0.5, 0.1, 0.019, 0.005], [0.0, 0.0, 0.002, 0.0], 0.001, 4),  # within the limit, but not by its error
        ([0.5, 0.1, 0.018, 0.005], [0.0, 0.0, 0.002, 0.0], 0.001, 3),
        ([0.5, 0.015, 0.03, 0.005], 0.0, 0.001, 4),  # a low value before a higher one is luck
        ([0.01, 0.005, 0.003, 0.001], 0.0, 0.001, 1),
        ([0.5, 0.4, 0.3, 0.2], 0.0, 0.1, None),
        ([0.5, 0.01, 0.01, float("nan")], 0.0, 0.001, None),
    ],
)  # fmt: skip
def test_the_least_budget_surely_within_the_limit(kl, error, int4, expected):
    found = planted(kl, error, int4)
    assert found.recommended == expected
    # The order of the rows does not matter.
    assert replace(found, budgets=found.budgets[::-1]).recommended == expected
    text = recommendation(found)
    assert (f"--kv-quant-bits {expected}," in text) if expected else ("not even at 4 bits" in text)
    assert f"{max(0.02, 1.5 * int4):.3g} nats" in text


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("tokens, drawn, contexts", [(9000, 2, 6), (30000, 5, 2), (4700, 5, 2), (5000, 6, 1)])
def test_held_out_contexts_are_disjoint_from_those_drawn(seed, tokens, drawn, contexts):
    settings = replace(SETTINGS, tokens=512 * drawn, seed=seed)
    held_out = HeldOut(contexts, 512)
    try:
        starts = held_out_starts(tokens, settings, held_out)
    except KVQuantError:
        assert tokens - 512 * drawn < (drawn + contexts) * 512  # each gap may be too small
        return
    assert len(starts) == contexts and min(starts) >= 0 and max(starts) + 512 <= tokens
    seen = [i for start in starts for i in range(start, start + 512)]
    assert len(set(seen)) == contexts * 512
    assert not set(seen) & set(draw_contexts(torch.arange(tokens), settings).flatten().tolist())


def test_held_out_contexts_are_spread_over_the_corpus():
    starts = held_out_starts(100_000, replace(SETTINGS, tokens=5120), HeldOut(4, 512))
    assert all(abs(start - (i + 0.5) * 25_000) < 2000 for i, start in enumerate(starts)), starts


def test_a_corpus_that_leaves_nothing_is_told():
    assert held_out_starts(1024, SETTINGS, HeldOut(1, 512)) == [512]
    with pytest.raises(
        KVQuantError, match="1023 tokens; besides the 512 .* room for 0 contexts of 512.*--no-recommend"
    ):
        held_out_starts(1023, SETTINGS, HeldOut(1, 512))
    for wrong, said in (((0, 512), "--held-out-contexts 0"), ((1, 448), "length 448"), ((1, 1000), "multiple of 64")):
        with pytest.raises(KVQuantError, match=said):
            HeldOut(*wrong)


@pytest.fixture(scope="module")
def measured(llama, ids):
    rotations = calibrate(llama, ids[:512], SETTINGS)
    seen = []
    found = measure_budgets(
        sharp(llama), [ids[512:1024]], rotations, HeldOut(1, 512), budgets=(3, 1.25, 2),
        progress=lambda *done: seen.append(done),
    )  # fmt: skip
    return rotations, found, seen


def sharp(model):
    """Returns a model that is sure of its next tokens, because even distributions have little to diverge."""
    from copy import deepcopy

    model = deepcopy(model)
    model.lm_head.weight.data *= 20
    return model


def test_budgets_are_measured_as_the_divergence_of_a_method_is(llama, ids, measured):
    rotations, found, seen = measured
    assert [row.budget for row in found.budgets] == [1.25, 2, 3] and found.reference.method == "int4"
    assert found.tokens == 512 - HeldOut(1, 512).first == 128
    model = sharp(llama)
    candidates = [candidate_of(name, rotations, model.config) for name in ("transform:2", "int4")]
    expected = mean_kl(
        model, [ids[512:1024]], {c.name: FakeQuantAttention(c.formats, c.rotations) for c in candidates}, first=384
    )
    for row, name in ((found.budgets[1], "transform:2"), (found.reference, "int4")):
        assert row.kl == pytest.approx(expected[name], rel=1e-6) and row.kl > 1e-6
    kl = [row.kl for row in found.budgets]
    assert kl[0] > kl[1] > kl[2] and all(row.kl_error > 0 for row in found.budgets)
    assert all(0 < row.top1 <= 1 for row in (*found.budgets, found.reference))
    for row in found.budgets:
        assert row.budget - 0.25 < row.bits <= row.budget and row.capacity == pytest.approx(0.9 * 16 / row.bits)
    assert seen == [("choosing widths", 0, 1), *(("divergence", i, 5) for i in range(6))]


def test_the_error_is_that_between_pages():
    values = torch.arange(4.0).repeat_interleave(64)
    mean, error = module._mean(values)
    assert mean == 1.5 and error == pytest.approx(torch.arange(4.0).std().item() / 2)


def test_what_was_measured_is_stored_beside_the_rotations(tmp_path, measured):
    rotations, found, _ = measured
    save_rotations(rotations, tmp_path / "mine", kv_heads=2)
    before = json.loads((tmp_path / "mine" / "config.json").read_text())
    again, _ = read_local(tmp_path / "mine")
    assert stored(again) is None
    store(planted([0.5, 0.01]), tmp_path / "mine")
    store(found, tmp_path / "mine")  # replaces the stored table
    after, _ = read_local(tmp_path / "mine")
    assert stored(after) == found and after.meta == again.meta
    text = (tmp_path / "mine" / "config.json").read_text()
    assert text.count('\n      {"method": "transform"') == 3  # one line per row
    config = json.loads(text)
    kept = config.pop("divergence")
    assert config == before and kept["recommended_bits"] == found.recommended and kept["limit"] == found.limit
    assert {p.name for p in (tmp_path / "mine").iterdir()} == {"config.json", "rotations.safetensors"}


def test_a_table_that_is_none_is_told(tmp_path):
    save_rotations(random_transform(), tmp_path / "mine", kv_heads=2)
    path = tmp_path / "mine" / "config.json"
    for wrong in (
        {"budgets": []},
        3,
        {**planted([0.5]).to_json(), "tokens": "many"},
        planted([float("nan")]).to_json(),
    ):
        path.write_text(json.dumps({**json.loads(path.read_text()), "divergence": wrong}))
        with pytest.raises(KVQuantError, match="divergence is not what `kvq calibrate` writes"):
            stored(read_local(tmp_path / "mine")[0])


def test_other_rotations_have_none(tmp_path):
    save_rotations(random_rotations(), tmp_path / "mine", kv_heads=2)
    assert stored(read_local(tmp_path / "mine")[0]) is None and stored(random_transform()) is None


def test_a_divergence_that_is_no_number_is_told(llama, ids, monkeypatch):
    def broken(*args, **kwargs):
        return {"int4": module.TokenDivergence(torch.tensor([float("nan")]), torch.tensor([True]))}

    monkeypatch.setattr(module, "divergences", broken)
    with pytest.raises(KVQuantError, match="int4: the model's divergence is not finite.*--dtype float32"):
        measure_budgets(llama, [ids[:512]], random_transform(), HeldOut(1, 512))
