"""A table of the known rotations, for ``kvq zoo``."""

from __future__ import annotations

from rich.table import Table

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.storage.card import describe_clips
from sglang_kvq.rotations.storage.hub import cached, find_folder
from sglang_kvq.rotations.storage.registry import PUBLISHED
from sglang_kvq.rotations.storage.zoo import shipped


def zoo_table() -> Table:
    """Model, where its rotations come from, and what is known of them. Looks at this machine only, not at the hub."""
    table = Table("model", "rotations", "known")
    for folder, config in shipped():
        clips = [tuple(c) if isinstance(c := config.get(name), list) else c for name in ("clip_k", "clip_v")]
        known = f"{config.get('granularity')}, clip K {describe_clips(clips[0])}, V {describe_clips(clips[1])}; "
        known += f"{config.get('corpus')}, {config.get('tokens')} tokens"
        table.add_row(str(config.get("base_model")), f"shipped: {folder}", known)
    for entry in PUBLISHED:
        table.add_row(entry.model, f"hub: {entry.repo}, folder of {entry.path}", _state(entry))
    return table


def _state(entry) -> str:
    snapshot = cached(entry.repo)
    if snapshot is None:
        return "not in the cache: fetched from the hub when first served"
    files = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]
    try:
        folder, _ = find_folder(files, entry.path, entry.repo)
    except KVQuantError:
        return "not in the cache: fetched from the hub when first served"
    return f"cached: {snapshot / folder}"
