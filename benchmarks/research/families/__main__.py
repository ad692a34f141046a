"""Judges families of KV-cache compression at equal memory: KL divergence, exact keys and needles.

    python -m benchmarks.research.families .models/SmolLM2-135M-Instruct --text HELD_OUT ... --calibration TEXT ...
    python -m benchmarks.research.families --report --out benchmarks/results/families.json

On a GPU add ``--device cuda``. A model without rotations in the zoo needs ``--transform DIR --oscar DIR``. ``--length``
takes 2K to 8K tokens. A run continues where an earlier one stopped: outcomes are kept in ``--work``, one per line.
``--report`` summarizes the outcomes of all models there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.research.families.cases import draw
from benchmarks.research.families.catalog import BUDGETS, Calibration, Entry, catalog
from benchmarks.research.families.judge import Judge, rows
from benchmarks.research.families.model import Prefilled
from sglang_kvq.evaluation import provenance
from sglang_kvq.rotations.calibration.hf_model import embedding_rows, load_model, tokenize

#: Characters of a text that are tokenized.
MOST = 120_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", help="folder of a transformers model")
    parser.add_argument("--text", nargs="*", type=Path, default=[], help="held-out texts")
    parser.add_argument("--calibration", nargs="*", type=Path, default=[], help="texts that methods may learn from")
    parser.add_argument("--cases", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a context")
    parser.add_argument("--following", type=int, default=24, help="tokens behind it whose divergence is measured")
    parser.add_argument("--budgets", nargs="*", type=float, default=list(BUDGETS), choices=BUDGETS)
    parser.add_argument("--transform", help="rotations of transform, if the zoo has none")
    parser.add_argument("--oscar", help="rotations of oscar, if the zoo has none")
    parser.add_argument("--device", default="", help="cuda or cpu")
    parser.add_argument("--work", type=Path, default=Path("families-work"), help="folder of outcomes")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.report:
        if args.out is None:
            parser.error("--report: give --out FILE")
        report(args.work, args.out)
        return
    if not (args.model and args.text and args.calibration):
        parser.error("give MODEL, --text and --calibration")
    run(args)


def run(args: argparse.Namespace) -> None:
    """Judges every method on every case that has no outcome yet."""
    model, tokenizer = load_model(args.model, device=args.device)
    torch.set_default_device(model.device)
    name = Path(args.model).name.lower()
    log = args.work / f"{name}.jsonl"
    done = {(one["case"], one["key"]) for one in read(log)}
    given = {key: value for key, value in (("transform", args.transform), ("oscar", args.oscar)) if value}
    calibration = calibrated(model, tokenizer, args, name)
    entries = list(catalog(args.model, model.config, calibration, args.budgets, given))
    say(f"{name}: {', '.join(f'{one.key} ({one.setting})' for one in entries)}")
    texts = [tokens(tokenizer, model, path) for path in args.text]
    drawn = draw(lambda s: tokenizer(s, add_special_tokens=False)["input_ids"], tokenizer.decode, texts, args.cases,
                 args.length, args.following)  # fmt: skip
    commit, dirty = provenance.commit()
    for case in drawn:
        left = [one for one in entries if (case.name, one.key) not in done]
        if not left:
            continue
        judge = Judge(model, case, kept(args.work / name, case.name))
        keep_prefilled(args.work / name, case.name, judge.prefilled)
        for entry in left:
            start = time.process_time()
            outcome = judged(judge, entry)
            line = {"model": name, "case": case.name, "key": entry.key, "budget": entry.budget, "method": entry.name}
            line |= {"setting": entry.setting, "device": record.device_name() if model.device.type == "cuda" else "CPU"}
            line |= {"commit": commit, "dirty": dirty, "seconds": time.process_time() - start, **outcome}
            with log.open("a") as file:
                file.write(json.dumps(line) + "\n")
        say(f"{name}: case {case.name}")


def judged(judge: Judge, entry: Entry) -> dict[str, Any]:
    found = judge.outcome(entry.method)
    return found | judge.asked(entry.method) if entry.choosing else found


def tokens(tokenizer: Any, model: Any, path: Path) -> torch.Tensor:
    return tokenize(tokenizer, path.read_text()[:MOST], embedding_rows(model))


def calibrated(model: Any, tokenizer: Any, args: argparse.Namespace, name: str) -> Calibration:
    """Reads one context of each calibration text, or loads them from an earlier run."""
    file = args.work / name / "calibration.pt"
    if file.exists():
        return Calibration(*torch.load(file, weights_only=False, map_location=model.device))
    contexts = [tokens(tokenizer, model, path)[: args.length].to(model.device) for path in args.calibration]
    found = Calibration.of(model, contexts)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save((found.read, found.layers), file)
    return found


def kept(folder: Path, case: str) -> Prefilled | None:
    file = folder / f"{case.replace('/', '_')}.pt"
    where = torch.get_default_device()
    return torch.load(file, weights_only=False, map_location=where) if file.exists() else None


def keep_prefilled(folder: Path, case: str, prefilled: Prefilled) -> None:
    file = folder / f"{case.replace('/', '_')}.pt"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(prefilled, file)


def read(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def report(work: Path, out: Path) -> None:
    """Writes the rows of all models in the folder of outcomes."""
    outcomes = [one for log in sorted(work.glob("*.jsonl")) for one in read(log)]
    if not outcomes:
        raise SystemExit(f"--work {work}: no outcomes. Run it with a model first.")
    found = []
    for row in rows(outcomes):
        mine = [one for one in outcomes if (one["model"], one["method"]) == (row["model"], row["method"])]
        at = {"measured_at": sorted({one["commit"] for one in mine}), "measured_dirty": any(o["dirty"] for o in mine)}
        found.append({**row, **at, "device": mine[0]["device"]})
    record.write(out, out.stem, found)
    say(f"{len(found)} rows of {len(outcomes)} outcomes in {out}")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
