"""Checkpoint of an interrupted calibration, from which the same command continues."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sglang_kvq.errors import KVQuantError, first_line
from sglang_kvq.rotations.calibration.settings import CalibrationSettings

#: Seconds between checkpoints inside a pass; a finished pass is always kept.
INTERVAL = 20.0

#: Version of the checkpoint; a run of another version cannot be continued. 2 has the keys' mean, 3 moments of
#: what is attended to for transform coding.
VERSION = "3"


class Checkpoint:
    """Sums of each pass in ``folder``: ``PASS.safetensors``, each written whole or not at all.

    Every file carries the run's fingerprint; a folder of another run is refused.
    """

    def __init__(self, folder: Path, fingerprint: dict[str, str]) -> None:
        """
        Args:
            fingerprint: what the run is made of, by name, from ``fingerprint``.

        Raises:
            KVQuantError: the folder holds another run's state, or cannot be read.
        """
        self.folder, self._fingerprint, self._saved = folder, fingerprint, 0.0
        for path in sorted(folder.glob("*.safetensors")):
            self._read(path)

    def load(self, name: str) -> tuple[int, dict[str, torch.Tensor]]:
        """Contexts that pass ``name`` has done, and its sums; 0 and nothing if it has not begun."""
        path = self.folder / f"{name}.safetensors"
        if not path.is_file():
            return 0, {}
        done, tensors = self._read(path)
        return done, tensors

    def save(self, name: str, done: int, state: dict[str, torch.Tensor], *, last: bool) -> None:
        """Keep a pass's sums after ``done`` contexts: the last ones always, others ``INTERVAL`` apart."""
        if not last and time.monotonic() - self._saved < INTERVAL:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".tmp", delete=False) as file:
                temporary = Path(file.name)
            try:
                metadata = {"done": str(done), "fingerprint": json.dumps(self._fingerprint)}
                save_file({k: v.cpu().contiguous() for k, v in state.items()}, temporary, metadata=metadata)
                temporary.rename(self.folder / f"{name}.safetensors")
            finally:
                temporary.unlink(missing_ok=True)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or first_line(error)
            raise KVQuantError(
                f"cannot write the checkpoint {self.folder}: {reason}; free some space, or choose another --output."
            ) from error
        self._saved = time.monotonic()

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self, path: Path) -> tuple[int, dict[str, torch.Tensor]]:
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                found, done = json.loads(metadata["fingerprint"]), int(metadata["done"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise KVQuantError(
                f"{path}: not the state of an interrupted calibration ({error}); delete {self.folder}, or pass "
                "--restart."
            ) from error
        differing = [name for name, value in self._fingerprint.items() if found.get(name) != value]
        if differing:
            raise KVQuantError(
                f"{self.folder}: an interrupted calibration with another {' and '.join(differing)} left its sums here. "
                "Repeat that command to finish it, pass --restart to discard them, or choose another --output."
            )
        return done, tensors


def fingerprint(model: torch.nn.Module, contexts: torch.Tensor, settings: CalibrationSettings) -> dict[str, str]:
    """Collects what decides a calibration's numbers: digests of model, drawn tokens and settings; and ``VERSION``.

    Of every parameter the first 64 elements are read: enough to tell two checkpoints apart, at no cost.
    """
    weights = hashlib.sha256(str(next(model.parameters()).dtype).encode())
    for name, parameter in model.named_parameters():
        sample = parameter.detach().flatten()[:64].float().cpu()
        weights.update(f"{name}{tuple(parameter.shape)}".encode() + sample.numpy().tobytes())
    text = hashlib.sha256(contexts.cpu().numpy().tobytes())
    return {
        "model": weights.hexdigest(),
        "text": text.hexdigest(),
        "settings": json.dumps(asdict(settings), sort_keys=True),
        "version": VERSION,
    }
