"""Method specs: what ``--methods`` lists, and the server flags that each stands for."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.material import digest

#: SGLang's own types, by what may follow ``fp8:``. e4m3 has the finer steps and is the usual meaning of FP8.
FP8 = {"": "fp8_e4m3", "e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2"}
REFERENCE = "none"


@dataclass(frozen=True)
class MethodSpec:
    """One row of the comparison.

    Attributes:
        label: what the table calls it: the spec, its rotation folder by name only.
        method: ``none``, ``fp8``, or a name that ``--kv-quant`` takes.
        bits: the value of ``--kv-quant-bits``, or of FP8 its type; empty if not given.
        rotations: folder, or location on the hub, for ``--kv-quant-rotations``.
        extra: further server flags of this method alone.
    """

    label: str
    method: str
    bits: str = ""
    rotations: str = ""
    extra: tuple[str, ...] = ()

    @property
    def is_reference(self) -> bool:
        return self.label == REFERENCE

    @property
    def slug(self) -> str:
        """A folder name: readable, and different for different labels."""
        plain = re.sub(r"[^\w.@-]+", "_", self.label)
        return plain if plain == self.label else f"{plain}-{digest(self.label)[:6]}"

    @property
    def flags(self) -> list[str]:
        """The server flags, to follow those that all methods share."""
        if self.method == REFERENCE:
            return list(self.extra)
        if self.method == "fp8":
            return ["--kv-cache-dtype", FP8[self.bits], *self.extra]
        flags = ["--kv-quant", self.method]
        flags += ["--kv-quant-bits", self.bits] if self.bits else []
        flags += ["--kv-quant-rotations", self.rotations] if self.rotations else []
        return [*flags, *self.extra]

    def identity(self) -> dict[str, Any]:
        """What decides the values, without paths: rotations by the hash of what describes them."""
        return {"spec": self.label, "rotations": _rotation_digest(self.rotations)}

    def calibration(self) -> dict[str, Any]:
        """``calibration`` (corpus, or the folder's name) and ``seed`` of a folder given in the spec."""
        config = _rotation_config(self.rotations)
        name = Path(self.rotations).name if self.rotations else None
        return {"calibration": config.get("corpus") or name, "seed": config.get("seed")}


def parse(text: str) -> MethodSpec:
    """``NAME[:BITS][@ROTATIONS] [--flag value ...]``, such as ``oscar:auto:2.5@rotations/wiki``.

    Raises:
        KVQuantError: no such method or FP8 type, or no such folder.
    """
    from sglang_kvq.methods import METHOD_NAMES

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise KVQuantError(f"--methods {text!r}: {error}.") from error
    if not words:
        raise KVQuantError("--methods: an empty name; separate methods by single commas.")
    head, at, rotations = words[0].partition("@")
    method, _, bits = head.partition(":")
    if method not in (REFERENCE, "fp8", *METHOD_NAMES):
        known = ", ".join((REFERENCE, "fp8", *METHOD_NAMES))
        raise KVQuantError(f"--methods {text!r}: no method {method!r}; there are {known}.")
    if method == "fp8" and bits not in FP8:
        raise KVQuantError(f"--methods {text!r}: FP8 comes as fp8:e4m3 (fp8) or fp8:e5m2.")
    if method == REFERENCE and (bits or rotations):
        raise KVQuantError(f"--methods {text!r}: none takes no bits and no rotations.")
    if at:
        folder = Path(rotations).expanduser()
        if folder.exists():
            rotations = str(folder.resolve())
        elif not rotations or rotations.startswith(("/", ".", "~")) or rotations.count("/") == 0:
            raise KVQuantError(f"--methods {text!r}: no folder {rotations!r} with rotations.")
    label = f"{head}@{Path(rotations).name}" if rotations else head
    return MethodSpec(" ".join([label, *map(_plain, words[1:])]), method, bits, rotations, tuple(words[1:]))


def parse_list(text: str) -> list[MethodSpec]:
    """Comma-separated specs, each once.

    Raises:
        KVQuantError: a spec is wrong, or two have the same label.
    """
    specs = [parse(part.strip()) for part in text.split(",")]
    labels = [spec.label for spec in specs]
    for label in labels:
        if labels.count(label) > 1:
            raise KVQuantError(f"--methods: {label!r} twice; rotation folders are told apart by their last name only.")
    return specs


def _plain(word: str) -> str:
    return Path(word).name if word.startswith("/") else word


def _rotation_config(location: str) -> dict[str, Any]:
    path = Path(location) / "config.json"
    if not location or not path.is_file():
        return {}
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        return config
    except ValueError:  # the server will say what is wrong with the folder
        return {}


def _rotation_digest(location: str) -> str | None:
    if not location:
        return None
    path = Path(location)
    if path.is_file():
        return digest(path.read_bytes().hex())
    # Its description has the hash of the rotations; the published layout has none, so then the files' sizes.
    config = _rotation_config(location)
    return digest(config or [[p.name, p.stat().st_size] for p in sorted(path.glob("*"))] or location)
