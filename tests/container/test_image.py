"""The image serves where little is allowed, and says with its exit status how it ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_kvq import __version__
from sglang_kvq.server_process import OPENER, ServerFailed
from tests.container.image import BASE, IMAGE, RESTRICTED, Container, Images

pytestmark = pytest.mark.timeout(1200)
Make = Callable[..., Container]


def ask(server: Container, path: str, body: Any = None) -> Any:
    """Returns the JSON that the server answers."""
    data = None if body is None else json.dumps(body).encode()
    with OPENER.open(urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})) as answer:
        return json.load(answer)


def generate(server: Container, tokens: int) -> int:
    """Returns the number of tokens that the server answers."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    answer = ask(server, "/generate", {"text": "Once upon a time", "sampling_params": sampling})
    return int(answer["meta_info"]["completion_tokens"])


@pytest.fixture(scope="module")
def restricted(container: Make) -> Iterator[Container]:
    with container("restricted", options=RESTRICTED) as server:
        yield server


def test_labels(images: Images) -> None:
    asked = subprocess.run(images.podman("image", "inspect", IMAGE), capture_output=True, check=True)
    (image,) = json.loads(asked.stdout)
    labels = {key.removeprefix("org.opencontainers.image."): value for key, value in image["Labels"].items()}
    assert labels["version"] == __version__ and labels["base.name"] == BASE and labels["licenses"] == "Apache-2.0"
    assert image["User"] == "10001"


def test_unknown_user_with_a_read_only_root_is_served(restricted: Container) -> None:
    assert generate(restricted, 8) == 8
    assert ask(restricted, "/server_info")["kv_quant"]["method"] == "int4", "the default needs no download"
    assert restricted.execute("id", "-u").stdout.strip() == "123456"
    assert restricted.execute("touch", "/etc/mark").returncode != 0


def test_health_check_asks_the_port_that_is_served(restricted: Container) -> None:
    assert restricted.port != 30000
    checked = restricted.execute("health.sh")
    assert checked.returncode == 0, checked.stderr


def test_killed_scheduler_ends_the_container_with_an_error(restricted: Container) -> None:
    os.kill(restricted.pid("sglang::scheduler"), signal.SIGKILL)
    assert restricted.status() not in (0, 143), restricted.log_tail()


def test_broken_weights_end_the_container_with_an_error(container: Make, readable: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(readable, tmp_path / "model")
    (weights,) = copy.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[: 1 << 20])
    broken = container("broken", model=copy)
    with pytest.raises(ServerFailed):
        broken.start()
    assert broken.status() not in (0, 143), broken.log_tail()
    assert "SafetensorError" in broken.log()


def test_termination_finishes_what_runs_and_a_config_file_chooses_the_method(container: Make, tmp_path: Path) -> None:
    chosen = tmp_path / "serve.yaml"
    chosen.write_text("kv-quant: hadamard\n")
    with container("config", "--config", "/serve.yaml", options=("-v", f"{chosen}:/serve.yaml:ro")) as server:
        assert ask(server, "/server_info")["kv_quant"]["method"] == "hadamard"
        answers: list[int] = []
        asking = threading.Thread(target=lambda: answers.append(generate(server, 64)))
        asking.start()
        while not ask(server, "/v1/loads")["loads"][0]["num_running_reqs"]:
            assert asking.is_alive(), "it was answered before it could be seen running"
        os.kill(server.pid("tini"), signal.SIGTERM)
        asking.join(300)
        assert answers == [64], server.log_tail()
        assert server.status() == 0, server.log_tail()


def test_unwritable_cache_is_named_before_the_server_starts(container: Make, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o755)
    refused = container("unwritable", options=(*RESTRICTED, "-v", f"{foreign}:/home/kvq:ro"))
    with pytest.raises(ServerFailed):
        refused.start()
    assert refused.status() == 1
    for named in ("user 123456 cannot write", "HOME /home/kvq", "/home/kvq/.triton/cache", "/.cache/flashinfer"):
        assert named in refused.log()


def test_form_of_config_that_sglang_ignores_is_refused(container: Make) -> None:
    refused = container("ignored", "--config=/serve.yaml")
    with pytest.raises(ServerFailed):
        refused.start()
    assert refused.status() == 2 and "Write --config FILE." in refused.log()
