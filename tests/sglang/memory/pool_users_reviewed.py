"""Our review of what ``pool_users`` finds in SGLang 0.5.16 to 0.5.18, 0.5.22 and 0.5.23: why each look is harmless.

One table covers all releases; an entry without a look in some release does no harm. A look without an entry fails
``test_pool_users``, which says where it is. Read the code around it, then enter it here, or fix our code.
"""

from sglang_kvq.sglang import compat, hooks
from tests.sglang.memory.pool_users import BACKEND, POOL

#: Parts of prefill/decode disaggregation; older releases refuse all of it.
_TRANSFERS = (
    {
        **dict.fromkeys(("ascend/", "fake/", "mori/"), "--disaggregation-transfer-backend"),
        "encoder/": "--encoder-only",
        "checksum.py": "--disaggregation-enable-kv-checksum",
        "common/dcp_pack.py": "--dcp-size",
        "common/staging_": "SGLANG_DISAGG_STAGING_BUFFER",
        "decode_hicache_mixin.py": "--enable-hierarchical-cache",
        "decode_kvcache_offload_manager.py": "--disaggregation-decode-enable-offload-kvcache",
        "minimax.py": "another pool",
        "role_switch.py": "--enable-pd-role-switch",
    }
    if compat.applies(hooks.TRANSFERS, compat.sglang_version())
    else {"": "--disaggregation-mode"}
)

