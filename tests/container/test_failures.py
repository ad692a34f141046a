"""Failures in operation, caused on purpose; docs/operations.md describes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sglang_kvq.server_process import free_port
from tests.container.image import RESTRICTED, Container
from tests.container.workshop import KEY, Ended, Workshop, said
from tests.rotations.hub_server import REPOSITORY

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("key", [None, "another key"])
def test_wrong_key(restricted: Container, key: str | None) -> None:
    status, body = restricted.generate("Hello", 1, key)
    assert status == 401
    said(body, "Unauthorized")
    assert restricted.execute("health.sh").returncode == 0, "the health check needs no key"


def test_prompt_longer_than_the_context(restricted: Container) -> None:
    status, body = restricted.generate("Hello " * 10_000, 1, KEY)
    assert status == 400
    said(body, "is longer than the model's context length")
    assert restricted.generate("Hello", 1, KEY)[0] == 200, "it serves on"


def test_body_of_6_megabytes(restricted: Container) -> None:
    status, _ = restricted.generate("Hello " * (1 << 20), 1, KEY)
    assert status == 400
    assert restricted.generate("Hello", 1, KEY)[0] == 200, "it serves on"


def test_two_replicas_fill_one_volume(restricted: Container, configured: Container) -> None:
    """Both replicas start with an empty volume, as different users of group 0; each waits for the other's downloads."""
    for server, key, user in ((restricted, KEY, "123456"), (configured, None, "10001")):
        assert server.generate("Hello", 1, key)[0] == 200
        assert server.execute("id", "-u").stdout.strip() == user
        assert json.loads(server.ask("/server_info", key=key)[1])["model_path"] == REPOSITORY
    files = [
        server.execute("find", "/home/kvq/.cache", "-name", "*.safetensors") for server in (restricted, configured)
    ]
    assert files[0].stdout == files[1].stdout != "", files


@contextmanager
def away(workshop: Workshop) -> Iterator[Container]:
    nobody = ("--env", "HF_HUB_OFFLINE=0", "--env", f"HF_ENDPOINT=http://127.0.0.1:{free_port()}")
    yield workshop.container("away", f"--model-path={REPOSITORY}", options=nobody)


@pytest.mark.ending.with_args(away)
def test_hub_that_cannot_be_reached(ended: Ended) -> None:
    assert ended.status not in (0, 143)
    said(ended.log, "Connection refused")


@contextmanager
def full(workshop: Workshop) -> Iterator[Container]:
    small = ("--tmpfs", "/home/kvq:size=32m,mode=1777")
    options = (*RESTRICTED, *workshop.hub, *small)
    yield workshop.container("full", f"--model-path={REPOSITORY}", options=options)


@pytest.mark.ending.with_args(full)
def test_disk_that_is_full(ended: Ended) -> None:
    assert ended.status not in (0, 143)
    said(ended.log, "No space left on device")
