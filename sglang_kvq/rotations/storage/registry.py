"""Rotations that others publish on the Hugging Face hub, and the models they belong to."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Published:
    """One model's published rotations.

    Attributes:
        model: the model's name, the last part of its hub id; a quantized copy NAME-FP8 has the same keys and values.
        repo: hub repo that holds the rotations.
        path: folder in the repo, or the model's name as ``hub.find_folder`` looks it up: the published layout tags
            folders with sequence length, prompts and group, and could not be listed when this was written.
        revision: regular expression of the model's revisions that they fit, if it matters.
        sha256: digests of the files, by name, when known; a download that differs is refused.
    """

    model: str
    repo: str
    path: str
    revision: str = ".*"
    sha256: dict[str, str] = field(default_factory=dict)

    @property
    def location(self) -> str:
        return f"{self.repo}/{self.path}"

    def fits(self, name: str, revision: str | None = None) -> bool:
        """Whether a model of that name (the last component of its path or id) and revision is this one."""
        same = re.search(rf"^{re.escape(self.model)}(?=$|-fp8)", name, re.IGNORECASE) is not None
        return same and (revision is None or re.fullmatch(self.revision, revision) is not None)


#: By OSCAR's authors (arXiv 2605.17757).
PUBLISHED = tuple(
    Published(model, "Zhongzhu/OSCAR-RotationZoo", model)
    for model in ("Qwen3-4B-Thinking-2507", "Qwen3-8B", "Qwen3-32B", "GLM-4.7-FP8", "MiniMax-M2.7")
)


def known_digests(location: str) -> dict[str, str]:
    """The registry's sha256 of the files at a location; empty if it knows none."""
    return next((entry.sha256 for entry in PUBLISHED if entry.location == location), {})
