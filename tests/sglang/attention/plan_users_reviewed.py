"""Our review of what ``plan_users`` finds in SGLang 0.5.16 and 0.5.23: why each place is harmless.

One table covers all releases. A place that is missing here fails ``test_plan_users``. Read the code at that place: does
SGLang call the backend's ``init_forward_metadata_out_graph`` for each step, outside of CUDA graphs? If so, enter the
reason here. If not, refuse the switch that turns it on, in ``sglang/checks.py``.
"""

#: Files read although ``pool_users_reviewed.NOT_SERVED`` leaves out their folder: our backend inherits from them.
ALSO = ("layers/attention/base_attn_backend.py",)

#: By file: the functions that plan, and why they are harmless.
PLANS = {
    "layers/attention/base_attn_backend.py": (
        "init_forward_metadata: init_forward_metadata_out_graph, init_forward_metadata: init_forward_metadata_in_graph",
        "one plan for an eager step; ours has nothing to do in a graph",
    ),
    "model_executor/model_runner.py": (
        "forward_split_prefill: init_forward_metadata",
        "the first of a prefill's splits plans for all of them",
    ),
    "model_executor/runner/base_runner.py": ("_dummy_run: init_forward_metadata", "warming up, on padding"),
    "model_executor/runner/eager_runner.py": (
        "_execute_decode: init_forward_metadata, _execute_extend: init_forward_metadata, "
        "_execute_idle: init_forward_metadata",
        "each eager step is planned",
    ),
    "model_executor/runner/decode_cuda_graph_runner.py": (
        "capture_one_shape: init_forward_metadata_out_graph, capture_one_shape: init_forward_metadata_in_graph, "
        "run_once: init_forward_metadata_in_graph, prep: init_forward_metadata_in_graph, "
        "_run_in_graph_metadata_prep: init_forward_metadata_in_graph, "
        "load_batch: init_forward_metadata_out_graph, "
        "_init_replay_attn_metadata_from_view: init_forward_metadata_out_graph",
        "each replay is planned before its graph, unless the plan itself is captured, which is refused",
    ),
    "model_executor/runner/metadata_glue_graph.py": (
        "run: init_forward_metadata_out_graph",
        "captures a plan: SGLANG_ENABLE_METADATA_GLUE_GRAPH is refused; the rest is DSpark's, also refused",
    ),
    "speculative/eagle_worker_common.py": (
        "prepare_for_draft_extend: init_forward_metadata",
        "of the draft model, whose pool and attention are SGLang's",
    ),
    "speculative/eagle_worker_v2.py": (
        "draft: init_forward_metadata",
        "of the draft model, whose pool and attention are SGLang's",
    ),
}

_DSPARK = "DSpark's, which --speculative-algorithm refuses"
_VISION = "the graphs of a vision tower"
_DEEPSEEK = "of DeepSeek's and other backends, in whose place ours stands"
_SAME = "what a step computes, logs or copies, not whether it is planned"
_REFUSED = "refused"

