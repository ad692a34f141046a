"""The log at start: short lines."""

from __future__ import annotations

from sglang_kvq.sglang.attention.worker import MOST_SHOWN, describe

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
