"""Lists known rotations for ``kvq zoo``: shipped ones, and published ones. It looks only at this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.storage.card import clip_range, describe_clips
from sglang_kvq.rotations.storage.hub import cached, files_of, find_folder
from sglang_kvq.rotations.storage.registry import PUBLISHED, ROTATION_ZOO, Published
from sglang_kvq.rotations.storage.zoo import is_transform, shipped


@dataclass(frozen=True)
class Known:
    """Rotations of one model, for one kind of method.

    Attributes:
        model: hub id of the model they were calibrated on; for published ones, its last part.
        origin: "shipped" or "hub".
        location: value for --kv-quant-rotations.
        folder: their folder on this machine; None if they must be fetched.
        config: their ``config.json``; empty for the published layout, which has none.
        location_inferred, refused: see ``Published``.
    """

    model: str
    origin: str
    location: str
    folder: Path | None
    config: dict[str, Any]
    location_inferred: bool = False
    refused: str = ""

    def clips(self) -> tuple[Any, Any]:
        """Returns ``clip_k`` and ``clip_v``, see ``RotationMeta``."""
        clip_k, clip_v = (
            tuple(c) if isinstance(c := self.config.get(name), list) else c for name in ("clip_k", "clip_v")
        )
        return clip_k, clip_v

    @property
    def method(self) -> str:
        """A value of ``--kv-quant`` that uses these rotations; "none" if the model is refused."""
        if self.refused:
            return "none"
        return "transform" if is_transform(self.config) else "oscar"

    def to_json(self) -> dict[str, Any]:
        """Returns the entry for ``kvq zoo --json``; unknown fields are null."""
        own = ("model", "method", "origin", "location", "location_inferred")
        known = ("granularity", "objective", "clip_k", "clip_v", "corpus", "tokens")
        return {
            **{name: getattr(self, name) for name in own},
            "refused": self.refused or None,
            "folder": self.folder and str(self.folder),
            **{name: self.config.get(name) for name in known},
        }


def known_rotations() -> list[Known]:
    """Returns the known rotations of all models, the shipped ones first."""
    ours = [Known(str(c.get("base_model")), "shipped", str(folder), folder, c) for folder, c in shipped()]
    return ours + [
        Known(entry.model, "hub", entry.location, _cached_folder(entry), {}, entry.inferred, entry.refused)
        for entry in PUBLISHED
    ]


def zoo_table(entries: Sequence[Known]) -> Table:
    """Builds a table with a row per model and method, at most 80 columns wide."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, caption_justify="left")
    table.add_column("model", overflow="fold")
    for name in ("for", "from", "here", "clip K", "clip V"):
        table.add_column(name, no_wrap=True)
    for entry in entries:
        clips = (clip_range(clip) for clip in entry.clips())
        origin = f"{entry.origin}{'?' * entry.location_inferred}"
        table.add_row(entry.model, entry.method, origin, "no" if entry.folder is None else "yes", *clips)
    table.caption = (
        "for: the value of --kv-quant that uses them. hub?: their folder's name is inferred, not confirmed. here: on "
        "this machine; others are fetched from the hub when first served. More with --verbose."
    )
    return table


def zoo_details(entries: Sequence[Known]) -> Iterator[str]:
    """Yields lines with everything known, for ``kvq zoo --verbose``."""
    for entry in entries:
        config, (clip_k, clip_v) = entry.config, entry.clips()
        here = "not in the cache: fetched from the hub when first served"
        yield entry.model
        yield f"  {entry.origin}: {entry.location}"
        if entry.location_inferred:
            yield "  the folder's name is inferred from its authors' scripts, not confirmed"
        if entry.refused:
            yield f"  not served: {entry.refused}"
        if entry.origin == "hub":
            yield f"  {here if entry.folder is None else f'cached: {entry.folder}'}"
        else:
            clips = f", clip K {describe_clips(clip_k)}, V {describe_clips(clip_v)}"
            yield f"  {config.get('granularity')}, for {entry.method}{clips * (not is_transform(config))}"
            yield f"  {config.get('corpus')}, {config.get('tokens')} tokens"


def _cached_folder(entry: Published) -> Path | None:
    snapshot = cached(ROTATION_ZOO)
    if snapshot is None:
        return None
    try:
        folder, _ = find_folder(files_of(snapshot), entry.path, ROTATION_ZOO)
    except KVQuantError:
        return None
    return snapshot / folder
