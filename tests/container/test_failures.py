"""Failures in operation, brought about; docs/operations.md describes them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_kvq.server_process import OPENER, ServerFailed, free_port
from tests.container.image import RESTRICTED, Container
from tests.rotations.hub_server import REPOSITORY, hub_server

pytestmark = pytest.mark.timeout(900)
Make = Callable[..., Container]
KEY = "the right key"
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text()


def refusal(server: Container, *, key: str | None, text: str) -> tuple[int, str]:
    """Returns the status and the body of an answer to a request for one token."""
    body = json.dumps({"text": text, "sampling_params": {"max_new_tokens": 1}}).encode()
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    try:
        with OPENER.open(urllib.request.Request(f"{server.url}/generate", body, headers)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def ended(server: Container) -> tuple[int, str]:
    """Starts a server that cannot; returns its exit status and its log."""
    with pytest.raises(ServerFailed):
        server.start()
    return server.status(), server.log()


def said(log: str, words: str) -> None:
    """Checks that these words are in the log, and on the page."""
    assert words in log
    assert words in PAGE, "docs/operations.md does not say what is seen"


@pytest.fixture(scope="module")
def guarded(container: Make) -> Iterator[Container]:
    with container("guarded", f"--api-key={KEY}") as server:
        yield server


@pytest.mark.parametrize("key", [None, "another key"])
def test_wrong_key(guarded: Container, key: str | None) -> None:
    status, body = refusal(guarded, key=key, text="Hello")
    assert status == 401
    said(body, "Unauthorized")
    assert guarded.execute("health.sh").returncode == 0, "the health check needs no key"


def test_prompt_longer_than_the_context(guarded: Container) -> None:
    status, body = refusal(guarded, key=KEY, text="Hello " * 10_000)
    assert status == 400
    said(body, "is longer than the model's context length")
    assert refusal(guarded, key=KEY, text="Hello")[0] == 200, "it serves on"


def test_body_of_6_megabytes(guarded: Container) -> None:
    status, _ = refusal(guarded, key=KEY, text="Hello " * (1 << 20))
    assert status == 400
    assert refusal(guarded, key=KEY, text="Hello")[0] == 200, "it serves on"


def test_hub_that_cannot_be_reached(container: Make) -> None:
    away = ("--env", "HF_HUB_OFFLINE=0", "--env", f"HF_ENDPOINT=http://127.0.0.1:{free_port()}")
    status, log = ended(container("away", f"--model-path={REPOSITORY}", options=away))
    assert status not in (0, 143)
    said(log, "Connection refused")


def test_disk_that_is_full(container: Make, readable: Path) -> None:
    with hub_server({"main": ("1" * 40, readable)}) as (address, _):
        hub = ("--env", "HF_HUB_OFFLINE=0", "--env", f"HF_ENDPOINT={address}")
        small = ("--tmpfs", "/home/kvq:size=64m,mode=1777")
        status, log = ended(container("full", f"--model-path={REPOSITORY}", options=(*RESTRICTED, *hub, *small)))
    assert status not in (0, 143)
    said(log, "No space left on device")


def test_two_replicas_fill_one_volume(container: Make, readable: Path, tmp_path: Path) -> None:
    volume = tmp_path / "home"
    volume.mkdir()
    volume.chmod(0o777)
    with hub_server({"main": ("1" * 40, readable)}) as (address, _):
        hub = ("--env", "HF_HUB_OFFLINE=0", "--env", f"HF_ENDPOINT={address}", "-v", f"{volume}:/home/kvq")
        servers = [container(n, f"--model-path={REPOSITORY}", options=(*RESTRICTED, *hub)) for n in ("one", "two")]
        try:
            with ThreadPoolExecutor() as pool:  # until the end: a server ends with the thread that started it
                list(pool.map(lambda server: server.start(), servers))
                for server in servers:
                    assert refusal(server, key=None, text="Hello")[0] == 200
        finally:
            for server in servers:
                server.stop()
