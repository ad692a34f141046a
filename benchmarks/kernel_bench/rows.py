"""Rows of results: one per kernel and shape, for a table on the terminal and a JSON file."""

from __future__ import annotations

from typing import Any

from benchmarks.kernel_bench.shapes import KV_HEADS, Q_HEADS, D


def row_of(
    kernel: str,
    batch: int,
    context: int,
    ours: float,
    theirs: float | None,
    error: float,
    fraction: float | None,
    **more: Any,
) -> dict[str, Any]:
    """Returns a row: our and FlashInfer's microseconds, relative error, and fraction of the bandwidth."""
    return {
        "kernel": kernel,
        "batch": batch,
        "context": context,
        "q_heads": Q_HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": D,
        "ours_us": round(ours, 2),
        "flashinfer_bf16_us": theirs and round(theirs, 2),
        "ratio": theirs and round(theirs / ours, 3),
        "bandwidth_fraction": fraction and round(fraction, 3),
        "rel_error": error,
        **more,
    }


HEAD = (
    f"{'kernel':19} {'shape':>12} {'ours us':>9} {'BF16 us':>9} {'ratio':>7} {'to FP8*':>7} {'bandw.':>6} {'error':>9}"
    f" {'FP8 best**':>18} {'bound us, ratio':>17}"
)


def show(row: dict) -> None:
    beside = f"{row['flashinfer_bf16_us']:9.1f} {row['ratio']:6.2f}x" if row["ratio"] else f"{'-':>9} {'-':>7}"
    other = row.get("ratio_fp8") or row.get("ratio_dequantized_first")
    beside += f" {other:6.2f}x" if other else f" {'-':>7}"
    fraction = f"{row['bandwidth_fraction']:6.1%}" if row["bandwidth_fraction"] else f"{'-':>6}"
    shape = f"{row['batch']} x {row['context']}"
    more = ""
    if row.get("fp8_bound_us"):
        best = f"{row['fp8_best']} {row['fp8_best_us']:.1f}" if row["fp8_best"] else "-"
        more = f" {best:>18} {row['fp8_bound_us']:9.1f} {row['ratio_fp8_bound']:6.2f}x"
    if row.get("separate_us"):
        more = f" separate memories: {row['separate_us']:.1f} us, {row['ratio_separate']:.3f}x"
    error = f"{row['rel_error']:9.1e}"
    print(f"{row['kernel']:19} {shape:>12} {row['ours_us']:9.1f} {beside} {fraction} {error}{more}", flush=True)
    if row.get("fp8_skipped"):
        print(f"  left out: {row['fp8_skipped']}", flush=True)
