"""The lines that the log shows at start are short."""

from __future__ import annotations

from dataclasses import replace

from sglang_kvq import KVQuantConfig
from sglang_kvq.cache.layout import KVGeometry, divide
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.sglang.attention.worker import MOST_SHOWN, describe
from sglang_kvq.sglang.memory.pool import describe_requests, describe_windows

FILES = {f"layer_{i}.pt": f"{i:064x}" for i in range(36)}


def test_what_layers_share_is_one_line_and_the_rest_one_each() -> None:
    clips = [0.9] * 30 + [round(0.91 + i / 100, 2) for i in range(6)]
    status = {"method": "oscar", "rotations_files": FILES, "clip_k": clips, "clip_v": 0.92, "kernels": "TritonOps"}
    first, *rest = describe(status)
    assert first == "ready: method=oscar, clip_v=0.92, kernels=TritonOps"
    assert rest[:36] == [f"rotations_files: {name}={digest}" for name, digest in FILES.items()]
    (layers,) = rest[36:]
    assert layers.startswith("clip_k by layer: 30 x 0.9, 1 x 0.91, ") and "1 others: see /server_info" in layers
    assert max(map(len, (first, *rest))) < 200


def test_few_values_are_all_listed() -> None:
    lines = list(describe({"keys": ["2 bits", "3 bits"] * MOST_SHOWN}))
    assert lines == ["ready: ", f"keys by layer: {MOST_SHOWN} x 2 bits, {MOST_SHOWN} x 3 bits"]


def test_windows_that_may_shrink_are_told_apart() -> None:
    config, geometry = KVQuantConfig("oscar"), KVGeometry(8, (PageFormat(128, 128),) * 36)
    whole = divide(config, geometry, pages=4000, slots=601, batch=2048)
    soft = divide(replace(config, recent_min=0), geometry, pages=4000, slots=601, batch=2048)
    assert describe_windows(whole) == f"at most {whole.max_requests} running requests"
    fewer = f"at most {soft.max_requests} running requests, {whole.max_requests} of them with whole windows"
    assert describe_windows(soft) == fewer and whole.max_requests < soft.max_requests
    short = min(soft.tokens // 4096, soft.max_requests)
    assert describe_requests(soft, [4096]) == f"at 4K: BF16 {soft.bf16_tokens // 4096} → {short} requests"
