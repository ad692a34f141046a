"""Table of every SGLang symbol that the plugin uses: its kind of use, reason, parameters and releases.

The table is data; importing it imports neither SGLang nor a handler. ``plugin`` verifies each entry before
it patches anything, so a symbol that a release moved or changed is reported by name.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from packaging.version import Version

from sglang_kvq.releases import NEW_TREE, OLD_TREE
from sglang_kvq.sglang import compat


class Kind(Enum):
    """Kinds of use of a symbol. Symbols of the first five kinds are patched, the others only used."""

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
    """One symbol of SGLang and the use that the plugin makes of it.

    Attributes:
        target: dotted path below ``sglang.srt``. For ``Kind.BACKEND`` the last part is the dict's key.
        why: the purpose of the use, in words.
        params: parameter names in order, without self or cls. The symbol's parameters must begin with these; further
            ones must be optional. None: only the symbol's existence is checked.
        handler: ``module:function`` below ``sglang_kvq.sglang``, imported at the first call.
        versions: releases that have this entry, as a version specifier; "" means all.
        always: the handler also runs when ``--kv-quant`` is off, and decides itself whether to act.
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


def _hook(kind: Kind, target: str, *words: str, only: str = "", always: bool = False) -> Hook:
    """Builds one entry of the scheduler's table.

    Args:
        target: a path, followed by parameter names in parentheses if they are checked.
        words: the handler, if the kind has one; then ``Hook.why``.
        only: ``Hook.versions``.
    """
    path, bracket, names = target.partition("(")
    params = tuple(filter(None, names.rstrip(")").split(", "))) if bracket else None
    handler = words[0] if kind in PATCHED_KINDS else None
    return Hook(kind, Process.SCHEDULER, path, words[-1], params, handler, only, always)


around, before, after = (functools.partial(_hook, kind) for kind in REGISTRY_KINDS)
backend, factory = functools.partial(_hook, Kind.BACKEND), functools.partial(_hook, Kind.FACTORY)
call, subclass, read = (functools.partial(_hook, kind) for kind in (Kind.CALL, Kind.SUBCLASS, Kind.READ))

# ``OLD_TREE`` and ``NEW_TREE`` are the releases before and after SGLang replaced its prefix cache. No release between
# them is supported, so the two constants also mark every other change that happened in this gap.

#: Releases whose allocator has no single method that all released pages go through, and those that have one.
PER_TOKEN_FREES, RELEASES_PAGES = "<0.5.17", ">=0.5.17"
#: Releases that change settings of a running process in ServerArgs, and those that do so in the runtime's context.
SETS_ARGUMENTS, SETS_CONTEXT = "<0.5.18", ">=0.5.18"

#: Releases whose transfers between servers cannot carry state of the plugin, and those whose transfers can.
NO_TRANSFERS, TRANSFERS = "<0.5.23", ">=0.5.23"

_MANAGER = "managers.tokenizer_manager.TokenizerManager"
_POOL = "mem_cache.kv_cache_configurator.KVCacheConfigurator"
_SIZES = "model_executor.pool_configurator.DefaultPoolConfigurator"
_WINDOWS = "model_executor.pool_configurator.HybridSWAPoolConfigurator"
_WEIGHTS = "model_executor.model_runner_components.weight_updater.WeightUpdater"
_EXPORTER = "model_executor.model_runner_components.weight_exporter.WeightExporter"
_PAGED = "mem_cache.allocator.paged"
_BACKEND = "layers.attention.base_attn_backend.AttentionBackend"
_CANARY = "kv_canary.pool_patcher"
_CONTROLLER = "managers.cache_controller.HiCacheController"
_ASSEMBLER = "mem_cache.hybrid_cache.hybrid_pool_assembler"

