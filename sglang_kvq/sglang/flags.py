"""Adds the ``--kv-quant`` flags, reads them, and sets the SGLang settings that they imply."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, MutableMapping
from typing import Any

from sglang_kvq.config import DEFAULT_BUDGET, KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.methods import METHOD_NAMES, Method, get_method
from sglang_kvq.methods.base import PLANE_BITS
from sglang_kvq.rotations.identity import cached_layers
from sglang_kvq.sglang import compat
from sglang_kvq.sglang.router import flags as episodic_flags
from sglang_kvq.sglang.runtime import CLI_ATTRIBUTE, attach
from sglang_kvq.sglang.types import ModelConfig, Original, ServerArgs

#: Flag (as an attribute name) and the ``KVQuantConfig`` field that it sets.
FIELDS = {
    "kv_quant": "method",
    "kv_quant_rotations": "rotations",
    "kv_quant_sink": "sink_tokens",
    "kv_quant_recent": "recent_tokens",
    "kv_quant_recent_min": "recent_min",
    "kv_quant_prefill_window": "prefill_window",
    "kv_quant_group_size": "group_size",
    "kv_quant_clip_k": "clip_k",
    "kv_quant_clip_v": "clip_v",
    "kv_quant_bf16_budget": "bf16_budget",
    "kv_quant_bits": "bits",
    "kv_quant_seed": "seed",
}
#: Requests in the largest decode batch that has a CUDA graph, and the least GPU memory in MiB for this limit. For
#: smaller GPUs SGLang deliberately captures few graphs.
DECODE_GRAPHS, _MEMORY = 1024, 60 * 1024
#: Paths whose requests are not logged, unless ``--uvicorn-access-log-exclude-prefixes`` names others.
UNLOGGED = ("/metrics", "/health")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags to a parser, unless the parser has them already."""
    if any(action.dest == "kv_quant" for action in parser._actions):
        return
    methods = "; ".join(f"{name}: {get_method(name).summary} ({get_method(name).paper})" for name in METHOD_NAMES)
    group = parser.add_argument_group("KV cache quantization (sglang-kvq)")
    # Flags that are not given are None, so ``parse_config`` notices typed defaults. KVQuantConfig has the defaults.
    add = group.add_argument

    add(
        "--kv-quant",
        choices=("none", *METHOD_NAMES),
        default="none",
        help=f"Keep most of the KV cache in 1.25 to 4 bits. {methods}. Default: none.",
    )
    add(
        "--kv-quant-bits",
        metavar="BITS|auto:TARGET",
        help="Width of a code. "
        + "; ".join(
            f"{name}: " + ", ".join(f"{w:g}" for w in get_method(name).widths) + _more_widths(get_method(name))
            for name in METHOD_NAMES
        )
        + ". The first is the default. With a half-bit width (2.5), keys get the wider code. auto:2.75 mixes 2 to 4 "
        "bits over layers by their calibrated sensitivity so that at most 2.75 bits per element are allocated, scales "
        "included. transform always allocates what it is given, over layers, keys, values and channels by energy.",
    )
    add("--kv-quant-seed", type=int, metavar="N", help="Seed of random rotations (turboquant). Default: 0.")
    add(
        "--kv-quant-rotations",
        metavar="PATH|HF_REPO",
        help="Rotations of this model: a folder, or org/name[/folder][@revision] on the hub. Default: those that the "
        "method knows for the model. Make your own with `kvq calibrate`.",
    )
    add(
        "--kv-quant-sink",
        type=int,
        metavar="TOKENS",
        help=f"First tokens of a request kept in BF16; a multiple of {PAGE_SIZE}. "
        f"Default: {KVQuantConfig.sink_tokens}.",
    )
    add(
        "--kv-quant-recent",
        type=int,
        metavar="TOKENS",
        help=f"Last tokens of a request kept in BF16; a multiple of {PAGE_SIZE}. "
        f"Default: {KVQuantConfig.recent_tokens}.",
    )
    add(
        "--kv-quant-recent-min",
        type=int,
        metavar="TOKENS",
        help="Recent tokens that every running request keeps in BF16 when BF16 pages run short; a multiple of "
        f"{PAGE_SIZE}. With fewer, more requests run at once. Default: 0 where BF16 pages and records share the "
        "memory, else all.",
    )
    add(
        "--kv-quant-prefill-window",
        type=int,
        metavar="TOKENS",
        help="Tokens before the recent ones that a prefill reads in BF16 too, as far as their BF16 pages have not been "
        f"given to others; a multiple of {PAGE_SIZE}. Default: {KVQuantConfig.prefill_window}.",
    )
    add(
        "--kv-quant-group-size",
        type=int,
        metavar="ELEMENTS",
        help="Elements of a head that share a scale and an offset. Default: head_dim, at most 128.",
    )
    add(
        "--kv-quant-clip-k",
        type=float,
        metavar="RATIO",
        help="Clip keys at this quantile of their magnitude; 1 clips nothing. Default: the calibration's.",
    )
    add(
        "--kv-quant-clip-v",
        type=float,
        metavar="RATIO",
        help="Clip values at this quantile of their magnitude; 1 clips nothing. Default: the calibration's.",
    )
    add(
        "--kv-quant-bf16-budget",
        type=float,
        metavar="SHARE",
        help="Share of the KV memory for BF16 pages, which then bounds the running requests. Default: BF16 pages and "
        f"records share the memory as they need it, or {DEFAULT_BUDGET} where a server cannot.",
    )
    episodic_flags.add_flags(parser)