#: Beginnings of paths that are not read, because a server with --kv-quant never runs their code.
NOT_SERVED = {
    # Refused by checks.py, through the setting that turns each on
    **{
        f"speculative/{name}": "--speculative-algorithm: drafts chains or n-grams only"
        for name in ("dflash", "dspark", "frozen_kv", "uno", "lilicorr", "domino", "decoupled", "ragged")
    },
    "speculative/multi_layer_eagle": "--enable-multi-layer-eagle",
    "speculative/adaptive": "--speculative-adaptive",
    "speculative/pp_": "--pp-size and --speculative-algorithm",
    "speculative/eagle_draft_": "graphs of the draft model, whose pool and attention are SGLang's",
    **{f"disaggregation/{name}": why for name, why in _TRANSFERS.items()},
    "dllm/": "--dllm-algorithm",
    "batch_overlap/": "--enable-two-batch-overlap",
    "kernel_plugins/": "--enable-nvidia-megakernel and --enable-amd-monokernel",
    "layers/cp/": "--attn-cp-size and --enable-prefill-cp",
    "layers/utils/cp_utils.py": "--attn-cp-size and --enable-prefill-cp",
    "layers/communicator_dsa_cp.py": "--enable-dsa-prefill-context-parallel",
    "layers/dcp/": "--dcp-size",
    "managers/hisparse_coordinator.py": "--enable-hisparse",
    "model_executor/cpu_graph_runner.py": "graphs on a CPU need --enable-torch-compile",
    "model_executor/encoder_swa_replay.py": "DeepSeek-V4's --enable-encoder-swa-bounded-replay",
    "model_executor/runner/row_bucket_graph_runner.py": "DeepSeek-V4's encoder",
    "model_executor/runner/prefill_cuda_graph_runner.py": "plans made-up requests as padding (around_capture_plan)",
    "hardware_backend/": "--device: cuda without ROCm, and cpu",
    # HiCache: our host pool (hicache/build.py) replaces SGLang's, and of the storage back ends only files are served
    **{
        f"mem_cache/pool_host/{name}": "another cache's host pool"
        for name in (
            "common.py",
            "dsa.py",
            "hisparse.py",
            "host_pool_decl.py",
            "mamba.py",
            "mha",
            "minimax_m3_",
            "mla.py",
        )
    },
    **{
        f"mem_cache/pool_host/{name}": "another cache's host pool"
        for name in ("npu_memfabric.py", "page_", "qsa.py", "unified.py")
    },
    "mem_cache/memory_pool_host.py": "another cache's host pools",
    "mem_cache/hybrid_cache/hybrid_pool_assembler.py": (
        "strategies of other caches; the plain one asks ours for layer_num, host_pool_decls and "
        "register_layer_transfer_counter, which KVCache has, and builds the host pool by a function that is hooked"
    ),
    "mem_cache/hybrid_cache/linker_pool_assembler.py": "--enable-unified-cache-external-linker",
    "mem_cache/hiradix_cache.py": "--enable-hierarchical-cache, before 0.5.22",
    "mem_cache/hi_mamba_radix_cache.py": "--enable-hierarchical-cache, before 0.5.22",
    "mem_cache/hicache_key_scheme.py": "slices pages of plain keys and values; no flag turns it on",
    "mem_cache/hisparse": "--enable-hisparse",
    "mem_cache/mla_host_dedup.py": "MLA",
    "mem_cache/buffer_mode/": "--hicache-host-memory-mode buffer_only",
    "mem_cache/storage/": "--hicache-storage-backend: but for files, which are bytes, and the connectors' flags",
    "mem_cache/sparsity/": "--enable-hisparse",
    # Code of other pools and allocators; after_configure stops a server that has one
    "mem_cache/memory_pool.py": "SGLang's pools; what KVCache itself does is inherited",
    "mem_cache/deepseek_v4_memory_pool.py": "another pool",
    "mem_cache/swa_memory_pool.py": "another pool",
    "mem_cache/unified_memory_pool.py": "another pool",
    "mem_cache/unified_draft_pool.py": "another pool",
    "mem_cache/minimax_m3_nvfp4_pool.py": "another pool",
    "mem_cache/qsa_kv_pool.py": "another pool",
    "mem_cache/index_key_cache.py": "a part of DSA's pool",
    "mem_cache/dsa_cache_layer_split.py": "a part of DSA's pool",
    "mem_cache/page_interleave": "--enable-kv-cache-sharding",
    "mem_cache/allocator/hisparse.py": "another allocator",
    "mem_cache/allocator/swa.py": "another allocator",
    "mem_cache/allocator/token.py": "another allocator",
    "mem_cache/allocator/unified_": "another allocator",
    "mem_cache/allocator/page_interleave.py": "another allocator",
    "mem_cache/multi_ended_allocator.py": "another allocator",
    # Other attention backends: SGLang's table has ours instead of them
    "layers/attention/": "other backends; the base class's own code is inherited",
    "layers/radix_linear_attention.py": "recurrent states, which SGLang's own backend keeps beside ours",
    # Models with attention that check_model or check_layers refuses
    **{
        f"models/{name}": "recurrent state"
        for name in (
            "falcon_h1.py",
            "falcon_mamba.py",
            "granitemoehybrid.py",
            "jet_nemotron.py",
            "lfm2.py",
            "lfm2_moe.py",
            "mamba2.py",
            "nemotron_h.py",
            "zaya.py",
            "inkling_common/",
        )
    },
    **{f"models/{name}": "MLA" for name in ("deepseek", "dots3_common/", "hunyuan_v4.py", "sarvam_moe.py")},
    **{
        f"models/{name}": "sliding windows that are refused"
        for name in ("gemma3_mm.py", "gemma4_mm.py", "muse_spark.py")
    },
    "models/minimax_m3.py": "sparse attention: SGLang builds another pool",
    "models/mindspore.py": "a model implementation for NPUs",
}

#: Attributes that our classes have with SGLang's meaning, whoever reads them.
SERVED = {
    POOL: {
        "size",
        "page_size",
        "device",
        "mem_usage",
        "maybe_get_custom_mem_pool",
        "move_kv_cache",
        "post_capture_active",
        "cpu_copy_carries_mamba",
        # For transfers
        "get_contiguous_buf_infos",
        "request_state_transfer_indices",
        "get_cpu_copy",
        "load_cpu_copy",
        "head_num",
    },
    BACKEND: {
        "token_to_kv_pool",
        "req_to_token_pool",
        "forward",
        "init_forward_metadata",
        "init_forward_metadata_out_graph",
        "init_forward_metadata_in_graph",
        "init_cuda_graph_state",
        "on_after_cuda_graph_warmup",
        "shared_read_ends",
        "get_cuda_graph_seq_len_fill_value",
        "get_cpu_graph_seq_len_fill_value",
        "max_context_len",
        "update_verify_buffers_to_fill_after_draft",
        # The base class's values are right for ours
        "get_verify_buffers_to_fill_after_draft",
        "verify_mask",
        "prepare_prefill_shared_read_snapshot",
        "resolve_prefill_shared_read_ends",
        "supports_ragged_verify_graph",
        "use_captured_forward_metadata_for_breakable_cuda_graph",
        "dllm_attention",
        "attn_backend_list",
        "extend_dummy_seqs_capped_by_req_pool",
        "folds_encoder_swa_replay",
        "late_layer_num_tokens",
        "validate_elastic_cuda_graph_recapture",
        "kv_index_translator",
        "get_fused_kv_write_buffers",
    },
}

