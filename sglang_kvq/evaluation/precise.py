"""``precise_<model>.json``: the accuracy map of one model, from output folders, reports and other maps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation import provenance, report
from sglang_kvq.evaluation.frontier import Row
from sglang_kvq.evaluation.map_rows import add_reference_where_missing, place, rows_of
from sglang_kvq.evaluation.store import Store, differences, read


def collect(sources: Sequence[Path], model: str, command: Sequence[str]) -> dict[str, Any]:
    """Returns the content of ``precise_<model>.json`` from output folders, reports and maps.

    If several sources have the same measurement, the first one counts.

    Raises:
        KVQuantError: no results, another model's results, or a task measured with different settings.
    """
    contents = [(source, _content(source, model)) for source in sources]
    settings: dict[str, Any] = {}
    rows: dict[tuple[Any, ...], Row] = {}
    for source, content in contents:
        _merge_settings(settings, content["settings"], source)
        for row in rows_of(content):
            rows.setdefault(tuple(row[name] for name in ("task", "context", "spec", "chunk")), row)
    if not rows:
        raise KVQuantError(f"{', '.join(map(str, sources))}: nothing measured in it.")
    found = [content for _, content in contents]
    header = provenance.header(f"precise_{model}", command, _joined(content["device"] for content in found))
    # Describes the measurements, not the command that wrote this file.
    measured = dict.fromkeys(part for content in found for part in content["command"].split("; "))
    header["command"] = "; ".join(dict.fromkeys([*measured, header["command"]]))
    header["commit"] = _joined(sha for content in found for sha in content["commit"].split(", "))
    header["dirty"] = any(content["dirty"] for content in found)
    header["date"] = max(content["date"] for content in found)
    names = dict.fromkeys(name for content in found for name in content["versions"])
    header["versions"] = {
        name: _joined(content["versions"][name] for content in found if name in content["versions"]) for name in names
    }
    ordered = sorted(add_reference_where_missing(list(rows.values())), key=place)
    return {**header, "model": model, "settings": settings, "rows": ordered}


def _content(source: Path, model: str) -> dict[str, Any]:
    if source.is_dir():
        return report.collect(Store(source), model)
    content = read(source)
    if not {"model", "rows", "settings", "device", "commit", "command"} <= content.keys():
        raise KVQuantError(f"{source}: neither a folder of results nor an accuracy_ or precise_ file of kvq eval.")
    if content["model"] != model:
        raise KVQuantError(
            f"{source}: is for {content['model']}, but --out names {model}; write precise_{content['model']}.json, or "
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
                f"{source}: {task} was measured with other settings than in the sources before it ({differing}); make "
                "a map of each, or measure again."
            )
        lengths = {name: _union(known[name], found[name]) for name in ("lengths", "contexts") if name in found}
        into[task] = {**known, **lengths}


def _fixed(settings: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Drops lengths, and contexts whose length is missing in ``other``; counts of the remaining contexts must match."""
    plain = {name: value for name, value in settings.items() if name not in ("lengths", "contexts")}
    theirs = {length for length, _ in other.get("contexts", ())}
    return {**plain, "contexts": sorted(pair for pair in settings.get("contexts", ()) if pair[0] in theirs)}


def _union(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    return sorted([*a, *(one for one in b if one not in a)])


def _joined(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))