# fmt: off
_MAIN: tuple[Hook, ...] = (
    # Flags and processes
    after("server_args.ServerArgs.add_cli_args(parser)",
         "flags:add_cli_args", "adds the --kv-quant flags", always=True),
    around("server_args.ServerArgs.from_cli_args(args)",
         "flags:from_cli_args", "checks and completes the flags, attaches the config", always=True),
    after("server_args.ServerArgs.check_server_args()",
         "checks:after_check_server_args", "last check before processes are spawned", always=True),
    factory("entrypoints.engine.Engine.server_args_class",
         "engine:server_args_from_kwargs", "Engine(kv_quant=...)", always=True),
    around("entrypoints.engine.Engine._launch_scheduler_processes(server_args, port_args, run_scheduler_process_func)",
         "plugin:launch_schedulers", "schedulers start only with the plugin", always=True),
    around("managers.tokenizer_control_mixin.TokenizerControlMixin.get_weights_by_name(obj, request)",
         "attention.folded_weights:explain_refusal", "says why a folded weight is not given", always=True),
    # Sessions
    around(f"{_MANAGER}.generate_request(obj, request)",
         "router.router:around_generate_request", "chooses what a request of a session reads", always=True),
    before(f"{_MANAGER}.abort_request(rid, abort_all)",
         "router.router:before_abort", "aborts a request of a session that is not sent yet", always=True),
    call(f"{_MANAGER}._tokenize_texts(texts, is_cross_encoder)", "a session's prompt as tokens"),
    call(f"{_MANAGER}._validate_one_request(obj, input_ids)", "whether a session's prompt fits the model's context"),
    before("entrypoints.http_server._setup_and_run_http_server(server_args, tokenizer_manager)",
         "router.routes:before_http_server", "/v1/sessions", always=True),
    read("entrypoints.http_server.app", "/v1/sessions"),
    # Facts about the device and the model
    call("utils.common.get_device(device_id)", "which device SGLang will choose"),
    call("utils.common.get_device_memory_capacity(device)", "how large decode batches in graphs may be"),
    call("configs.hybrid_arch.mambaish_config(model_config)", "recognises models with recurrent state"),
    read("configs.model_config.AttentionArch.MHA", "recognises MLA"),
    call("configs.model_config.is_minimax_sparse(config)", "recognises sparse attention"),
    call("configs.model_config.ModelConfig.__init__("
         "model_path, trust_remote_code, revision, context_length, model_override_args, is_embedding, "
         "enable_multimodal, dtype)",
         "the model's shapes, before SGLang settles its flags"),
    call("server_args.ServerArgs.get_model_config()", "the model's shapes", only=OLD_TREE),
    call("arg_groups.overrides.model_config_of(server_args)", "the model's shapes", only=NEW_TREE),
    call("arg_groups.overrides.resolution_result(server_args, field, default)",
         "settings as SGLang decided them", only=NEW_TREE),
)

