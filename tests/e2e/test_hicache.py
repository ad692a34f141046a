"""Quantized pages go to host memory and to storage; answers from them equal those of pages that stayed."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.rotations import save_rotations
from tests.e2e.client import Client
from tests.e2e.test_server_metrics import eventually
from tests.rotations.helpers import random_transform

#: The device has 24 pages, which four prompts fill, and then seven BF16 pages.
FLAGS = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "3", "--hicache-storage-backend", "file"),
    *("--hicache-storage-prefetch-policy", "wait_complete", "--kv-quant-recent", "64"),
    *("--max-total-tokens", str(24 * PAGE_SIZE), "--max-running-requests", "1"),
    *("--chunked-prefill-size", "128"),
    *("--enable-cache-report", "--enable-metrics", "--decode-log-interval", "1"),
)
#: Whole pages of a prompt, and tokens after them.
PAGES, MORE = 5, 20
CACHED = PAGES * PAGE_SIZE
PLACES = ("device", "host", "storage")


def prompt(index: int) -> list[int]:
    numbers = random.Random(index)
    return [numbers.randrange(100, 500) for _ in range(CACHED + MORE)]


def ask(client: Client, index: int) -> tuple[dict[str, int], list[float]]:
    return read(client, prompt(index))


def read(client: Client, ids: list[int]) -> tuple[dict[str, int], list[float]]:
    """Returns where a prompt's tokens were cached, and the log-probabilities of its last tokens and of the answer."""
    meta = client.generate(ids, 3, return_logprob=True, logprob_start_len=CACHED + 1)["meta_info"]
    found = meta.get("cached_tokens_details") or {}
    logprobs = [entry[0] for entry in meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]]
    return {place: found.get(place) or 0 for place in PLACES}, logprobs


def at(place: str, tokens: int = CACHED) -> dict[str, int]:
    return {**dict.fromkeys(PLACES, 0), place: tokens}


def files_in(folder: Path) -> tuple[str, str]:
    """Returns flags with which SGLang's file storage uses this folder."""
    return "--hicache-storage-backend-extra-config", json.dumps({"file_storage_path": str(folder)})


def push_out(client: Client) -> None:
    """Fills the device with other prompts' pages."""
    for index in range(10, 15):
        ask(client, index)


@pytest.fixture(scope="module")
def storage(tmp_path_factory) -> Path:
    """Returns the folder with the pages of all servers in this file."""
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def small_host(plugins) -> dict[str, str]:
    """Returns variables of a server that uses host memory although there is little."""
    return plugins("small_host")


@pytest.fixture
def start(servers, small_host, storage) -> Callable[..., Client]:
    """``start(*flags)`` returns a client of a server with an empty cache; with ``fresh``, one that kills the last."""

    def go(*flags: str, fresh: bool = False) -> Client:
        client = Client(servers(*flags, *FLAGS, *files_in(storage), env=small_host, model=servers.shallow, fresh=fresh))
        client.flush()
        return client

    return go


def stayed(client: Client) -> list[float]:
    """Returns prompt 0's answer from pages that stayed on the device while other prompts took their BF16 pages."""
    place, _ = ask(client, 0)
    assert place == at("device", 0), "nothing is cached yet"
    for index in range(20, 30):  # one page each, which stays in BF16 longer than an older sink
        client.generate(prompt(index)[: PAGE_SIZE + 8], 1)
    place, logprobs = ask(client, 0)
    assert place == at("device")
    return logprobs


def wait_for(holds: Callable[[], bool], what: str) -> None:
    deadline = time.time() + 300
    while not holds():
        assert time.time() < deadline, what
        time.sleep(0.2)


def page_names(index: int) -> list[str]:
    """Returns SGLang's names of a prompt's pages, without the part for the model."""
    from sglang.srt.mem_cache.utils import get_hash_str

    names: list[str] = []
    for page in range(PAGES):
        names.append(get_hash_str(prompt(index)[page * PAGE_SIZE :][:PAGE_SIZE], names[-1] if names else None))
    return names


def stored(storage: Path, index: int, method: str = "int2") -> list[Path]:
    """Waits until all of a prompt's pages are stored; returns their files."""
    found: list[Path] = []

    def there() -> bool:
        found[:] = [file for name in page_names(index) for file in storage.glob(f"{name}*-kvq2-{method}-*.bin")]
        return len(found) == PAGES

    wait_for(there, "pages do not arrive in storage")
    return found


def come_back(client: Client) -> None:
    """Asserts that prompt 0's answers from host and storage equal the answer from pages that stayed."""
    want = stayed(client)
    push_out(client)
    place, logprobs = ask(client, 0)
    assert place == at("host") and logprobs == want
    client.flush()
    place, logprobs = ask(client, 0)
    assert place == at("storage") and logprobs == want