#: Environment variables by the reason why they are harmless; those under ``_REFUSED`` are in
#: ``checks.REFUSED_ENVIRONMENT``.
VARIABLES = {
    _REFUSED: (
        "SGLANG_ENABLE_METADATA_GLUE_GRAPH",
        "SGLANG_ENABLE_OVERLAP_PLAN_STREAM",
        "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",
    ),
    _DSPARK: (
        "SGLANG_DSPARK_EMBED_IN_GRAPH",
        "SGLANG_HIP_DSPARK_DRAFT_RAW_METADATA",
        "SGLANG_OPT_DSV41_DSPARK_DRAFT_PREP_FORK",
        "SGLANG_OPT_DSV41_DSPARK_SKIP_PREFILLED_INPUTS",
        "SGLANG_OPT_DSV41_POST_FORWARD_CUDA_GRAPH",
        "SGLANG_OPT_DSV41_SAMPLING_ACCEPT_GRAPH",
        "SGLANG_OPT_DSV41_TARGET_METADATA_EARLY",
        "SGLANG_OPT_DSV41_TARGET_VERIFY_METADATA_GLUE",
        "SGLANG_RAGGED_VERIFY_MODE",
        "SGLANG_TEST_RAGGED_VERIFY_FORCE_UNIFORM_CAPTURE",
    ),
    "without a captured plan it does nothing": ("SGLANG_OPT_SKIP_GLUED_REPLAY_VIEW",),
    "of the draft model, whose pool and attention are SGLang's": (
        "SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH",
        "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION",
        "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND",
    ),
    "--pp-size refuses drafts; warming up": ("SGLANG_ENABLE_PP_SPEC", "SGLANG_PP_PARALLEL_DEEPGEMM_WARMUP"),
    "--enable-memory-saver is refused": ("SGLANG_MEMORY_SAVER_CUDA_GRAPH",),
    "what HiCache remembers of its files": (
        "SGLANG_HICACHE_FILE_BACKEND_ENABLE_METADATA_CACHE",
        "SGLANG_HICACHE_FILE_BACKEND_METADATA_TTL",
    ),
    _DEEPSEEK: (
        "SGLANG_DSV4_DECODER_TAIL_GRAPH_MAX_ROWS",
        "SGLANG_DSV4_DECODER_TAIL_GRAPH_MIN_PREFILL_TOKENS",
        "SGLANG_EXPERIMENTAL_DSA_KPOOL_METADATA_FUSION",
        "SGLANG_MUSA_FA3_FORCE_UPDATE_METADATA",
        "SGLANG_OPT_FLASHINFER_VERIFY_HOST_PLAN",
        "SGLANG_OPT_USE_JIT_INDEXER_METADATA",
        "SGLANG_OPT_USE_MSA_DECODE_UNDER_GRAPH",
        "SGLANG_PREP_IN_CUDA_GRAPH",
    ),
    "recurrent states, which SGLang's own backend keeps beside ours": (
        "SGLANG_DISABLE_KDA_PREFILL_GRAPH_EXTEND",
        "SGLANG_KDA_PREFILL_GRAPH_MAX_SEQS",
        "SGLANG_VALIDATE_MAMBA_REPLAY_STATE_INDICES",
    ),
    _VISION: (
        "SGLANG_KIMI_K3_VIT_CUDA_GRAPH_CACHE_CAPACITY",
        "SGLANG_KIMI_K3_VIT_CUDA_GRAPH_MAX_SEQLEN",
        "SGLANG_KIMI_K3_VIT_CUDA_GRAPH_MIN_HITS",
        "SGLANG_VIT_ENABLE_CUDA_GRAPH",
    ),
    _SAME: (
        "SGLANG_DETECT_SLOW_RANK",
        "SGLANG_EAGER_INPUT_NO_COPY",
        "SGLANG_ENABLE_CUDA_GRAPH_CAPTURE_TRACE",
        "SGLANG_ENABLE_CUDA_GRAPH_DEDUP",
        "SGLANG_ENABLE_GRAPH_POOL_BORROW",
        "SGLANG_ENABLE_GRAPH_POOL_PRECARVE",
        "SGLANG_GRAPH_BATCH_CAPTURE",
        "SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE",
        "SGLANG_LOG_DECODE_GRAPH_KEY",
        "SGLANG_LOG_EXPERT_LOCATION_METADATA",
        "SGLANG_OPT_CUDA_GRAPH_FILL_FAST_PATH",
    ),
    "when graphs are launched and when events are recorded, behind the plan": (
        "SGLANG_ENABLE_PREFILL_WAR_READ_DONE",
        "SGLANG_FORCE_COARSE_WAR_BARRIER",
    ),
    "a graph in pieces is planned before it like a whole one": ("SGLANG_USE_BREAKABLE_CUDA_GRAPH",),
}

#: Flags by the reason why they are harmless.
FLAGS = {
    "check_resolved allows whole graphs for decoding, and for prefill those between which attention runs": (
        "cuda_graph_backend_decode",
        "cuda_graph_backend_prefill",
        "cuda_graph_config",
        "cuda_graph_tc_compiler",
    ),
    "which batches have graphs; each step is planned with and without": (
        "cuda_graph_bs_decode",
        "cuda_graph_bs_prefill",
        "cuda_graph_max_bs_decode",
        "cuda_graph_max_bs_prefill",
        "cuda_graph_max_seq_len_prefill",
        "cuda_graph_prefill_max_context",
        "debug_cuda_graph",
        "disable_cuda_graph",
        "disable_cuda_graph_padding",
        "disable_decode_cuda_graph",
        "disable_prefill_cuda_graph",
    ),
    _SAME: ("enable_cudagraph_gc", "enable_profile_cuda_graph"),
    _DSPARK: ("speculative_dspark_align_verify_tokens_to_graph_tier",),
    "recurrent states of models that are not served, or layers beside ours": (
        "enable_gdn_replayssm_spec",
        "enable_linear_replayssm",
        "enable_linear_replayssm_spec",
        "linear_replayssm_cache_len",
    ),
    "DeepSeek-V4's, whose attention is refused": (
        "enable_decoder_swa_bounded_replay",
        "enable_encoder_swa_bounded_replay",
    ),
}

#: The variables that ``sglang/checks.py`` refuses.
REFUSED = VARIABLES[_REFUSED]
