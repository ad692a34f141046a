"""Checkpoint of an interrupted calibration, from which the same command continues."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sglang_kvq.errors import KVQuantError, first_line
from sglang_kvq.rotations.calibration.settings import CalibrationSettings, positions_of

#: Seconds between checkpoints inside a pass; a finished pass is always saved.
INTERVAL = 20.0

#: Version of the checkpoint; a run of another version cannot be continued. Version 2 added the keys' mean, 3 moments
#: weighted by attention for transform coding, 4 another order of sensitivities, 5 the model's buffers and positions.
VERSION = "5"


class Checkpoint:
    """Sums of each pass in ``folder``: ``PASS.safetensors``, each written whole or not at all.

    Every file carries the run's fingerprint; a folder of another run is refused.
    """

    def __init__(self, folder: Path, fingerprint: dict[str, str]) -> None:
        """Checks that the folder holds the state of the run with this ``fingerprint``, or nothing."""
        self.folder, self._fingerprint, self._saved = folder, fingerprint, 0.0
        for path in sorted(folder.glob("*.safetensors")):
            self._read(path)

    def load(self, name: str) -> tuple[int, dict[str, torch.Tensor]]:
        """Returns the number of contexts that pass ``name`` has done, and its sums; 0 and none if it has not begun."""
        path = self.folder / f"{name}.safetensors"
        if not path.is_file():
            return 0, {}
        return self._read(path)

    def save(self, name: str, done: int, state: dict[str, torch.Tensor], *, last: bool) -> None:
        """Saves a pass's sums after ``done`` contexts: always if ``last``, else at least ``INTERVAL`` seconds apart."""
        if not last and time.monotonic() - self._saved < INTERVAL:
            return
        try:
            metadata = {"done": str(done), "fingerprint": json.dumps(self._fingerprint)}
            write_tensors(self.folder / f"{name}.safetensors", state, metadata)
        except (OSError, SafetensorError) as error:
            raise KVQuantError(
                f"cannot write the checkpoint {self.folder}: {first_line(error)}. Free some space, or choose another "
                "--output."
            ) from error
        self._saved = time.monotonic()

    def _read(self, path: Path) -> tuple[int, dict[str, torch.Tensor]]:
        try:
            tensors, metadata = read_tensors(path)
            found, done = json.loads(metadata["fingerprint"]), int(metadata["done"])
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise KVQuantError(
                f"{path}: not the state of an interrupted calibration ({error}). Delete {self.folder}, or pass "
                "--restart."
            ) from error
        differing = [name for name, value in self._fingerprint.items() if found.get(name) != value]
        if differing:
            raise KVQuantError(
                f"{self.folder}: an interrupted calibration with another {' and '.join(differing)} left its sums here. "
                "Repeat that command to finish it, pass --restart to discard them, or choose another --output."
            )
        return done, tensors


def discard(folder: Path) -> None:
    """Deletes a checkpoint's files, also unfinished ones, and the folder if it holds no others.

    Raises:
        KVQuantError: a file cannot be deleted.
    """
    try:
        for path in (*folder.glob("*.safetensors"), *folder.glob("tmp*.tmp")):
            path.unlink()
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    except OSError as error:
        raise KVQuantError(
            f"cannot delete the checkpoint {folder}: {first_line(error)}. Delete it, or choose another --output."
        ) from error


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Writes a safetensors file, whole or not at all; creates its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        temporary = Path(file.name)
    try:
        save_file({name: x.cpu().contiguous() for name, x in tensors.items()}, temporary, metadata=metadata)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns the tensors and metadata of a safetensors file."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118 (not a dict)


def fingerprint(model: torch.nn.Module, contexts: torch.Tensor, settings: CalibrationSettings) -> dict[str, str]:
    """Returns what determines a calibration's results: digests of model and drawn tokens, settings and ``VERSION``.

    Only the first 64 elements of each parameter and buffer are read. They distinguish two models at no cost. A config
    with another RoPE gives other buffers, or another number of positions.
    """
    weights = hashlib.sha256(f"{next(model.parameters()).dtype}{positions_of(model.config)}".encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        sample = tensor.detach().flatten()[:64].float().cpu()
        weights.update(f"{name}{tuple(tensor.shape)}".encode() + sample.numpy().tobytes())
    text = hashlib.sha256(contexts.cpu().numpy().tobytes())
    return {
        "model": weights.hexdigest(),
        "text": text.hexdigest(),
        "settings": json.dumps(asdict(settings), sort_keys=True),
        "version": VERSION,
    }