_DSV4 = "DeepSeek-V4, which is refused; behind a test of the pool's class or of the architecture"
_OTHER_POOL = "behind a test of the pool's class"
_HICACHE = "HiCache"

#: Looks that need a reason of their own: by path, the attributes, and why reading them is harmless.
REVIEWED = {
    POOL: {
        "kv_canary/pool_patcher/api.py": ("type()", "attachers are found by class; canary.py registers ours"),
        "disaggregation/decode.py": (
            "clear_request_scoped_state?, full_kv_pool, full_kv_pool?, head_num?, is DeepSeekV4TokenToKVPool, "
            "is SWAKVPool, swa_kv_pool, unified_swa_ring_size, unified_swa_window",
            f"SGLANG_DISAGG_STAGING_BUFFER, which is refused, and {_OTHER_POOL}",
        ),
        "disaggregation/prefill.py": (
            "end_layer?, full_kv_pool, full_kv_pool?, is DeepSeekV4TokenToKVPool, is HybridLinearKVPool, "
            "layer_shard_enabled?, layer_shard_rank?, layer_shard_size?, layer_shard_start?, request_window, "
            "sliding_window, start_layer, unified_swa_ring_size, unified_swa_window",
            f"KV sharding and SGLANG_DISAGG_STAGING_BUFFER, which are refused, and {_OTHER_POOL}",
        ),
        "disaggregation/utils.py": (
            "_unified_kv, _unified_kv?, compression_ratios, full_kv_pool, full_to_swa_index_mapping, "
            "get_c128_kv_buf_infos, get_c4_state_buf_infos, get_compress_tail_buf_infos, get_dense_kv_state_buf_infos, "
            "get_index_k_state_buf_infos, get_kv_layer_ids, get_kv_scale_buf_infos, "
            "get_qsa_compressed_state_buf_infos, get_qsa_compressed_state_layer_ids, get_qsa_pending_state_buf_infos, "
            "get_qsa_pending_state_layer_ids, get_request_state_buf_infos, get_request_state_buf_infos?, "
            "get_state_buf_infos, get_state_buf_infos?, get_state_conv_shard_groups, get_state_conv_shard_groups?, "
            "get_state_dim_per_tensor, get_state_dim_per_tensor?, get_state_layer_ids, get_state_slice_outer_counts, "
            "get_state_slice_outer_counts?, get_swa_valid_from_buf_infos, get_unified_swa_ring_buf_infos, "
            "get_unified_swa_ring_buf_infos?, index_head_dim, index_k_pool, index_kpool, index_kv_pool, "
            "is BaseSWAKVPool, is DSATokenToKVPool, is DSV4NPUTokenToKVPool, is DeepSeekV4TokenToKVPool, "
            "is HybridLinearKVPool, is MHATokenToKVPool, is MHATokenToKVPoolMXFP8, is MLATokenToKVPool, "
            "is MiniMaxM3Nvfp4KVPool, is MiniMaxSparseKVPool, is NPUMLATokenToKVPool, is QSATokenToKVPool, "
            "is SWAKVPool, k_buffer, kpool_use_compress, kv_cache_layout, layer_num, pd_kv_layout, request_window, "
            "sliding_window, swa_kv_pool, swa_req_ring_size, tail_extra_slots?, unified_swa_pages, "
            "unified_swa_ring_size, unified_swa_window, use_dsa?, v_buffer",
            f"state of other pools, {_OTHER_POOL} or of what only these have; ours is added by disaggregation.seam",
        ),
        "mem_cache/common.py": ("is DeepSeekV4TokenToKVPool", _DSV4),
        "mem_cache/kv_cache_builder.py": (
            "is MHATokenToKVPool, is MLATokenToKVPool, is HybridLinearKVPool, is SWAKVPool, is BaseSWAKVPool, "
            "full_kv_pool, type(), is DeepSeekV4TokenToKVPool, needs_paged_swa_allocator, _unified_kv?, request_window",
            "host pools of HiCache; the rest is DeepSeek-V4's",
        ),
        "mem_cache/kv_cache_configurator.py": (
            "is NoOpMHATokenToKVPool, type(), is PageInterleaveKVPoolMixin, is PageInterleaveDSATokenToKVPool, "
            "is PageInterleaveMHATokenToKVPool, is PageInterleaveMLATokenToKVPool, is DeepSeekV4TokenToKVPool, "
            "needs_paged_swa_allocator, _unified_kv, clear_c4_req_states, register_mapping, swa_uses_full_indices=",
            "--prefill-only-disable-kv-cache, KV sharding and DeepSeek-V4: refused; maps of draft pools with windows",
        ),
        "mem_cache/kv_index_translator.py": (
            "is BaseSWAKVPool, is DeepSeekV4TokenToKVPool, request_window, translate_loc_from_full_to_swa",
            _OTHER_POOL,
        ),
        "managers/cache_controller.py": (
            "is HybridLinearKVPool, full_kv_pool, is MLATokenToKVPool, is DeepSeekV4TokenToKVPool, layer_num, "
            "register_layer_transfer_counter, storage_format_tag, type()",
            "HiCache: KVCache has what is used of it, and our host pool the tag",
        ),
        "mem_cache/l2_transfer.py": (
            "host_transfer_translate?",
            "KVCache has it: None, as our pages have their own ids",
        ),
        "mem_cache/pool_host/base.py": (
            "_owned_local_layer_range, layer_num, layer_shard_enabled, layer_shard_size, is HostKVCache, end_layer, "
            "start_layer, store_dtype",
            "layers that are sharded over workers, for host pools that ask; ours does not",
        ),
        "mem_cache/pool_host/group.py": (
            "is HostKVCache, is MHATokenToKVPool",
            "the host pool is one; the other test is behind --disaggregation-mode decode",
        ),
        "mem_cache/hybrid_cache/hybrid_cache_controller.py": (
            "alloc, free",
            "side pools of hybrids, which are refused",
        ),
        "mem_cache/hybrid_cache/host_pool_config.py": ("is MLATokenToKVPool, layer_num", _OTHER_POOL),
        "mem_cache/hicache_auto_size.py": (
            "is BaseSWAKVPool, is HybridLinearKVPool, is SWAKVPool, type()",
            "hicache/build.py estimates the bytes of ours before",
        ),
        "mem_cache/registry.py": ("register_layer_transfer_counter", _HICACHE),
        "mem_cache/unified_radix_cache.py": (
            "is MHATokenToKVPool, is SWAKVPool, full_kv_pool, swa_kv_pool, translate_loc_from_full_to_swa",
            _HICACHE,
        ),
        "model_executor/forward_batch_deepseek_mha_mixin.py": (
            "is HybridLinearKVPool, is MLATokenToKVPool, full_kv_pool",
            "MLA",
        ),
        "model_executor/model_runner_components/kv_pool_runtime.py": (
            "finalize_backing, post_capture_backed_bytes, dtype",
            "sizing after graph capture: the pool says it is not used",
        ),
        "model_executor/runner/base_runner.py": (
            "request_window",
            "--enable-encoder-swa-bounded-replay, for DeepSeek-V4",
        ),
        "model_executor/runner/eager_runner.py": ("get_kv_buffer_shape", "for decode context parallelism only"),
        "speculative/eagle_worker_common.py": ("clear_unaccepted_c128_draft_states?", _DSV4),
        "speculative/eagle_worker_v2.py": (
            "qsa_compress_ratio, qsa_token_topk",
            "the draft model's, behind a test of its backend's class",
        ),
        "models/qwen3.py": ("get_kv_buffer", "ROCm only, which is refused"),
        "models/utils.py": (
            "dtype, is SWAKVPool, get_key_buffer, get_value_buffer, full_to_swa_index_mapping",
            "enable_fused_set_kv_buffer wants bfloat16, ours is uint8; without it nobody makes the argument",
        ),
    },
    BACKEND: {
        "managers/scheduler.py": (
            "extend_attention_block_m?, extend_attention_block_m",
            "sizes chunks by a kernel's tile if the backend has one",
        ),
        "managers/tp_worker.py": ("tail_forward_metadata", "only if folds_encoder_swa_replay"),
        "model_executor/model_runner_components/attention_backend_setup.py": (
            "prefill_attention_backend_str=, decode_attention_backend_str=",
            "written for models to read",
        ),
        "model_executor/runner/decode_cuda_graph_runner.py": (
            "is DeepseekV4AttnBackend, enable_early_verify_metadata, glue_draft_metadata, glue_target_verify_metadata",
            "speculative decoding",
        ),
        "model_executor/runner/eager_runner.py": (
            "forward_metadata=",
            "cleared for a batch without attention; ours has none",
        ),
        "model_executor/runner_utils/shared_read_event.py": ("type()", "its name, for the log"),
        "speculative/eagle_worker_v2.py": (
            "attn_backends, is DeepseekSparseAttnBackend, is QwenSparseAttnBackend",
            "the draft model's, which is SGLang's",
        ),
        "speculative/spec_utils.py": (
            "update_mamba_state_after_mtp_verify?, update_mamba_state_after_mtp_verify",
            "of models with recurrent state",
        ),
        "models/qwen3_5.py": (
            "linear_attn_backend?, supports_fused_gdn, supports_packed_verify?",
            "of the backend that SGLang puts around ours and its own for linear attention",
        ),
        "models/hunyuan_v3.py": (
            "is HPCOpsAttnBackend, use_fp8, fused_qk_rope_store_kv_fp8",
            "only with HPCOpsAttnBackend, which ours is not",
        ),
    },
}

