"""Tests that only ``./test --all`` runs, each with a cheaper test that finds the same kind of fault.

On a GPU, the kernels are tested in full without ``--all``, because there the tests are fast.
"""

from __future__ import annotations

import re

#: Replacements in the default suite, by a pattern of test ids after ``tests/``; each begins with their paths.
NIGHTLY = {
    # Servers for SGLang's own behavior, models of other kinds, several workers.
    r"e2e/test_kits\.py": "tests/e2e/test_serving.py: turns, sessions, retraction and aborts, under the same checks; "
    "tests/cache/test_tiers.py damages tables in every way that the checks find",
    r"e2e/test_capture\.py": "tests/rotations/calibration/test_run.py: sums; tests/rotations/test_cli.py: the command",
    r"e2e/test_canary\.py": "tests/sglang/memory/test_canary.py: the canary is attached; its checks are SGLang's",
    r"e2e/test_evaluation\.py": "tests/evaluation: the command, over a stand-in; tests/e2e/test_transform.py: the KL",
    r"e2e/test_numbers\.py": "tests/e2e/test_transform.py: the KL of one method; tests/methods, tests/formats: others",
    r"e2e/test_parallel\.py": "tests/sglang/attention/test_worker_rotations.py and "
    "tests/sglang/memory/test_capacity.py: what each worker holds",
    r"e2e/test_pipeline\.py": "tests/sglang/memory/test_stages.py: what stages agree on; "
    "tests/sglang/attention/test_turns.py: micro-batches",
    r"e2e/test_engine_sessions\.py": "tests/sglang/test_engine.py: keywords; tests/e2e/test_sessions.py: sessions",
    r"e2e/test_episodes\.py": "tests/sessions/test_episodes.py and tests/sglang/router/test_session_episodes.py",
    r"e2e/test_folding\.py": "tests/sglang/prefix/test_folding.py",
    r"e2e/test_key_scores\.py": "tests/attention/test_key_scores.py and tests/sglang/attention/test_scoring.py",
    r"e2e/test_soft_windows\.py": "tests/cache/test_soft_windows.py and tests/sglang/memory/test_capacity.py",
    r"e2e/test_windows\.py": "tests/sglang/attention/test_window_backend.py, tests/sglang/prefix/test_window_tree.py "
    "and tests/sglang/memory/test_window_sizes.py",
    r"e2e/test_speculation": "tests/sglang/attention/test_verify.py and tests/sglang/attention/test_drafts.py",
    r"e2e/test_disaggregation": "tests/sglang/disaggregation",
    r"e2e/modes/test_lora": "tests/sglang/attention/test_folded_weights.py",
    r"e2e/modes/test_mixed_chunk": "tests/sglang/attention/test_mixed_batches.py",
    r"e2e/modes/test_priorities": "tests/e2e/test_serving.py: retraction",
    # Tests with servers that repeat what other tests of their file show.
    r"e2e/test_hybrid\.py.*\[no radix cache\]": "tests/e2e/test_hybrid.py: differs from the other in a lookup",
    r"e2e/test_hicache\.py::test_(a_killed|write_back|first_|host_memory)": "tests/sglang/hicache: what is ours",
    r"e2e/test_hicache_late\.py::test_answers_without": "tests/cache/test_host_schedules.py: schedules find the same "
    "faults; tests/e2e/test_hicache_late.py: late copies",
    r"e2e/test_hicache_stores\.py": "tests/sglang/hicache/test_stores.py: SGLang's classes over other clients",
    r"e2e/test_hicache_windows\.py": "tests/sglang/hicache and tests/sglang/attention/test_window_backend.py",
    r"e2e/test_hicache_drafts\.py": "tests/sglang/hicache/test_hicache.py: a draft's host pool; "
    "tests/sglang/attention/test_verify.py",
    r"e2e/test_newcomer\.py::test_demo": "tests/e2e/test_demo.py: the program",
    r"e2e/test_newcomer\.py::test_quick_start.*\[wheel": "tests/packaging/test_installed.py: the wheel is whole and "
    "imported elsewhere; tests/e2e/test_newcomer.py: the quick start, in the clone",
    r"e2e/test_newcomer\.py::test_doctor": "tests/packaging/test_imports.py: what a clone's root hides; "
    "tests/e2e/test_newcomer.py: the quick start runs kvq doctor and a server there",
    r"e2e/test_serving\.py::test_streaming_sessions_find": "tests/e2e/test_serving.py: the same numbers, written down",
    r"e2e/test_selection\.py::test_(several|without_room|what_never)": "tests/sglang/prefix/test_selection.py",
    r"e2e/test_sessions\.py::test_(a_flushed|log_prob|metrics|sessions_and_plain|a_pool_too|an_abort|a_killed|turns_grow"
    r"|an_edited)": "tests/sglang/router",
    r"sglang/doctor/test_doctor_host\.py::test_module_and_console_script_agree": "tests/e2e/test_newcomer.py: "
    "both pass, one in the clone, the other there and elsewhere",
    r"kernels/test_compile\.py::test_kernels_compile_for_other": "tests/kernels/test_compile.py: the same for an H100",
    r"monitoring/test_live\.py": "tests/monitoring/test_monitoring.py: metrics that panels name exist",
    r"e2e/test_server_metrics\.py::test_an_error": "tests/sglang/attention/test_error_watch.py",
}


def is_nightly(test: str) -> bool:
    """Returns True if only ``--all`` runs a test, by its id."""
    return any(re.match(f"tests/{pattern}", test) for pattern in NIGHTLY)