_SCHEDULER: tuple[Hook, ...] = (
    # Processes
    before("managers.scheduler.Scheduler.__init__(server_args, port_args)",
         "plugin:before_scheduler_init", "all hooks are in place, or the server stops", always=True),
    after("managers.scheduler.Scheduler.get_init_info()",
         "observe:add_init_info", "method and rotations in /server_info"),
    # Capacity
    after("managers.scheduler.Scheduler.init_model_worker()", "memory.capacity:limit_prompts", "the longest prompt"),
    around(f"{_SIZES}._compute_cell_size(kvc, num_layers)", "memory.capacity:compute_cell_size", "bytes per token"),
    after(f"{_SIZES}.__init__(kvc)", "attention.drafts:after_sizes", "prices a draft model's cache"),
    after("layers.attention.hybrid_linear_attn_backend.MambaAttnBackendBase.__init__(model_runner)",
         "attention.drafts:after_states", "recurrent states follow drafts that branch"),
    around("mem_cache.memory_pool.conv_window_dedup_enabled(is_npu, is_cpu, speculative_eagle_topk, is_kda)",
         "attention.drafts:around_shared_windows", "drafts that branch do not share windows"),
    call("configs.model_config.ModelConfig.from_server_args(server_args, model_path, model_revision, is_draft_model)",
         "a draft model's shapes"),
    around(f"{_SIZES}.calculate_pool_sizes(available_bytes, page_size)",
         "memory.capacity:calculate_pool_sizes", "subtracts the BF16 pages from the budget"),
    around(f"{_POOL}.resolve_max_num_reqs(token_capacity)",
         "memory.capacity:resolve_max_num_reqs", "running requests follow from the BF16 pages"),
    around(f"{_POOL}._handle_max_mamba_cache(total_rest_memory)",
         "memory.recurrent_states:handle_max_mamba_cache", "divides memory between recurrent states and the cache"),
    call("distributed.parallel_state.get_world_group()", "pipeline stages agree on the number of requests"),
    call(f"{_POOL}._calculate_mamba_ratio()", "states of a request"),
    read(f"{_POOL}.mambaish_config", "bytes of a state"),
    read(f"{_POOL}.ps", "data-parallel workers", only=OLD_TREE),
    read(f"{_POOL}.attn_dp_size", "data-parallel workers", only=NEW_TREE),
    call("configs.model_config.ModelConfig.get_num_kv_heads(tensor_parallel_size)", "this worker's KV heads"),
    call("configs.model_config.ModelConfig.get_total_num_kv_heads()", "whether workers can share them"),
    call("configs.model_config.ModelConfig.get_swa_num_kv_heads(tensor_parallel_size)",
         "bytes of windows, for kvq doctor"),
    call("server_args.ServerArgs.override(source)", "sets the ratio of memory", only=SETS_ARGUMENTS),
    call("runtime_context.RuntimeContext.override(source)", "sets the ratio of memory", only=SETS_CONTEXT),
    call("runtime_context.RuntimeContext.config_leaf(name)", "reads what SGLang sized", only=SETS_CONTEXT),
    # Pool
    around(f"{_POOL}._build_mha_kv_pool(max_total_num_tokens, mha_pool_class, quant_method)",
         "memory.pool:build_mha_kv_pool", "builds the two-tier pool"),
    around(f"{_POOL}._build_hybrid_linear_kv_pool(max_total_num_tokens, req_to_token_pool, mha_pool_class)",
         "memory.pool:build_hybrid_linear_kv_pool", "builds the two-tier pool beside recurrent states", only=OLD_TREE),
    around(f"{_POOL}._build_hybrid_linear_kv_pool("
         "max_total_num_tokens, req_to_token_pool, mha_pool_class, mla_pool_class, dsa_pool_class)",
         "memory.pool:build_hybrid_linear_kv_pool", "builds the two-tier pool beside recurrent states", only=NEW_TREE),
    read("mem_cache.memory_pool.HybridLinearKVPool", "the pool of a hybrid"),
    # Sliding windows
    around(f"{_WINDOWS}.__init__(kvc)",
         "memory.window_sizes:around_init", "bytes per token of the layers that see all tokens"),
    around(f"{_WINDOWS}.calculate_pool_sizes(available_bytes, page_size)",
         "memory.window_sizes:calculate_pool_sizes", "divides memory between windows and the cache"),
    around(f"{_WINDOWS}.calculate_pool_sizes_from_max_tokens(max_total_num_tokens, page_size)",
         "memory.window_sizes:calculate_pool_sizes_from_max_tokens", "windows keep what they need"),
    around("model_executor.pool_configurator.SWAChunkCapPoolConfigurator.is_applicable(kvc)",
         "memory.window_sizes:without_cap", "windows are sized in one way", only=OLD_TREE),
    around("model_executor.pool_configurator.SWARequestCapPoolConfigurator.is_applicable(kvc)",
         "memory.window_sizes:without_cap", "windows are sized in one way", only=NEW_TREE),
    read(f"{_POOL}.sliding_window_size", "how far windows reach"),
    around(f"{_POOL}._build_hybrid_swa_kv_pool(full_max_total_num_tokens, swa_max_total_num_tokens, mha_pool_class)",
         "memory.window_pool:build_hybrid_swa_kv_pool", "builds the two-tier pool beside that of the windows"),
    read("mem_cache.swa_memory_pool.SWAKVPool", "the pool of a model with windows"),
    call("mem_cache.swa_memory_pool.SWAKVPool.translate_loc_from_full_to_swa(kv_indices)", "windows on a CPU"),
    call("mem_cache.memory_pool.KVWriteLoc(loc, swa_loc)", "windows on a CPU"),
    read("mem_cache.allocator.swa.SWATokenToKVPoolAllocator", "hands out pages of both pools"),
    call("layers.attention.triton_backend.TritonAttnBackend(model_runner)", "attention of the layers with windows"),
    read("environ.envs.SGLANG_SWA_EVICTION_INTERVAL", "how long what left a window is kept"),
    # Allocator
    around(f"{_POOL}._build_token_to_kv_pool_allocator("
         "sizes, token_to_kv_pool, is_dsv4_model, req_to_token_pool, token_to_kv_pool_allocator)",
         "memory.build:build_allocator", "builds the allocator"),
    after(f"{_POOL}.configure(pre_model_load_memory)",
         "checks:after_configure", "no other pool may serve instead", always=True),
    read(f"{_POOL}.server_args", "the worker being configured"),
    read(f"{_POOL}.model_config", "the worker being configured"),
    read(f"{_POOL}.layer_info", "the worker being configured"),
    read(f"{_POOL}.kv_cache_dtype", "the worker being configured"),
    read(f"{_POOL}.device", "the worker being configured"),
    read(f"{_POOL}.is_draft_worker", "the worker being configured"),
    subclass("mem_cache.memory_pool.KVCache.__init__("
         "size, page_size, dtype, layer_num, device, enable_memory_saver, start_layer, end_layer)",
         "the pool"),
    subclass("mem_cache.memory_pool.MHATokenToKVPool.move_kv_cache(tgt_loc, src_loc)", "accepted drafts move together"),
    subclass(f"{_PAGED}.PagedTokenToKVPoolAllocator.__init__(size, page_size, dtype, device, kvcache, need_sort)",
         "the allocator"),
    subclass(f"{_PAGED}.PagedTokenToKVPoolAllocator.clear()", "forgets every page"),
    subclass(f"{_PAGED}.PagedTokenToKVPoolAllocator.free(free_index)", "pages coming back", only=PER_TOKEN_FREES),
    subclass(f"{_PAGED}.PagedTokenToKVPoolAllocator._release_page_ids", "pages coming back", only=RELEASES_PAGES),
    call(f"{_PAGED}.PagedTokenToKVPoolAllocator.get_all_free_pages()", "which pages are free", only=NEW_TREE),
    subclass(f"{_PAGED}.PagedTokenToKVPoolAllocator.alloc(need_size)", "pages of a shared memory", only=NEW_TREE),
    subclass(f"{_PAGED}.PagedTokenToKVPoolAllocator.alloc_extend("
         "prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, num_new_pages)",
         "pages of prompts, and of a shared memory"),
    call(f"{_PAGED}.PagedTokenToKVPoolAllocator.merge_and_sort_free()", "pages of prompts"),
    subclass(f"{_PAGED}.PagedTokenToKVPoolAllocator.alloc_decode(seq_lens, seq_lens_cpu, last_loc)",
         "pages of a shared memory, and a kernel that is loaded before requests need it"),
    subclass("mem_cache.allocator.base.BaseTokenToKVPoolAllocator.create_prefill_budget("
         "tree_cache, num_mixed_decode_tokens)", "admission by what windows take", only=NEW_TREE),
    subclass("mem_cache.allocator.base.BaseTokenToKVPoolAllocator.evict_to_free_tokens(tree_cache, num_tokens)",
         "cached prefixes give way to windows", only=NEW_TREE),
    subclass("mem_cache.allocator.base.BaseTokenToKVPoolAllocator.check_decode_capacity("
         "num_tokens, tree_cache, requests, spec_algorithm)", "retraction by what windows take", only=NEW_TREE),
    subclass("mem_cache.prefill_budget.PrefillBudget.__init__(allocator, tree_cache, num_mixed_decode_tokens)",
         "admission by what windows take", only=NEW_TREE),
    subclass("mem_cache.prefill_budget.PrefillBudget.reserve("
         "extend_input_len, max_new_tokens, extra_tokens, chunk_limit, is_chunked_continuation)",
         "admission by what windows take", only=NEW_TREE),
    subclass("mem_cache.prefill_budget.PrefillBudget.check_prefill", "admission by what windows take", only=NEW_TREE),
    subclass("mem_cache.prefill_budget.PrefillBudget.can_allocate_prefill",
         "admission by what windows take", only=NEW_TREE),
    subclass("mem_cache.prefill_budget.PrefillBudget.prepare_load_back("
         "full_tokens, extend_input_len, max_new_tokens, swa_host_hit_length, chunk_limit)",
         "room for pages from the host", only=NEW_TREE),
    read("mem_cache.prefill_budget.PrefillBudget.load_back_needs_full_tokens", "room for pages from the host",
         only=NEW_TREE),
    subclass("mem_cache.prefill_budget.PrefillBudget.remaining_total", "admission by what windows take", only=NEW_TREE),
    subclass("mem_cache.prefill_budget.PrefillBudget.remaining_current",
         "admission by what windows take", only=NEW_TREE),
    call("mem_cache.base_prefix_cache.BasePrefixCache.evict_for_alloc(params)",
         "cached prefixes give way to windows", only=NEW_TREE),
    call("mem_cache.memory_pool.ReqToTokenPool.available_size()", "how many requests run", only=NEW_TREE),
    call(f"{_PAGED}.alloc_extend_naive(prefix_lens, seq_lens, last_loc, free_pages, out_indices, page_size, device)",
         "page allocation on a CPU"),
    call("utils.get_num_new_pages(seq_lens, page_size, prefix_lens, decode)", "page allocation on a CPU"),
    # Rows and tree
    around("mem_cache.memory_pool.ReqToTokenPool.free(req)",
         "prefix.rows:around_free", "a row given back frees its window", only=OLD_TREE),
    around("session.streaming_session.StreamingSession.release_session(session_id)",
         "prefix.rows:around_release_session", "a session's row frees its window", only=OLD_TREE),
    around("mem_cache.memory_pool.ReqToTokenPool.free_rows(indices)",
         "prefix.rows:around_free_rows", "rows given back free their windows", only=NEW_TREE),
    around("mem_cache.radix_cache.RadixCache.cache_finished_req(req, is_insert, kv_len_to_handle)",
         "prefix.tree:around_finished", "BF16 pages follow the tree's pages", only=OLD_TREE),
    around("mem_cache.radix_cache.RadixCache.cache_unfinished_req(req, chunked)",
         "prefix.tree:around_unfinished", "BF16 pages follow the tree's pages", only=OLD_TREE),
    around("mem_cache.unified_radix_cache.UnifiedRadixCache.cache_finished_req(req, is_insert, kv_len_to_handle)",
         "prefix.tree:around_finished", "BF16 pages follow the tree's pages", only=OLD_TREE),
    around("mem_cache.unified_radix_cache.UnifiedRadixCache.cache_unfinished_req(req, chunked)",
         "prefix.tree:around_unfinished", "BF16 pages follow the tree's pages", only=OLD_TREE),
    call("mem_cache.base_prefix_cache.BasePrefixCache.supports_mamba()",
         "whether the tree ends prefixes at recurrent states"),
    read("mem_cache.base_prefix_cache.MatchPrefixParams", "looks up what is cached"),
    read("mem_cache.radix_cache.RadixKey", "looks up what is cached"),
    around("mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree(req, up_to)",
         "prefix.tree:around_checkpoint", "BF16 pages follow the tree's pages", only=NEW_TREE),
    # Transfers between servers
    around("disaggregation.utils.ReqToMetadataIdxAllocator.__init__(size)",
         "disaggregation.seam:around_slots", "room for windows on their way", only=TRANSFERS),
    around("disaggregation.utils.ReqToMetadataIdxAllocator.available_size()",
         "disaggregation.seam:around_available", "requests wait until their window has room", only=TRANSFERS),
    after("disaggregation.utils.setup_state_kv_args(kv_args, token_to_kv_pool, draft_token_to_kv_pool)",
         "disaggregation.seam:after_state", "windows are sent, layouts compared", only=TRANSFERS),
    around("managers.tp_worker.TpModelWorker.forward_batch_generation(batch)",
         "disaggregation.seam:around_forward", "quantizes and packs what is sent", only=TRANSFERS),
    after("disaggregation.decode.SchedulerDisaggregationDecodeMixin._get_new_prebuilt_batch(running_batch)",
         "disaggregation.seam:after_prebuilt", "takes over requests that have arrived", only=TRANSFERS),
    around("disaggregation.decode.DecodeReqToTokenPool.free(req)",
         "disaggregation.seam:around_free", "a row given back frees its window", only=TRANSFERS),
    around("disaggregation.common.conn.CommonKVManager.try_ensure_parallel_info(bootstrap_addr)",
         "disaggregation.seam:around_parallel_info", "refuses servers with another layout", only=TRANSFERS),
    around("disaggregation.decode.DecodePreallocQueue._ensure_prefill_info(addr_to_reqs)",
         "disaggregation.seam:around_prefill_info", "gives up transfers from such a server", only=TRANSFERS),
    after("disaggregation.decode.DecodePreallocQueue._update_handshake_waiters("
          "rids_to_check, pp_good_rids, pp_bad_rids)",
          "disaggregation.seam:after_handshakes", "ends their requests with the reason", only=TRANSFERS),
    call("disaggregation.decode._bootstrap_addr(req)", "the address of a request's prefill server", only=TRANSFERS),
    before("disaggregation.prefill.SchedulerDisaggregationPrefillMixin.process_batch_result_disagg_prefill("
         "batch, result)",
         "disaggregation.drafts:before_prefill_result", "keeps a draft model's first guess", only=TRANSFERS),
    around("disaggregation.utils.MetadataBuffers.set_buf(req)",
         "disaggregation.drafts:around_metadata", "sends a draft model's first guess", only=TRANSFERS),
    around("speculative.spec_info.SpeculativeAlgorithm.build_disagg_draft_input("
         "batch, last_tokens_tensor, future_map)",
         "disaggregation.drafts:around_first_round", "what the first round of drafts begins with", only=TRANSFERS),
    call("speculative.eagle_disaggregation.build_eagle_disagg_draft_input(batch, last_tokens_tensor, future_map)",
         "a draft model's first guess", only=TRANSFERS),
    call("runtime_context.get_spec()", "how many drafts, and by which algorithm", only=TRANSFERS),
    call("managers.overlap_utils.RelayPayload.from_ngram(draft_input)", "n-grams begin", only=TRANSFERS),
    call("speculative.ngram_info.NgramVerifyInput.__init__()", "n-grams begin", only=TRANSFERS),
    call("mem_cache.memory_pool.MHATokenToKVPool.get_cpu_copy(indices)", "a retracted request's drafts",
         only=TRANSFERS),
    call("mem_cache.memory_pool.MHATokenToKVPool.load_cpu_copy(kv_cache_cpu, indices)",
         "a retracted request's drafts", only=TRANSFERS),
    call("mem_cache.memory_pool.MHATokenToKVPool.get_contiguous_buf_infos()", "tells a draft model's pages apart",
         only=TRANSFERS),
    read("disaggregation.base.conn.StateType.DSV4_REQUEST_STATE", "windows are sent once per request", only=TRANSFERS),
    call("disaggregation.utils.append_state_component(kv_args, state_type, data_ptrs, data_lens, item_lens)",
         "windows are sent once per request", only=TRANSFERS),
    call("disaggregation.utils.prepare_abort(req, error_message, status_code)",
         "ends requests to another layout", only=TRANSFERS),
    call("runtime_context.get_disagg()", "whether this server prefills or decodes", only=TRANSFERS),
    call("mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.get_cpu_copy(indices, mamba_indices, req_pool_index)",
         "retraction on a decode server", only=TRANSFERS),
    call("mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.load_cpu_copy("
         "kv_cache_cpu, indices, mamba_indices, req_pool_index)",
         "retraction on a decode server", only=TRANSFERS),
    around("managers.schedule_policy.PrefillAdder._update_prefill_budget",
         "memory.batch_tokens:around_charge", "a prefill batch counts tokens, not whole pages", only=NEW_TREE),
    call("managers.schedule_policy.PrefillAdder.ceil_paged_tokens(tokens)", "what a batch counts for a prompt",
         only=NEW_TREE),
    # Selected pages
    around("managers.schedule_batch.Req.init_next_round_input(tree_cache, cow_mamba)",
         "prefix.selection:around_next_round", "brings the pages that a request begins with"),
    around("managers.schedule_policy.PrefillAdder.add_one_req(req, has_chunked_req, truncation_align_size)",
         "prefix.selection:around_add", "a request waits until what it begins with is there"),
    read("managers.schedule_policy.AddReqResult.NO_TOKEN", "a request waits"),
    read("managers.schedule_policy.AddReqResult.OTHER", "a request waits"),
    call("mem_cache.base_prefix_cache.BasePrefixCache.evictable_size()", "room for copies"),
    around("managers.schedule_batch.Req._compute_max_prefix_len(input_len)",
         "prefix.episodes:around_longest_match", "prompts that score are computed, cached or not"),
    after("model_executor.forward_batch_info.ForwardBatch.init_new",
         "prefix.selection:after_new_batch", "whose batch runs next; positions behind the whole history"),
    read("model_executor.forward_batch_info.ForwardBatch.rids", "which requests of a batch are scored, or decode"),
    call("mem_cache.base_prefix_cache.InsertParams(key, value)", "copies of pages enter the tree"),
    call("mem_cache.base_prefix_cache.EvictParams(num_tokens)", "room for copies"),
    # Folds
    around("mem_cache.common.release_kv_cache(req, tree_cache, is_insert)",
         "prefix.folding:around_release", "chosen tokens stay when a request ends as a fold", only=OLD_TREE),
    around("mem_cache.common.release_kv_cache(req, tree_cache, checkpoint)",
         "prefix.folding:around_release", "chosen tokens stay when a request ends as a fold", only=NEW_TREE),
    read("managers.schedule_batch.FINISH_ABORT", "a fold without room"),
    # HiCache
    around(f"{_ASSEMBLER}.build_kv_host_pool("
         "kv_pool, page_size, use_mla, override_kv_cache_dim, host_size, mtp_draft_device_pools, pool_label)",
         "hicache.build:build_kv_host_pool", "builds the pool of quantized pages in host memory", only=NEW_TREE),
    around("speculative.base_spec_worker._can_pack_hicache_mtp(spec_algorithm, draft_runners)",
         "hicache.build:around_packing", "keeps drafts apart from quantized pages", only=NEW_TREE),
    around("mem_cache.hicache_auto_size._estimate_hicache_bytes(params, draft_plan)",
         "hicache.build:estimate_bytes", "sizes host memory", only=NEW_TREE),
    subclass("mem_cache.pool_host.base.HostKVCache.__init__("
         "dtype, device_capacity_tokens, size_per_token, start_layer, end_layer, host_to_device_ratio, host_size, "
         "page_size, layout, pin_memory, device, allocator_type)",
         "the pool in host memory", only=NEW_TREE),
    subclass("mem_cache.pool_host.base.HostKVCache.prepare_transfer_indices("
         "host_indices, device_indices, io_backend)", "which pages move", only=NEW_TREE),
    subclass("mem_cache.pool_host.base.HostKVCache.backup_from_device_all_layer_physical("
         "device_pool, host_indices, device_indices, io_backend)", "pages to the host", only=NEW_TREE),
    subclass("mem_cache.pool_host.base.HostKVCache.load_to_device_per_layer_physical("
         "device_pool, host_indices, device_indices, layer_id, io_backend, is_draft)",
         "pages from the host", only=NEW_TREE),
    subclass("mem_cache.pool_host.base.HostKVCache.storage_format_tag", "names of pages in storage", only=NEW_TREE),
    subclass("mem_cache.pool_host.base.HostKVCache.get_data_page(index, flat)", "pages to storage", only=NEW_TREE),
    subclass("mem_cache.pool_host.base.HostKVCache.set_from_flat_data_page(index, data_page)",
         "pages from storage", only=NEW_TREE),
    read("mem_cache.pool_host.common.ALLOC_MEMORY_FUNCS", "host memory", only=NEW_TREE),
    call("mem_cache.pool_host.common.get_allocator_type()", "host memory", only=NEW_TREE),
    call("runtime_context.get_memory()", "how much host memory", only=NEW_TREE),
    call("runtime_context.get_schedule()", "the stream of the layers", only=NEW_TREE),
    before(f"{_CONTROLLER}.start_writing()",
         "hicache.transfers:before_start_writing", "records of pages that go to the host", only=NEW_TREE),
    before(f"{_CONTROLLER}.start_loading()",
         "hicache.transfers:before_start_loading", "pages that come from the host are quantized ones", only=NEW_TREE),
    read("managers.cache_controller.CacheOperation.__init__(host_indices, device_indices, node_id)",
         "which pages move", only=NEW_TREE),
    call("managers.cache_controller.LayerDoneCounter.wait_until(threshold)",
         "a layer's pages have come from the host", only=NEW_TREE),
    call("mem_cache.swa_memory_pool.SWAKVPool._wait_for_layer(layer_id)",
         "a layer's pages have come from the host, beside layers with windows", only=NEW_TREE),
    call("mem_cache.hicache_auto_size._pool_bytes(pool)", "bytes of windows on the host", only=NEW_TREE),
    call("mem_cache.hicache_auto_size._draft_bytes(target, draft)", "bytes of drafts on the host", only=NEW_TREE),
    subclass("mem_cache.memory_pool.KVCache.register_layer_transfer_counter(layer_transfer_counter)",
         "a layer's pages have come from the host"),
    before(f"{_CONTROLLER}._generic_page_set(hash_values, host_indices, extra_info)",
         "hicache.storage:before_page_set", "checksums of pages in storage", only=NEW_TREE),
    around(f"{_CONTROLLER}._generic_page_get(operation, hash_values, host_indices, extra_info)",
         "hicache.storage:around_page_get", "a damaged page is computed again", only=NEW_TREE),
    before(f"{_CONTROLLER}._page_set_zero_copy(hash_values, host_indices, extra_info)",
         "hicache.storage:before_page_set", "checksums of pages in storage", only=NEW_TREE),
    around(f"{_CONTROLLER}._page_get_zero_copy(operation, hash_values, host_indices, extra_info)",
         "hicache.storage:around_page_get", "a damaged page is computed again", only=NEW_TREE),
    after("mem_cache.storage.backend_factory.StorageBackendFactory.create_backend("
         "backend_name, storage_config, mem_pool_host)",
         "hicache.stores:after_create", "a quantized page is one object", only=NEW_TREE),
    call("mem_cache.hicache_storage.HiCacheFile._get_suffixed_key(key)", "removes a damaged page", only=NEW_TREE),
    before(f"{_CONTROLLER}.attach_storage_backend("
         "storage_backend, prefetch_threshold, model_name, storage_backend_extra_config)",
         "hicache.storage:before_attach", "refuses storage that does not fit", only=NEW_TREE),
    call("mem_cache.utils.get_hash_str(token_ids)", "compiles what names stored pages", only=NEW_TREE),
    # Looking inside
    around("managers.scheduler_components.invariant_checker.SchedulerInvariantChecker._check_tree_cache()",
         "observe:check_when_idle", "checks the tiers when idle"),
    call("managers.scheduler_components.invariant_checker.SchedulerInvariantChecker._report_leak(pool_name, token_msg)",
         "reports a failed check"),
    around("managers.scheduler.Scheduler.get_internal_state(recv_req)",
         "observe:add_internal_state", "tiers in /server_info"),
    after("observability.metrics_collector.SchedulerMetricsCollector.log_stats(stats)",
         "metrics:after_log_stats", "tiers in /metrics"),
    read("observability.metrics_collector.QueueCount.total", "requests that run and wait"),
    # The KV canary
    call(f"{_CANARY}.api.register_pool_attacher(pool_class, attacher)", "--kv-canary over the two-tier pool"),
    call(f"{_CANARY}.buffer_alloc.alloc_canary_buf(num_slots, device)", "the canary's buffers"),
    call("kv_canary.buffer_group.CanaryBufferGroup("
         "kind, k_head, k_tail, v_head, v_tail, real_kv_sources_k, real_kv_sources_v, swa_index_lut, "
         "kv_token_id_vs_position_offset)",
         "the canary's buffers"),
    read("kv_canary.buffer_group.PoolKind.FULL", "the canary's buffers"),
    # Attention
    backend("layers.attention.attention_registry.ATTENTION_BACKENDS.triton",
         "attention.worker:create_backend", "attention on a GPU"),
    backend("layers.attention.attention_registry.ATTENTION_BACKENDS.torch_native",
         "attention.worker:create_backend", "attention on a CPU"),
    around("model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner."
           "_init_forward_metadata_for_capture(forward_batch, shape_key)",
           "attention.backend:around_capture_plan", "the requests of a capture are padding", only=NEW_TREE),
    around("model_executor.runner_backend.breakable_cuda_graph_backend.BreakableCudaGraphBackend."
           "capture_one(shape_key, forward_fn, capture_inputs, post_warmup_hook)",
           "attention.prompt_graphs:around_capture_one", "prompts in one CUDA graph", only=NEW_TREE),
    call("model_executor.runner_utils.pool.graph_pool_capture_scope()", "prompts in one CUDA graph", only=NEW_TREE),
    subclass(f"{_BACKEND}.init_forward_metadata_out_graph(forward_batch, in_capture)", "plans a batch"),
    subclass(f"{_BACKEND}.init_cuda_graph_state(max_bs, max_num_tokens)", "CUDA graphs"),
    subclass(f"{_BACKEND}.update_verify_buffers_to_fill_after_draft(spec_info, cuda_graph_bs)", "verifies drafts"),
    subclass(f"{_BACKEND}.needs_cpu_seq_lens", "verifies drafts"),
    read("model_executor.forward_batch_info.ForwardMode.is_target_verify()", "verifies drafts"),
    subclass(f"{_BACKEND}.get_cuda_graph_seq_len_fill_value()", "CUDA graphs"),
    subclass(f"{_BACKEND}.forward_decode(q, k, v, layer, forward_batch, save_kv_cache)", "attention of one layer"),
    subclass(f"{_BACKEND}.forward_extend(q, k, v, layer, forward_batch, save_kv_cache)", "attention of one layer"),
    read("layers.radix_attention.RadixAttention", "what a layer asks of attention"),
    read("layers.quantization.unquant.UnquantizedLinearMethod", "recognises plain weights"),
    read("layers.radix_attention.AttentionType.DECODER", "what a layer asks of attention"),
    call("runtime_context.get_parallel()", "this worker's rank and heads"),
    call("runtime_context.get_server_args()", "whether drafts branch, and how many processes answer clients"),
    # Weights: new weights would lack the value rotation that is folded into the loaded ones
    around(f"{_WEIGHTS}.update_weights_from_disk(model_path, load_format)",
         "attention.folded_weights:refuse_update", "refuses while V is folded into the weights"),
    around(f"{_WEIGHTS}.update_weights_from_tensor(named_tensors, load_format)",
         "attention.folded_weights:refuse_update", "refuses while V is folded into the weights"),
    around(f"{_WEIGHTS}.update_weights_from_ipc(recv_req)",
         "attention.folded_weights:refuse_update", "refuses while V is folded into the weights"),
    around(f"{_WEIGHTS}.update_weights_from_distributed(names, dtypes, shapes, group_name, load_format)",
         "attention.folded_weights:refuse_update", "refuses while V is folded into the weights", only=OLD_TREE),
    around(f"{_WEIGHTS}.load_weights_from_distributed(named_tensors)",
         "attention.folded_weights:refuse_update", "refuses while V is folded into the weights", only=NEW_TREE),
    around("managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.begin_weight_update(recv_req)",
         "attention.folded_weights:refuse_update_session", "refuses while V is folded into the weights", only=NEW_TREE),
    call("managers.io_struct.BeginWeightUpdateReqOutput", "refuses while V is folded into the weights", only=NEW_TREE),
    # Weights: folded weights must not leave this server, because they are not the checkpoint's
    around(f"{_EXPORTER}.init_weights_send_group_for_remote_instance("
         "master_address, ports, group_rank, world_size, group_name, backend)",
         "attention.folded_weights:refuse_sending", "refuses while V is folded into the weights"),
    around(f"{_EXPORTER}.send_weights_to_remote_instance(master_address, ports, group_name)",
         "attention.folded_weights:refuse_sending", "refuses while V is folded into the weights"),
    around(f"{_EXPORTER}.save_remote_model(url)",
         "attention.folded_weights:refuse_saving", "refuses while V is folded into the weights"),
    around(f"{_EXPORTER}.save_sharded_model(path, pattern, max_size)",
         "attention.folded_weights:refuse_saving", "refuses while V is folded into the weights"),
    around(f"{_EXPORTER}.get_weights_by_name(name, truncate_size)",
         "attention.folded_weights:refuse_reading", "refuses while V is folded into the weights"),
    around("utils.weight_checker.WeightChecker.handle(action, allow_quant_error)",
         "attention.folded_weights:refuse_saving", "refuses while V is folded into the weights", only=OLD_TREE),
    around("utils.weight_checker.WeightChecker.handle(action, allow_quant_error, skip_tensor_list, role)",
         "attention.folded_weights:refuse_saving", "refuses while V is folded into the weights", only=NEW_TREE),
)
# fmt: on

TABLE = (*(replace(hook, process=Process.MAIN) for hook in _MAIN), *_SCHEDULER)


def for_release(version: Version, process: Process | None = None, table: Iterable[Hook] = TABLE) -> list[Hook]:
    """Returns the entries for a release, of one process or of all."""
    return [h for h in table if compat.applies(h.versions, version) and process in (None, h.process)]


def find(hook: Hook) -> Any:
    """Returns the symbol itself.

    Raises:
        ImportError, AttributeError, KeyError: the installed SGLang does not have the symbol.
    """
    parent, _, name = hook.path.rpartition(".")
    owner = pkgutil.resolve_name(parent)
    return owner[name] if hook.kind is Kind.BACKEND else getattr(owner, name)


def problem(hook: Hook) -> str | None:
    """Returns why the symbol cannot be used as the table says; None if it can. Imports the symbol's module."""
    use = f"{hook.path} ({hook.kind.value}: {hook.why})"
    try:
        symbol = find(hook)
    except Exception as error:  # an import may fail in any way; every failure is reported
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
    """Returns the ``problem`` of each entry that has one."""
    return [text for hook in hooks if (text := problem(hook)) is not None]
