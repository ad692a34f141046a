"""The installed SGLang's own test kits (``sglang.test``) against a running server.

    python -m tests.gpu.kits --url http://127.0.0.1:30000 --kl 0.02 --output kits.json

The server's model needs a tokenizer and at least 32,000 tokens. ``streaming_sessions``, ``running_timeout`` and
``waiting_timeout`` need a server started for them (``NEEDS``) and run only when named by ``--kits``. The end-to-end
tests call the same functions with sizes for a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import random
import re
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace

import requests
from transformers import AutoTokenizer

from tests.e2e.client import held_out_text

PAGE = 64


@dataclass(frozen=True)
class Sizes:
    """Amounts of work for the kits; lengths in tokens."""

    clients: int
    rounds: int
    turn: int
    answer: int
    tree_nodes: int
    tree_chunk: int
    groups: int
    branches: int
    prefix: int
    jitter_prefixes: int
    jitter_requests: int
    jitter_prefix: tuple[int, int]
    jitter_answer: int
    at_once: int
    pause_answer: int
    pause_seconds: float


GPU = Sizes(
    clients=16,
    rounds=6,
    turn=700,
    answer=64,
    tree_nodes=400,
    tree_chunk=256,
    groups=3,
    branches=3,
    prefix=512,
    jitter_prefixes=8,
    jitter_requests=8,
    jitter_prefix=(500, 1500),
    jitter_answer=256,
    at_once=32,
    pause_answer=1024,
    pause_seconds=5,
)
CPU = Sizes(
    clients=2,
    rounds=3,
    turn=80,
    answer=6,
    tree_nodes=12,
    tree_chunk=16,
    groups=2,
    branches=2,
    prefix=128,
    jitter_prefixes=2,
    jitter_requests=1,
    jitter_prefix=(80, 150),
    jitter_answer=80,
    at_once=3,
    pause_answer=100,
    pause_seconds=2,
)


@dataclass
class Target:
    """The server that a kit tests.

    Attributes:
        kl: the largest KL between a token's log-probabilities of decoding and of prefilling, as the kits measure it.
        tolerance: the largest difference between log-probabilities of the same context in different batches.
    """

    url: str
    sizes: Sizes = GPU
    kl: float = 0.02
    tolerance: float = 0.4

    @cached_property
    def model(self) -> str:
        response = requests.get(f"{self.url}/server_info", timeout=30)
        response.raise_for_status()
        return response.json()["tokenizer_path"]

    @cached_property
    def tokenizer(self):
        return AutoTokenizer.from_pretrained(self.model)

    def poll(self) -> int | None:
        """Returns None while the server answers, like ``poll`` of a running process."""
        with contextlib.suppress(requests.RequestException):
            if requests.get(f"{self.url}/health", timeout=60).status_code == 200:
                return None
        return 1

    def texts(self, count: int, tokens: int) -> list[list[int]]:
        """Returns different pieces of English, as ids."""
        ids = self.tokenizer(held_out_text()).input_ids
        if len(ids) < count * tokens:
            ids = self.tokenizer(held_out_text(everything=True)).input_ids
        if len(ids) < count * tokens:
            raise ValueError(f"{count} texts of {tokens} tokens: there are only {len(ids)}; use smaller sizes.")
        return [ids[i * tokens : (i + 1) * tokens] for i in range(count)]

    def suffixes(self, count: int, tokens: int, seed: int) -> list[list[int]]:
        rng = random.Random(seed)
        return [[rng.randint(1, 30000) for _ in range(tokens)] for _ in range(count)]


def _kit(name: str) -> ModuleType:
    """Imports ``sglang.test.NAME``. Some kits import the ``datasets`` package for samples that are not used here."""
    if "datasets" not in sys.modules and importlib.util.find_spec("datasets") is None:
        absent = ModuleType("datasets")
        absent.load_dataset = absent.Dataset = absent.load_from_disk = None
        sys.modules["datasets"] = absent
    return importlib.import_module(f"sglang.test.{name}")


def _run_case(target: Target, mixin: type, tests: tuple[str, ...], **attributes) -> dict:
    """Runs methods of a kit that is written as a mixin of ``unittest``.

    Raises:
        AssertionError: a method failed; the message is its traceback.
    """
    names = {"base_url": target.url, "process": SimpleNamespace(poll=target.poll), "model": target.model}
    case = type(mixin.__name__, (mixin, unittest.TestCase), {**names, **attributes})
    result = unittest.TestResult()
    unittest.TestSuite(case(name) for name in tests).run(result)
    for _, text in (*result.errors, *result.failures):
        raise AssertionError(text)
    assert target.poll() is None, "the server no longer answers"
    return {"tests": result.testsRun}


# -- the prefix cache ------------------------------------------------------------------------------------------------


def cache_hit(target: Target) -> dict:
    """Runs turns of several clients: all earlier tokens must be found in the cache, to the page."""
    size = target.sizes
    conversations = [
        {"conversations": [{"value": target.tokenizer.decode(ids)}, {"value": "."}]}
        for ids in target.texts(size.clients * size.rounds, size.turn // 2)
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as samples:
        json.dump(conversations, samples)
        samples.flush()
        result = _kit("kits.cache_hit_kit").run_multiturn_cache_hit_test(
            target.url,
            target.model,
            num_clients=size.clients,
            num_rounds=size.rounds,
            request_length=size.turn,
            output_length=size.answer,
            dataset_path=samples.name,
        )
    overall = result["overall"]
    assert overall["total_cached_tokens"] > 0
    return {"hit_rate": round(overall["cache_hit_rate"], 4), "cached_tokens": overall["total_cached_tokens"]}


def branching(target: Target) -> dict:
    """Runs the prefix-branching kit: one prefix continues in three ways, and each finds it in the cache.

    The kit itself expects the behavior of recurrent models, whose tree keeps a branching point only from the second
    visit on. With attention alone the second request already finds the prefix.
    """

    class Case(_kit("kits.prefix_cache_branching_kit").PrefixCacheBranchingMixin):
        base_url = target.url

    assert requests.post(f"{target.url}/flush_cache", timeout=60).status_code == 200
    prefix = "hi" * 257
    replies = [Case.send_request_helper(prefix + word * 4 * PAGE) for word in ("this", "here", "that")]
    cached = [reply["meta_info"]["cached_tokens"] for reply in replies]
    # Plain SGLang caches single tokens, so it may also find a part of the following word; only whole pages count.
    assert [n // PAGE * PAGE for n in cached] == [0, 256, 256], cached
    return {"cached": cached}


def radix_tree(target: Target) -> dict:
    """Runs a random tree of prompts all at once, each with an answer of another length."""
    kit, size = _kit("kits.radix_cache_server_kit"), target.sizes

    def tree() -> list[dict]:
        random.seed(5)
        nodes = generate(size.tree_nodes, size.tree_chunk)
        return [
            {**node, "decode_len": min(node["decode_len"], size.tree_chunk)} for node in nodes
        ]  # the kit fixes the root's length

    generate = kit.gen_radix_tree
    with _patched(kit, "gen_radix_tree", tree):
        kit.run_radix_attention_test(target.url)
    return {"requests": size.tree_nodes + 1}


# -- log-probabilities -----------------------------------------------------------------------------------------------


def multiturn_kl(target: Target) -> dict:
    """Runs three turns in interleaved branches, without and with cache hits, and replays them as prefills."""
    kit, size = _kit("kl_multiturn_utils"), target.sizes
    count = size.groups * size.branches
    texts = target.texts(count, size.prefix)
    turns = [target.suffixes(count, length, seed) for seed, length in enumerate((size.turn // 2, size.turn // 3))]
    found = kit.make_mamba_decode_assert(PAGE)  # the number of tokens that must be cached, in whole pages
    common = dict(
        turn_suffixes=turns, max_new_tokens=2 * size.answer, assert_decode_cached_tokens=found, replay_batch_size=2
    )
    shared = [texts[i // size.branches] for i in range(count)]
    whole = [ids + more for ids, more in zip(shared, target.suffixes(count, size.turn // 3, 11))]
    runs = {
        "multiturn": partial(kit.test_input_output_logprobs_match_helper, input_ids=texts),
        "prefill_hit": partial(
            kit.test_input_output_logprobs_match_prefill_cache_hit_helper,
            prefix_input_ids=shared,
            full_input_ids=whole,
            branches_per_group=size.branches,
            assert_prefill_cached_tokens=kit.make_mamba_prefill_assert(PAGE),
        ),
        "decode_hit": partial(
            kit.test_input_output_logprobs_match_decode_cache_hit_helper,
            first_turn_input_ids=shared,
            branches_per_group=size.branches,
        ),
    }
    figures = {}
    for name, helper in runs.items():
        with contextlib.redirect_stdout(io.StringIO()) as said:
            helper(target.url, target.model, target.kl, **common)
        figures[name] = float(re.findall(r"avg_kl_div=(\S+)", said.getvalue())[-1])
    return figures


def jitter(target: Target) -> dict:
    """Runs prefixes and random cuts of their answers in shuffled batches: one context must score the same in each.

    The kit demands equal bits, which neither BF16 SGLang nor our cache has between batches of different shapes. Here
    log-probabilities may differ by ``tolerance``, and a token where that explains it. The kit's delays of CUDA events
    need an engine that the kit itself starts, so they are left out.
    """
    kit, size, differences = _kit("cache_consistency_jitter"), target.sizes, []

    class Engine:
        def generate(self, **body):
            response = requests.post(f"{target.url}/generate", json=body, timeout=600)
            assert response.status_code == 200, response.text
            return response.json()

        def flush_cache(self):
            return SimpleNamespace(success=requests.post(f"{target.url}/flush_cache", timeout=60).status_code == 200)

    def near(a: dict[int, float], b: dict[int, float]) -> bool:
        lowest = max(min(a.values()), min(b.values()))
        far = max(abs(a.get(t, lowest) - b.get(t, lowest)) for t in a.keys() | b.keys())
        differences.append(far)
        return far <= target.tolerance

    record = kit._record_response

    def record_scores(observations, *args, **kwargs):
        answer = record(observations, *args, **kwargs)
        for seen in observations.values():  # compares scores only, because near-ties may end in different tokens
            seen[:] = [(0, scores) for _, scores in seen]
        return answer

    with _patched(kit, "_topk_equal", near), _patched(kit, "_record_response", record_scores):
        kit.run_jitter_test(
            Engine(),
            num_unique_prefixes=size.jitter_prefixes,
            requests_per_prefix=size.jitter_requests,
            prefix_len_min=size.jitter_prefix[0],
            prefix_len_max=size.jitter_prefix[1],
            new_tokens=size.jitter_answer,
            min_retracted_requests=0,
            vocab_size=30000,
        )
    return {"compared": len(differences), "largest_difference": round(max(differences), 4)}


# -- requests that end early -----------------------------------------------------------------------------------------


def abort_all(target: Target) -> dict:
    return _run_case(
        target,
        _kit("kits.abort_timeout_kit").AbortAllMixin,
        ("test_abort_all",),
        abort_all_num_requests=target.sizes.at_once,
        abort_all_max_new_tokens=1500,
    )


def running_timeout(target: Target) -> dict:
    return _run_case(
        target,
        _kit("kits.abort_timeout_kit").RunningTimeoutTwoWaveMixin,
        ("test_running_timeout_no_crash",),
        running_timeout_num_wave1=target.sizes.at_once,
        running_timeout_num_wave2=target.sizes.at_once,
        running_timeout_sleep=1.5,
        running_timeout_max_new_tokens=1500,
    )


def waiting_timeout(target: Target) -> dict:
    return _run_case(target, _kit("kits.abort_timeout_kit").WaitingTimeoutMixin, ("test_waiting_timeout",))


def pause(target: Target) -> dict:
    kit = _kit("kits.pause_generation_kit")
    with _to_the_end(kit, 1):
        return _run_case(
            target,
            kit.PauseResumeInPlaceMixin,
            ("test_pause_resume_in_place",),
            pause_num_requests=target.sizes.at_once,
            pause_max_new_tokens=target.sizes.pause_answer,
            pause_duration=target.sizes.pause_seconds,
        )


def streaming_sessions(target: Target) -> dict:
    """Runs turns that inherit the cache, and sessions that survive aborts of their first and later turns."""
    kit = _kit("kits.streaming_session_kit")
    tests = ("kv_cache_inheritance", "nth_mid_abort_recovery", "first_mid_abort_recovery", "preabort_recovery")

    with _to_the_end(kit, 1000):
        return _run_case(
            target,
            kit.StreamingSessionKitMixin,
            tuple(f"test_{name}" for name in tests),
            tokenizer=target.tokenizer,
            kv_inherit_offsets=(0, -1),  # without overlap scheduling, the next turn computes the last token
        )


#: Kits for any server, in the order in which ``run`` takes them.
KITS: dict[str, Callable[[Target], dict]] = {
    kit.__name__: kit for kit in (cache_hit, branching, radix_tree, multiturn_kl, jitter, abort_all, pause)
}
#: Kits for servers that are started for them.
MORE = {kit.__name__: kit for kit in (running_timeout, waiting_timeout, streaming_sessions)}
NEEDS = {
    "running_timeout": "SGLANG_REQ_RUNNING_TIMEOUT=3",
    "waiting_timeout": "SGLANG_REQ_WAITING_TIMEOUT=0.01 and --max-running-requests 1",
    "streaming_sessions": "--enable-streaming-session --allow-auto-truncate",
}


def available(kit: str) -> bool:
    """Returns True if the installed release has the kit: the jitter kit came later than the others."""
    return kit != "jitter" or importlib.util.find_spec("sglang.test.cache_consistency_jitter") is not None


def run(url: str, kits: list[str] | None = None, sizes: Sizes = GPU, **limits: float) -> list[dict]:
    """Runs kits one after the other; a failing kit does not stop the next.

    Args:
        kits: names in ``KITS`` and ``MORE``; None means all of ``KITS`` that this release has.
        limits: ``kl`` and ``tolerance`` of ``Target``.

    Returns:
        A row per kit: its name, ``ok``, seconds, and its figures or the error.
    """
    everything, rows = {**KITS, **MORE}, []
    if unknown := set(kits or ()) - set(everything):
        raise ValueError(f"no kit {', '.join(sorted(unknown))}; there are {', '.join(everything)}.")
    target = Target(url.rstrip("/"), sizes, **limits)
    for name in kits or [name for name in KITS if available(name)]:
        begin = time.monotonic()
        try:
            figures = {"ok": True, **everything[name](target)}
        except Exception:  # whatever a kit raises is reported in its row, and the command exits with 1
            figures = {"ok": False, "error": traceback.format_exc()[-2000:]}
        row = {"kit": name, "sglang": version("sglang"), "seconds": round(time.monotonic() - begin, 1), **figures}
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


@contextlib.contextmanager
def _patched(owner: ModuleType, name: str, value) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _to_the_end(kit: ModuleType, tokens: int):
    """Makes answers of at least ``tokens`` tokens ignore EOS; a small model may end before a kit interrupts it."""

    def post(url: str, json: dict | None = None, **options) -> requests.Response:
        sampling = (json or {}).get("sampling_params", {})
        if sampling.get("max_new_tokens", 0) >= tokens:
            json = {**json, "sampling_params": {**sampling, "ignore_eos": True}}
        return requests.post(url, json=json, **options)

    return _patched(kit, "requests", SimpleNamespace(get=requests.get, post=post))


def main() -> int:
    needs = "; ".join(f"{kit}: {what}" for kit, what in NEEDS.items())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="URL of the running server")
    parser.add_argument("--kits", nargs="+", help=f"default: {' '.join(KITS)}. For servers started for them: {needs}")
    parser.add_argument("--cpu-sizes", action="store_true", help="use the small sizes of the tests on a CPU")
    parser.add_argument(
        "--kl",
        type=float,
        default=0.02,
        help="largest KL between decoding and prefilling (default: %(default)s)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.4,
        help="largest difference of log-probabilities in jitter (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, help="JSON file for the rows")
    given = parser.parse_args()
    rows = run(given.url, given.kits, CPU if given.cpu_sizes else GPU, kl=given.kl, tolerance=given.tolerance)
    if given.output:
        given.output.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
