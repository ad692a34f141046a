"""An output folder: one file per (method, task), written when it is measured, so that a run can be resumed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.files import read, write_json

if TYPE_CHECKING:
    from sglang_kvq.evaluation.tasks.base import Outcome


class Store:
    """Stores results as ``FOLDER/runs/METHOD/TASK.json``, and ``server.json`` next to them.

    Args:
        overwrite: measure again what was measured with other settings, instead of refusing.
        command: the measuring command, recorded with every result.
    """

    def __init__(self, folder: Path, overwrite: bool = False, command: str = "") -> None:
        self.folder, self.overwrite, self.command = folder, overwrite, command

    def runs(self, slug: str) -> Path:
        return self.folder / "runs" / slug

    def finished(self, slug: str, task: str, identity: dict[str, Any]) -> bool:
        """Returns whether a method's task was measured with exactly these settings.

        Raises:
            KVQuantError: it was measured with other settings, and ``overwrite`` is False.
        """
        path = self.runs(slug) / f"{task}.json"
        if not path.exists():
            return False
        stored = read(path).get("identity", {})
        identity = json.loads(json.dumps(identity))
        if stored == identity:
            return True
        if self.overwrite:
            return False
        raise KVQuantError(
            f"{path.relative_to(self.folder)} was measured with other settings ({differences(stored, identity)}). Give "
            "--overwrite to measure it again, or another --out."
        )

    def save(self, slug: str, task: str, identity: dict[str, Any], outcome: Outcome, more: dict[str, Any]) -> None:
        content = {"task": task, "identity": identity, "command": self.command, **more, **vars(outcome)}
        write_json(self.runs(slug) / f"{task}.json", content)
        (self.runs(slug) / f"{task}.error.json").unlink(missing_ok=True)

    def save_error(self, slug: str, task: str, message: str, log: str = "") -> None:
        """Records why a task (or, as task ``server``, a whole method) could not be measured."""
        write_json(self.runs(slug) / f"{task}.error.json", {"error": message, "log": log.splitlines()})

    def save_server(self, slug: str, facts: dict[str, Any]) -> None:
        write_json(self.runs(slug) / "server.json", facts)
        (self.runs(slug) / "server.error.json").unlink(missing_ok=True)

    def forget_failure(self, slug: str) -> None:
        """Forgets that a method's server failed, once all of its tasks are measured."""
        (self.runs(slug) / "server.error.json").unlink(missing_ok=True)

    def methods(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Returns all files of the folder: per method, by name (``server``, ``kl``, ``kl.error``, ...)."""
        found = {}
        for folder in sorted((self.folder / "runs").glob("*")):
            files = {path.name.removesuffix(".json"): read(path) for path in sorted(folder.glob("*.json"))}
            if files:
                found[folder.name] = files
        return found


def differences(stored: dict[str, Any], wanted: dict[str, Any], prefix: str = "") -> str:
    """Lists the settings that differ, with both values, shortened."""
    found = []
    for key in sorted({*stored, *wanted}):
        old, new = stored.get(key), wanted.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += [differences(old, new, f"{prefix}{key}.")] if old != new else []
        elif old != new:
            found.append(f"{prefix}{key}: {_brief(old)}, now {_brief(new)}")
    return "; ".join(found)


def _brief(value: Any) -> str:
    text = re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1…", json.dumps(value))
    return text if len(text) <= 120 else f"{text[:117]}…"
