"""Every SGLang symbol the plugin touches: what, why, with which parameters, in which releases.

The table is data; importing it imports neither SGLang nor a handler. ``plugin`` verifies each entry before
anything is patched, so a release that moved or changed one is reported by name.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from packaging.version import Version

from sglang_kvq.releases import NEW_TREE, OLD_TREE
from sglang_kvq.sglang import compat


class Kind(Enum):
    """Kinds of use of a symbol. The first five are patched, the rest only used."""

    AROUND = "around"  #: handler(original, *args, **kwargs) replaces the call
    BEFORE = "before"  #: handler(*args, **kwargs) runs first
    AFTER = "after"  #: handler(result, *args, **kwargs) may return another result
    BACKEND = "backend"  #: an entry of SGLang's dict of attention backends: handler(model_runner)
    FACTORY = "factory"  #: a class attribute that builds an object: handler(original, **kwargs)
    CALL = "call"
    SUBCLASS = "subclass"
    READ = "read"


#: Kinds that SGLang's own HookRegistry applies.
REGISTRY_KINDS = (Kind.AROUND, Kind.BEFORE, Kind.AFTER)
PATCHED_KINDS = (*REGISTRY_KINDS, Kind.BACKEND, Kind.FACTORY)


class Process(Enum):
    MAIN = "main"  #: the process that parses flags and serves HTTP
    SCHEDULER = "scheduler"  #: each process that holds a part of the model and of the cache


@dataclass(frozen=True)
class Hook:
    """One symbol.

    Attributes:
        target: dotted path below ``sglang.srt``; for ``Kind.BACKEND`` the last part is the dict's key.
        why: what it is needed for.
        params: parameter names in order, without self or cls. The symbol must begin with these and may go on with
            optional ones. None: only its existence is checked.
        handler: ``module:function`` below ``sglang_kvq.sglang``, imported at the first call.
        versions: releases that the entry is for, as a version specifier; "" is all.
        always: the handler also runs when ``--kv-quant`` is off (it then decides itself).
    """

    kind: Kind
    process: Process
    target: str
    why: str
    params: tuple[str, ...] | None = None
    handler: str | None = None
    versions: str = ""
    always: bool = False

    @property
    def path(self) -> str:
        return f"sglang.srt.{self.target}"


def _hooks(process: Process, *rows: tuple[Kind, str, str, dict[str, Any]]) -> tuple[Hook, ...]:
    return tuple(Hook(kind, process, target, why, **more) for kind, target, why, more in rows)


# ``OLD_TREE`` and ``NEW_TREE`` are the two generations of SGLang's prefix cache, and of much that changed with it.
# Between them nothing is supported, so these are also the only words for what changed somewhere in the gap.

#: Where SGLang's allocator has no method that all released pages go through.
PER_TOKEN_FREES, RELEASES_PAGES = "<0.5.17", ">=0.5.17"
#: Where settings are changed in a running process: in ServerArgs, or in the runtime's context.
SETS_ARGUMENTS, SETS_CONTEXT = "<0.5.18", ">=0.5.18"

_MANAGER = "managers.tokenizer_manager.TokenizerManager"
_POOL = "mem_cache.kv_cache_configurator.KVCacheConfigurator"
_SIZES = "model_executor.pool_configurator.DefaultPoolConfigurator"
_WINDOWS = "model_executor.pool_configurator.HybridSWAPoolConfigurator"
_WEIGHTS = "model_executor.model_runner_components.weight_updater.WeightUpdater"
_EXPORTER = "model_executor.model_runner_components.weight_exporter.WeightExporter"
_PAGED = "mem_cache.allocator.paged"
_BACKEND = "layers.attention.base_attn_backend.AttentionBackend"
_CANARY = "kv_canary.pool_patcher"

TABLE: tuple[Hook, ...] = (
    *_hooks(
        Process.MAIN,
        (
            Kind.AFTER,
            "server_args.ServerArgs.add_cli_args",
            "adds the --kv-quant flags",
            dict(params=("parser",), handler="flags:add_cli_args", always=True),
        ),
        (
            Kind.AROUND,
            "server_args.ServerArgs.from_cli_args",
            "checks and completes the flags, attaches the config",
            dict(params=("args",), handler="flags:from_cli_args", always=True),
        ),
        (
            Kind.AFTER,
            "server_args.ServerArgs.check_server_args",
            "last check before processes are spawned",
            dict(params=(), handler="checks:after_check_server_args", always=True),
        ),
        (
            Kind.FACTORY,
            "entrypoints.engine.Engine.server_args_class",
            "Engine(kv_quant=...)",
            dict(handler="engine:server_args_from_kwargs", always=True),
        ),
        (
            Kind.AROUND,
            "entrypoints.engine.Engine._launch_scheduler_processes",
            "schedulers start only with the plugin",
            dict(
                params=("server_args", "port_args", "run_scheduler_process_func"),
                handler="plugin:launch_schedulers",
                always=True,
            ),
        ),
        (
            Kind.AROUND,
            "managers.tokenizer_control_mixin.TokenizerControlMixin.get_weights_by_name",
            "says why a folded weight is not given",
            dict(params=("obj", "request"), handler="weights:explain_refusal", always=True),
        ),
        # Sessions
        (
            Kind.AROUND,
            f"{_MANAGER}.generate_request",
            "chooses what a request of a session reads",
            dict(params=("obj", "request"), handler="sessions:around_generate_request", always=True),
        ),
        (
            Kind.BEFORE,
            f"{_MANAGER}.abort_request",
            "aborts a request of a session that is not sent yet",
            dict(params=("rid", "abort_all"), handler="sessions:before_abort", always=True),
        ),
        (
            Kind.CALL,
            f"{_MANAGER}._tokenize_texts",
            "a session's prompt as tokens",
            dict(params=("texts", "is_cross_encoder")),
        ),
        (
            Kind.CALL,
            f"{_MANAGER}._validate_one_request",
            "whether a session's prompt fits the model's context",
            dict(params=("obj", "input_ids")),
        ),
        (
            Kind.BEFORE,
            "entrypoints.http_server._setup_and_run_http_server",
            "/v1/sessions",
            dict(params=("server_args", "tokenizer_manager"), handler="session_routes:before_http_server", always=True),
        ),
        (Kind.READ, "entrypoints.http_server.app", "/v1/sessions", {}),
        (Kind.CALL, "utils.common.get_device", "which device SGLang will choose", dict(params=("device_id",))),
        (
            Kind.CALL,
            "configs.hybrid_arch.mambaish_config",
            "recognises models with recurrent state",
            dict(params=("model_config",)),
        ),
        (Kind.READ, "configs.model_config.AttentionArch.MHA", "recognises MLA", {}),
        (Kind.CALL, "configs.model_config.is_minimax_sparse", "recognises sparse attention", dict(params=("config",))),
        (
            Kind.CALL,
            "configs.model_config.ModelConfig.__init__",
            "the model's shapes, before SGLang settles its flags",
            dict(
                params=(
                    "model_path",
                    "trust_remote_code",
                    "revision",
                    "context_length",
                    "model_override_args",
                    "is_embedding",
                    "enable_multimodal",
                    "dtype",
                )
            ),
        ),
        (
            Kind.CALL,
            "server_args.ServerArgs.get_model_config",
            "the model's shapes",
            dict(params=(), versions=OLD_TREE),
        ),
        (
            Kind.CALL,
            "arg_groups.overrides.model_config_of",
            "the model's shapes",
            dict(params=("server_args",), versions=NEW_TREE),
        ),
        (
            Kind.CALL,
            "arg_groups.overrides.resolution_result",
            "settings as SGLang decided them",
            dict(params=("server_args", "field", "default"), versions=NEW_TREE),
        ),
    ),
    *_hooks(
        Process.SCHEDULER,
        (
            Kind.BEFORE,
            "managers.scheduler.Scheduler.__init__",
            "all hooks are in place, or the server stops",
            dict(params=("server_args", "port_args"), handler="plugin:before_scheduler_init", always=True),
        ),
        (
            Kind.AFTER,
            "managers.scheduler.Scheduler.get_init_info",
            "method and rotations in /server_info",
            dict(params=(), handler="observe:add_init_info"),
        ),
        # Capacity
        (
            Kind.AROUND,
            f"{_SIZES}._compute_cell_size",
            "bytes per token",
            dict(params=("kvc", "num_layers"), handler="capacity:compute_cell_size"),
        ),
        (
            Kind.AFTER,
            f"{_SIZES}.__init__",
            "prices a draft model's cache",
            dict(params=("kvc",), handler="drafts:after_sizes"),
        ),
        (
            Kind.AFTER,
            "layers.attention.hybrid_linear_attn_backend.MambaAttnBackendBase.__init__",
            "recurrent states follow drafts that branch",
            dict(params=("model_runner",), handler="drafts:after_states"),
        ),
        (
            Kind.AROUND,
            "mem_cache.memory_pool.conv_window_dedup_enabled",
            "drafts that branch do not share windows",
            dict(
                params=("is_npu", "is_cpu", "speculative_eagle_topk", "is_kda"), handler="drafts:around_shared_windows"
            ),
        ),
        (
            Kind.CALL,
            "configs.model_config.ModelConfig.from_server_args",
            "a draft model's shapes",
            dict(params=("server_args", "model_path", "model_revision", "is_draft_model")),
        ),
        (
            Kind.AROUND,
            f"{_SIZES}.calculate_pool_sizes",
            "takes the BF16 pages off the budget",
            dict(params=("available_bytes", "page_size"), handler="capacity:calculate_pool_sizes"),
        ),
        (
            Kind.AROUND,
            f"{_POOL}.resolve_max_num_reqs",
            "running requests follow from the BF16 pages",
            dict(params=("token_capacity",), handler="capacity:resolve_max_num_reqs"),
        ),
        (
            Kind.AROUND,
            f"{_POOL}._handle_max_mamba_cache",
            "memory of recurrent states beside a smaller cache",
            dict(params=("total_rest_memory",), handler="states:handle_max_mamba_cache"),
        ),
        (Kind.CALL, f"{_POOL}._calculate_mamba_ratio", "states of a request", dict(params=())),
        (Kind.READ, f"{_POOL}.mambaish_config", "bytes of a state", {}),
        (Kind.READ, f"{_POOL}.ps", "data-parallel workers", dict(versions=OLD_TREE)),
        (Kind.READ, f"{_POOL}.attn_dp_size", "data-parallel workers", dict(versions=NEW_TREE)),
        (
            Kind.CALL,
            "configs.model_config.ModelConfig.get_num_kv_heads",
            "this worker's KV heads",
            dict(params=("tensor_parallel_size",)),
        ),
        (
            Kind.CALL,
            "configs.model_config.ModelConfig.get_total_num_kv_heads",
            "whether workers can share them",
            dict(params=()),
        ),
        (
            Kind.CALL,
            "configs.model_config.ModelConfig.get_swa_num_kv_heads",
            "bytes of windows, for kvq doctor",
            dict(params=("tensor_parallel_size",)),
        ),
        (
            Kind.CALL,
            "server_args.ServerArgs.override",
            "sets the ratio of memory",
            dict(params=("source",), versions=SETS_ARGUMENTS),
        ),
        (
            Kind.CALL,
            "runtime_context.RuntimeContext.override",
            "sets the ratio of memory",
            dict(params=("source",), versions=SETS_CONTEXT),
        ),
        (
            Kind.CALL,
            "runtime_context.RuntimeContext.config_leaf",
            "reads what SGLang sized",
            dict(params=("name",), versions=SETS_CONTEXT),
        ),
        # Pool and allocator
        (
            Kind.AROUND,
            f"{_POOL}._build_mha_kv_pool",
            "builds the two-tier pool",
            dict(params=("max_total_num_tokens", "mha_pool_class", "quant_method"), handler="pool:build_mha_kv_pool"),
        ),
        *(
            (
                Kind.AROUND,
                f"{_POOL}._build_hybrid_linear_kv_pool",
                "builds the two-tier pool beside recurrent states",
                dict(
                    params=("max_total_num_tokens", "req_to_token_pool", "mha_pool_class", *more),
                    handler="pool:build_hybrid_linear_kv_pool",
                    versions=versions,
                ),
            )
            for more, versions in (((), OLD_TREE), (("mla_pool_class", "dsa_pool_class"), NEW_TREE))
        ),
        (Kind.READ, "mem_cache.memory_pool.HybridLinearKVPool", "the pool of a hybrid", {}),
        # Sliding windows
        (
            Kind.AROUND,
            f"{_WINDOWS}.__init__",
            "bytes per token of the layers that see all tokens",
            dict(params=("kvc",), handler="window_sizes:around_init"),
        ),
        (
            Kind.AROUND,
            f"{_WINDOWS}.calculate_pool_sizes",
            "divides memory between windows and the cache",
            dict(params=("available_bytes", "page_size"), handler="window_sizes:calculate_pool_sizes"),
        ),
        (
            Kind.AROUND,
            f"{_WINDOWS}.calculate_pool_sizes_from_max_tokens",
            "windows keep what they need",
            dict(
                params=("max_total_num_tokens", "page_size"),
                handler="window_sizes:calculate_pool_sizes_from_max_tokens",
            ),
        ),
        *(
            (
                Kind.AROUND,
                f"model_executor.pool_configurator.{name}.is_applicable",
                "windows are sized in one way",
                dict(params=("kvc",), handler="window_sizes:without_cap", versions=versions),
            )
            for name, versions in (
                ("SWAChunkCapPoolConfigurator", OLD_TREE),
                ("SWARequestCapPoolConfigurator", NEW_TREE),
            )
        ),
        (
            Kind.READ,
            f"{_POOL}.sliding_window_size",
            "how far windows reach",
            {},
        ),
        (
            Kind.AROUND,
            f"{_POOL}._build_hybrid_swa_kv_pool",
            "builds the two-tier pool beside that of the windows",
            dict(
                params=("full_max_total_num_tokens", "swa_max_total_num_tokens", "mha_pool_class"),
                handler="window_pool:build_hybrid_swa_kv_pool",
            ),
        ),
        (Kind.READ, "mem_cache.swa_memory_pool.SWAKVPool", "the pool of a model with windows", {}),
        (
            Kind.CALL,
            "mem_cache.swa_memory_pool.SWAKVPool.translate_loc_from_full_to_swa",
            "windows on a CPU",
            dict(params=("kv_indices",)),
        ),
        (Kind.CALL, "mem_cache.memory_pool.KVWriteLoc", "windows on a CPU", dict(params=("loc", "swa_loc"))),
        (
            Kind.READ,
            "mem_cache.allocator.swa.SWATokenToKVPoolAllocator",
            "hands out pages of both pools",
            {},
        ),
        (
            Kind.CALL,
            "layers.attention.triton_backend.TritonAttnBackend",
            "attention of the layers with windows",
            dict(params=("model_runner",)),
        ),
        (Kind.READ, "environ.envs.SGLANG_SWA_EVICTION_INTERVAL", "how long what left a window is kept", {}),
        (
            Kind.AROUND,
            f"{_POOL}._build_token_to_kv_pool_allocator",
            "builds the allocator",
            dict(
                params=(
                    "sizes",
                    "token_to_kv_pool",
                    "is_dsv4_model",
                    "req_to_token_pool",
                    "token_to_kv_pool_allocator",
                ),
                handler="allocator:build_allocator",
            ),
        ),
        (
            Kind.AFTER,
            f"{_POOL}.configure",
            "no other pool may serve instead",
            dict(params=("pre_model_load_memory",), handler="checks:after_configure", always=True),
        ),
        *(
            (Kind.READ, f"{_POOL}.{field}", "the worker being configured", {})
            for field in ("server_args", "model_config", "layer_info", "kv_cache_dtype", "device", "is_draft_worker")
        ),
        (
            Kind.SUBCLASS,
            "mem_cache.memory_pool.KVCache.__init__",
            "the pool",
            dict(
                params=(
                    "size",
                    "page_size",
                    "dtype",
                    "layer_num",
                    "device",
                    "enable_memory_saver",
                    "start_layer",
                    "end_layer",
                )
            ),
        ),
        (
            Kind.SUBCLASS,
            "mem_cache.memory_pool.MHATokenToKVPool.move_kv_cache",
            "accepted drafts move together",
            dict(params=("tgt_loc", "src_loc")),
        ),
        (
            Kind.SUBCLASS,
            f"{_PAGED}.PagedTokenToKVPoolAllocator.__init__",
            "the allocator",
            dict(params=("size", "page_size", "dtype", "device", "kvcache", "need_sort")),
        ),
        (Kind.SUBCLASS, f"{_PAGED}.PagedTokenToKVPoolAllocator.clear", "forgets every page", dict(params=())),
        (
            Kind.SUBCLASS,
            f"{_PAGED}.PagedTokenToKVPoolAllocator.free",
            "pages coming back",
            dict(params=("free_index",), versions=PER_TOKEN_FREES),
        ),
        (
            Kind.SUBCLASS,
            f"{_PAGED}.PagedTokenToKVPoolAllocator._release_page_ids",
            "pages coming back",
            dict(versions=RELEASES_PAGES),
        ),
        (
            Kind.CALL,
            f"{_PAGED}.PagedTokenToKVPoolAllocator.get_all_free_pages",
            "which pages are free",
            dict(params=(), versions=NEW_TREE),
        ),
        (
            Kind.CALL,
            f"{_PAGED}.alloc_extend_naive",
            "page allocation on a CPU",
            dict(params=("prefix_lens", "seq_lens", "last_loc", "free_pages", "out_indices", "page_size", "device")),
        ),
        (
            Kind.CALL,
            "utils.get_num_new_pages",
            "page allocation on a CPU",
            dict(params=("seq_lens", "page_size", "prefix_lens", "decode")),
        ),
        # Rows and tree
        (
            Kind.AROUND,
            "mem_cache.memory_pool.ReqToTokenPool.free",
            "a row given back frees its window",
            dict(params=("req",), handler="rows:around_free", versions=OLD_TREE),
        ),
        (
            Kind.AROUND,
            "session.streaming_session.StreamingSession.release_session",
            "a session's row frees its window",
            dict(params=("session_id",), handler="rows:around_release_session", versions=OLD_TREE),
        ),
        (
            Kind.AROUND,
            "mem_cache.memory_pool.ReqToTokenPool.free_rows",
            "rows given back free their windows",
            dict(params=("indices",), handler="rows:around_free_rows", versions=NEW_TREE),
        ),
        *(
            (
                Kind.AROUND,
                f"mem_cache.{tree}.cache_{moment}_req",
                "overlays follow the tree's pages",
                dict(params=("req", *more), handler=f"tree:around_{moment}", versions=OLD_TREE),
            )
            for tree in ("radix_cache.RadixCache", "unified_radix_cache.UnifiedRadixCache")
            for moment, more in (("finished", ("is_insert", "kv_len_to_handle")), ("unfinished", ("chunked",)))
        ),
        (
            Kind.CALL,
            "mem_cache.base_prefix_cache.BasePrefixCache.supports_mamba",
            "whether the tree ends prefixes at recurrent states",
            dict(params=()),
        ),
        (
            Kind.READ,
            "mem_cache.base_prefix_cache.MatchPrefixParams",
            "looks up what is cached",
            {},
        ),
        (Kind.READ, "mem_cache.radix_cache.RadixKey", "looks up what is cached", {}),
        (
            Kind.AROUND,
            "mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree",
            "overlays follow the tree's pages",
            dict(params=("req", "up_to"), handler="tree:around_checkpoint", versions=NEW_TREE),
        ),
        # Selected pages
        (
            Kind.AROUND,
            "managers.schedule_batch.Req.init_next_round_input",
            "brings the pages that a request begins with",
            dict(params=("tree_cache", "cow_mamba"), handler="selection:around_next_round"),
        ),
        (
            Kind.AROUND,
            "managers.schedule_policy.PrefillAdder.add_one_req",
            "a request waits until what it begins with is there",
            dict(params=("req", "has_chunked_req", "truncation_align_size"), handler="selection:around_add"),
        ),
        (Kind.READ, "managers.schedule_policy.AddReqResult.NO_TOKEN", "a request waits", {}),
        (Kind.READ, "managers.schedule_policy.AddReqResult.OTHER", "a request waits", {}),
        (Kind.CALL, "mem_cache.base_prefix_cache.BasePrefixCache.evictable_size", "room for copies", dict(params=())),
        (
            Kind.AROUND,
            "managers.schedule_batch.Req._compute_max_prefix_len",
            "prompts that score are computed, cached or not",
            dict(params=("input_len",), handler="episodes:around_longest_match"),
        ),
        (
            Kind.AFTER,
            "model_executor.forward_batch_info.ForwardBatch.init_new",
            "positions behind the whole history",
            dict(handler="selection:move_positions"),
        ),
        (
            Kind.READ,
            "model_executor.forward_batch_info.ForwardBatch.rids",
            "which requests of a batch are scored",
            {},
        ),
        (
            Kind.CALL,
            "mem_cache.base_prefix_cache.InsertParams",
            "copies of pages enter the tree",
            dict(params=("key", "value")),
        ),
        (Kind.CALL, "mem_cache.base_prefix_cache.EvictParams", "room for copies", dict(params=("num_tokens",))),
        # Folds
        *(
            (
                Kind.AROUND,
                "mem_cache.common.release_kv_cache",
                "chosen tokens stay when a request ends as a fold",
                dict(params=("req", "tree_cache", enters), handler="folding:around_release", versions=versions),
            )
            for enters, versions in (("is_insert", OLD_TREE), ("checkpoint", NEW_TREE))
        ),
        (Kind.READ, "managers.schedule_batch.FINISH_ABORT", "a fold without room", {}),
        # Looking inside
        (
            Kind.AROUND,
            "managers.scheduler_components.invariant_checker.SchedulerInvariantChecker._check_tree_cache",
            "checks the tiers when idle",
            dict(params=(), handler="observe:check_when_idle"),
        ),
        (
            Kind.CALL,
            "managers.scheduler_components.invariant_checker.SchedulerInvariantChecker._report_leak",
            "reports a failed check",
            dict(params=("pool_name", "token_msg")),
        ),
        (
            Kind.AROUND,
            "managers.scheduler.Scheduler.get_internal_state",
            "tiers in /server_info",
            dict(params=("recv_req",), handler="observe:add_internal_state"),
        ),
        (
            Kind.AFTER,
            "observability.metrics_collector.SchedulerMetricsCollector.log_stats",
            "tiers in /metrics",
            dict(params=("stats",), handler="metrics:after_log_stats"),
        ),
        (Kind.READ, "observability.metrics_collector.QueueCount.total", "requests that run and wait", {}),
        # The KV canary
        (
            Kind.CALL,
            f"{_CANARY}.api.register_pool_attacher",
            "--kv-canary over the two-tier pool",
            dict(params=("pool_class", "attacher")),
        ),
        (
            Kind.CALL,
            f"{_CANARY}.buffer_alloc.alloc_canary_buf",
            "the canary's buffers",
            dict(params=("num_slots", "device")),
        ),
        (
            Kind.CALL,
            "kv_canary.buffer_group.CanaryBufferGroup",
            "the canary's buffers",
            dict(
                params=(
                    "kind",
                    "k_head",
                    "k_tail",
                    "v_head",
                    "v_tail",
                    "real_kv_sources_k",
                    "real_kv_sources_v",
                    "swa_index_lut",
                    "kv_token_id_vs_position_offset",
                )
            ),
        ),
        (Kind.READ, "kv_canary.buffer_group.PoolKind.FULL", "the canary's buffers", {}),
        # Attention
        (
            Kind.BACKEND,
            "layers.attention.attention_registry.ATTENTION_BACKENDS.triton",
            "attention on a GPU",
            dict(handler="worker:create_backend"),
        ),
        (
            Kind.BACKEND,
            "layers.attention.attention_registry.ATTENTION_BACKENDS.torch_native",
            "attention on a CPU",
            dict(handler="worker:create_backend"),
        ),
        (
            Kind.SUBCLASS,
            f"{_BACKEND}.init_forward_metadata_out_graph",
            "plans a batch",
            dict(params=("forward_batch", "in_capture")),
        ),
        (Kind.SUBCLASS, f"{_BACKEND}.init_cuda_graph_state", "CUDA graphs", dict(params=("max_bs", "max_num_tokens"))),
        (
            Kind.SUBCLASS,
            f"{_BACKEND}.update_verify_buffers_to_fill_after_draft",
            "verifies drafts",
            dict(params=("spec_info", "cuda_graph_bs")),
        ),
        (Kind.SUBCLASS, f"{_BACKEND}.needs_cpu_seq_lens", "verifies drafts", {}),
        (
            Kind.READ,
            "model_executor.forward_batch_info.ForwardMode.is_target_verify",
            "verifies drafts",
            dict(params=()),
        ),
        (Kind.SUBCLASS, f"{_BACKEND}.get_cuda_graph_seq_len_fill_value", "CUDA graphs", dict(params=())),
        *(
            (
                Kind.SUBCLASS,
                f"{_BACKEND}.forward_{mode}",
                "attention of one layer",
                dict(params=("q", "k", "v", "layer", "forward_batch", "save_kv_cache")),
            )
            for mode in ("decode", "extend")
        ),
        (Kind.READ, "layers.radix_attention.RadixAttention", "what a layer asks of attention", {}),
        (Kind.READ, "layers.quantization.unquant.UnquantizedLinearMethod", "recognises plain weights", {}),
        (Kind.READ, "layers.radix_attention.AttentionType.DECODER", "what a layer asks of attention", {}),
        (Kind.CALL, "runtime_context.get_parallel", "this worker's rank and heads", dict(params=())),
        (Kind.CALL, "runtime_context.get_server_args", "whether drafts branch", dict(params=())),
        # Weights: new ones would lack the value rotation folded into those loaded
        *(
            (
                Kind.AROUND,
                f"{_WEIGHTS}.update_weights_from_{source}",
                "refuses while V is folded into the weights",
                dict(params=params, handler="weights:refuse_update", versions=versions),
            )
            for source, params, versions in (
                ("disk", ("model_path", "load_format"), ""),
                ("tensor", ("named_tensors", "load_format"), ""),
                ("ipc", ("recv_req",), ""),
                ("distributed", ("names", "dtypes", "shapes", "group_name", "load_format"), OLD_TREE),
            )
        ),
        (
            Kind.AROUND,
            f"{_WEIGHTS}.load_weights_from_distributed",
            "refuses while V is folded into the weights",
            dict(params=("named_tensors",), handler="weights:refuse_update", versions=NEW_TREE),
        ),
        (
            Kind.AROUND,
            "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.begin_weight_update",
            "refuses while V is folded into the weights",
            dict(params=("recv_req",), handler="weights:refuse_update_session", versions=NEW_TREE),
        ),
        (
            Kind.CALL,
            "managers.io_struct.BeginWeightUpdateReqOutput",
            "refuses while V is folded into the weights",
            dict(versions=NEW_TREE),
        ),
        # ... and elsewhere these would lack what undoes it
        *(
            (
                Kind.AROUND,
                f"{_EXPORTER}.{name}",
                "refuses while V is folded into the weights",
                dict(params=params, handler=f"weights:{handler}"),
            )
            for name, params, handler in (
                (
                    "init_weights_send_group_for_remote_instance",
                    ("master_address", "ports", "group_rank", "world_size", "group_name", "backend"),
                    "refuse_sending",
                ),
                ("send_weights_to_remote_instance", ("master_address", "ports", "group_name"), "refuse_sending"),
                ("save_remote_model", ("url",), "refuse_saving"),
                ("save_sharded_model", ("path", "pattern", "max_size"), "refuse_saving"),
                ("get_weights_by_name", ("name", "truncate_size"), "refuse_reading"),
            )
        ),
        *(
            (
                Kind.AROUND,
                "utils.weight_checker.WeightChecker.handle",
                "refuses while V is folded into the weights",
                dict(params=("action", "allow_quant_error", *more), handler="weights:refuse_saving", versions=versions),
            )
            for more, versions in (((), OLD_TREE), (("skip_tensor_list", "role"), NEW_TREE))
        ),
    ),
)


def for_release(version: Version, process: Process | None = None, table: Iterable[Hook] = TABLE) -> list[Hook]:
    """The entries that apply to a release, of one process or of all."""
    return [h for h in table if compat.applies(h.versions, version) and process in (None, h.process)]


def find(hook: Hook) -> Any:
    """The symbol itself.

    Raises:
        ImportError, AttributeError, KeyError: it is not there.
    """
    parent, _, name = hook.path.rpartition(".")
    owner = pkgutil.resolve_name(parent)
    return owner[name] if hook.kind is Kind.BACKEND else getattr(owner, name)


def problem(hook: Hook) -> str | None:
    """Why the installed SGLang's symbol cannot be used as the table says; None if it can. Imports its module."""
    use = f"{hook.path} ({hook.kind.value}: {hook.why})"
    try:
        symbol = find(hook)
    except Exception as error:  # an import may fail in any way; each is reported
        return f"{use}: not found: {type(error).__name__}: {error}"
    if hook.params is None:
        return None
    try:
        found = list(inspect.signature(symbol).parameters.values())
    except (TypeError, ValueError) as error:
        return f"{use}: no signature: {error}"
    if found and found[0].name in ("self", "cls"):
        found = found[1:]
    named = [p for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    count = len(hook.params)
    further = [p for p in named[count:] if p.default is p.empty]
    # Releases of OLD_TREE pass the ranks to Scheduler.__init__ after the two parameters used.
    if tuple(p.name for p in named[:count]) != hook.params or (further and hook.kind is not Kind.BEFORE):
        return f"{use}: parameters are ({', '.join(p.name for p in named)}), expected ({', '.join(hook.params)})"
    return None


def problems(hooks: Iterable[Hook]) -> list[str]:
    """``problem`` of each entry that has one."""
    return [text for hook in hooks if (text := problem(hook)) is not None]
