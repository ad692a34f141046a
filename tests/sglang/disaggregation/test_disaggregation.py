"""The hooks on SGLang's prefill/decode disaggregation, and the settings that are refused with it."""

from __future__ import annotations

from dataclasses import replace
from http import HTTPStatus
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version

from sglang_kvq.cache.layout import KVGeometry
from sglang_kvq.cache.pending import PendingOps
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.sessions.config import EpisodicConfig
from sglang_kvq.sglang import checks, compat, hooks, runtime
from sglang_kvq.sglang.disaggregation import checks as transfers
from sglang_kvq.sglang.disaggregation import seam
from sglang_kvq.sglang.disaggregation.handover import Handover
from sglang_kvq.sglang.disaggregation.layout import layout_name
from sglang_kvq.sglang.disaggregation.staging import staging_bytes
from sglang_kvq.sglang.memory import capacity
from tests.cache.scheduler_model import Model

SERVED = compat.applies(hooks.TRANSFERS, compat.sglang_version())
served = pytest.mark.skipif(not SERVED, reason="this SGLang release sends plain pages only")

# -- refusals ---------------------------------------------------------------------------------------

MODEL = SimpleNamespace(is_hybrid_swa=False)


@pytest.fixture
def plain(monkeypatch):
    """Makes ``MODEL`` a model without recurrent states."""
    monkeypatch.setattr(transfers, "keeps_states", lambda model: model is not MODEL)


def test_older_releases_refuse_with_that_reason(monkeypatch):
    monkeypatch.setattr(compat, "sglang_version", lambda: Version("0.5.22"))
    with pytest.raises(KVQuantError, match=r"--disaggregation-mode decode: SGLang 0\.5\.22 .*Install SGLang 0\.5\.23"):
        checks.check_flags({"disaggregation_mode": "decode"}, "cuda")


@served
@pytest.mark.parametrize(
    "values",
    [
        {"disaggregation_transfer_backend": "mori"},
        {"disaggregation_transfer_backend": "fake"},
        {"disaggregation_enable_kv_checksum": True},
        {"disaggregation_decode_host_receive_threshold": 0.5},
        {"disaggregation_decode_allocation_policy": "prefill_complete"},
        {"optimistic_prefill_attempts": 1},
        {"enable_dp_attention": True},
        {"enable_streaming_session": True},
        {"kv_canary": "log"},
    ],
    ids=lambda v: next(iter(v)),
)
def test_settings_are_refused_beside_a_transfer(values):
    field, value = next(iter(values.items()))
    assert transfers.refused_flags(values) == []
    with pytest.raises(KVQuantError) as error:
        checks.check_flags({"disaggregation_mode": "prefill", **values}, "cuda")
    shown = f"--{field.replace('_', '-')}" + ("" if value is True else f" {value}")
    assert f"{shown} and --disaggregation-mode prefill: " in str(error.value)


@served
def test_only_the_prefill_server_has_pages_in_host_memory():
    values = {"enable_hierarchical_cache": True, "disaggregation_mode": "prefill"}
    checks.check_flags(values, "cuda")
    with pytest.raises(KVQuantError, match="--enable-hierarchical-cache and --disaggregation-mode decode: .*except on"):
        checks.check_flags({**values, "disaggregation_mode": "decode"}, "cuda")


@served
def test_fields_exist():
    from sglang.srt.server_args import ServerArgs

    assert {field for field, _, _ in transfers.REFUSED} <= set(ServerArgs.__struct_fields__)


