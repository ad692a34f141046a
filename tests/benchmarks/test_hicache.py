"""The benchmark of HiCache: where pages were, what files hold, and which rows are kept; functions replace servers."""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import hicache, record
from benchmarks.bench_serving.workloads import WORKLOADS
from sglang_kvq.cache.layout import KVGeometry, divide, share, window_slots
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.specs import parse
from sglang_kvq.formats.page import PageFormat

LENGTH = 128
PROMPT = list(range(LENGTH + hicache.TURN))


class FakeServer:
    """A server that takes cache places from ``places`` in order; ``shift`` changes log-probabilities by place."""

    def __init__(self, *places: tuple[str, int], shift: dict[str, float] | None = None) -> None:
        self.places, self.shift, self.asked = list(places), shift or {}, []

    def drain(self) -> None: ...

    def json(self, path: str, body: dict, timeout: float = 0) -> dict:
        if not body.get("return_logprob"):
            self.asked.append(body["input_ids"])
            return {"meta_info": {}}
        place, tokens = self.places.pop(0)
        count = len(body["input_ids"]) - body["logprob_start_len"]
        base = -1.0 - self.shift.get(place, 0.0)
        own = [[None, 0, None], *([base, 7, None] for _ in range(count - 1))]
        top = [None, *([[base, 7, None], [-3.0, 8, None]] for _ in range(count - 1))]
        details = {"device": 0, "host": 0, "storage": 0, place: tokens}
        found = {"input_token_logprobs": own, "input_top_logprobs": top, "cached_tokens_details": details}
        return {"meta_info": found}


def asking(*places: tuple[str, int], **shift: float) -> hicache.Answers:
    return hicache.Answers(
        FakeServer(*places, shift=shift), LENGTH, 2, lambda number: [1000 * number + n for n in range(LENGTH)]
    )


def test_answers_are_compared_with_pages_that_stayed():
    places = [(place, LENGTH) for place in ("device", "device", "host", "storage")]
    row = asking(*places, host=0.25).row(PROMPT, 0)
    assert row["host_apart"] == 0.25 and row["storage_apart"] == 0.0
    assert row["kl_stayed"] == 0.0 and row["kl_host"] > 0.01 and row["kl_storage"] == 0.0


def test_prompts_that_take_room_are_new_each_time():
    """Prompts that evict others are new each time, because pages from files would take no BF16 copies."""
    asked = asking(*[(place, LENGTH) for place in ("device", "device", "host", "storage")] * 2)
    for turn in range(2):
        asked.row(PROMPT, turn)
    others = [tuple(ids[:64]) for ids in asked.running.asked if ids != PROMPT[:LENGTH]]
    assert len(set(others)) == len(others) == 2 * (2 + len(hicache.OTHERS))


def test_prompts_that_take_room_take_all_bf16_pages():
    """In a memory that BF16 pages share they would take none: it has BF16 pages for a whole prefill batch."""

    def budget(method: str) -> list[str]:
        flags = hicache.small_flags(parse(method), 144)
        assert flags[:4] == ("--max-total-tokens", "9216", "--max-running-requests", "1")
        return [value for name, value in pairwise(flags) if name == "--kv-quant-bf16-budget"]

    assert budget("none") == [] and budget("int2") == ["0.1"]
    config = KVQuantConfig("int2", bf16_budget=0.1)
    geometry = KVGeometry(8, (PageFormat(128, 128),) * 36)
    others = 2 * config.slots_per_request  # before the second reading
    assert divide(config, geometry, pages=144, slots=1000, wanted=1, chunk=8192).slots < others
    shared = share(geometry, window_slots(config, 8192), pages=144, budget_bytes=1 << 40, wanted=1)
    assert shared.arena.slots_beside(144) > 10 * others


@pytest.mark.parametrize("wrong", [("host", LENGTH), ("device", LENGTH - 64)])
def test_pages_that_were_elsewhere_have_no_figure(wrong):
    with pytest.raises(KVQuantError, match="tokens should come from the device"):
        asking(wrong).row(PROMPT, 0)


def test_files_are_counted_and_waited_for(tmp_path):
    for name, size in (("a.bin", 10), ("b.bin", 30), ("c.tmp", 5)):
        (tmp_path / name).write_bytes(b"x" * size)
    assert hicache.files_of(tmp_path) == (2, 40)
    hicache.wait_for_files(tmp_path, 2)
    with pytest.raises(KVQuantError, match="only 2 of 3 pages were stored within 0 s"):
        hicache.wait_for_files(tmp_path, 3, 0.3)
    assert hicache.settled(tmp_path) == (2, 40)
    hicache.forget_files(tmp_path)
    assert hicache.files_of(tmp_path) == (2, 40)


def test_answers_with_another_policy_or_late_loads_are_other_rows(tmp_path):
    def name(policy: str, late: int) -> str:
        args = argparse.Namespace(model=hicache.MODEL, layers=None, write_policy=policy, late_loads=late)
        return hicache.answers_name(args, parse("int2"))

    assert name("write_through", 0) == "answers, int2"
    assert name("write_back", 9) == "answers, int2, write_back, loads 9 cycles late"
    assert "write_back" in hicache.storage_flags(tmp_path, "write_back")


def test_cached_tokens_by_place():
    text = (
        'sglang:prompt_tokens_total{model="m"} 100.0\n'
        'sglang:cached_tokens_total{cache_source="device"} 30.0\n'
        'sglang:cached_tokens_total{cache_source="host"} 20.0\n'
        'sglang:cached_tokens_total{cache_source="storage_file"} 5.0\n'
        'sglang:cached_tokens_total{cache_source="total"} 55.0\n'
    )
    server = argparse.Namespace(request=lambda path: text.encode())
    assert hicache.prompt_tokens(server) == {"all": 100.0, "device": 30.0, "host": 20.0, "storage": 5.0}


def test_conversations_all_run_at_once():
    args = argparse.Namespace(tiny=False, conversations=256, seconds=9.0)
    workload = hicache.conversations(args)
    (load,), (base,) = workload.loads, WORKLOADS["chats"].loads
    assert load.clients == load.requests == 256 and load.turns == base.turns and workload.seconds == 9.0


def test_rows_of_the_file_are_kept(tmp_path: Path, capsys):
    out = tmp_path / "rows.json"
    record.merge(out, "hicache", [{"scenario": "traffic, oscar"}], key="scenario")
    args = argparse.Namespace(out=out, again=False)
    assert hicache.kept(args, "traffic, oscar") and not hicache.kept(args, "traffic, none")
    assert capsys.readouterr().out == "traffic, oscar: kept\n"
    assert not hicache.kept(argparse.Namespace(out=out, again=True), "traffic, oscar")
