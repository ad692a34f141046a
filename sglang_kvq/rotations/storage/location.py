"""Names of rotations on the Hugging Face hub: ``org/name[/folder][@revision]``."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PART = r"[\w.+=,-]+"
_HUB = re.compile(
    rf"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:/(?P<folder>{_PART}(?:/{_PART})*))?(?:@(?P<revision>{_PART}(?:/{_PART})*))?"
)


@dataclass(frozen=True)
class HubLocation:
    """A folder of a repository on the hub.

    Attributes:
        repo: ``org/name``.
        folder: path in the repository, or a model's name (``hub.find_folder``); "" for the root.
        revision: branch, tag or commit; None for the default branch.
    """

    repo: str
    folder: str = ""
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubLocation | None:
        """The location that ``text`` names; None if it cannot be on the hub."""
        found = _HUB.fullmatch(text)
        return found and cls(found["repo"], found["folder"] or "", found["revision"])

    def __str__(self) -> str:
        path = f"{self.repo}/{self.folder}" if self.folder else self.repo
        return f"{path}@{self.revision}" if self.revision else path