@served
@pytest.mark.parametrize("name", [name for name, _ in transfers.REFUSED_ENVIRONMENT])
def test_switches_are_refused_beside_a_transfer(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    checks.check_flags({}, "cuda")
    with pytest.raises(KVQuantError, match=f"{name}=1 and --disaggregation-mode decode: .*Unset it"):
        checks.check_flags({"disaggregation_mode": "decode"}, "cuda")


@served
@pytest.mark.parametrize("backend", [None, "mooncake", "mooncake_tcp", "nixl"])
@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("algorithm", [None, "NGRAM", "EAGLE3"])
def test_what_is_served_passes(mode, backend, algorithm):
    more = {"tp_size": 2, "enable_lora": True, "disaggregation_decode_enable_radix_cache": algorithm != "NGRAM"}
    more["speculative_algorithm"] = algorithm
    checks.check_flags({"disaggregation_mode": mode, "disaggregation_transfer_backend": backend, **more}, "cuda")


@served
@pytest.mark.parametrize("algorithm", ["NGRAM", "STANDALONE"])
def test_a_prefix_cache_that_sglang_refuses_with_drafts_is_refused(algorithm):
    values = {"disaggregation_decode_enable_radix_cache": True, "speculative_algorithm": algorithm}
    checks.check_flags({"disaggregation_mode": "prefill", **values}, "cuda")
    with pytest.raises(KVQuantError, match=f"--disaggregation-decode-enable-radix-cache .*{algorithm}: SGLang serves"):
        checks.check_flags({"disaggregation_mode": "decode", **values}, "cuda")


@pytest.mark.parametrize(
    ("config", "model", "text"),
    [
        (KVQuantConfig("int4", recent_min=64), MODEL, "--kv-quant-recent-min 64 and --disaggregation-mode decode: "),
        (
            KVQuantConfig("int4", episodic=EpisodicConfig("retrieve", embedder="/models/words")),
            MODEL,
            "--episodic-policy retrieve and ",
        ),
        (KVQuantConfig("int4"), SimpleNamespace(is_hybrid_swa=True), "sliding windows"),
        (KVQuantConfig("int4"), SimpleNamespace(is_hybrid_swa=False), "recurrent states"),
    ],
    ids=["soft windows", "episodes", "sliding windows", "states"],
)
def test_configs_and_models_are_refused_beside_a_transfer(config, model, text, plain, monkeypatch):
    monkeypatch.setattr(
        compat, "resolved", lambda args, field, default=None: {"disaggregation_mode": "decode"}.get(field)
    )
    assert any(text in found for found in transfers.refused_settings(None, config, model))
    assert transfers.refused_settings(None, KVQuantConfig("int4"), MODEL) == []
    monkeypatch.setattr(compat, "resolved", lambda args, field, default=None: "null")
    assert transfers.refused_settings(None, config, model) == []


def test_draft_models_that_keep_more_than_a_cache_are_refused(plain, monkeypatch):
    given = {"disaggregation_mode": "decode", "speculative_algorithm": "EAGLE3"}
    monkeypatch.setattr(compat, "resolved", lambda args, field, default=None: given.get(field))
    monkeypatch.setattr(transfers, "draft_model", lambda args, model: SimpleNamespace(is_hybrid_swa=True))
    found = transfers.refused_settings(None, KVQuantConfig("int4"), MODEL)
    assert [text.split(" and ")[0] for text in found] == [
        "a draft model with sliding windows",
        "a draft model with recurrent states",
    ]
    given["speculative_algorithm"] = "NGRAM"
    assert transfers.refused_settings(None, KVQuantConfig("int4"), MODEL) == []


# -- the layout's name ------------------------------------------------------------------------------

FORMAT = PageFormat(64, 64, 0.96, 0.92)


INT2 = KVQuantConfig("int2")


def named(config=INT2, formats=(FORMAT, FORMAT), workers=1, sha256="a" * 64) -> str:
    state = runtime.Runtime(config, KVGeometry(3, tuple(formats)), tuple(range(len(formats))))
    state.status["rotations_sha256"] = sha256
    return layout_name(state, workers)


@pytest.mark.parametrize(
    "other",
    [
        {"config": KVQuantConfig("int4")},
        {"config": KVQuantConfig("int2", sink_tokens=128)},
        {"config": KVQuantConfig("int2", recent_tokens=128)},
        {"formats": (FORMAT, replace(FORMAT, clip_k=0.9))},
        {"formats": (FORMAT, replace(FORMAT, group_size=32))},
        {"formats": (FORMAT,)},
        {"workers": 2},
    ],
    ids=["method", "sinks", "recent", "clips", "groups", "layers", "tensor parallelism"],
)
def test_the_name_tells_layouts_apart(other):
    assert named() == named(config=KVQuantConfig("int2", bf16_budget=0.3, prefill_window=64))
    assert named(**other) != named()


def test_the_name_tells_rotations_apart():
    assert named(KVQuantConfig("oscar")) != named(KVQuantConfig("oscar"), sha256="b" * 64)
    assert named(KVQuantConfig("turboquant")) != named(KVQuantConfig("turboquant", seed=1))
    assert named(KVQuantConfig("turboquant")) == named(KVQuantConfig("turboquant", seed=0), sha256=None)


# -- the hooks --------------------------------------------------------------------------------------


@pytest.fixture
def worker(monkeypatch):
    """``worker(decode)`` returns the runtime of a worker whose transfers have begun, and the model of its cache."""

    def begin(decode: bool) -> tuple[runtime.Runtime, Model]:
        model = Model(40, 30, 4, 1, 2)
        state = runtime.Runtime(KVQuantConfig("int2", recent_tokens=128), KVGeometry(1, model.pool.formats), (0,))
        state.pages, state.tiers, state.staged_windows = model.pool, model.tiers, 3
        monkeypatch.setattr(runtime, "_current", state)
        state.handover = Handover(model.pool, decode=decode, sink_pages=1, recent_pages=2, entries=3)
        return state, model

    return begin


def test_room_for_transfers_comes_off_the_budget(monkeypatch):
    seen, states = [], []
    for windows in (0, 8):
        state = runtime.Runtime(KVQuantConfig("int2"), KVGeometry(2, (FORMAT,)), (0,), staged_windows=windows)
        monkeypatch.setattr(runtime, "_current", state)
        capacity.calculate_pool_sizes(lambda self, available, page: seen.append(available), None, 1 << 30, 64)
        states.append(state.budget_slots)
    assert 0 < seen[0] - seen[1] <= staging_bytes(KVGeometry(2, (FORMAT,)), 6, 8) and states[0] > states[1]


@served
@pytest.mark.parametrize(("mode", "slots"), [("prefill", 3), ("decode", 16)])
def test_a_prefill_server_has_as_many_metadata_slots_as_entries(mode, slots, worker, monkeypatch):
    import sglang.srt.runtime_context as context

    state, _ = worker(decode=False)
    state.handover = None
    monkeypatch.setattr(context, "get_disagg", lambda: SimpleNamespace(disaggregation_mode=mode))
    sizes = []
    seam.around_slots(lambda self, size: sizes.append(size), None, 16)
    assert sizes == [slots] and state.handover.decode is (mode == "decode")
    assert state.handover.staging.entries == 3


def test_a_request_waits_until_its_window_has_room(worker):
    state, _ = worker(decode=True)
    for row in (1, 2, 3):
        assert seam.around_available(lambda self: 9, None) == 4 - row
        state.handover.staged_rows(row, 100)
    assert seam.around_available(lambda self: 9, None) == 0
    state.handover.free_row(2)
    assert seam.around_available(lambda self: 9, None) == 1
    assert seam.around_available(lambda self: 0, None) == 0


def test_workers_count_the_same_room_whatever_their_devices_have_done(worker):
    """Workers must admit the same requests. A window that is still being read is waited for when its room is taken."""

    class Reading:
        def query(self) -> bool:
            raise AssertionError("asks the device")

        def synchronize(self) -> None:
            waited.append(self)

    waited: list[Reading] = []
    state, _ = worker(decode=True)
    staging = state.handover.staging
    first = [staging.take() for _ in range(3)]
    reading = [Reading(), Reading()]
    staging._read.extend(zip(reading, first))
    assert seam.around_available(lambda self: 9, None) == 2 and not waited
    assert [staging.take(), staging.take()] == first[:2] and waited == reading
    assert seam.around_available(lambda self: 9, None) == 0


def test_room_is_made_of_requests_that_ended_without_a_plan(worker, monkeypatch):
    state, model = worker(decode=True)
    for row in (1, 2, 3):
        state.handover.staged_rows(row, 100)
    settled = []
    monkeypatch.setattr(Handover, "settle", lambda self, tiers: settled.append(tiers))
    assert seam.around_available(lambda self: 9, None) == 0 and settled == [model.tiers]
    state, _ = worker(decode=False)
    assert seam.around_available(lambda self: 9, None) == 9 and len(settled) == 1, "a prefill server has none"


@served
def test_windows_are_registered_and_the_layout_is_named(worker, monkeypatch):
    import sglang.srt.runtime_context as context
    from sglang.srt.disaggregation.base.conn import KVArgs, StateType
    from sglang.srt.disaggregation.utils import setup_state_kv_args

    state, _ = worker(decode=True)
    monkeypatch.setattr(context, "get_parallel", lambda: SimpleNamespace(attn_tp_size=1))
    args = KVArgs()
    pool = SimpleNamespace()
    getattr(setup_state_kv_args, "__wrapped__", setup_state_kv_args)(args, pool)
    seam.after_state(None, args, pool)
    assert args.state_types == [StateType.DSV4_REQUEST_STATE]
    (pointers,), (lengths,) = args.state_data_ptrs, args.state_item_lens
    assert len(pointers) == 2 and lengths[0] == lengths[1] == state.handover.staging.table[0, 0].nbytes
    assert args.kv_cache_dtype_str == layout_name(state, 1)


def test_entries_of_records_are_even_and_lie_where_pages_do(worker):
    state, model = worker(decode=False)
    pointers, sizes, items = state.handover.buffers()
    assert len(pointers) == 2, "one layer, and one entry that makes them even"
    assert pointers[0] == model.pool.records[0].data_ptr() and items[0] == model.pool.records[0][0].nbytes
    assert all(size == item * (model.pool.pages + 1) for size, item in zip(sizes, items))


def test_a_prefill_batch_packs_the_windows_of_prompts_that_end(worker):
    state, model = worker(decode=False)
    one, two = model.start(list(range(400))), model.start(list(range(1000, 1300)))
    assert model.extend([(one, 256), (two, 300)])

    def req(request, computed, entry):
        return SimpleNamespace(
            origin_input_ids=request.tokens,
            extend_end=computed,
            kv=SimpleNamespace(req_pool_idx=request.row),
            metadata_buffer_index=entry,
        )

    batch = SimpleNamespace(
        reqs=[req(one, 256, 0), req(two, 300, 2)], forward_mode=SimpleNamespace(is_extend=lambda: True)
    )
    assert seam.around_forward(lambda self, batch, *rest: ("result", rest), None, batch, 7) == ("result", (7,))
    whole = model.row_pages(one, 256) + model.row_pages(two, 256)
    assert model.tiers.page_valid[torch.tensor(whole)].all(), "whole pages have records"
    assert state.handover.staged_rows(two.row, 300) == [8, 9, 10, 11]
    with pytest.raises(RuntimeError, match="is sent with the window"):
        state.handover.staged_rows(one.row, 400)
    idle = SimpleNamespace(reqs=None, forward_mode=SimpleNamespace(is_extend=lambda: False))
    assert seam.around_forward(lambda self, batch: "idle", None, idle) == "idle"
    batch.reqs[1].metadata_buffer_index = -1
    with pytest.raises(RuntimeError, match="cannot send yet"):
        seam.around_forward(lambda self, batch: None, None, batch)


def test_a_row_given_back_frees_its_window_and_its_entry(worker):
    state, model = worker(decode=True)
    state.handover.staged_rows(2, 100)
    req = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=2))
    seam.around_free(lambda self, req: setattr(req.kv, "req_pool_idx", None), None, req)
    assert state.handover.staging.available() == 3
    spans, _, events = model.tiers.pending.pack(torch.device("cpu"))
    assert spans[3 * events :].tolist() == [2]


