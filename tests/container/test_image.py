"""The image serves with few permissions, and its exit status says how it ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from sglang_kvq import __version__
from tests.container.image import BASE, IMAGE, RESTRICTED, Container, Images
from tests.container.workshop import KEY, Ended, Workshop, said

pytestmark = pytest.mark.timeout(900)


def asked(server: Container, path: str, key: str | None = None) -> Any:
    """Returns the JSON that the server answers."""
    status, body = server.ask(path, key=key)
    assert status == 200, body
    return json.loads(body)


def generated(server: Container, tokens: int, key: str | None = None) -> int:
    """Returns the number of tokens that the server answers."""
    status, body = server.generate("Once upon a time", tokens, key)
    assert status == 200, body
    return int(json.loads(body)["meta_info"]["completion_tokens"])


def test_labels(images: Images) -> None:
    asked = subprocess.run(images.podman("image", "inspect", IMAGE), capture_output=True, check=True)
    (image,) = json.loads(asked.stdout)
    labels = {key.removeprefix("org.opencontainers.image."): value for key, value in image["Labels"].items()}
    assert labels["version"] == __version__ and labels["base.name"] == BASE and labels["licenses"] == "Apache-2.0"
    assert image["User"] == "10001"


@contextmanager
def broken(workshop: Workshop) -> Iterator[Container]:
    copy = shutil.copytree(workshop.readable, workshop.logs / "broken model")
    (weights,) = copy.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[: 1 << 20])
    yield workshop.container("broken", model=copy)


@pytest.mark.ending.with_args(broken)
def test_broken_weights_end_the_container_with_an_error(ended: Ended) -> None:
    assert ended.status not in (0, 143), ended.log
    said(ended.log, "SafetensorError")


@contextmanager
def unwritable(workshop: Workshop) -> Iterator[Container]:
    foreign = workshop.logs / "foreign"
    foreign.mkdir(mode=0o755)
    yield workshop.container("unwritable", options=(*RESTRICTED, "-v", f"{foreign}:/home/kvq:ro"))


@pytest.mark.ending.with_args(unwritable)
def test_unwritable_cache_is_named_before_the_server_starts(ended: Ended) -> None:
    assert ended.status == 1
    said(ended.log.replace("123456", "10001"), "user 10001 cannot write:")
    for named in ("HOME /home/kvq", "/home/kvq/.cache/sglang/triton", "/.cache/flashinfer"):
        assert named in ended.log


@contextmanager
def ignored(workshop: Workshop) -> Iterator[Container]:
    yield workshop.container("ignored", "--config=/serve.yaml")


@pytest.mark.ending.with_args(ignored)
def test_form_of_config_that_sglang_ignores_is_refused(ended: Ended) -> None:
    assert ended.status == 2 and "Write --config FILE." in ended.log


def test_unknown_user_with_a_read_only_root_is_served(restricted: Container) -> None:
    assert generated(restricted, 8, KEY) == 8
    assert asked(restricted, "/server_info", KEY)["kv_quant"]["method"] == "int4", "the default needs no download"
    assert restricted.execute("id", "-u").stdout.strip() == "123456"
    assert restricted.execute("touch", "/etc/mark").returncode != 0


def test_health_check_asks_the_port_that_is_served(restricted: Container) -> None:
    assert restricted.port != 30000
    checked = restricted.execute("health.sh")
    assert checked.returncode == 0, checked.stderr


def test_killed_scheduler_ends_the_container_with_an_error(restricted: Container) -> None:
    os.kill(restricted.pid("sglang::scheduler"), signal.SIGKILL)
    assert restricted.status(60) not in (0, 143), restricted.log_tail()


def test_termination_finishes_what_runs_and_a_config_file_chooses_the_method(configured: Container) -> None:
    assert asked(configured, "/server_info")["kv_quant"]["method"] == "hadamard"
    answers: list[int] = []
    asking = threading.Thread(target=lambda: answers.append(generated(configured, 256)))
    asking.start()
    while not asked(configured, "/v1/loads")["loads"][0]["num_running_reqs"]:
        assert asking.is_alive(), "it was answered before it could be seen running"
    os.kill(configured.pid("tini"), signal.SIGTERM)
    asking.join(300)
    assert answers == [256], configured.log_tail()
    assert configured.status() == 0, configured.log_tail()
