"""Makes result files: ``accuracy_<model>.json`` of an output folder, ``precise_<model>.json`` of several sources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation import provenance
from sglang_kvq.evaluation.files import read, write_json
from sglang_kvq.evaluation.report.page import LEGEND, section
from sglang_kvq.evaluation.report.rows import Row, add_reference, place, rows_of
from sglang_kvq.evaluation.specs import REFERENCE, method_of, spec_of
from sglang_kvq.evaluation.store import Store, common_settings, differences
from sglang_kvq.evaluation.tasks import TASK_NAMES
from sglang_kvq.evaluation.tasks.statistics import paired_difference

#: Columns of every row of a report, null where not measured.
COLUMNS = (
    *("method", "allocated_bits", "pool_bits", "kl", "kl_se", "top1_agreement", "perplexity"),
    *(
        "humaneval",
        "humaneval_se",
        "gsm8k",
        "gsm8k_se",
        "math",
        "math_se",
        "needle_16k",
        "needle_32k",
        "calibration",
        "seed",
    ),
)

# -- reports ----------------------------------------------------------------------------------------------


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
    settings = common_settings(methods)
    references = {_label(files): files for files in methods.values() if method_of(_label(files)) == REFERENCE}
    rows = [_row(slug, files, references) for slug, files in methods.items()]
    # By descending bits, so BF16 comes first; a method that failed to start has no bits and comes last.
    worst = float("inf")
    rows.sort(key=lambda row: (-(row["allocated_bits"] or 0), worst if row["kl"] is None else row["kl"], row["method"]))
    servers = [files["server"] for files in methods.values() if "server" in files]
    devices = sorted({server["device_name"] for server in servers if "device_name" in server})
    content = provenance.header(f"accuracy_{model}", command, ", ".join(devices) or "unknown")
    measured = [file for files in methods.values() for name, file in files.items() if name in TASK_NAMES]
    if measured:  # the header describes the measurements, not the command that wrote the report
        content["commit"] = ", ".join(sorted({file["commit"] for file in measured}))
        content["dirty"] = any(file["dirty"] for file in measured)
    if not command:
        content["command"] = "; ".join(dict.fromkeys(filter(None, (file.get("command") for file in measured))))
    for server in servers:
        content["versions"] |= server.get("versions", {})
    if versions := sorted({server["version"] for server in servers if "version" in server}):
        content["versions"]["sglang"] = ", ".join(versions)
    content["versions"].setdefault("sglang", "unknown")
    return {**content, "model": model, "settings": settings, "rows": rows}


def _label(files: dict[str, Any]) -> str:
    return str(files.get("server", {}).get("label", ""))


def _row(slug: str, files: dict[str, Any], references: dict[str, dict[str, Any]]) -> dict[str, Any]:
    server = files.get("server", {})
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row["method"] = server.get("label", slug)
    row |= {name: server.get(name) for name in ("allocated_bits", "pool_bits", "calibration", "seed")}
    warnings: list[str] = []
    for task in filter(files.get, TASK_NAMES):
        row |= files[task]["row"]
        warnings += [f"{task}: {warning}" for warning in files[task]["warnings"]]
        row |= _against(task, files[task], _reference(task, _label(files), references))
    errors = [
        f"{task}: {files[f'{task}.error']['error']}" for task in ("server", *TASK_NAMES) if f"{task}.error" in files
    ]
    row["warnings"], row["error"] = warnings, "; ".join(errors) or None
    row["kl_per_context"] = files.get("kl", {}).get("details", {}).get("per_context")
    row["server"] = {name: server[name] for name in ("version", "chunk", "capacity", "kv_quant") if name in server}
    return row


def _reference(task: str, label: str, references: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Returns BF16's result of a task, with the same chunk size if there is one; others only change its rounding."""
    spec = label.partition(" ")[0]
    suffix = spec.removeprefix(spec_of(spec))
    found = [references[name] for name in (f"{REFERENCE}{suffix}", *sorted(references)) if name in references]
    return next((files[task] for files in found if task in files), None)


