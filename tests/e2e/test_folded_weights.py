"""A server gives away no weights with V's rotation in them, and stays alive when a request asks for them."""

from __future__ import annotations

import pytest

from tests.e2e.client import Client
from tests.e2e.test_serving import CHAT, STRICT


@pytest.fixture
def chat(servers) -> Client:
    return Client(servers(*CHAT, env=STRICT, model=servers.shallow))


def test_folded_weights_are_refused_with_the_reason(chat):
    assert chat.state()["v_rotation_folded"] is True
    layer = "model.layers.1.self_attn"
    plain = chat.post("/get_weights_by_name", name=f"{layer}.q_proj.weight", truncate_size=2)
    assert plain.status_code == 200 and len(plain.json()) == 2, plain.text
    for name, path, body in (
        ("V", "/get_weights_by_name", {"name": f"{layer}.v_proj.weight", "truncate_size": 2}),
        ("O", "/get_weights_by_name", {"name": f"{layer}.o_proj.weight", "truncate_size": 2}),
        ("checksums", "/weights_checker", {"action": "checksum"}),
        ("update", "/update_weights_from_disk", {"model_path": "/nowhere"}),
    ):
        answer = chat.post(path, **body)
        assert answer.status_code == 400 and "folded the value rotation" in answer.text, (name, answer.text)
    missing = chat.post("/get_weights_by_name", name="model.layers.99.self_attn.v_proj.weight")
    assert missing.status_code == 400 and "folded" not in missing.text, missing.text
    assert chat.generate([1, 2, 3], 2)["output_ids"]
