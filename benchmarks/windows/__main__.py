"""Compares windows of a model: divergence, copies, programs and bytes by sink and recent tokens that stay in BF16.

    python -m benchmarks.windows MODEL --text TEXT ... --out benchmarks/results/windows_MODEL.json
    python -m benchmarks.windows MODEL --text TEXT ... --out FILE --tasks kl,copies --device cuda --batch 15
    python -m benchmarks.windows MODEL --out FILE --tasks exact_keys,multi_key,humaneval \\
        --eval FOLDER -- --humaneval HumanEval.jsonl.gz --retrieval-lengths 4096,8192
    python -m benchmarks.windows --table --out FILE
    python -m benchmarks.windows --page

Bytes, divergence and copies need no server. transformers runs the model with a fake-quantized history, in float32 on a
CPU, or on a GPU with products in TF32 (exact for stored keys and values, which are BF16). Only the last ``--measured``
tokens of each context count, so that even the largest window leaves most of their history quantized. For other tasks,
``kvq eval`` starts a server for each window in ``--eval FOLDER``; arguments after ``--`` go to it.

The same command continues where it was stopped, or where ``--minutes`` ended. A row is one method and window, or
``bf16``:

kl, top1              nats per token from BF16, and share of tokens whose likeliest successor is BF16's
copies_4k             share of keys all of whose tokens are likeliest after the right ones (``copies``)
copies_4k_nats        negative log-likelihood of a key's token
bytes_4k, …_share     of one request of that many tokens, its BF16 pages included; relative to plain BF16
TASK, TASK_CONTEXT    scores of ``kvq eval``
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.windows import copies
from benchmarks.windows.cases import BF16, METHODS, RECENTS, SINKS, Case, Row, bytes_of, candidates, cases_of
from benchmarks.windows.measure import copy_units, in_turns, kl_units, measure
from benchmarks.windows.table import table, write_page
from sglang_kvq.cache.layout import KVGeometry
from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.report.rows import rows_of
from sglang_kvq.evaluation.tasks.base import file_identity, short
from sglang_kvq.rotations.calibration.hf_model import embedding_rows, load_model, tokenize
from sglang_kvq.rotations.calibration.settings import read_text
from sglang_kvq.rotations.identity import geometry_of

NAME = "windows"
#: Tasks that need no server.
OWN = {"kl", "copies"}


def add_scores(rows: dict[str, Row], cases: Sequence[Case], report: dict[str, Any]) -> list[str]:
    """Adds the scores of a report of ``kvq eval``; returns the names of the rows that got any."""
    by = {case.spec: case.name for case in cases}
    changed = []
    for found in rows_of(report):
        name = by.get(found["spec"])
        if name is not None and found["task"] not in ("kl", "top1", "perplexity"):
            column = found["task"] if found["context"] is None else f"{found['task']}_{short(found['context'])}"
            rows[name] |= {column: found["score"], f"{column}_se": found["score_se"]}
            changed.append(name)
    return list(dict.fromkeys(changed))


def evaluate(model: str, cases: Sequence[Case], tasks: str, folder: Path, more: Sequence[str]) -> dict[str, Any]:
    """Runs ``kvq eval`` and returns its report.

    Raises:
        KVQuantError: it wrote no report, or the folder has several.
    """
    methods = ",".join(["none", *(case.spec for case in cases)])
    words = [sys.executable, "-m", "sglang_kvq.cli", "eval", "--model", model, "--methods", methods]
    subprocess.run([*words, "--tasks", tasks, "--out", str(folder), *more])
    reports = sorted(folder.glob("accuracy_*.json"))
    if len(reports) != 1:
        raise KVQuantError(f"--eval {folder}: {len(reports)} reports of kvq eval; give a folder of its own.")
    found: dict[str, Any] = json.loads(reports[0].read_text())
    return found


def contexts_of(tokenizer: Any, model: Any, texts: Sequence[Path], skip: float, count: int, length: int) -> list[Any]:
    """Returns contexts evenly spaced over each text, alternating between texts, int64 ``[length]`` each.

    Raises:
        KVQuantError: a text is too short.
    """
    found: list[list[torch.Tensor]] = []
    for number, path in enumerate(texts):
        text, share = read_text(path), count // len(texts) + (number < count % len(texts))
        ids = tokenize(tokenizer, text[int(len(text) * skip) :], embedding_rows(model))
        if len(ids) < share * length:
            raise KVQuantError(
                f"--text {path}: {len(ids)} tokens, but {share} contexts need {share * length}; give more text, or "
                "fewer --contexts."
            )
        starts = torch.linspace(0, len(ids) - length, share).long().tolist()
        found.append([ids[start : start + length] for start in starts])
    return [found[n % len(texts)][n // len(texts)] for n in range(count)]


def numbers(words: str) -> tuple[int, ...]:
    return tuple(map(int, words.split(",")))


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", help="folder or hub name")
    parser.add_argument("--out", type=Path, help="JSON file; it keeps its other rows")
    parser.add_argument("--text", type=Path, nargs="+", help="held-out texts, which calibration did not use")
    parser.add_argument("--skip", type=float, default=0.0, help="share of each text to leave out, at its beginning")
    parser.add_argument("--methods", default=",".join(METHODS), help="NAME[:BITS]; default %(default)s")
    parser.add_argument("--rotations", type=Path, nargs="*", default=[], help="folders; default the RotationZoo's")
    parser.add_argument("--sinks", type=numbers, default=SINKS, help="default 0,64,128")
    parser.add_argument("--recents", type=numbers, default=RECENTS, help="default 64,256,512,1024,2048")
    parser.add_argument("--tasks", default="kl", help="kl, copies, or tasks of kvq eval; default %(default)s")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a context; default %(default)s")
    parser.add_argument(
        "--measured", type=int, default=512, help="number of last tokens of a context that count; default %(default)s"
    )
    parser.add_argument("--contexts", type=int, default=4, help="contexts of the divergence; default %(default)s")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of the copies; default %(default)s")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="stop after this many minutes; run again for the rest"
    )
    parser.add_argument("--eval", type=Path, help="folder of kvq eval, for tasks other than kl and copies")
    parser.add_argument("--device", default="cpu", help="device of the divergence and copies; default %(default)s")
    parser.add_argument("--batch", type=int, default=5, help="windows read together; default %(default)s")
    parser.add_argument("--table", action="store_true", help="only print the tables of --out")
    parser.add_argument("--page", action="store_true", help="only write docs/results/windows.md")
    return parser


def main() -> None:
    parser = parser_of()
    args, more = record.parse(parser)
    if args.page:
        print(write_page())
        return
    if args.out is None:
        parser.error("--out: missing. Give the JSON file.")
    if args.table:
        print(table(record.read_rows(args.out)), end="")
        return
    tasks = args.tasks.split(",")
    if not args.model:
        parser.error("MODEL: missing. Give its folder or hub name.")
    if "kl" in tasks and not args.text:
        parser.error("--tasks kl: needs --text. Give held-out text.")
    if OWN & set(tasks) and args.length <= args.measured + max(args.sinks) + max(args.recents):
        parser.error(f"--length {args.length}: must be above --measured and the largest window together")
    if set(tasks) - OWN and args.eval is None:
        parser.error(f"--tasks {args.tasks}: kvq eval measures them. Give --eval FOLDER.")
    try:
        sweep(args, tasks, more)
    except KVQuantError as error:
        parser.error(str(error))


def sweep(args: argparse.Namespace, tasks: Sequence[str], more: Sequence[str]) -> None:
    """Measures what the file lacks.

    Raises:
        KVQuantError: the file has other settings, or there is too little text.
    """
    deadline = time.monotonic() + 60 * args.minutes
    cases = cases_of(args.methods.split(","), args.sinks, args.recents)
    if args.device != "cpu":
        torch.set_float32_matmul_precision("high")
    model, tokenizer = load_model(args.model, device=args.device, dtype="float32")
    methods = candidates(args.methods.split(","), model, args.model, args.rotations)
    rows = {row["case"]: row for row in record.read_rows(args.out)}
    kv_heads = geometry_of(model.config).kv_heads
    settings = {
        "texts": [file_identity(path) for path in args.text or []],
        "skip": args.skip,
        "contexts": args.contexts,
        "length": args.length,
        "measured": args.measured,
        "products": "float32" if args.device == "cpu" else "tf32",
        "largest": [max(args.sinks), max(args.recents)],
    }
    own = OWN & set(tasks)
    before = json.dumps(rows)
    for case in cases:
        row = rows.setdefault(
            case.name, {"case": case.name, "method": case.method, "sink": case.sink, "recent": case.recent}
        )
        row |= bytes_of(case, KVGeometry(kv_heads, tuple(methods[case.method].formats)))
        if own and row.setdefault("settings", settings) != settings:
            raise KVQuantError(f"--out {args.out}: its row {case.name!r} has other settings. Give another file.")
    names = [case.name for case in cases]
    if "copies" in tasks:
        rows.setdefault(BF16, {"case": BF16, "method": "none"})
        names.append(BF16)

    def save() -> None:
        for name in names:
            for field in record.SOURCE:
                rows[name].pop(field, None)  # a row measured again gets a new source
        record.merge(args.out, NAME, [rows[name] for name in names], key="case", model=Path(args.model).name)

    if json.dumps(rows) != before:
        save()
    units = []
    if "kl" in tasks:
        contexts = contexts_of(tokenizer, model, args.text, args.skip, args.contexts, args.length)
        units.append(kl_units(contexts, args.measured))
    if "copies" in tasks:
        prompts = [
            copies.draw(
                lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
                tokenizer("")["input_ids"],
                number,
                length=args.length,
                sink=max(args.sinks),
                recent=max(args.recents),
            )
            for number in range(args.prompts)
        ]
        units.append(copy_units(prompts, f"copies_{short(args.length)}_prompts"))
    whole = measure(model, in_turns(*units), cases, methods, rows, save, batch=args.batch, deadline=deadline)
    others = ",".join(task for task in tasks if task not in OWN)
    if others:
        del model
        add_scores(rows, cases, evaluate(args.model, cases, others, args.eval, more))
        save()
    print(table([rows[name] for name in names]), end="")
    if not whole:
        print("the time is over: the same command measures the rest")


if __name__ == "__main__":
    main()