def test_requests_that_arrived_are_events_in_order(worker):
    state, _ = worker(decode=True)
    pool = SimpleNamespace(device=torch.device("cpu"))
    state.tiers = SimpleNamespace(pending=PendingOps(), pool=pool)
    reqs = []
    for row, tokens in ((1, 100), (2, 200)):
        state.handover.staged_rows(row, tokens)
        reqs.append(SimpleNamespace(kv=SimpleNamespace(req_pool_idx=row, cache_protected_len=64 * (row - 1))))
    batch = SimpleNamespace(reqs=reqs, seq_lens_cpu=torch.tensor([100, 200]))
    seam.after_prebuilt(None, None, None)
    assert not state.tiers.pending
    seam.after_prebuilt(batch, None, None)
    arrived = list(iter(lambda: state.tiers.pending.take_fill(pool.device), None))
    assert [int(event.rows) for event in arrived] == [1, 2]
    assert [len(event.pages) for event in arrived] == [1, 2], "whole pages after what was cached here"
    empty, scheduler = SimpleNamespace(reqs=[], seq_lens_cpu=torch.tensor([])), SimpleNamespace(forward_stream="layers")
    pool.device = torch.device("cuda")
    for scheduler.enable_overlap, stream in ((False, None), (True, "layers")):
        seam.after_prebuilt(empty, scheduler, None)
        assert state.handover.layers == stream


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::7"])
def test_another_layout_refuses_the_address_and_not_the_server(host, worker):
    worker(decode=True)
    address = f"[{host}]:8998" if ":" in host else f"{host}:8998"

    def differs(self, address):
        raise RuntimeError("KV cache dtype mismatch: prefill server has kv_cache_dtype=kvq1-int4")

    assert seam.around_parallel_info(differs, None, address) is False
    if SERVED:
        ended_with_the_reason(host, address)
    assert seam.around_parallel_info(lambda self, address: True, None, address) is True
    assert runtime.current().handover.refused == {}


