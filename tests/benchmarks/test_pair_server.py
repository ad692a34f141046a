"""Two servers behave like one: each request goes to both, and an abandoned request ends on both."""

from __future__ import annotations

import io
import socket
import threading
import time
import urllib.request

import pytest

from benchmarks.pair_server import PairServer


class Half:
    """A server that notes its requests."""

    command, running = ["--kv-quant", "int4"], True

    def __init__(self, cached: int, events: int = 3) -> None:
        self.cached, self.events, self.asked, self.closed = cached, events, [], threading.Event()

    def json(self, path, asked, timeout=0):
        self.asked.append(asked)
        details = {"cached_tokens_details": {"host": self.cached}} if self.cached else {}
        return {"output_ids": [self.cached], "meta_info": {"cached_tokens": self.cached, **details}}

    def request(self, path, asked, timeout=0):
        self.asked.append((path, asked))
        return str(self.cached).encode()

    def stream(self, path, asked, timeout, headers):
        self.asked.append(asked)
        half = self

        class Response(io.BytesIO):
            def __exit__(self, *exc) -> None:
                half.closed.set()

        return Response(b"data\n" * self.events)

    def log(self) -> str:
        return ""

    def drain(self, seconds: float = 0) -> None: ...

    def check_alive(self) -> None: ...

    def held(self) -> list[str]:
        return [f"holds {self.cached} tokens"] if self.cached else []


@pytest.fixture
def pair() -> PairServer:
    return PairServer(Half(64), Half(0), 7)


def test_the_decode_server_answers_and_the_prefill_server_knows_what_was_cached(pair):
    answer = pair.json("/generate", {"input_ids": [1, 2]})
    assert answer == {"output_ids": [0], "meta_info": {"cached_tokens": 64, "cached_tokens_details": {"host": 64}}}
    assert pair.prefill.asked == pair.decode.asked and pair.decode.asked[0]["bootstrap_port"] == 7
    answers = pair.json("/generate", {"input_ids": [[1], [2], [3]]})
    assert len(answers) == 3 and sorted(x["input_ids"][0] for x in pair.decode.asked[1:]) == [1, 2, 3]
    rooms = {asked["bootstrap_room"] for asked in pair.decode.asked}
    assert len(rooms) == 4, "each request meets its other half in a room of its own"


def test_who_leaves_a_stream_leaves_both(pair):
    with pair.stream("/generate", {"input_ids": [1]}) as response:
        assert response.readline() == b"data\n"
    assert pair.prefill.closed.wait(120) and pair.decode.closed.wait(120)
    pair.request("/abort_request", {"rid": "x"})
    assert pair.prefill.asked[-1] == pair.decode.asked[-1] == ("/abort_request", {"rid": "x"})


def test_who_leaves_a_server_that_says_nothing_does_not_wait_for_it(pair):
    """A prefill server whose decode server was given up sends nothing until it notices that its client is gone."""
    gone = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            while connection.recv(1 << 16):
                pass
            gone.set()

        threading.Thread(target=serve, daemon=True).start()
        address, opened = f"http://127.0.0.1:{listening.getsockname()[1]}/", threading.Event()

        def stream(path, asked, timeout, headers):
            response = urllib.request.urlopen(address, timeout=600)
            opened.set()
            return response

        pair.prefill.stream = stream
        begin = time.monotonic()
        with pair.stream("/generate", {"input_ids": [1]}):
            assert opened.wait(120)
            time.sleep(0.2)  # now its reader waits for a line
        assert time.monotonic() - begin < 300 and gone.wait(120)


def test_what_either_holds_is_told(pair, monkeypatch):
    monkeypatch.setattr("benchmarks.tiny_server.time.sleep", lambda seconds: None)
    assert pair.held_when_empty() == ["the prefill server: holds 64 tokens"]
