"""Places on the Hugging Face hub, ``org/name[/folder][@revision]``, and the rotations that others publish there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

#: Repository of OSCAR's authors (arXiv 2605.17757).
ROTATION_ZOO = "Zhongzhu/OSCAR-RotationZoo"

_PART = r"[\w.+=,-]+"
_HUB = re.compile(
    rf"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:/(?P<folder>{_PART}(?:/{_PART})*))?(?:@(?P<revision>{_PART}(?:/{_PART})*))?"
)


@dataclass(frozen=True)
class HubLocation:
    """A folder of a repository ``org/name`` on the hub, at a branch, tag or commit.

    The folder is a path, a model's name (``hub.find_folder``), or "" for the root.
    """

    repo: str
    folder: str = ""
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubLocation | None:
        """Parses ``text``; returns None if it cannot be a location on the hub."""
        found = _HUB.fullmatch(text)
        return found and cls(found["repo"], found["folder"] or "", found["revision"])

    def __str__(self) -> str:
        path = f"{self.repo}/{self.folder}" if self.folder else self.repo
        return f"{path}@{self.revision}" if self.revision else path


@dataclass(frozen=True)
class Published:
    """One model's published rotations.

    Attributes:
        model: the model's name, the last part of its hub id; a quantized copy NAME-FP8 has the same keys and values.
        path: folder in the repository.
        inferred: the folder's name comes from its authors' scripts; nobody has listed the repository to confirm it.
        refused: why ``--kv-quant`` does not serve the model; "" if it does.
        per_head: the folder has one matrix per KV head, and older shared ones, which cost this model its accuracy.
    """

    model: str
    path: str
    inferred: bool = False
    refused: str = ""
    per_head: bool = False

    @property
    def location(self) -> str:
        return f"{ROTATION_ZOO}/{self.path}"

    def fits(self, name: str) -> bool:
        """Returns True if a model of that name (the last component of its path or id) is this one."""
        return re.search(rf"^{re.escape(self.model)}(?=$|-fp8)", name, re.IGNORECASE) is not None


#: The folders of ``ROTATION_ZOO``: those that have been seen there, then those that only its authors' scripts name.
PUBLISHED = (
    Published("Qwen3-8B", "Qwen3-8B/seq20000_prompt83_group128"),
    Published("Qwen3-32B", "Qwen3-32B/seq16000_prompt69_group128"),
    Published("GLM-4.7-FP8", "GLM-4.7-FP8/seq10000_prompt43_group128"),
    Published("GLM-5.2-FP8", "GLM-5.2-FP8/c_kv_rcov_phblock_g128", refused="MLA"),
    Published("Qwen3-4B-Thinking-2507", "Qwen3-4B-Thinking-2507/seq20000_prompt83_group128", inferred=True),
    Published("Qwen3-30B-A3B", "Qwen3-30B-A3B", inferred=True, per_head=True),
    Published("Qwen3.5-4B", "Qwen3.5-4B", inferred=True),
    Published("Qwen3.5-35B-A3B", "Qwen3.5-35B-A3B", inferred=True),
    Published("Qwen3.8-27B", "Qwen3.8-27B", inferred=True),
    Published("MiniMax-M2.7", "MiniMax-M2.7", inferred=True),
    Published("MiniMax-M3", "MiniMax-M3", inferred=True, refused="sparse attention"),
    Published("gemma-4-12b-it", "Gemma4-12B", inferred=True, refused="sliding windows"),
)


def cached_id(model_path: str) -> str | None:
    """Returns the hub id of a snapshot in the hub's cache, ``models--ORG--NAME/snapshots/COMMIT``; else None."""
    *_, repository, folder, _ = ("", "", *Path(model_path).absolute().parts)
    is_snapshot = folder == "snapshots" and repository.startswith("models--")
    return repository.removeprefix("models--").replace("--", "/") if is_snapshot else None


def name_of(model_path: str) -> str:
    """Returns a model's name: the last part of its hub id or of its folder's path."""
    return Path(cached_id(model_path) or Path(model_path).absolute()).name


def published_at(location: HubLocation) -> Published | None:
    """Returns the entry of a folder on the hub, at any revision; None if it has none."""
    return next((e for e in PUBLISHED if location.repo == ROTATION_ZOO and e.path == location.folder), None)


def published_for(name: str) -> Published | None:
    """Returns the entry for a model of that name; None if it has none."""
    return next((entry for entry in PUBLISHED if entry.fits(name)), None)