def _against(task: str, ours: dict[str, Any], reference: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the differences from the reference, item by item, if both answered the same items.

    Differences are those of scores and of the answers' lengths.
    """
    found: dict[str, Any] = {}
    for column, name in ((task, "items"), (f"{task}_tokens", "tokens")):
        mine = ours["details"].get(name)
        theirs = (reference or {}).get("details", {}).get(name)
        if mine and theirs and ours is not reference and len(mine) == len(theirs):
            found[f"{column}_vs_none"], found[f"{column}_vs_none_se"] = paired_difference(mine, theirs)
    return found


def write(folder: Path, content: dict[str, Any]) -> Path:
    """Writes ``accuracy_<model>.json`` and ``.md`` to a folder; returns the JSON's path."""
    path = folder / f"{content['name']}.json"
    write_json(path, content)
    path.with_suffix(".md").write_text(f"# Accuracy of {content['model']}\n\n{section(content)}\n{LEGEND}")
    return path


# -- maps -------------------------------------------------------------------------------------------------


def collect_map(sources: Sequence[Path], model: str, command: Sequence[str]) -> dict[str, Any]:
    """Returns the content of ``precise_<model>.json`` from output folders, reports and maps.

    If several sources have the same measurement, the first one counts.

    Raises:
        KVQuantError: no results, another model's results, or a task measured with different settings.
    """
    contents = [_content(source, model) for source in sources]
    settings: dict[str, Any] = {}
    rows: dict[tuple[Any, ...], Row] = {}
    for source, content in zip(sources, contents):
        _merge_settings(settings, content["settings"], source)
        for row in rows_of(content):
            rows.setdefault(tuple(row[name] for name in ("task", "context", "spec", "chunk")), row)
    if not rows:
        raise KVQuantError(f"{', '.join(map(str, sources))}: nothing measured in it.")
    header = provenance.header(f"precise_{model}", command, _joined(content["device"] for content in contents))
    # The header describes the measurements, not only the command that wrote this file.
    measured = [part for content in contents for part in content["command"].split("; ")]
    header["command"] = "; ".join(dict.fromkeys([*measured, header["command"]]))
    header["commit"] = _joined(sha for content in contents for sha in content["commit"].split(", "))
    header["dirty"] = any(content["dirty"] for content in contents)
    header["date"] = max(content["date"] for content in contents)
    names = dict.fromkeys(name for content in contents for name in content["versions"])
    header["versions"] = {
        name: _joined(content["versions"][name] for content in contents if name in content["versions"])
        for name in names
    }
    ordered = sorted(add_reference(list(rows.values())), key=place)
    return {**header, "model": model, "settings": settings, "rows": ordered}


def _content(source: Path, model: str) -> dict[str, Any]:
    if source.is_dir():
        return collect(Store(source), model)
    content = read(source)
    if not {"model", "rows", "settings", "device", "commit", "command"} <= content.keys():
        raise KVQuantError(f"{source}: neither a folder of results nor an accuracy_ or precise_ file of kvq eval.")
    if content["model"] != model:
        raise KVQuantError(
            f"{source}: is for {content['model']}, but --out names {model}. Write precise_{content['model']}.json, or "
            "give other files."
        )
    return content


def _merge_settings(into: dict[str, Any], new: dict[str, Any], source: Path) -> None:
    """Merges the settings of a source; only lengths may differ between sources, because every row names its own.

    Raises:
        KVQuantError: another setting differs.
    """
    for task, found in new.items():
        known = into.setdefault(task, found)
        differing = differences(_fixed(known, found), _fixed(found, known))
        if differing:
            raise KVQuantError(
                f"{source}: {task} was measured with other settings than in the sources before it ({differing}). Make "
                "a map of each, or measure again."
            )
        lengths = {
            name: sorted([*known[name], *(one for one in found[name] if one not in known[name])])
            for name in ("lengths", "contexts")
            if name in found
        }
        into[task] = {**known, **lengths}


def _fixed(settings: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Drops lengths, and contexts whose length is missing in ``other``; counts of the remaining contexts must match."""
    plain = {name: value for name, value in settings.items() if name not in ("lengths", "contexts")}
    theirs = {length for length, _ in other.get("contexts", ())}
    return {**plain, "contexts": sorted(pair for pair in settings.get("contexts", ()) if pair[0] in theirs)}


def _joined(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))