def _more_widths(method: Method) -> str:
    """Returns the help text for values of ``--kv-quant-bits`` other than the listed widths."""
    if method.planes:
        low, high = PLANE_BITS
        return f" or any number from {low:g} to {high:g}"
    return ", auto" if method.mixed else ""


def add_cli_args(result: None, parser: argparse.ArgumentParser) -> None:
    """AFTER ``ServerArgs.add_cli_args``: adds the flags."""
    add_flags(parser)


def parse_config(values: Mapping[str, Any]) -> KVQuantConfig | None:
    """Returns the configuration that the flags give; None without ``--kv-quant``.

    Raises:
        KVQuantError: a value is out of range, or a flag is given without ``--kv-quant``.
    """
    method = values.get("kv_quant") or "none"
    episodic = episodic_flags.parse(values)
    given = {field: values[flag] for flag, field in FIELDS.items() if values.get(flag) is not None}
    if method == "none":
        for flag, field in FIELDS.items():
            if flag != "kv_quant" and field in given:
                raise KVQuantError(
                    f"--{flag.replace('_', '-')} has no effect without --kv-quant. Add --kv-quant "
                    f"{{{','.join(METHOD_NAMES)}}} or leave it out."
                )
        if episodic is not None:
            raise KVQuantError(
                f"--episodic-policy {episodic.policy} chooses pages of the quantized cache. Add --kv-quant "
                f"{{{','.join(METHOD_NAMES)}}} or leave it out."
            )
        return None
    if "bits" in given:  # numbers, if they come from Engine(kv_quant_bits=3) or YAML
        bits = given["bits"]
        given["bits"] = bits if isinstance(bits, str) else f"{bits:g}" if isinstance(bits, (int, float)) else str(bits)
    return KVQuantConfig(**given, episodic=episodic)


def decode_graphs(values: Mapping[str, Any], model: ModelConfig | None) -> int | None:
    """Returns the largest decode batch for which CUDA graphs are captured; None leaves the choice to SGLang.

    SGLang captures graphs up to the batch that a BF16 cache serves: 256 requests on a GPU of 80 GB. A quantized cache
    serves larger batches. Without a graph, a decode step waits until the host has launched its kernels.
    """
    named = ("cuda_graph_max_bs_decode", "cuda_graph_bs_decode", "speculative_algorithm", "enable_dp_attention")
    if any(values.get(name) for name in named) or values.get("moe_a2a_backend") not in (None, "none"):
        return None  # the user chose a size, or SGLang's buffers grow with the batch
    if model is None or len(cached_layers(model.hf_config)) < model.num_hidden_layers:
        return None  # SGLang's buffers for sliding windows grow with the batch, and recurrent states limit it
    if (compat.gpu_memory() or 0) < _MEMORY:
        return None
    return min(DECODE_GRAPHS, values.get("max_running_requests") or DECODE_GRAPHS)


def complete(
    values: MutableMapping[str, Any], config: KVQuantConfig, device: str, model: ModelConfig | None = None
) -> None:
    """Sets the SGLang settings that ``--kv-quant`` implies. ``checks.check_flags`` has already refused other values."""
    values["page_size"] = PAGE_SIZE
    values["attention_backend"] = compat.attention_backend(device)
    # With "auto" SGLang would use an FP8 cache if the loaded checkpoint asks for one (ModelOpt's kv_cache_quant_algo).
    values["kv_cache_dtype"] = "bfloat16"
    # A calibration would also count the dummy batches with which SGLang captures graphs.
    if config.capture or "breakable" not in compat.prefill_graphs(device):
        values["disable_prefill_cuda_graph"] = True
        values["cuda_graph_backend_prefill"] = None
    if device == "cuda" and (most := decode_graphs(values, model)) is not None:
        values["cuda_graph_max_bs_decode"] = most
    # Otherwise every metrics scrape and every health probe writes a line to the log.
    values["uvicorn_access_log_exclude_prefixes"] = values.get("uvicorn_access_log_exclude_prefixes") or [*UNLOGGED]


def prepare(values: MutableMapping[str, Any]) -> KVQuantConfig | None:
    """Removes the flags from ``values``, checks the remaining settings, and sets those that the flags imply.

    Args:
        values: the dict of a Namespace, or the keywords of Engine.

    Raises:
        KVQuantError: ``--kv-quant`` cannot be combined with a setting in ``values``.
        SystemExit: this SGLang is not as expected, so the checks could miss a symbol that they use.
    """
    from sglang_kvq.sglang import checks, plugin

    config = parse_config(values)
    for flag in (*FIELDS, *episodic_flags.FIELDS):
        values.pop(flag, None)
    if config is not None:
        plugin.stop_unless_in_place(config)
        device = checks.device_of(values)
        checks.check_flags(values, device)
        complete(values, config, device, checks.check_named_model(values, config))
    return config


def from_cli_args(original: Original, cls: type, args: argparse.Namespace) -> ServerArgs:
    """AROUND ``ServerArgs.from_cli_args``: reads the flags and attaches the config to the ServerArgs.

    Raises:
        SystemExit: the flags or this SGLang cannot be served; the message names what is wrong and the fix.
    """
    values = dict(vars(args))
    try:
        config = prepare(values)
    except KVQuantError as error:
        raise SystemExit(f"sglang-kvq: {error}") from None
    if config is None:
        return original(cls, args)
    server_args = original(cls, argparse.Namespace(**values))
    attach(config, server_args)
    setattr(server_args, CLI_ATTRIBUTE, True)
    return server_args
