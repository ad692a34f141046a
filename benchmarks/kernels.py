"""Times our kernels and FlashInfer's over BF16 and FP8, at Qwen3-8B's geometry.

    python benchmarks/kernels.py --out benchmarks/results/kernels_h200.json

Every figure is the median of CUDA-graph replays. Before each replay the L2 cache is flushed by reading. A flush by
writing would leave the cache full of lines that the kernel must write back (5 to 8 us), which does not happen in a
decode step; decode rows also have the time after such a flush. A kernel with a wrong result gets no speed. Each kernel
is checked first (attention against float64 on the same codes, records bit for bit), and an error beyond the bound ends
the run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import baseline, record
from benchmarks.kernel_bench import fp8
from benchmarks.kernel_bench.decode import decode_rows, quantize_rows, shared_rows, step_rows, sweep
from benchmarks.kernel_bench.extend import extend_rows, short_rows, sweep_extend
from benchmarks.kernel_bench.folds import fold_rows
from benchmarks.kernel_bench.heads import heads_rows, sweep_heads
from benchmarks.kernel_bench.planes import (
    BUDGETS,
    HEAD_DIMS,
    decode_planes_rows,
    extend_planes_rows,
    quantize_planes_rows,
)
from benchmarks.kernel_bench.rows import HEAD, show
from benchmarks.kernel_bench.scores import score_rows, sweep_scores
from benchmarks.kernel_bench.shapes import KV_HEADS, Q_HEADS, D
from benchmarks.kernel_bench.timer import Timer, copy_bandwidth
from sglang_kvq.attention import prefill_library, ragged

PLANES = ("quantize", "extend", "decode")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--sweep", action="store_true", help="only compare ways to launch the decode kernel")
    parser.add_argument("--shared", action="store_true", help="only decoding over a shared memory, and without")
    parser.add_argument("--decode", action="store_true", help="no prefill chunks")
    parser.add_argument("--extend", action="store_true", help="only prefill chunks")
    parser.add_argument(
        "--planes",
        nargs="?",
        const=",".join(PLANES),
        help=f"only transform coding, compared with oscar; some of {', '.join(PLANES)} if given, comma-separated",
    )
    parser.add_argument(
        "--budgets", type=float, nargs="+", default=BUDGETS, help="budgets for --planes; default %(default)s"
    )
    parser.add_argument(
        "--head-dims", type=int, nargs="+", default=HEAD_DIMS, help="head dims for --planes; default %(default)s"
    )
    parser.add_argument("--alone", action="store_true", help="with --planes, without FlashInfer")
    parser.add_argument(
        "--heads", action="store_true", help="only decoding with 5 to 16 heads to a KV head, or heads of 64"
    )
    parser.add_argument(
        "--fp8",
        nargs="?",
        const=",".join(fp8.KERNELS),
        default="",
        help=f"in rows of decoding, also other kernels over FP8: {', '.join(fp8.KERNELS)}, or some of these. "
        "One that is unavailable is left out, with the reason",
    )
    parser.add_argument("--folds", action="store_true", help="only moving tokens into other pages")
    parser.add_argument("--short", action="store_true", help="with --extend, only short ones")
    parser.add_argument(
        "--sweep-heads", action="store_true", help="only compare ways to decode many heads, or heads of 64"
    )
    parser.add_argument(
        "--sweep-extend", action="store_true", help="only compare ways to launch the kernel for short extends"
    )
    parser.add_argument("--scores", action="store_true", help="only scores of past keys")
    parser.add_argument(
        "--sweep-scores", action="store_true", help="only compare ways to launch the kernels for scores"
    )
    args = parser.parse_args()
    chosen_planes = args.planes.split(",") if args.planes else PLANES
    if unknown := set(chosen_planes) - set(PLANES):
        parser.error(f"--planes {', '.join(unknown)}: not one of {', '.join(PLANES)}")
    others = args.fp8.split(",") if args.fp8 else []
    if unknown := set(others) - set(fp8.KERNELS):
        parser.error(f"--fp8 {', '.join(unknown)}: not one of {', '.join(fp8.KERNELS)}")
    torch.manual_seed(0)
    timer = Timer(args.repeats)
    bandwidth = copy_bandwidth(timer)
    beside = baseline.version() or "not installed"
    print(f"{record.device_name()}, copy bandwidth {bandwidth / 1e3:,.0f} GB/s, FlashInfer {beside}")
    if args.sweep:
        sweep(timer)
        return
    if args.sweep_heads:
        for rows in sweep_heads(timer, bandwidth):
            if args.out:
                record.merge(args.out, "heads", rows, key="case", copy_gb_per_s=round(bandwidth / 1e3))
        return
    if args.sweep_extend:
        sweep_extend(timer)
        return
    if args.sweep_scores:
        sweep_scores(timer)
        return
    extends = []
    if not (args.decode or args.planes or args.scores or args.folds or args.heads or args.shared):
        prefill, used = prefill_library.load(
            Q_HEADS, KV_HEADS, D, torch.device("cuda"), ragged.workspace_tokens(KV_HEADS, D)
        )
        print(f"long prefill chunks: {used}", flush=True)
        # Short extends run first, because the other rows then send every chunk to the library.
        extends = [short_rows(timer, prefill), extend_rows(timer, None)] + (
            [extend_rows(timer, prefill)] if prefill else []
        )
    if args.short:
        extends = extends[:1]
    some = (args.budgets, args.head_dims)
    of_planes = {
        "quantize": quantize_planes_rows(timer, bandwidth, *some),
        "extend": extend_planes_rows(timer, *some),
        "decode": decode_planes_rows(timer, bandwidth, *some, compare=not args.alone),
    }
    planes = [of_planes[name] for name in chosen_planes]
    folds, heads = [fold_rows(timer, bandwidth)], [heads_rows(timer, bandwidth, others)]
    parts = [decode_rows(timer, bandwidth, others), quantize_rows(timer, bandwidth), step_rows(timer), *planes]
    scores, shared = [score_rows(timer)], [shared_rows(timer, bandwidth)]
    print(HEAD)
    print("* of short extends: to the prefix dequantized first")
    print("** the fastest kernel over FP8, and an ideal one at the bandwidth")
    chosen = [*parts, *heads, *folds, *extends, *scores]
    alone = (
        (args.scores, scores),
        (args.shared, shared),
        (args.folds, folds),
        (args.heads, heads),
        (args.planes, planes),
    )
    for given, some in (*alone, (args.extend, extends)):
        chosen = some if given else chosen
    for part in chosen:
        rows = []
        try:
            for row in part:
                rows.append(row)
                show(row)
        finally:  # rows already measured are kept, even if the next result is wrong
            if args.out and rows:
                record.merge(args.out, "kernels", rows, key="kernel", copy_gb_per_s=round(bandwidth / 1e3))


if __name__ == "__main__":
    main()
