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
    """Microseconds of ours and of FlashInfer over BF16; error: relative; fraction: of the bandwidth."""
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


def show(row: dict) -> None:
    beside = f"{row['flashinfer_bf16_us']:9.1f} {row['ratio']:6.2f}x" if row["ratio"] else f"{'-':>9} {'-':>7}"
    other = row.get("ratio_fp8") or row.get("ratio_dequantized_first")
    beside += f" {other:6.2f}x" if other else f" {'-':>7}"
    fraction = f"{row['bandwidth_fraction']:6.1%}" if row["bandwidth_fraction"] else f"{'-':>6}"
    shape = f"{row['batch']} x {row['context']}"
    print(
        f"{row['kernel']:19} {shape:>12} {row['ours_us']:9.1f} {beside} {fraction}   {row['rel_error']:.1e}", flush=True
    )
