"""An output folder: one file per (method, task), written when it is measured, so that a run can be resumed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.files import read, write_json
from sglang_kvq.evaluation.tasks import TASK_NAMES

if TYPE_CHECKING:
    from sglang_kvq.evaluation.tasks.base import Outcome


#: The file of an output folder that is locked while something is measured into it.
LOCK = ".lock"


class Store:
    """Stores results as ``FOLDER/runs/METHOD/TASK.json``, and ``server.json`` next to them.

    Args:
        overwrite: measure again what was measured with other settings, instead of refusing.
        command: the measuring command, recorded with every result.
    """

    def __init__(self, folder: Path, overwrite: bool = False, command: str = "") -> None:
        self.folder, self.overwrite, self.command = folder, overwrite, command

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from measuring into the folder. The system ends the lock with this process.

        Raises:
            KVQuantError: another process is measuring, or the file system refuses the lock.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as opened:
            try:
                file = opened.enter_context((self.folder / LOCK).open("a"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise KVQuantError(
                    f"--out {self.folder}: another kvq eval is measuring into this folder. Wait until it ends, or give "
                    "another --out."
                ) from None
            except OSError as error:
                raise KVQuantError(
                    f"--out {self.folder}: its file {LOCK} cannot be locked ({error.strerror}). Give another --out."
                ) from error
            yield

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
        self.forget_failure(slug)

    def forget_failure(self, slug: str) -> None:
        """Forgets that a method's server failed, once it runs or all of its tasks are measured."""
        (self.runs(slug) / "server.error.json").unlink(missing_ok=True)

    def methods(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Returns all files of the folder: per method, by name (``server``, ``kl``, ``kl.error``, ...)."""
        found = {}
        for folder in sorted((self.folder / "runs").glob("*")):
            files = {path.name.removesuffix(".json"): read(path) for path in sorted(folder.glob("*.json"))}
            if files:
                found[folder.name] = files
        return found


def common_settings(
    methods: Mapping[str, Mapping[str, Any]], planned: Mapping[tuple[str, str], dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Returns each task's settings, which must be equal for all methods, or its column would compare nothing.

    Args:
        methods: see ``Store.methods``.
        planned: identities of what is about to be measured, by method and task; they replace stored ones.

    Raises:
        KVQuantError: methods have other settings of a task, or were measured on other models.
    """
    planned = {key: json.loads(json.dumps(identity)) for key, identity in (planned or {}).items()}
    settings = {task: identity["task"] for (_, task), identity in planned.items()}
    model = next((identity["model"] for identity in planned.values() if "model" in identity), None)
    for slug, files in methods.items():
        for task in TASK_NAMES:
            if task not in files or (slug, task) in planned:
                continue
            found = files[task]["identity"]
            model = model or found.get("model")
            if found.get("model", model) != model:
                raise KVQuantError(
                    f"runs/{slug}/{task}.json was measured on another model ({found['model']}, not {model}). Delete "
                    "it, or give another --out."
                )
            wanted = settings.setdefault(task, found["task"])
            if wanted != found["task"]:
                raise KVQuantError(
                    f"runs/{slug}/{task}.json was measured with other settings than the same task of other methods "
                    f"({differences(found['task'], wanted)}). Measure it again with --overwrite, delete it, or give "
                    "another --out."
                )
    return settings


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