def ended_with_the_reason(host: str, address: str) -> None:
    """Checks that SGLang's poll, which all workers reduce, ends a request to a refused address, and no other one."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    aborted, reasons = [], {}
    asked = [
        SimpleNamespace(
            req=SimpleNamespace(bootstrap_host=h, bootstrap_port=8998, bootstrap_room=n, finished_reason=None),
            kv_receiver=SimpleNamespace(abort=lambda n=n: aborted.append(n)),
        )
        for n, h in enumerate((host, "b"))
    ]
    queue = SimpleNamespace(queue=asked, kv_manager=SimpleNamespace(record_failure=reasons.__setitem__))
    ready, waiting = seam.around_prefill_info(lambda self, asked: ({}, asked["x"]), queue, {"x": asked})
    assert (ready, waiting, aborted, list(reasons)) == ({}, asked[1:], [0], [0])
    seam.after_handshakes(None, queue)
    assert asked[0].req.finished_reason is None, "the poll has not ended it yet"
    for each in asked:
        each.req.return_logprob, each.req.finished_reason = False, FINISH_ABORT("the poll's words")
    seam.after_handshakes(None, queue)
    reason, other = (each.req.finished_reason for each in asked)
    assert reason.message == reasons[0] and reason.status_code == HTTPStatus.BAD_REQUEST
    assert address in reason.message and "kvq1-int4" in reason.message and "Give both servers" in reason.message
    assert other.message == "the poll's words"


def test_the_pool_asks_the_handover(worker):
    from sglang_kvq.sglang.memory.pool import KVQuantPool

    state, model = worker(decode=True)
    pool = object.__new__(KVQuantPool)
    pool.device = "cpu"
    assert pool.get_contiguous_buf_infos() == state.handover.buffers()
    assert pool.request_state_transfer_indices(3, 70) == state.handover.staged_rows(3, 70)
    request = model.start(list(range(70)))
    assert model.extend([(request, 70)])
    locations = model.pool.req_to_token[request.row, :70]
    saved = pool.get_cpu_copy(locations, mamba_indices=None, req_pool_index=request.row)
    with pytest.raises(RuntimeError, match="without its row"):
        pool.load_cpu_copy(saved, locations)
    pool.load_cpu_copy(saved, locations, mamba_indices=None, req_pool_index=4)
    assert state.handover._restored[4] is saved and saved.tokens == 70
    state.handover = None
    with pytest.raises(RuntimeError, match="without --disaggregation-mode"):
        pool.get_contiguous_buf_infos()
