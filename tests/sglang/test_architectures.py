"""The table of architectures is complete for the installed SGLang, and agrees with the checks of a config of each."""

import json
import subprocess
import sys

import pytest

from benchmarks.tiny_models import ARCHITECTURES
from sglang_kvq.errors import KVQuantError
from sglang_kvq.releases import OLD_TREE
from sglang_kvq.sglang import architectures as table
from sglang_kvq.sglang import checks, compat
from sglang_kvq.sglang.architectures import FAMILIES, UNTRIED, Answer, Evidence, by_architecture
from tests.conftest import ROOT
from tests.sglang.architecture_examples import EXAMPLES, REFUSED
from tests.sglang.architecture_probe import WINDOWED, Said, entry_classes

#: Words in the refusal of a config or of its layers, by reason, where they are not the reason's own words.
WORDS = {
    table.NO_CACHE: ("recurrent state", "SSM attention"),
    table.SLIDING: ("sliding",),
    table.ASYMMETRIC: ("sliding", "value heads of"),
    table.SPARSE: ("sliding",),
    table.BOTH_WAYS: ("attention of type", "sliding"),
    table.SHARED: ("sliding", "the cache holds layers"),
    table.HIDDEN: ("no attention layers that can be checked",),
}

#: Architectures that only the table refuses, and the evidence for the refusal.
BY_TABLE = {
    **dict.fromkeys(
        ("Grok1ForCausalLM", "Grok1ModelForCausalLM"), "models/grok.py passes logit_cap; it cannot be imported on a CPU"
    ),
    **dict.fromkeys(
        ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"), "model_config.is_minimax_sparse"
    ),
    **dict.fromkeys(
        ("LlamaForClassification", "EmbeddingGemmaModel", "NanbeigeForSequenceClassification", "PixtralVisionModel"),
        "SGLang says so only with --is-embedding, or of no text at all",
    ),
    "MindSporeForCausalLM": "models/mindspore.py needs an NPU",
    "DiffusionGemmaForBlockDiffusion": "models/gemma4_diffusion.py denoises its answers",
    **dict.fromkeys(
        ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"),
        "its full layers have heads of 512, which SGLang reads of configs that transformers does not write yet",
    ),
    **dict.fromkeys(
        (name for family in FAMILIES if family.reason is UNTRIED for name in family.architectures),
        "nothing of it is known to be in the way",
    ),
}

#: Architectures that only newer releases can build, and why.
UNBUILT = {
    "ApertusForCausalLM": (OLD_TREE, "its activation reads a parameter's value"),
    "Sarashina2VisionForCausalLM": ("==0.5.18", "its file imports a name that SGLang does not have"),
}

#: Parts of the names of draft models, or of their files.
DRAFTS = ("eagle", "nextn", "mtp", "dflash", "dspark", "lilicorr")


@pytest.fixture(scope="session")
def probed() -> dict[str, dict[str, Said]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.sglang.architecture_probe"], cwd=ROOT, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr
    return {kind: {name: Said(**said) for name, said in all_.items()} for kind, all_ in json.loads(done.stdout).items()}


def test_table_has_every_architecture_of_this_release():
    assert entry_classes(), "SGLang's models are not where they were"
    assert set(entry_classes()) <= set(by_architecture()), "add them to sglang_kvq/sglang/architectures.py"


def test_examples_are_of_architectures_in_the_table():
    assert {*EXAMPLES, *REFUSED} <= set(by_architecture())
    in_part = {name for name, family in by_architecture().items() if family.answer is Answer.IN_PART}
    assert set(REFUSED) == in_part


@pytest.mark.parametrize("name", entry_classes())
def test_table_says_what_the_checks_say(probed, name):
    family, said = by_architecture()[name], probed["examples"][name]
    if family.answer is Answer.REFUSED:
        assert family.reason and said.table in (family.reason.what, None if said.unread else "")
        refused_for(name, family.reason, said)
        return
    assert said.unread is None and said.config is None and said.table is None and said.layers is None, said
    old, why = UNBUILT.get(name, (None, ""))
    if family.evidence is not Evidence.READ and not (old and compat.applies(old, compat.sglang_version())):
        assert said.unbuilt is None, f"{said.unbuilt}: {why or 'its family says that it is built'}"


@pytest.mark.parametrize("name", [name for name in entry_classes() if name in REFUSED])
def test_what_is_refused_of_a_family_that_is_served_in_part(probed, name):
    reason = by_architecture()[name].reason
    assert reason
    refused_for(name, reason, probed["refused"][name])


@pytest.mark.parametrize("name", [name for name in WINDOWED if name in entry_classes()])
def test_windows_that_a_config_names_without_layers_are_not_applied(probed, name):
    """Since no layer gets a window, ``identity.unapplied_window`` may calibrate such models with full attention."""
    said = probed["windowed"][name]
    assert said.unread is None and said.config is None and said.layers is None, said


def refused_for(name: str, reason: table.Reason, said: Said) -> None:
    """Asserts that the checks without the table refuse the model for that reason, unless there is other evidence."""
    if reason is table.DRAFT:
        assert any(word in f"{name} {entry_classes()[name]}".lower() for word in DRAFTS)
    elif name not in BY_TABLE and not (reason is table.HIDDEN or "Transformers" in name):
        text = said.config or said.layers
        assert text and any(word in text for word in WORDS.get(reason, (reason.what.split(" (")[0],))), said


def test_refusal_comes_before_anything_is_loaded(model_folder):
    """The refusal needs no weights, even of a model whose config alone shows nothing."""
    from sglang.srt.configs.model_config import ModelConfig

    from sglang_kvq.config import KVQuantConfig

    model = ModelConfig(model_path=model_folder(architectures=["SDARForCausalLM"]))
    with pytest.raises(KVQuantError, match="SDARForCausalLM.*attention that looks at later tokens"):
        checks.check_model(model, KVQuantConfig("hadamard"))


def test_what_a_gpu_compared_is_what_the_table_says():
    rows = json.loads((ROOT / "benchmarks" / "results" / "gpu_h200.json").read_text())["rows"]
    compared = {ARCHITECTURES[row["model"]] for row in rows if row["model"] in ARCHITECTURES and row["passed"]}
    said = {family.name: set(family.architectures) for family in table.FAMILIES if family.evidence is Evidence.GPU}
    assert all(architectures & compared for architectures in said.values()), "a family that no GPU has compared"
    assert compared <= set().union(*said.values())


def test_every_refusal_says_what_would_lift_it():
    for family in table.FAMILIES:
        assert (family.reason is None) == (family.answer is Answer.SERVED), family.name
        assert (family.evidence is None) == (family.answer is Answer.REFUSED), family.name
        assert family.reason is None or (family.reason.what and family.reason.lift), family.name
        assert family.answer is not Answer.IN_PART or family.note, family.name


def test_unknown_architecture_is_in_no_family():
    assert table.family_of(["SomethingElse"]) is None and table.family_of(None) is None
    assert table.refusal_of(["SomethingElse"]) is None and table.refusal_of(["LlamaForCausalLM"]) is None
    assert table.family_of(["LlamaForCausalLM"]).evidence is Evidence.GPU
