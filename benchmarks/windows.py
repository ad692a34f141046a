"""Which windows suit a model: divergence, copies, programs and bytes by sink and recent tokens that stay in BF16.

    python -m benchmarks.windows MODEL --text TEXT --skip 0.8 --out benchmarks/results/windows_MODEL.json
    python -m benchmarks.windows MODEL --text TEXT --out FILE --tasks exact_keys,multi_key,humaneval \\
        --eval FOLDER -- --humaneval HumanEval.jsonl.gz --retrieval-lengths 4096,8192
    python -m benchmarks.windows --table --out FILE

Bytes and the divergence need no server: transformers runs the model with a fake-quantized history, on a CPU or a GPU
(``sglang_kvq.rotations.inspection.divergence``). Only the last ``--measured`` tokens of each context count, so that
the largest window leaves most of their history quantized. Other tasks run on servers by ``kvq eval``, one for each
window, in ``--eval FOLDER``; what follows ``--`` goes to it.

The same command goes on where it was stopped, or where ``--minutes`` ended. A row is one method and window:

kl, top1              nats per token from BF16, and share of tokens whose likeliest successor is BF16's
bytes_4k, …_share     of one request of that many tokens, its BF16 pages included; relative to plain BF16
TASK, TASK_CONTEXT    scores of ``kvq eval``
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from sglang_kvq.cache.layout import CONTEXTS, KVGeometry
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.report.rows import rows_of
from sglang_kvq.evaluation.tasks.base import file_identity, short
from sglang_kvq.evaluation.tasks.statistics import mean_and_error
from sglang_kvq.methods import RotationKind, get_method
from sglang_kvq.rotations import load_rotations
from sglang_kvq.rotations.calibration.hf_model import embedding_rows, load_model, tokenize
from sglang_kvq.rotations.calibration.settings import read_text
from sglang_kvq.rotations.identity import geometry_of, layer_numbers
from sglang_kvq.rotations.inspection.candidates import Candidate, candidate_of, takes
from sglang_kvq.rotations.inspection.divergence import FakeQuantAttention, divergences
from sglang_kvq.rotations.resolve import resolve_rotations

SINKS, RECENTS = (0, 64, 128), (64, 256, 512, 1024, 2048)
METHODS = ("oscar", "transform:2.5")
#: Windows that share one pass of the unquantized model; after each group the file is written.
GROUP = 5
NAME = "windows"
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A method with a window."""

    method: str
    sink: int
    recent: int

    @property
    def name(self) -> str:
        return f"{self.method}, {self.sink} + {self.recent}"

    @property
    def spec(self) -> str:
        """The method of ``kvq eval``."""
        return f"{self.method} --kv-quant-sink {self.sink} --kv-quant-recent {self.recent}"


def cases_of(methods: Iterable[str], sinks: Sequence[int], recents: Sequence[int]) -> list[Case]:
    return [Case(method, sink, recent) for method in methods for sink in sinks for recent in recents]