def test_answers_from_host_and_storage_are_those_of_pages_that_stayed(start, storage):
    client = start("--kv-quant", "int2")
    come_back(client)
    files, state = list(storage.glob("*.bin")), client.state()
    assert len(files) >= PAGES and all("-kvq2-int2-" in file.name for file in files)
    assert {file.stat().st_size for file in files} == {state["host_page_bytes"]}
    assert state["host_page_bytes"] < PAGE_SIZE * state["bf16_token_bytes"] / 5
    assert state["errors"] == 0 and state["damaged_pages"] == 0 and state["shared_memory"]


def test_a_damaged_file_is_a_miss_and_is_written_again(start, storage):
    client, mine = start("--kv-quant", "int2"), 50
    ask(client, mine)
    file = stored(storage, mine)[3]
    good = file.read_bytes()
    file.write_bytes(good[:1000] + bytes([good[1000] ^ 4]) + good[1001:])
    client.flush()
    assert ask(client, mine)[0] == at("storage", 3 * PAGE_SIZE)
    eventually(client, lambda values: values.get("sglang_kvq_damaged_pages_total") == 1)
    wait_for(file.exists, "the page is not written again")

    file = stored(storage, mine)[1]
    file.write_bytes(good[:-1])
    client.flush()
    assert ask(client, mine)[0] == at("storage", PAGE_SIZE)
    assert client.state()["damaged_pages"] == 2 and client.state()["errors"] == 0


def test_a_killed_server_leaves_its_pages(start, storage):
    """The next server gives the same answer from files. A page that was being written is whole or a miss."""
    client, mine, others = start("--kv-quant", "int2"), 60, range(61, 66)
    ask(client, mine)
    stored(storage, mine)
    client.flush()
    place, want = ask(client, mine)
    assert place == at("storage")
    files = len(list(storage.glob("*.bin")))
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(ask, client, index) for index in others]
        wait_for(lambda: len(list(storage.glob("*.bin"))) > files, "no page is being written")
        again = start("--kv-quant", "int2", fresh=True)
        lost = [one.exception() for one in asked]
    assert any(lost), "the setting: requests were running"
    assert ask(again, mine) == (at("storage"), want)
    for index in others:
        ask(again, index)
        stored(storage, index)
        again.flush()
        assert ask(again, index)[0] == at("storage")
    assert again.state()["errors"] == 0


def test_write_back(start):
    """Pages go to the host only when they are evicted."""
    client = start("--kv-quant", "int4", "--hicache-write-policy", "write_back")
    want = stayed(client)
    push_out(client)
    place, logprobs = ask(client, 0)
    assert place == at("host") and logprobs == want
    assert client.state()["errors"] == 0


def test_first_tokens_come_along(start, servers, tmp_path):
    """Transform coding reads first tokens in BF16, so the answers are equal only if the host has kept these."""
    config = json.loads((servers.shallow / "config.json").read_text())
    heads = config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotations = random_transform(config["num_hidden_layers"], heads, dim)
    save_rotations(rotations, tmp_path / "rotations", kv_heads=heads)
    client = start("--kv-quant", "transform", "--kv-quant-rotations", str(tmp_path / "rotations"))
    want = stayed(client)
    push_out(client)
    place, logprobs = ask(client, 0)
    assert place == at("host") and logprobs == want
    client.flush()
    place, logprobs = ask(client, 0)
    assert place == at("storage") and logprobs == want
    assert client.state()["errors"] == 0


def test_host_memory_as_a_buffer(start, storage):
    """A buffer keeps nothing: pages come back from storage, and a page that storage lost is written again."""
    client = start("--kv-quant", "hadamard", "--hicache-host-memory-mode", "buffer_only")
    want = stayed(client)
    file = stored(storage, 0, "hadamard")[3]
    for leaves in (push_out, Client.flush):
        leaves(client)
        place, logprobs = ask(client, 0)
        assert place == at("storage") and logprobs == want
    good = file.read_bytes()
    file.write_bytes(good[:1000] + bytes([good[1000] ^ 4]) + good[1001:])
    client.flush()
    assert ask(client, 0)[0] == at("storage", 3 * PAGE_SIZE)
    # SGLang believes that the page is stored until it asks once more.
    client.flush()
    ask(client, 0)
    wait_for(file.exists, "the page is not written again")
    client.flush()
    assert ask(client, 0)[0] == at("storage")
    assert client.state()["damaged_pages"] == 1 and client.state()["errors"] == 0
