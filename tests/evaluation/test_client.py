"""Failed requests: which ones are sent again, and what the user is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.client import Answer, Client, RequestRefused
from tests.evaluation.fake_server import FakeServer


def test_dropped_connections_are_tried_again_and_counted():
    with FakeServer(fail=2) as server:
        client = Client(server.url, pause=0.01)
        assert client.complete("2 + 2?", 40).text.endswith("42")
        assert client.retries == 2


def test_three_times_is_enough():
    with FakeServer(fail=3) as server, pytest.raises(RequestRefused, match="/v1/completions"):
        Client(server.url, pause=0.01).complete("x", 8)


def test_an_error_status_is_not_tried_again():
    with FakeServer(template=False) as server:
        client = Client(server.url, pause=0.01)
        with pytest.raises(RequestRefused, match="400.*chat_template"):
            client.chat([{"role": "user", "content": "x"}], 8)
        assert len(server.requests) == 1 and client.retries == 0
        assert client.has_chat_template is False


def test_a_style_that_is_given_is_used():
    with FakeServer() as server:
        client = Client(server.url)
        assert [client.style(style) for style in ("chat", "completion")] == ["chat", "completion"]
        assert server.requests == [] and client.style("auto") == "chat"


def test_nobody_there():
    with pytest.raises(KVQuantError, match="refused"):
        _ = Client("http://127.0.0.1:9", attempts=1).facts
    with pytest.raises(RequestRefused, match="refused"):  # not taken for a server without a template
        _ = Client("http://127.0.0.1:9/template", attempts=1).has_chat_template
    with pytest.raises(KVQuantError, match="must be a URL"):
        Client("localhost:30000")


def test_an_answer_may_have_no_text(monkeypatch):
    choice = {"message": {"content": None}, "finish_reason": "length"}
    body = {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 9}}
    client = Client("http://127.0.0.1:9")
    monkeypatch.setattr(client, "request", lambda path, asked: body)
    assert client.chat("Hello", 9) == Answer("", False, 3, 9)


def test_facts():
    with FakeServer("oscar", chunk=-1) as server:
        facts = Client(server.url).facts
    assert (facts.method, facts.allocated_bits, facts.pool_bits, facts.chunk) == ("oscar", 2.5, 2.9, None)
    with FakeServer() as server:
        facts = Client(server.url).facts
    assert (facts.method, facts.allocated_bits, facts.context_length) == ("none", 16.0, 4096)
    assert (facts.room, replace(facts, capacity=2000).room) == (4096, 2000 - 64)
    fp8 = replace(facts, kv_cache_dtype="fp8_e4m3")
    assert (fp8.method, fp8.allocated_bits, fp8.pool_bits) == ("fp8", 8.0, 8.0)
