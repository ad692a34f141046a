"""Flags are validated once, with a message that names the value and the fix."""

from __future__ import annotations

import pickle

import pytest

from sglang_kvq import KVQuantConfig, KVQuantError
from sglang_kvq.methods import METHOD_NAMES, get_method


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_every_method_declares_itself(name):
    method = get_method(name)
    assert method.name == name and method.summary and method.paper
    assert KVQuantConfig(name).slots_per_request == 6


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"method": "oskar"}, "--kv-quant oskar: unknown method. Choose one of none, oscar"),
        ({"rotations": ""}, "--kv-quant-rotations '': empty. Give a folder"),
        ({"sink_tokens": 65}, "--kv-quant-sink 65: must be a multiple of the page size 64.*nearest valid value is 64"),
        ({"sink_tokens": -64}, "--kv-quant-sink -64"),
        ({"recent_tokens": 100}, "--kv-quant-recent 100: .*nearest valid value is 128"),
        ({"recent_tokens": 0}, "--kv-quant-recent 0: .*at least 64"),
        ({"recent_min": 100}, "--kv-quant-recent-min 100: .*multiple of the page size 64, from 0 to .* 256"),
        ({"recent_min": 320}, "--kv-quant-recent-min 320: .*from 0 to --kv-quant-recent 256. Leave it out"),
        ({"recent_min": -64}, "--kv-quant-recent-min -64: "),
        ({"group_size": 48}, "--kv-quant-group-size 48: must be 32, 64, 96 or 128"),
        ({"clip_k": 1.5}, "--kv-quant-clip-k 1.5"),
        ({"clip_v": 0.0}, "--kv-quant-clip-v 0.0"),
        ({"bf16_budget": 0.0}, "--kv-quant-bf16-budget 0.0"),
        ({"bf16_budget": 0.9}, "--kv-quant-bf16-budget 0.9"),
    ],
    ids=lambda x: "-".join(map(str, x.items() if isinstance(x, dict) else [])) or None,
)
def test_bad_values_name_themselves_and_the_fix(fields, message):
    with pytest.raises(KVQuantError, match=message):
        KVQuantConfig(**{"method": "oscar", **fields})


def test_config_travels_to_other_processes_unchanged():
    config = KVQuantConfig("hadamard", sink_tokens=128, clip_k=0.9)
    assert pickle.loads(pickle.dumps(config)) == config


def test_description_names_what_was_changed():
    assert KVQuantConfig("oscar").describe() == "method=oscar"
    assert KVQuantConfig("oscar", recent_tokens=512).describe() == "method=oscar, recent_tokens=512"