def bytes_of(case: Case, geometry: KVGeometry) -> Row:
    """Bytes of one request at each of ``CONTEXTS``: its pages, and the BF16 pages that it holds at most."""
    name, _, bits = case.method.partition(":")
    config = KVQuantConfig(name, bits=bits or None, sink_tokens=case.sink, recent_tokens=case.recent)
    row: Row = {"bits": round(geometry.record_bits_per_element, 3)}
    for context in CONTEXTS:
        pages = -(-context // PAGE_SIZE)
        size = pages * geometry.page_bytes + min(pages, config.slots_per_request) * geometry.slot_bytes
        row[f"bytes_{short(context)}"] = size
        row[f"bytes_{short(context)}_share"] = round(size / (pages * geometry.slot_bytes), 4)
    return row


def candidates(methods: Iterable[str], model: Any, path: str, folders: Sequence[Path]) -> dict[str, Candidate]:
    """Methods with the rotations of a folder that suits them, else with the model's own of the RotationZoo.

    Raises:
        KVQuantError: there are none.
    """
    geometry, numbers = geometry_of(model.config)._asdict(), layer_numbers(model.config)
    loaded = [load_rotations(folder, **geometry, numbers=numbers) for folder in folders]
    found = {}
    for method in methods:
        learned = None
        if get_method(method.partition(":")[0]).rotation is RotationKind.LEARNED:
            learned = next((rotations for rotations in loaded if takes(method, rotations)), None)
            if learned is None:
                name, _, bits = method.partition(":")
                learned = resolve_rotations(KVQuantConfig(name, bits=bits or None), path, model.config)
        found[method] = candidate_of(method, learned, model.config)
    return found


def measure_kl(
    model: Any,
    contexts: Sequence[torch.Tensor],
    measured: int,
    cases: Sequence[Case],
    methods: dict[str, Candidate],
    rows: dict[str, Row],
    save: Callable[[list[str]], None],
    deadline: float = float("inf"),
) -> bool:
    """Adds the divergence to rows, context by context and some windows at a time; False if the deadline ended it.

    Args:
        rows: by the cases' names; ``kl_contexts`` has what earlier runs measured: nats and agreement of each context.
        save: called with the names of the rows that changed.
    """
    ready = {name: candidate.rotations.to(model.device) for name, candidate in methods.items()}
    for number, ids in enumerate(contexts):
        open_cases = [case for case in cases if len(rows[case.name].setdefault("kl_contexts", [])) <= number]
        for at in range(0, len(open_cases), GROUP):
            if time.monotonic() > deadline:
                return False
            group = open_cases[at : at + GROUP]
            attentions = {
                case.name: FakeQuantAttention(
                    methods[case.method].formats, ready[case.method], sink=case.sink, recent=case.recent
                )
                for case in group
            }
            found = divergences(model, [ids], attentions, first=len(ids) - measured)
            for name, one in found.items():
                values = [float(one.kl.mean()), float(one.agrees.double().mean())]
                rows[name]["kl_contexts"].append([round(value, 6) for value in values])
                summarize(rows[name])
            save(list(found))
            print(
                f"context {number + 1} of {len(contexts)}: {', '.join(line(rows[name]) for name in found)}", flush=True
            )
    return True


def summarize(row: Row) -> None:
    """Writes the means over contexts, and their standard errors, into a row."""
    for name, values in zip(("kl", "top1"), zip(*row["kl_contexts"])):
        mean, error = mean_and_error(values)
        row[name], row[f"{name}_se"] = round(mean, 6), None if error is None else round(error, 6)


def line(row: Row) -> str:
    return f"{row['sink']} + {row['recent']}: {row['kl']:.4f}"


def add_scores(rows: dict[str, Row], cases: Sequence[Case], report: dict[str, Any]) -> list[str]:
    """Adds scores of a report of ``kvq eval``; returns the names of the rows that have any."""
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
        KVQuantError: it wrote none.
    """
    methods = ",".join(["none", *(case.spec for case in cases)])
    words = [sys.executable, "-m", "sglang_kvq.cli", "eval", "--model", model, "--methods", methods]
    subprocess.run([*words, "--tasks", tasks, "--out", str(folder), *more])
    reports = sorted(folder.glob("accuracy_*.json"))
    if len(reports) != 1:
        raise KVQuantError(f"--eval {folder}: {len(reports)} reports of kvq eval; give a folder of its own.")
    found: dict[str, Any] = json.loads(reports[0].read_text())
    return found


def table(rows: Sequence[Row]) -> str:
    """A Markdown table of each method: windows in rows."""
    parts = []
    columns = list(
        dict.fromkeys(name for row in rows for name in row if f"{name}_se" in row and name not in ("kl", "top1"))
    )
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        heads = ["sink + recent", "KL, nats", "top-1, %", *(f"{name}, %" for name in columns)]
        heads += [f"bytes at {short(context).upper()}, % of BF16" for context in CONTEXTS]
        lines = [heads, ["---"] * len(heads)]
        for row in sorted(mine, key=lambda row: (row["sink"], row["recent"])):
            cells = [
                f"{row['sink']} + {row['recent']}",
                with_error(row, "kl", 1, ".4f"),
                with_error(row, "top1", 100, ".1f"),
            ]
            cells += [with_error(row, name, 100, ".1f") for name in columns]
            cells += [f"{100 * row[f'bytes_{short(context)}_share']:.1f}" for context in CONTEXTS]
            lines.append(cells)
        text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        parts.append(f"`{method}`, {mine[0]['bits']:.2f} bits per element:\n\n{text}")
    return "\n\n".join(parts) + "\n"


def with_error(row: Row, name: str, factor: float, form: str) -> str:
    if row.get(name) is None:
        return ""
    error = row.get(f"{name}_se")
    return format(factor * row[name], form) + ("" if error is None else f" ± {format(factor * error, form)}")


def numbers(words: str) -> tuple[int, ...]:
    return tuple(map(int, words.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", help="folder or hub name")
    parser.add_argument("--out", type=Path, required=True, help="JSON file; it keeps its other rows")
    parser.add_argument("--text", type=Path, help="held-out text, which calibration did not use")
    parser.add_argument("--skip", type=float, default=0.0, help="share of the text to leave out, at its beginning")
    parser.add_argument("--methods", default=",".join(METHODS), help="NAME[:BITS]; default %(default)s")
    parser.add_argument("--rotations", type=Path, nargs="*", default=[], help="folders; default the RotationZoo's")
    parser.add_argument("--sinks", type=numbers, default=SINKS, help="default 0,64,128")
    parser.add_argument("--recents", type=numbers, default=RECENTS, help="default 64,256,512,1024,2048")
    parser.add_argument("--tasks", default="kl", help="kl, or tasks of kvq eval; default %(default)s")
    parser.add_argument("--length", type=int, default=4096, help="tokens per context; default %(default)s")
    parser.add_argument("--measured", type=int, default=512, help="of these the last ones count; default %(default)s")
    parser.add_argument("--contexts", type=int, default=4, help="default %(default)s")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="of the divergence; the rest another time")
    parser.add_argument("--eval", type=Path, help="folder of kvq eval, for tasks other than kl")
    parser.add_argument("--device", default="cpu", help="of the divergence; default %(default)s")
    parser.add_argument("--table", action="store_true", help="only print the tables of --out")
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    args, more = parser.parse_args(words[:at]), words[at + 1 :]
    if args.table:
        print(table(record.read_rows(args.out)), end="")
        return
    tasks = args.tasks.split(",")
    if not args.model:
        parser.error("MODEL: missing. Give its folder or hub name.")
    if "kl" in tasks and (args.text is None or args.length <= args.measured + max(args.sinks) + max(args.recents)):
        parser.error("kl: needs --text, and a --length above --measured and the largest window together")
    if set(tasks) != {"kl"} and args.eval is None:
        parser.error(f"--tasks {args.tasks}: kvq eval measures them. Give --eval FOLDER.")
    deadline = time.monotonic() + 60 * args.minutes
    cases = cases_of(args.methods.split(","), args.sinks, args.recents)
    model, tokenizer = load_model(args.model)
    model = model.to(args.device)
    methods = candidates(args.methods.split(","), model, args.model, args.rotations)
    rows = {row["case"]: row for row in record.read_rows(args.out)}
    kv_heads = geometry_of(model.config).kv_heads
    settings = {"text": file_identity(args.text)["sha256"] if args.text else None, "skip": args.skip}
    settings |= {"length": args.length, "measured": args.measured}
    for case in cases:
        row = rows.setdefault(
            case.name, {"case": case.name, "method": case.method, "sink": case.sink, "recent": case.recent}
        )
        row |= bytes_of(case, KVGeometry(kv_heads, tuple(methods[case.method].formats)))
        if "kl" in tasks and row.setdefault("kl_settings", settings) != settings:
            parser.error(f"--out {args.out}: its row {case.name!r} has other settings. Give another file.")

    def save(names: Sequence[str]) -> None:
        for name in names:
            for field in record.SOURCE:
                rows[name].pop(field, None)  # a row measured again has a new source
        record.merge(args.out, NAME, [rows[name] for name in names], key="case", model=Path(args.model).name)

    save([case.name for case in cases])
    whole = True
    if "kl" in tasks:
        text = read_text(args.text)
        ids = tokenize(tokenizer, text[int(len(text) * args.skip) :], embedding_rows(model))
        if len(ids) < args.contexts * args.length:
            parser.error(
                f"{args.text}: {len(ids)} tokens, but {args.contexts} contexts need {args.contexts * args.length}"
            )
        starts = torch.linspace(0, len(ids) - args.length, args.contexts).long().tolist()
        contexts = [ids[start : start + args.length] for start in starts]
        whole = measure_kl(model, contexts, args.measured, cases, methods, rows, save, deadline)
    others = ",".join(task for task in tasks if task != "kl")
    if others:
        del model
        save(add_scores(rows, cases, evaluate(args.model, cases, others, args.eval, more)))
    print(table([rows[case.name] for case in cases]), end="")
    if not whole:
        print("the time is over: the same command measures the rest")


if __name__ == "__main__":
    main()
