"""A tiny Qwen2.5-VL: images among words, positions of three axes, and prefixes that differ by an image only."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.answers import greedy_difference, input_logprobs, steps, token_difference
from launch.server import Server
from tests.e2e.client import Client
from tests.e2e.modes import tiny_vision
from tests.e2e.modes.tiny import OURS
from tests.e2e.test_serving import assert_empties
from tests.gpu.families import ROUNDING, prompt

FLAGS = (
    *("--skip-server-warmup", "--random-seed", "0", "--mm-attention-backend", "sdpa"),
    *("--chunked-prefill-size", "128", "--context-length", "1024", "--max-total-tokens", "4096"),
)
RECENT = 512
#: A prompt of 338 tokens lies in sinks and window. Of one of 818, the last words read a history with most of the image.
WORDS = {"short": (20, 60), "long": (90, 470)}
#: Tokens of the long prompt that read no history: sinks, window and a chunk.
BEFORE = 64 + RECENT + 128


def words(name: str) -> str:
    before, after = WORDS[name]
    return tiny_vision.text(prompt(f"{name} before", before), prompt(f"{name} after", after))


def ask(server: Server, name: str, image: int, tokens: int = 1, start: int = 0) -> dict:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    asked = {"text": words(name), "image_data": [tiny_vision.image(image)], "sampling_params": sampling}
    more = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 16 if tokens > 1 else 0}
    return server.json("/generate", {**asked, **more})


@pytest.fixture(scope="module")
def start(servers, tmp_path_factory) -> Callable[..., Server]:
    model = tiny_vision.write(tmp_path_factory.mktemp("images"))
    return lambda *flags: servers(*FLAGS, *flags, model=model)


@pytest.fixture(scope="module")
def plain(start) -> dict[tuple, dict]:
    """What SGLang's own cache says of two images."""
    server = start()
    said = {(name, image): ask(server, name, image) for name in WORDS for image in range(2)}
    return said | {("answer", image): ask(server, "long", image, 30, -1) for image in range(2)}


@pytest.fixture(scope="module")
def ours(plain, start) -> Server:
    return start(*OURS, "--kv-quant-recent", str(RECENT))


def test_images_answer_as_over_sglangs_own_cache(ours, plain):
    Client(ours).flush()
    for name in WORDS:
        for image in range(2):
            reply = ask(ours, name, image)
            theirs, other = (input_logprobs(plain[name, n]) for n in (image, 1 - image))
            at = BEFORE if name == "long" else 20 + tiny_vision.IMAGE_TOKENS
            found = token_difference(input_logprobs(reply)[at:], theirs[at:])
            apart = token_difference(other[at:], theirs[at:])
            print(f"{name}, image {image}: {found}; the other image: {apart}")
            assert found.mean < (ROUNDING if name == "short" else apart.mean / 3)
            assert apart.mean > 0.3, "the image hardly matters"
    assert Client(ours).state()["tiers"]["quantized_tokens"] > 0


def test_a_prefix_with_another_image_is_not_found(ours):
    """Words before the image are; the image's places are keys that its content makes."""
    Client(ours).flush()
    length = sum(WORDS["long"]) + tiny_vision.IMAGE_TOKENS + 2
    cached = [ask(ours, "long", image, start=length - 2)["meta_info"]["cached_tokens"] for image in (0, 1, 0, 1)]
    assert cached == [0, 64, (length - 2) // 64 * 64, (length - 2) // 64 * 64]


def test_answers_after_cached_images_are_those_of_sglangs_own_cache(ours, plain):
    for image in range(2):
        reply = ask(ours, "long", image, 30, -1)
        assert reply["meta_info"]["cached_tokens"] > 512
        found = greedy_difference(steps(reply), steps(plain["answer", image]))
        print(f"answer to image {image}: {found}")
        assert found.tokens > 0 and found.mean < 4 * ROUNDING
    state = Client(ours).state()
    assert state["errors"] == 0 and state["v_rotation_folded"] is False
    assert_empties(Client(ours))
