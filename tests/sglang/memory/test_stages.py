"""Pipeline stages agree on one layout, and refuse settings that would put them out of step or were not tried."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_kvq.cache.layout import KVGeometry
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.sessions.config import EpisodicConfig
from sglang_kvq.sglang import checks, compat, runtime
from sglang_kvq.sglang.memory import capacity, stages
from sglang_kvq.sglang.runtime import attach
from tests.sglang.memory.test_capacity import OLD

CONFIG = KVQuantConfig("int2")
PAGES = 200
MODEL = SimpleNamespace(num_hidden_layers=4, is_hybrid_swa=False, hf_config=SimpleNamespace())


def size(rank: int, pages: int, pp_size: int = 2) -> tuple[int, int, int]:
    """Sizes one stage: the more layers it has, the fewer windows its memory holds.

    Args:
        rank: which stage; the second one has one more layer.

    Returns:
        The requests that run at once, that number in the stage's layout, and the layout's slots.
    """
    state = runtime.Runtime(CONFIG, KVGeometry(1, (PageFormat(64, 64, 0.96, 0.92),) * (3 + rank)), tuple(range(3)))
    state.budget_slots = 60 // (3 + rank)
    runtime._current = state
    args = SimpleNamespace(max_running_requests=100, chunked_prefill_size=8192, pp_size=pp_size)
    attach(CONFIG, args)
    parallel = {"ps": SimpleNamespace(attn_dp_size=1)} if OLD else {"attn_dp_size": 1}
    configurator = SimpleNamespace(server_args=args, **parallel)
    requests = capacity.resolve_max_num_reqs(lambda self, tokens: 100, configurator, pages * 64)
    return requests, state.layout.max_requests, state.layout.slots


def _stage(rank: int, pages: int, meeting: Path, answers: multiprocessing.Queue) -> None:
    """Runs one stage's process without SGLang's groups: gloo's own group replaces the world's."""
    from sglang.srt.distributed import parallel_state

    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    parallel_state.get_world_group = lambda: SimpleNamespace(cpu_group=torch.distributed.group.WORLD)
    try:
        answers.put((rank, size(rank, pages)))
    except SystemExit as error:
        answers.put((rank, str(error)))


def both(folder: Path, *pages: int) -> list:
    """Returns the answers of two stages, in two processes that meet in ``folder``."""
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    processes = [fork.Process(target=_stage, args=(rank, pages[rank], folder / "meeting", answers)) for rank in (0, 1)]
    for process in processes:
        process.start()
    found = dict(answers.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
    return [found[rank] for rank in (0, 1)]


def test_stages_run_as_many_requests_as_the_smallest_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "_current", None)
    alone = [size(rank, PAGES, pp_size=1) for rank in (0, 1)]
    assert alone[0][0] > alone[1][0], "the stages would differ"
    first, second = both(tmp_path, PAGES, PAGES)
    assert first[:2] == second[:2] == alone[1][:2]
    assert first[2] == alone[0][2], "a stage keeps the BF16 pages that it affords"


def test_stages_of_unequal_pages_do_not_start(tmp_path):
    first, second = both(tmp_path, PAGES, PAGES - 1)
    assert first == second and f"from {PAGES - 1} to {PAGES} pages" in first


def test_one_stage_asks_nobody(monkeypatch):
    monkeypatch.setattr(runtime, "_current", None)
    monkeypatch.setattr(stages, "least_of_all", None)
    size(0, PAGES, pp_size=1)


def test_stages_divide_their_memory_once():
    """With stages memory is not shared: their pages and windows differ in size, so their boundaries would differ."""
    args = SimpleNamespace(pp_size=2)
    kvc = SimpleNamespace(server_args=args, model_config=SimpleNamespace(hf_config=None))
    if OLD:
        pytest.skip("this release has no shared memory")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capacity.drafts, "keeps_states", lambda model: False)
        assert "--pp-size" in capacity.why_not_shared(kvc, CONFIG)
        args.pp_size = 1
        assert capacity.why_not_shared(kvc, CONFIG) is None


def _typed(field: str, allowed: tuple) -> object:
    known = {"disaggregation_mode": "prefill", "speculative_algorithm": "NGRAM"}
    return known.get(field, True)


@pytest.mark.parametrize(("field", "why", "allowed"), stages.REFUSED, ids=[field for field, _, _ in stages.REFUSED])
def test_setting_is_refused_beside_stages(field, why, allowed):
    value = _typed(field, allowed)
    (found,) = stages.refused_flags({field: value, "pp_size": 2})
    assert found.startswith("--" + field.replace("_", "-")) and "and --pp-size 2: " + why in found
    for harmless in allowed:
        assert stages.refused_flags({field: harmless, "pp_size": 2}) == []
    for one in (None, 1):
        assert stages.refused_flags({field: value, "pp_size": one}) == []


def test_fields_exist():
    from tests.sglang.test_checks import _fields

    assert {field for field, _, _ in stages.REFUSED} <= set(_fields())


def _found(monkeypatch, config=CONFIG, **model) -> list[str]:
    monkeypatch.setattr(stages, "keeps_states", lambda model: getattr(model, "states", False))
    monkeypatch.setattr(compat, "resolved", lambda args, field, default=None: {"pp_size": 2}.get(field, default))
    return stages.refused_settings(None, config, SimpleNamespace(**{**vars(MODEL), **model}))


def test_plain_models_are_served(monkeypatch):
    assert _found(monkeypatch) == []


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({"is_hybrid_swa": True}, "a model with sliding windows and --pp-size 2: not tried"),
        ({"states": True}, "a model with recurrent states and --pp-size 2: not tried"),
        ({"num_hidden_layers": 1}, "--pp-size 2: the model has 1 layers. Use at most 1."),
    ],
    ids=["windows", "states", "layers"],
)
def test_model_is_refused(monkeypatch, model, text):
    (found,) = _found(monkeypatch, **model)
    assert text in found


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (KVQuantConfig("int2", episodic=EpisodicConfig("retrieve", embedder="folder")), "--episodic-policy"),
        (KVQuantConfig("int2", capture="/tmp/sums"), "kvq calibrate and --pp-size 2"),
    ],
    ids=["sessions", "calibration"],
)
def test_what_stages_would_decide_apart_is_refused(monkeypatch, config, text):
    (found,) = _found(monkeypatch, config)
    assert found.startswith(text)


def test_command_line_is_refused_before_processes_start():
    with pytest.raises(checks.KVQuantError, match="--speculative-algorithm NGRAM and --pp-size 2: drafts"):
        checks.check_flags({"speculative_algorithm": "NGRAM", "pp_size": 2}, "cpu")
    checks.check_flags({"pp_size": 2}, "cpu")
