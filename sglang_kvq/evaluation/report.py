"""The accuracy report: rows from a store, as JSON (the form of benchmarks/results) and as a Markdown table."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation import map_table, provenance
from sglang_kvq.evaluation.map_rows import is_map
from sglang_kvq.evaluation.specs import REFERENCE, method_of, spec_of
from sglang_kvq.evaluation.stats import paired_difference
from sglang_kvq.evaluation.store import Store, read, write_json
from sglang_kvq.evaluation.tasks import TASK_NAMES

NO_VALUE = "–"  # noqa: RUF001  (a dash in a table)
#: Columns of every row, null where not measured.
COLUMNS = (
    *("method", "allocated_bits", "pool_bits", "kl", "kl_se", "top1_agreement", "perplexity"),
    *("humaneval", "humaneval_se", "gsm8k", "gsm8k_se", "needle_16k", "needle_32k", "calibration", "seed"),
)


def collect(store: Store, model: str, command: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the report of everything in an output folder: the content of ``accuracy_<model>.json``.

    Args:
        command: the command that writes the report; if empty, the recorded commands of the measurements.

    Raises:
        KVQuantError: the folder is empty, or a column mixes tasks of different settings.
    """
    methods = store.methods()
    if not methods:
        raise KVQuantError(f"{store.folder}: no results in it.")
    settings = _common_settings(methods)
    references = {_label(files): files for files in methods.values() if method_of(_label(files)) == REFERENCE}
    rows = [_row(slug, files, references) for slug, files in methods.items()]
    # The unquantized one first, then by size; a method that failed to start has no bits and comes last.
    worst = float("inf")
    rows.sort(key=lambda row: (-(row["allocated_bits"] or 0), worst if row["kl"] is None else row["kl"], row["method"]))
    devices = sorted(
        {files["server"]["device_name"] for files in methods.values() if "device_name" in files.get("server", {})}
    )
    content = provenance.header(f"accuracy_{model}", command, ", ".join(devices) or "unknown")
    measured = [file for files in methods.values() for name, file in files.items() if name in TASK_NAMES]
    if measured:  # describes the measurements, not the command that wrote the report
        content["commit"] = ", ".join(sorted({file["commit"] for file in measured}))
        content["dirty"] = any(file["dirty"] for file in measured)
    if not command:
        content["command"] = "; ".join(dict.fromkeys(filter(None, (file.get("command") for file in measured))))
    for found in (files.get("server", {}).get("versions", {}) for files in methods.values()):
        content["versions"] |= found
    versions = sorted(
        {files["server"]["version"] for files in methods.values() if "version" in files.get("server", {})}
    )
    content["versions"]["sglang"] = ", ".join(versions) or content["versions"].get("sglang", "unknown")
    return {**content, "model": model, "settings": settings, "rows": rows}


