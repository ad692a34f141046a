"""A prefill and a decode server that together behave like one server of a tiny model."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

from benchmarks.tiny_server import TinyServer, empty, with_plugin

ROOT = Path(__file__).resolve().parent.parent
#: Transfer backends that a pair may use; the first is the default.
ENGINES = ("mooncake_tcp", "nixl")


def mode(engine: str = ENGINES[0]) -> tuple[str, ...]:
    """Returns the flags of a server of a pair; the server's role must follow."""
    return ("--disaggregation-transfer-backend", engine, "--disaggregation-mode")


def on_a_cpu(folder: Path, path: str, drafts: bool = False) -> str:
    """Returns a PYTHONPATH with which servers transfer pages on a CPU; SGLang's shortcut for page ids needs CUDA.

    Args:
        path: the rest of the PYTHONPATH.
        drafts: whether servers verify drafts, with stand-ins for kernels that need AMX.
    """
    path = with_plugin(folder, ROOT / "tests" / "e2e" / "transfers_on_cpu.py", path)
    standins = str(ROOT / "tests" / "e2e" / "speculation") if drafts else ""
    return os.pathsep.join(filter(None, (standins, path)))


def hang_up(response: Any) -> None:
    """Ends the connection of a response that another thread may be reading.

    Closing alone would wait for that thread, which may wait for a server that sends nothing more.
    """
    with suppress(OSError, AttributeError):
        response.fp.raw._sock.shutdown(socket.SHUT_RDWR)


class PairServer:
    """Sends each request to both servers, as SGLang's router does.

    Args:
        port: port at which the prefill server gives the decode server its address.
    """

    def __init__(self, prefill: TinyServer, decode: TinyServer, port: int) -> None:
        self.prefill, self.decode, self.port = prefill, decode, port
        self.command, self.both = decode.command, (prefill, decode)
        self._starters = ThreadPoolExecutor(2)  # servers end with the threads that started them

    def start(self, timeout: float | None = None) -> PairServer:
        for job in [self._starters.submit(server.start, timeout) for server in self.both]:
            job.result()
        return self

    def stop(self, grace: float = 10.0) -> None:
        for server in self.both:
            server.stop(grace)
        self._starters.shutdown(wait=False)

    @property
    def running(self) -> bool:
        return all(server.running for server in self.both)

    def check_alive(self) -> None:
        for server in self.both:
            server.check_alive()

    def log(self) -> str:
        return "\n".join(server.log() for server in self.both)

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(server.log_tail(lines) for server in self.both)

    def states(self) -> list[dict[str, Any]]:
        return [state for server in self.both for state in server.states()]

    def drain(self, seconds: float = 60) -> None:
        for server in self.both:
            server.drain(seconds)

    # -- requests -----------------------------------------------------------------------------------------

    def request(self, path: str, asked: Any = None, timeout: float = 300.0) -> bytes:
        """Sends other requests than prompts, such as an abort, to both servers. Returns the decode server's answer."""
        answers = [server.request(path, asked, timeout) for server in self.both]
        return answers[-1]

    def json(self, path: str, asked: Any = None, timeout: float = 300.0) -> Any:
        """Returns the decode server's answer, or a list of answers for a list of prompts.

        ``cached_tokens`` and its details come from the prefill server, which has read the prompts.
        """
        if path != "/generate":
            return self.decode.json(path, asked, timeout)
        ids = asked["input_ids"]
        if ids and isinstance(ids[0], list):
            with ThreadPoolExecutor(len(ids)) as pool:
                return list(pool.map(lambda one: self._answer({**asked, "input_ids": one}, timeout), ids))
        return self._answer(asked, timeout)

    def _answer(self, asked: dict[str, Any], timeout: float) -> dict[str, Any]:
        asked = self._in_a_room(asked)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(self.prefill.json, "/generate", asked, timeout)
            answer: dict[str, Any] = self.decode.json("/generate", asked, timeout)
            read = first.result()["meta_info"]
            answer["meta_info"]["cached_tokens"] = read.get("cached_tokens", 0)
            answer["meta_info"]["cached_tokens_details"] = read.get("cached_tokens_details")
        return answer

    def _in_a_room(self, asked: dict[str, Any]) -> dict[str, Any]:
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.port}
        return {**asked, **where, "bootstrap_room": random.getrandbits(30)}

    @contextmanager
    def stream(
        self, path: str, asked: dict[str, Any], timeout: float = 120, headers: Mapping[str, str] | None = None
    ) -> Iterator[Any]:
        """Yields the decode server's open response; leaving it early abandons the request on both servers."""
        asked = self._in_a_room(asked)
        opened: list[Any] = []
        left = threading.Event()

        def read() -> None:
            # The response may end while it is read.
            with (
                suppress(OSError, ValueError, AttributeError, HTTPException),
                self.prefill.stream(path, asked, timeout, headers) as response,
            ):
                opened.append(response)
                while not left.is_set() and response.readline():
                    pass

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            with self.decode.stream(path, asked, timeout, headers) as response:
                yield response
        finally:
            left.set()
            for response in opened:
                hang_up(response)
            reader.join(5)

    # -- looking inside -----------------------------------------------------------------------------------

    def held_when_empty(self) -> list[str]:
        """Lists what the servers hold although nothing runs and their caches were flushed; [] if all is right."""
        empty(self)
        named = zip(("prefill", "decode"), self.both)
        return [f"the {name} server: {line}" for name, server in named for line in server.held()]