_FUSES = "False only where enable_fused_set_kv_buffer is true: never, as test_model_calls shows"
_WINDOWS = "has sliding windows too, of a kind that check_model refuses"
_BOTH_WAYS = "its attention looks at later tokens, which check_layers refuses"

#: Calls of attention layers with more than q, k, v and the batch: by path, the arguments, and why no answer is wrong.
#: The backend refuses any argument that it does not know (``layers.own_keys_and_values``), at the latest in warm-up.
CALLS = {
    "models/baichuan.py": ("**", "ALiBi slopes, on NPUs only"),
    "models/bailing_moe.py": ("save_kv_cache", _FUSES),
    "models/dflash.py": ("sinks", "a draft model of speculative decoding"),
    "models/gemma3n_causal.py": ("save_kv_cache", _WINDOWS),
    "models/gemma4_causal.py": ("save_kv_cache", _WINDOWS),
    "models/gpt_oss.py": ("save_kv_cache, sinks", "sinks are served; save_kv_cache is " + _FUSES),
    "models/granite.py": ("sinks", "served"),
    "models/granitemoe.py": ("sinks", "served"),
    "models/hunyuan_v3.py": ("None, save_kv_cache", "only with HPCOpsAttnBackend, which ours is not"),
    "models/iquest_loopcoder.py": ("None, save_kv_cache", "its later loops read the first's cache; " + _WINDOWS),
    "models/iquest_q1.py": ("return_lse", "is refused in the call, in warm-up"),
    "models/llada2.py": ("save_kv_cache", _BOTH_WAYS),
    "models/mimo_v2.py": ("None, save_kv_cache, sinks", "heads of keys and values differ, which check_model refuses"),
    "models/minicpmv.py": ("key_padding_mask", "not a RadixAttention: the resampler of its image encoder"),
    "models/qwen3.py": ("save_kv_cache", "False on ROCm only, which is refused"),
    "models/qwen3_moe.py": ("save_kv_cache", _FUSES),
    "models/qwen4_exp.py": ("**", "recurrent state, which check_model refuses"),
    "models/sdar.py": ("save_kv_cache", _BOTH_WAYS),
    "models/sdar_moe.py": ("save_kv_cache", _BOTH_WAYS),
    "models/whisper.py": ("save_kv_cache", "True; and an encoder, which check_model refuses"),
}
