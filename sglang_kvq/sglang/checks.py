"""Refuses settings that ``--kv-quant`` does not support, and names the fix, before any process is spawned.

Checks run at three moments, each as early as its facts are known. ``check_flags`` and ``check_named_model`` check the
flags as typed. ``check_resolved`` checks the settings that SGLang derived from them. ``after_configure`` checks the
pool that each scheduler uses.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sglang_kvq.config import MAX_GQA_GROUP, KVQuantConfig
from sglang_kvq.constants import HEAD_DIMS, PAGE_SIZE
from sglang_kvq.errors import KVQuantError, typed
from sglang_kvq.releases import NEW_TREE, OLD_TREE, OLD_TREE_RELEASES, RELEASES, WITHOUT_STATES, WITHOUT_WINDOWS
from sglang_kvq.rotations.identity import unapplied_window
from sglang_kvq.sessions.config import EPICACHE
from sglang_kvq.sglang import architectures, compat
from sglang_kvq.sglang.architectures import unsupported_windows
from sglang_kvq.sglang.attention.drafts import BRANCHING, DRAFT_DTYPES, SERVED, check_speculation, keeps_states
from sglang_kvq.sglang.disaggregation import checks as transfers
from sglang_kvq.sglang.hicache import checks as hicache_checks
from sglang_kvq.sglang.memory import stages
from sglang_kvq.sglang.runtime import CLI_ATTRIBUTE, attach, config_of, logger
from sglang_kvq.sglang.types import Configurator, ModelConfig, ServerArgs


@dataclass(frozen=True)
class Refused:
    """A setting that must keep one of its harmless values.

    Attributes:
        field: attribute of ServerArgs; skipped if a release does not have it.
        why: the reason, which completes "--flag: ...".
        allowed: harmless values.
    """

    field: str
    why: str
    allowed: tuple[object, ...] = (None, False, "")


_SPEC = f"this way of drafting is not supported yet. Supported are {', '.join(SERVED)}"
_HOST = "pages are moved by SGLang as plain BF16 rows, which the 2-bit cache does not have"
_SPLIT = "this way of splitting the cache over workers is not supported yet"
_SHARED = "the value rotation is folded into this server's weights, so they cannot be shared or arrive later"
_WHOLE = "it replaces the model's forward pass, and with it the attention that reads and writes the 2-bit cache"
_ONE = (None, 1)

#: Refused settings, sorted by subject. LoRA is allowed: with it, the value rotation is applied at run time.
REFUSED: tuple[Refused, ...] = (
    Refused("speculative_algorithm", _SPEC, (None, *SERVED)),
    Refused("speculative_eagle_topk", "drafts that branch are supported with NGRAM only. Use 1, for a chain", _ONE),
    Refused("speculative_adaptive", "a changing number of drafts is not supported yet"),
    Refused("speculative_draft_kv_cache_dtype", "its memory use is not known. Use auto", tuple(DRAFT_DTYPES)),
    Refused("enable_multi_layer_eagle", _SPEC),
    Refused("decoupled_spec_role", _SPEC, (None, "null")),
    Refused("enable_lmcache", _HOST),
    Refused("enable_flexkv", _HOST),
    Refused("enable_unified_cache_external_linker", _HOST),
    Refused("enable_hisparse", _HOST),
    Refused("radix_cache_backend", "another prefix cache is not supported"),
    Refused("disaggregation_decode_enable_offload_kvcache", _HOST),
    Refused("disaggregation_decode_retraction_backup", _HOST, (None, "none", "cpu_tensor")),
    Refused("enable_pd_role_switch", "memory for transfers is reserved for one role"),
    Refused("encoder_only", "an encoder has no KV cache"),
    Refused("dcp_size", _SPLIT, _ONE),
    Refused("attn_cp_size", _SPLIT, _ONE),
    Refused("enable_prefill_cp", _SPLIT),
    Refused("enable_prefill_context_parallel", _SPLIT),
    Refused("enable_dsa_prefill_context_parallel", _SPLIT),
    Refused("enable_kv_cache_sharding", _SPLIT),
    Refused("enable_two_batch_overlap", "two half batches at once would share one plan of pages"),
    Refused("enable_pdmux", "prefill and decode at once would share one plan of pages"),
    Refused("dllm_algorithm", "diffusion models rewrite tokens that are already quantized"),
    Refused("enable_memory_saver", "the memory saver would release pages that it does not know"),
    Refused("enable_page_major_kv_layout", "the cache has its own layout"),
    Refused("enable_unified_memory", "the cache has its own layout"),
    Refused("prefill_only_disable_kv_cache", "there would be no KV cache to quantize"),
    Refused("enable_mis", "multi-item scoring needs the flashinfer attention backend"),
    Refused("enable_deterministic_inference", "results are not yet guaranteed to be independent of the batch"),
    Refused("rl_on_policy_target", "results are not yet guaranteed to be independent of the batch"),
    Refused("enable_nvidia_megakernel", _WHOLE),
    Refused("enable_amd_monokernel", _WHOLE),
    Refused("enable_torch_compile", "the attention kernels are not traced by torch.compile"),
    Refused("kv_canary_real_data", "a page's bytes change when it is quantized", (None, "none")),
    Refused(
        "kv_cache_dtype",
        "--kv-quant decides how the cache is kept. Leave it at auto",
        (None, "auto", "bf16", "bfloat16"),
    ),
    Refused("weight_cache_mode", _SHARED, (None, "off")),
    Refused("remote_instance_weight_loader_start_seed_via_transfer_engine", _SHARED),
    Refused("checkpoint_engine_wait_weights_before_ready", _SHARED),
    Refused("startup_weight_load_mode", _SHARED, (None, "serial")),
    Refused("model_impl", "attention layers of other implementations cannot be checked", (None, "auto", "sglang")),
    Refused("use_ray", "the plugin cannot check schedulers that Ray starts"),
    Refused("smg_grpc_mode", "the plugin cannot check schedulers that this server starts"),
    Refused("grpc_mode", "the plugin cannot check schedulers that this server starts"),
)

#: Environment variables of SGLang that are refused, why, and in which releases.
REFUSED_ENVIRONMENT = (
    ("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "the cache cannot be resized after graph capture", ""),
    ("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "another prefix cache is not supported", ""),
    ("SGLANG_ENABLE_UNIFIED_RADIX_TREE", "another prefix cache is not supported", OLD_TREE),
    ("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "plans write the cache, so they run on the stream of the layers", ""),
    ("SGLANG_PP_COMM_OVERLAP", "a scheduler would rewrite rows that its stage has not read yet", NEW_TREE),
    ("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "it captures a plan once and repeats it, so later pages are not planned", ""),
)


#: Supported architectures with recurrent states: SGLang keeps the states, and a pool for layers of full attention.
HYBRIDS = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
#: Those that the releases of ``OLD_TREE`` do not serve; the oldest does not even see their states.
NEWER_HYBRIDS = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")


def device_of(values: Mapping[str, Any]) -> str:
    """Returns the device that SGLang will choose, ``cpu`` or ``cuda``.

    Raises:
        KVQuantError: SGLang will choose another device, or the GPU is AMD's.
    """
    from sglang.srt.utils.common import get_device

    device = str(values.get("device") or get_device()).split(":")[0]
    if device not in ("cpu", "cuda"):
        raise KVQuantError(f"--device {device}: --kv-quant runs on cuda, and on cpu for tests. Leave out --kv-quant.")
    if device == "cuda" and torch.version.hip:  # on ROCm SGLang's models write the cache themselves
        raise KVQuantError("ROCm: --kv-quant runs on NVIDIA GPUs, and on cpu for tests. Leave out --kv-quant.")
    return device


def check_flags(values: Mapping[str, Any], device: str) -> None:
    """Refuses settings as the user typed them.

    Raises:
        KVQuantError: lists every refused setting, with the fix.
    """
    found = [
        f"{typed(r.field, values[r.field])}: {r.why}."
        for r in REFUSED
        if r.field in values and values[r.field] not in r.allowed
    ]
    if values.get("page_size") not in (None, PAGE_SIZE):
        found.append(f"--page-size {values['page_size']}: pages hold {PAGE_SIZE} tokens. Use {PAGE_SIZE}.")
    ours = compat.attention_backend(device)
    for field in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        if values.get(field) not in (None, ours):
            flag = "--" + field.replace("_", "-")
            found.append(f"{flag} {values[field]}: --kv-quant uses its own attention backend. Leave the flag out.")
    graphs = str(values.get("cuda_graph_backend_prefill") or "disabled").rpartition(".")[2].lower()
    if graphs not in (served := compat.prefill_graphs(device)):
        found.append(
            f"--cuda-graph-backend-prefill {values['cuda_graph_backend_prefill']}: with this SGLang and device it may "
            f"be {' or '.join(served)}. Leave the flag out."
        )
    chunk = values.get("chunked_prefill_size") or -1
    if chunk > 0 and chunk % PAGE_SIZE:
        found.append(f"--chunked-prefill-size {chunk}: must be a multiple of {PAGE_SIZE}.")
    breadth = values.get("speculative_ngram_max_bfs_breadth")
    if values.get("speculative_algorithm") == BRANCHING and breadth not in _ONE:
        found.append(f"--speculative-ngram-max-bfs-breadth {breadth}: wider trees are not supported. Set it to 1.")
    for name, why, versions in REFUSED_ENVIRONMENT:
        on = os.environ.get(name, "").lower() not in ("", "0", "false", "no", "off")
        if on and compat.applies(versions, compat.sglang_version()):
            found.append(f"{name}={os.environ[name]}: {why}. Unset it.")
    for others in (hicache_checks, transfers, stages):
        found += others.refused_flags(values)
    _raise(found)


def _raise(found: list[str]) -> None:
    if found:
        raise KVQuantError(
            "--kv-quant cannot be combined with:\n"
            + "\n".join(f"  {text}" for text in found)
            + "\nRemove these settings, or --kv-quant."
        )


def after_check_server_args(result: None, server_args: ServerArgs) -> None:
    """AFTER ``ServerArgs.check_server_args``: runs the last checks before SGLang spawns processes.

    Raises:
        KVQuantError: ``Engine`` got a setting that cannot be served.
        SystemExit: the command line has such a setting, or this SGLang differs from the hook table.
    """
    from sglang_kvq.sglang import plugin

    config = config_of(server_args)
    if config is None:
        return
    plugin.prepare_to_spawn(config)
    try:
        check_resolved(server_args, config)
    except KVQuantError as error:
        if getattr(server_args, CLI_ATTRIBUTE, False):
            raise SystemExit(f"sglang-kvq: {error}") from None
        raise
    limit_windows(server_args, config)


def limit_windows(server_args: ServerArgs, config: KVQuantConfig) -> None:
    """Shortens sinks and recent windows that exceed the longest request; memory is reserved for whole windows."""
    context = compat.model_config(server_args).context_len
    limited = config.within(context)
    if limited != config:
        logger.info(
            "kv-quant: a request has at most %d tokens, so windows of %d sink and %d recent tokens serve like those of "
            "--kv-quant-sink %d --kv-quant-recent %d",
            context,
            limited.sink_tokens,
            limited.recent_tokens,
            config.sink_tokens,
            config.recent_tokens,
        )
        attach(limited, server_args)


def check_resolved(server_args: ServerArgs, config: KVQuantConfig) -> None:
    """Refuses settings that SGLang derived from the flags and the model. Loads the rotations to check that they fit.

    Raises:
        KVQuantError: names the setting, the model's property or the rotation file.
    """
    device = compat.resolved(server_args, "device").split(":")[0]
    backend, graphs = compat.attention_backend(device), compat.resolved(server_args, "cuda_graph_config")
    found = [
        f"{typed(r.field, value)} (set by SGLang for this model): {r.why}."
        for r in REFUSED
        if (value := compat.resolved(server_args, r.field, r.allowed[0])) not in r.allowed
    ]
    for field, wanted in (
        ("page_size", (PAGE_SIZE,)),
        ("attention_backend", (backend,)),
        ("prefill_attention_backend", (None, backend)),
        ("decode_attention_backend", (None, backend)),
    ):
        value = compat.resolved(server_args, field)
        if value not in wanted:
            found.append(f"{field}={value} (set by SGLang for this model): --kv-quant needs {wanted[-1]}.")
    if graphs is not None:
        prefill, decode = compat.prefill_graphs(device), ("disabled", "full")
        for phase, allowed in ((graphs.prefill, prefill), (graphs.decode, decode)):
            name = getattr(phase.backend, "value", phase.backend)
            if name not in allowed:
                found.append(f"a CUDA graph backend {name} (cuda_graph_config): must be {' or '.join(allowed)}.")
    _raise(found)
    model = compat.model_config(server_args)
    check_model(model, config)
    _raise(
        [*transfers.refused_settings(server_args, config, model), *stages.refused_settings(server_args, config, model)]
    )
    if (window := unapplied_window(model.hf_config)) is not None:
        logger.info("SGLang does not apply the config's sliding_window of %d tokens: all layers see all tokens", window)
    check_speculation(server_args, model)
    hicache_checks.check_resolved(server_args, config, model)
    if model.is_hybrid_swa and (canary := compat.resolved(server_args, "kv_canary", "none")) not in (None, "none"):
        raise KVQuantError(
            f"--kv-canary {canary}: the canary does not support a model with sliding windows and --kv-quant. Leave the "
            "flag out."
        )
    check_mixed(server_args, model)
    check_query_heads(model, attention_workers(server_args))
    if device == "cuda":  # on a CPU SGLang pads the heads, so any number of workers can share them
        check_division(model, attention_workers(server_args))
    if config.episodic is not None:
        from sglang_kvq.sglang.router import checks as episodic_checks
        from sglang_kvq.sglang.router import router as session_router

        episodic_checks.check(server_args, model, config.episodic)
        session_router.load_embedder(config.episodic.embedder, config.episodic.embedder_device)
    from sglang_kvq.rotations.resolve import resolve_formats, resolve_rotations

    rotations = resolve_rotations(config, model.model_path, model.hf_config)
    formats = resolve_formats(config, rotations, model.hf_config)
    if config.episodic is not None and config.episodic.policy == EPICACHE:
        from sglang_kvq.cache.fold import check_moves

        check_moves(config.method, formats)


def check_mixed(server_args: ServerArgs, model: ModelConfig) -> None:
    """Refuses ``--enable-mixed-chunk`` together with features with which it was not tried.

    Raises:
        KVQuantError: names the other feature.
    """
    if not compat.resolved(server_args, "enable_mixed_chunk", False):
        return
    untried = {
        "speculative decoding": compat.resolved(server_args, "speculative_algorithm") is not None,
        "sliding windows": model.is_hybrid_swa,
        "recurrent states": keeps_states(model),
    }
    other = next((what for what, there in untried.items() if there), None)
    if other is not None:
        raise KVQuantError(
            f"--enable-mixed-chunk: --kv-quant was not tested with both mixed batches and {other}. Leave the flag out."
        )


def check_named_model(values: Mapping[str, Any], config: KVQuantConfig) -> ModelConfig | None:
    """Runs ``check_model`` before SGLang settles the other flags.

    For some unsupported models SGLang would otherwise stop first, at a flag that we set.

    Returns:
        The model's config; None if it cannot be read yet. Then SGLang reports why, or ``check_resolved`` checks it.

    Raises:
        KVQuantError: as in ``check_model``.
    """
    from sglang.srt.configs.model_config import ModelConfig

    given = {name: values[name] for name in ("revision", "dtype", "is_embedding") if values.get(name) is not None}
    try:
        model = ModelConfig(
            values["model_path"],
            trust_remote_code=bool(values.get("trust_remote_code")),
            model_override_args=values.get("json_model_override_args") or "{}",
            **given,
        )
    except Exception:  # SGLang itself soon reads the same config, with all settings, and reports the error
        return None
    check_model(model, config)
    return model


def check_model(model: ModelConfig, config: KVQuantConfig) -> None:
    """Refuses models whose attention the cache does not support, by SGLang's ModelConfig.

    Layers are checked again once they are loaded.

    Raises:
        KVQuantError: the model's first unsupported property.
    """
    names = model.hf_config.architectures
    what = next(_unsupported(model), None)
    if what is not None:
        raise KVQuantError(
            f"{model.model_path} ({', '.join(names)}) has {what}, which --kv-quant does not support. "
            "Serve it without --kv-quant."
        )
    _check_release(model)
    if model.dtype != torch.bfloat16:
        raise KVQuantError(
            f"{model.model_path} runs in {model.dtype}, but windows are kept in bfloat16. Add --dtype bfloat16."
        )
    if config.group_size is not None and model.head_dim % config.group_size:
        raise KVQuantError(
            f"--kv-quant-group-size {config.group_size}: must divide the model's head_dim {model.head_dim}. "
            "Leave the flag out."
        )


def _check_release(model: ModelConfig) -> None:
    """Refuses a model that is served with other SGLang releases only.

    Raises:
        KVQuantError: names these releases.
    """
    architecture = model.hf_config.architectures[0]
    for what, releases, has in (
        ("recurrent states", OLD_TREE_RELEASES, architecture in NEWER_HYBRIDS),
        ("recurrent states", WITHOUT_STATES, architecture in HYBRIDS),
        ("sliding windows", WITHOUT_WINDOWS, model.is_hybrid_swa),
    ):
        if has and compat.sglang_version().base_version in releases:
            *others, last = (release for release in RELEASES if release not in releases)
            raise KVQuantError(
                f"{model.model_path} ({', '.join(model.hf_config.architectures)}) has {what}, which --kv-quant does "
                f"not support with SGLang {compat.sglang_version()}. Use SGLang {', '.join(others)} or {last}, or "
                "serve it without --kv-quant."
            )


def _unsupported(model: ModelConfig) -> Iterator[str]:
    """Yields completions of "this model has ...".

    The simplest checks come first: later ones read attributes that SGLang sets for some models only.
    """
    from sglang.srt.configs.model_config import AttentionArch, is_minimax_sparse

    text = model.hf_text_config
    layer_types = set(getattr(text, "layer_types", None) or ())
    if model.attention_arch != AttentionArch.MHA:
        yield f"{model.attention_arch.name} attention"
    if is_minimax_sparse(model.hf_config) or getattr(text, "indexer_budget", None):
        yield "sparse attention, which selects tokens by keys of its own"
    if _has_other_states(model, layer_types):
        yield f"recurrent state (Mamba or linear attention; of such models these are served: {', '.join(HYBRIDS)})"
    if model.is_encoder_decoder:
        yield "an encoder with cross attention"
    if not model.is_generation:
        yield "no text generation (embedding, reward or encoder model, or --is-embedding)"
    if (chunk := getattr(model, "attention_chunk_size", None)) or "chunked_attention" in layer_types:
        yield f"attention in chunks of {chunk} tokens"
    if windows := unsupported_windows(model, layer_types):
        yield windows
    if cap := getattr(text, "attn_logit_softcapping", None):
        yield f"logit soft-capping ({cap})"
    if getattr(model.hf_config, "dual_chunk_attention_config", None):
        yield "dual chunk attention"
    if model.head_dim != model.v_head_dim:
        yield f"key heads of {model.head_dim} and value heads of {model.v_head_dim} elements"
    if model.head_dim not in HEAD_DIMS:
        yield f"heads of {model.head_dim} elements (supported: {', '.join(map(str, HEAD_DIMS))})"
    if layers := architectures.refusal_of(model.hf_config.architectures):  # properties that only loaded layers show
        yield layers


def check_query_heads(model: ModelConfig, workers: int) -> None:
    """Refuses a model with more query heads per KV head than the kernels take.

    Args:
        workers: number of workers that share the attention heads.

    Raises:
        KVQuantError: says how many workers can serve the model.
    """
    heads: int = model.num_attention_heads

    def group(workers: int) -> float:
        return heads / workers / int(model.get_num_kv_heads(workers))

    if group(workers) > MAX_GQA_GROUP:
        fitting = [n for n in range(1, heads + 1) if group(n) <= MAX_GQA_GROUP and _indivisible(model, n) is None]
        enough = min(fitting, key=lambda n: (n & (n - 1) > 0, n))  # powers of two first: they divide other sizes too
        raise KVQuantError(
            f"{model.model_path} has {group(workers):g} query heads per KV head, and the kernels support at most "
            f"{MAX_GQA_GROUP}. Add --tp {enough}, or serve it without --kv-quant."
        )


def check_division(model: ModelConfig, workers: int) -> None:
    """Refuses a number of GPUs that cannot share the model's heads; SGLang's layers would fail an assertion later.

    Workers divide the query heads. They divide KV heads too, or, if there are fewer KV heads than workers, an equal
    number of workers keeps each KV head.

    Args:
        workers: number of workers that share the attention heads.

    Raises:
        KVQuantError: names the heads, and the numbers of workers that can share them.
    """
    if (what := _indivisible(model, workers)) is not None:
        fitting = [n for n in range(1, model.num_attention_heads + 1) if _indivisible(model, n) is None]
        raise KVQuantError(
            f"--tp {workers}: {model.model_path} has {what}, which {workers} GPUs cannot share. Use "
            f"{', '.join(map(str, fitting))}."
        )


def _indivisible(model: ModelConfig, workers: int) -> str | None:
    """Returns the heads that this number of workers cannot share, in words; None if all heads can be shared."""
    kv_heads = model.get_total_num_kv_heads()
    if model.num_attention_heads % workers:
        return f"{model.num_attention_heads} query heads"
    if kv_heads % workers and workers % kv_heads:
        return f"{kv_heads} KV heads"
    for name, heads in (("key", "linear_num_key_heads"), ("value", "linear_num_value_heads")):
        count = getattr(model.hf_text_config, heads, None)
        if count and count % workers:
            return f"{count} {name} heads in its layers of linear attention"
    return None


def attention_workers(server_args: ServerArgs) -> int:
    """Returns the number of workers that share a request's attention heads."""
    workers: int = compat.resolved(server_args, "tp_size", 1)
    if compat.resolved(server_args, "enable_dp_attention", False):
        workers //= compat.resolved(server_args, "dp_size", 1)
    return workers