def _common_settings(methods: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns, per task, the settings of all methods, which must be equal for a column to mean anything."""
    settings: dict[str, Any] = {}
    for slug, files in methods.items():
        for task in TASK_NAMES:
            if task in files:
                found = files[task]["identity"]["task"]
                if settings.setdefault(task, found) != found:
                    raise KVQuantError(
                        f"runs/{slug}/{task}.json was measured with other settings than the same task of other "
                        "methods; measure it again with --overwrite, or delete it."
                    )
    return settings


def _label(files: dict[str, Any]) -> str:
    return str(files.get("server", {}).get("label", ""))


def _row(slug: str, files: dict[str, Any], references: dict[str, dict[str, Any]]) -> dict[str, Any]:
    server = files.get("server", {})
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row["method"] = server.get("label", slug)
    row |= {name: server.get(name) for name in ("allocated_bits", "pool_bits", "calibration", "seed")}
    warnings, errors = [], []
    for task in ("server", *TASK_NAMES):
        if task != "server" and task in files:
            row |= files[task]["row"]
            warnings += [f"{task}: {warning}" for warning in files[task]["warnings"]]
            row |= _against(task, files[task], _reference(task, _label(files), references))
        if f"{task}.error" in files:
            errors.append(f"{task}: {files[f'{task}.error']['error']}")
    row["warnings"], row["error"] = warnings, "; ".join(errors) or None
    row["kl_per_context"] = files.get("kl", {}).get("details", {}).get("per_context")
    row["server"] = {name: server[name] for name in ("version", "chunk", "capacity", "kv_quant") if name in server}
    return row


def _reference(task: str, label: str, references: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Returns BF16's result of a task: with the same chunks, or else others, which only change BF16's rounding."""
    suffix = label.removeprefix(spec_of(label)) if " " not in label else ""
    found = [references[name] for name in (f"{REFERENCE}{suffix}", *sorted(references)) if name in references]
    return next((files[task] for files in found if task in files), None)


def _against(task: str, ours: dict[str, Any], reference: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the difference from the reference, item by item, if both answered the same items."""
    items = ours["details"].get("items")
    theirs = (reference or {}).get("details", {}).get("items")
    if not items or not theirs or ours is reference or len(items) != len(theirs):
        return {}
    difference, error = paired_difference(items, theirs)
    return {f"{task}_vs_none": difference, f"{task}_vs_none_se": error}


def write(folder: Path, content: dict[str, Any]) -> Path:
    """Writes ``accuracy_<model>.json`` and ``.md`` to a folder; returns the JSON's path."""
    path = folder / f"{content['name']}.json"
    write_json(path, content)
    path.with_suffix(".md").write_text(f"# Accuracy of {content['model']}\n\n{section(content)}")
    return path


# -- Markdown ---------------------------------------------------------------------------------------------


def section(content: dict[str, Any], plots: Sequence[tuple[str, str]] = ()) -> str:
    """Returns one model's table and a description of its measurement. ``plots`` are (caption, link)."""
    rows = content["rows"]
    needles = sorted({key for row in rows for key in row if key.startswith("needle_") and _is_length(key)}, key=_length)
    needles = [key for key in needles if any(row.get(key) is not None for row in rows)]
    scores = [key for key in ("humaneval", "gsm8k") if any(row.get(key) is not None for row in rows)]
    names = ["method", "bits", "KL, nats per token", "top-1", "perplexity"]
    names += [{"humaneval": "HumanEval, %", "gsm8k": "GSM8K, %"}[key] for key in scores]
    names += [f"needle {key.removeprefix('needle_')}, %" for key in needles]
    head = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]

    def line(row: dict[str, Any]) -> str:
        cells = [f"`{row['method']}`", _number(row["allocated_bits"], ".2f")]
        cells += [
            _with_error(row, "kl", ".4f"),
            _number(row["top1_agreement"], ".1%"),
            _with_error(row, "perplexity", ".2f"),
        ]
        cells += [_percent(row, key) for key in scores] + [_number(row.get(key), ".0%", NO_VALUE) for key in needles]
        return "| " + " | ".join(cells) + " |"

    labels = {row["method"] for row in rows}
    more = [row for row in rows if "@" in row["method"] and row["method"].partition("@")[0] in labels]
    text = "\n".join([*head, *(line(row) for row in rows if row not in more)]) + "\n\n" + _how(content)
    notes = [f"- `{row['method']}`: {note}" for row in rows for note in _notes(row)]
    text += ("\n" + "\n".join(notes) + "\n") if notes else ""
    text += "".join(f"\n![{caption}]({link})\n" for caption, link in plots)
    if more:
        text += _folded(f"Other calibrations of these methods ({len(more)})", "\n".join([*head, *map(line, more)]))
    origins = [f"- `{row['method']}`: {origin}" for row in rows for origin in _origin(row)]
    commands = "\n".join(f"    {command}" for command in content["command"].split("; "))
    return text + _folded("Commands and rotations", "\n\n".join(filter(None, [commands, "\n".join(origins)])))


def _folded(title: str, text: str) -> str:
    """Returns text that is collapsed until the reader opens it."""
    return f"\n<details><summary>{title}</summary>\n\n{text}\n\n</details>\n"


def _is_length(key: str) -> bool:
    return key.removeprefix("needle_").removesuffix("k").isdigit()


def _length(key: str) -> int:
    word = key.removeprefix("needle_")
    return int(word[:-1]) * 1024 if word.endswith("k") else int(word)


def _number(value: float | None, form: str, missing: str = "") -> str:
    return missing if value is None else format(value, form)


def _with_error(row: dict[str, Any], key: str, form: str) -> str:
    if row.get(key) is None:
        return ""
    error = row.get(f"{key}_se")
    return format(row[key], form) + ("" if error is None else f" ± {format(error, form)}")


def _percent(row: dict[str, Any], key: str) -> str:
    """Formats score ± error, and the paired difference from BF16 in points."""
    if row.get(key) is None:
        return ""
    text = f"{100 * row[key]:.1f}"
    text += "" if row.get(f"{key}_se") is None else f" ± {100 * row[f'{key}_se']:.1f}"
    difference, error = row.get(f"{key}_vs_none"), row.get(f"{key}_vs_none_se")
    return text if difference is None else f"{text} ({100 * difference:+.1f} ± {100 * (error or 0):.1f})"


def _origin(row: dict[str, Any]) -> list[str]:
    seed = "" if row.get("seed") is None else f", seed {row['seed']}"
    return [f"rotations: {row['calibration']}{seed}"] if row.get("calibration") not in (None, "fixed", "none") else []


def _notes(row: dict[str, Any]) -> list[str]:
    return [*row.get("warnings", []), *([f"**not measured**: {row['error']}"] if row.get("error") else [])]


def _how(content: dict[str, Any]) -> str:
    """Describes the measurement from the settings and the header; the command is folded away."""
    settings, words = content["settings"], []
    if kl := settings.get("kl"):
        texts = ", ".join(text["file"] for text in kl["texts"])
        share = f" after its first {kl['skip']:.0%}" if kl["skip"] else ""
        counts = " and ".join(f"{count} contexts of {length} tokens" for length, count in kl["contexts"])
        words.append(f"KL, top-1 agreement and perplexity: {counts} from {texts}{share}, from token {kl['first']} on.")
    sizes = {
        key: next((row[f"{key}_n"] for row in content["rows"] if row.get(f"{key}_n")), None)
        for key in ("humaneval", "gsm8k")
    }
    if "humaneval" in settings:
        words.append(f"HumanEval: pass@1 of {sizes['humaneval']} problems, greedy.")
    if "gsm8k" in settings:
        words.append(f"GSM8K: {sizes['gsm8k']} problems, {settings['gsm8k']['shots']} worked examples, greedy.")
    if needle := settings.get("needle"):
        words.append(f"Needle: {len(needle['depths'])} depths, {needle['trials']} per cell.")
    dirty = " with uncommitted changes" if content["dirty"] else ""
    words.append(
        f"{content['device']}, SGLang {content['versions']['sglang']}, {content['date']}, commit "
        f"{content['commit'][:10]}{dirty}."
    )
    return " ".join(words) + "\n"


INTRODUCTION = """# Accuracy

Written by `kvq eval --report` from the files in benchmarks/results. [evaluation.md](evaluation.md) explains how each
value is measured and what it does not show.

- *bits*: allocated bits per stored element, scales and offsets included. The first and the most recent tokens of a
  request are BF16.
- ±: one standard error, between contexts for KL and perplexity, between problems for scores.
- In brackets: the difference from `none` (BF16), paired by problem.
- A map (plot and first table of a model) merges several calibrations of a method and shows the error between them.
- The KL of `none` compares two runs of the same server: it is the noise of the measurement.
"""


def page(files: Sequence[Path], target: Path) -> str:
    """Returns ``docs/accuracy.md`` from report files, with links to the plots next to them.

    A map (``precise_<model>.json``) is at the head of its model's section. If all files are maps, they replace their
    blocks in the existing page, and nothing else.

    Raises:
        KVQuantError: a file is no report, or all files are maps and the page lacks their blocks.
    """
    contents = {path: read(path) for path in files}
    for path, content in contents.items():
        if not {"model", "rows", "settings", "device", "commit"} <= content.keys():
            raise KVQuantError(f"{path}: not a report of kvq eval (accuracy_<model>.json or precise_<model>.json).")
    maps = {path: content for path, content in contents.items() if is_map(content)}
    blocks = {content["model"]: _block(path, content, target) for path, content in maps.items()}
    if maps and len(maps) == len(contents):
        text = target.read_text() if target.exists() else ""
        for content in maps.values():
            text = map_table.replace(text, content["name"], blocks[content["model"]])
        return text
    parts = [INTRODUCTION]
    reports = {path: content for path, content in contents.items() if path not in maps}
    models = Counter(content["model"] for content in reports.values())
    for path, content in reports.items():
        block = blocks.pop(content["model"], None)
        plots = []
        names = (("", "Quality against allocated bits"), ("_needle", "Needle in a haystack"))
        for name, caption in names[1:] if block else names:
            plot = path.with_name(f"{path.stem}{name}.png")
            if plot.exists():
                plots.append((f"{caption}, {content['model']}", _relative(plot, target.parent)))
        where = f", {content['device']}" if models[content["model"]] > 1 else ""
        text = section(content, plots)
        parts.append(f"## {content['model']}{where}\n\n" + (f"{block}\n{text}" if block else text))
    return "\n".join([*parts, *(f"## {model}\n\n{block}" for model, block in blocks.items())])


def _block(path: Path, content: dict[str, Any], target: Path) -> str:
    """Returns a map's block with links to its files."""
    plot = path.with_suffix(".png")
    link = _relative(plot, target.parent) if plot.exists() else None
    name = _relative(target, provenance.ROOT)
    return map_table.block(content, _relative(path, target.parent), link, target.name if ".." in name else name)


def _relative(path: Path, start: Path) -> str:
    return Path(os.path.relpath(path.resolve(), start.resolve())).as_posix()
