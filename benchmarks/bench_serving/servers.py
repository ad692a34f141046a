"""The servers that are compared: one model with different caches, and otherwise the same flags."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import late_kernels
from benchmarks.bench_serving.words import write_tokenizer
from benchmarks.capacity import geometry_and_flags, random_rotations, random_transform
from benchmarks.tiny_server import plugin_path
from launch.server import Server
from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.specs import FP8, REFERENCE, MethodSpec, parse
from sglang_kvq.methods import get_method
from sglang_kvq.methods.base import RotationKind
from sglang_kvq.sglang.observe import QUIET

#: Tokens per event of a stream; with many tokens, neither server's nor client's Python dominates the measurement.
EVENT = 8
RECENT_MIN = "--kv-quant-recent-min"
#: Tokens that a chat template may add to a conversation; a text's tokens may also be more than it was made of.
TEMPLATE = 512
#: Extra seconds for the check that an idle server makes.
GRACE = 5.0


@dataclass(frozen=True)
class Setup:
    """A model and the settings that all its servers share.

    Attributes:
        layers: number of the model's first layers to use; None for all.
        shared: further flags of all servers.
        plain: further flags of servers without ``--kv-quant``.
        recent_min: ``--kv-quant-recent-min`` of servers with ``--kv-quant``; None for the default.
    """

    model: Path
    layers: int | None
    shared: tuple[str, ...]
    plain: tuple[str, ...]
    recent_min: int | None
    cpu: bool

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.model / "config.json").read_text())
        return config

    @property
    def has_weights(self) -> bool:
        return any(self.model.glob("*.safetensors"))

    def tokenizer(self, folder: Path) -> Path:
        """Returns the model's tokenizer, or, if it has none, a tokenizer of words that is written to ``folder``."""
        if (self.model / "tokenizer_config.json").exists():
            return self.model
        return write_tokenizer(folder / "tokenizer", self.config["vocab_size"])


def label(spec: MethodSpec, setup: Setup) -> str:
    """Returns a method's name in the result file, which includes everything that distinguishes it."""
    if setup.recent_min is None or spec.method in (REFERENCE, "fp8"):
        return spec.label
    return f"{spec.label} {RECENT_MIN} {setup.recent_min}"


def specs_of(words: str) -> list[MethodSpec]:
    """Parses ``--methods``.

    Raises:
        KVQuantError: a method is unknown, or names a chunk size.
    """
    for word in words.split(","):
        if "#" in word:
            raise KVQuantError(f"--methods {word}: every server has SGLang's own chunk size. Leave out what follows #.")
    return [parse(word.strip()) for word in words.split(",")]


def method_flags(spec: MethodSpec, setup: Setup, folder: Path) -> list[str]:
    """Returns the flags of a method; a model without weights gets random rotations."""
    if spec.method == REFERENCE:
        return [*setup.plain, *spec.extra]
    if spec.method == "fp8":
        return ["--kv-cache-dtype", FP8[spec.bits], *setup.plain, *spec.extra]
    flags = ["--kv-quant", spec.method, *(["--kv-quant-bits", spec.bits] if spec.bits else [])]
    rotations = spec.rotations
    if not rotations and not setup.has_weights and get_method(spec.method).rotation is RotationKind.LEARNED:
        geometry, _ = geometry_and_flags(setup.model, setup.layers)
        make = random_transform if spec.method == "transform" else random_rotations
        rotations = str(make(folder / f"rotations-{spec.method}", *geometry))
    flags += ["--kv-quant-rotations", rotations] if rotations else []
    flags += [RECENT_MIN, str(setup.recent_min)] if setup.recent_min is not None else []
    return [*flags, *spec.extra]


def server(spec: MethodSpec, setup: Setup, tokenizer: Path, context: int, folder: Path) -> Server:
    """Returns the server of a method, not yet started; its log is in ``folder``.

    Args:
        context: tokens of the longest request, including its answer.
    """
    _, cut = geometry_and_flags(setup.model, setup.layers)
    flags = ["--tokenizer-path", str(tokenizer), "--enable-metrics", "--stream-interval", str(EVENT)]
    flags += ["--random-seed", "0", "--skip-server-warmup", "--context-length", str(context + TEMPLATE), *cut]
    flags += [] if setup.has_weights else ["--load-format", "dummy"]
    flags += [*setup.shared, *method_flags(spec, setup, folder)]
    env = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1", "HF_HUB_OFFLINE": "1"}
    env |= late_kernels.ENV | plugin_path(folder / "plugin")
    return Server(setup.model, *flags, cpu=setup.cpu, env=env, log_path=folder / f"{spec.slug}.log")


def facts(running: Server, spec: MethodSpec) -> dict[str, Any]:
    """Returns a row's facts about its server, and checks that the server uses the requested cache.

    Raises:
        KVQuantError: it uses another cache.
    """
    info = running.info()
    state = info["internal_states"][0]
    plugin = state.get("kv_quant")
    dtype = str(info.get("kv_cache_dtype", "auto"))
    served = plugin["method"] if plugin else "fp8" if "fp8" in dtype else REFERENCE
    if served != spec.method:
        raise KVQuantError(f"--methods {spec.label}: the server's cache is {served}. Read its log.")
    plain_bits = 8.0 if spec.method == "fp8" else 16.0
    return {
        "cache_tokens": info["max_total_num_tokens"],
        "most_requests": state.get("effective_max_running_requests_per_dp"),
        "allocated_bits": plugin["record_bits_per_element"] if plugin else plain_bits,
        "attention_backend": info.get("attention_backend"),
    }


def warm_up(running: Server, lengths: Sequence[int], vocabulary: int) -> None:
    """Compiles the kernels that workloads need, with new and cached prompts of these lengths and with a few streams.

    Raises:
        KVQuantError: an answer has a wrong length.
    """
    generator = np.random.default_rng(0)
    for length in sorted({*lengths, 64}):
        prompts = generator.integers(0, vocabulary, (2, length)).tolist()
        for asked in (prompts, [[*prompt, 5] for prompt in prompts]):
            body = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
            answers = running.json("/generate", {"input_ids": asked, "sampling_params": body})
            found = {one["meta_info"]["completion_tokens"] for one in answers}
            if found != {12}:
                raise KVQuantError(
                    f"a prompt of {length} tokens: answers of {found} tokens instead of 12. {running.log_tail()}"
                )
    running.drain()


def check_errors(running: Server) -> None:
    """Checks the cache's own error counters.

    Raises:
        KVQuantError: a counter is not 0.
    """
    for state in running.info()["internal_states"]:
        plugin = state.get("kv_quant") or {}
        wrong = {name: plugin[name] for name in ("errors", "damaged_pages") if plugin.get(name)}
        if wrong:
            raise KVQuantError(f"the cache counts {wrong}; no figure is kept. {running.log_tail()}")


def held(running: Server) -> dict[str, int]:
    """Returns what the tiers of an idle server with an empty prefix cache hold: nothing, if no page was lost.

    The cache is emptied twice, with a tiny request in between. Pages that a request frees are released only by the next
    batch, or by a check that the server makes after ``QUIET`` seconds without work.
    """
    running.drain()
    sampling = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
    running.json("/generate", {"input_ids": [[5, 6, 7 + n] for n in range(8)], "sampling_params": sampling})
    running.drain()
    deadline = time.monotonic() + QUIET + GRACE
    while True:
        time.sleep(1.0)
        tiers = (running.info()["internal_states"][0].get("kv_quant") or {}).get("tiers", {})
        left = {name: value for name, value in tiers.items() if value}
        if not left or time.monotonic() > deadline:
            return left