def _has_other_states(model: ModelConfig, layer_types: set[str]) -> bool:
    """Returns True if a model has recurrent states and is none of ``HYBRIDS``, as far as the installed SGLang knows."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    architecture = model.hf_config.architectures[0]
    if mambaish_config(model) is None and not (
        architecture in NEWER_HYBRIDS and compat.applies(OLD_TREE, compat.sglang_version())
    ):
        return bool(layer_types & {"linear_attention", "mamba"})
    return architecture not in HYBRIDS


def after_configure(result: Any, configurator: Configurator, *args: Any, **kwargs: Any) -> None:
    """AFTER ``KVCacheConfigurator.configure``: checks that pool and allocator are this plugin's.

    Raises:
        SystemExit: SGLang built its own, so ``--kv-quant`` would serve a plain BF16 cache.
    """
    config = config_of(configurator.server_args)
    if config is None or configurator.is_draft_worker:  # a draft model has SGLang's pool and the target's allocator
        return
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    pool, allocator = result.token_to_kv_pool, result.token_to_kv_pool_allocator
    if type(pool) in (HybridLinearKVPool, SWAKVPool):  # not their subclasses, which serve other kinds of attention
        pool = pool.full_kv_pool
    if type(allocator) is SWATokenToKVPoolAllocator:
        allocator = allocator.full_attn_allocator
    for use, built in (("pool", pool), ("allocator", allocator)):
        if not type(built).__module__.startswith("sglang_kvq."):
            raise SystemExit(
                f"--kv-quant {config.method}: SGLang built a {type(built).__name__} as KV cache {use} for this model, "
                "so its cache would not be quantized. Serve it without --kv-quant."
            )


def log_checkpoint_cache(model: torch.nn.Module) -> None:
    """Logs that a checkpoint asks for another cache format, as ModelOpt's may; ``flags.complete`` has overruled it."""
    wanted = getattr(getattr(model, "quant_config", None), "kv_cache_quant_algo", None)
    if wanted and str(wanted).lower() not in ("auto", "none"):
        logger.info("kv-quant decides how the cache is kept, not this checkpoint's kv_cache_quant_algo %s", wanted)
