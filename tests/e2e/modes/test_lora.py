"""Adapters on queries, keys, values and outputs, over a cache that rotates values.

The value rotation may not be folded into the weights, because an adapter adds to V and reads the attention's output in
the model's own basis. With folding, a server would answer wrongly, but only with adapters.
"""

from __future__ import annotations

import pytest

from benchmarks import tiny_adapters
from benchmarks.answers import another_page, check, greedy, steps, token_difference
from benchmarks.tiny_models import MODELS, VOCABULARY
from launch.server import Server
from tests.e2e.client import Client
from tests.e2e.conftest import ON_GPU
from tests.e2e.modes.tiny import FLAGS, LONG, OURS, SHORT, after_windows, read, write
from tests.e2e.test_serving import assert_empties
from tests.gpu.families import ROUNDING, prompt

NAMES = (None, "first", "second")
LORA = (*tiny_adapters.FLAGS, *(() if ON_GPU else ("--lora-backend", "torch_native")))


@pytest.fixture(scope="module")
def serve(servers, plugins, tmp_path_factory):
    """``serve(*flags)`` returns a server with two adapters."""
    folder, env = tmp_path_factory.mktemp("adapters"), {} if ON_GPU else plugins("lora_on_cpu")
    model = write(folder)
    adapters = [(name, tiny_adapters.write(folder / name, MODELS["llama"], n)) for n, name in enumerate(NAMES) if name]
    paths = [f"{name}={path}" for name, path in adapters]
    return lambda *flags: servers(*FLAGS, *flags, *LORA, "--lora-paths", *paths, model=model, env=env)


@pytest.fixture(scope="module")
def plain(serve) -> dict[tuple, list[float]]:
    """Returns log-probabilities with SGLang's own cache, by adapter and prompt; one prompt has a wrong page."""
    server, said = serve(), {}
    for name in NAMES:
        for kind, ids in prompts().items():
            said[name, kind] = read(server, ids, lora_path=name)
    return said


@pytest.fixture(scope="module")
def ours(plain, serve) -> Server:
    return serve(*OURS)


def prompts() -> dict[str, list[int]]:
    long = prompt("long", LONG)
    return {"short": prompt("short", SHORT), "long": long, "wrong page": another_page(long, 1, 0, VOCABULARY)}


def test_values_are_rotated_at_run_time(ours):
    assert Client(ours).state()["v_rotation_folded"] is False
    assert "rotates V at run time, not in the weights: --enable-lora" in ours.log()


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_answers_as_over_sglangs_own_cache(ours, plain, name):
    """In BF16 an answer differs by noise, in four bits by less than half of a wrong page; adapters are far apart."""
    said = {kind: read(ours, ids, lora_path=name) for kind, ids in prompts().items() if kind != "wrong page"}
    found = token_difference(said["short"], plain[name, "short"])
    others = [token_difference(said["short"], plain[other, "short"]).mean for other in NAMES if other != name]
    print(f"{name}: {found}, other adapters {others}")
    assert found.mean < ROUNDING < 0.3 < min(others)
    wrong = after_windows(plain[name, "wrong page"], plain[name, "long"]).mean
    assert after_windows(said["long"], plain[name, "long"]).mean < wrong / 2


def test_a_prefix_is_found_with_its_own_adapter_only(ours):
    Client(ours).flush()
    ids, cached = prompt("shared", LONG), {}
    for turn in range(2):
        for name in NAMES:
            reply = greedy(ours, ids, 4, lora_path=name)
            cached[turn, name] = reply["meta_info"]["cached_tokens"]
    assert [cached[0, name] for name in NAMES] == [0, 0, 0]
    assert [cached[1, name] for name in NAMES] == [LONG // 64 * 64] * 3


def test_adapters_in_one_batch_answer_like_each_alone(ours):
    """Answers begin in one batch; each is then forced, by its own adapter over its own pages."""
    Client(ours).flush()
    ids = [prompt(f"together {n}", 300 + 70 * n) for n in range(3)]
    replies = greedy(ours, ids, 40, lora_path=list(NAMES))
    for each, name, reply in zip(ids, NAMES, replies):
        assert len(steps(reply)) == 40
        found = check(ours, each, reply, lora_path=name)
        print(f"{name}: {found}")
        assert found.mean < 3 * ROUNDING
    assert Client(ours).state()["errors"] == 0
    assert_empties(Client(ours))
