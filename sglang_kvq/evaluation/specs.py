"""Method specs: the entries of ``--methods``, and the server flags that each of them means."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_kvq.errors import KVQuantError, unknown
from sglang_kvq.evaluation.files import digest

#: SGLang's own types, by the suffix of ``fp8:``. e4m3 has finer steps and is the usual meaning of FP8.
FP8 = {"": "fp8_e4m3", "e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2"}
REFERENCE = "none"
CHUNK_FLAG = "--chunked-prefill-size"
#: Default chunk size. In small chunks, most of a prompt attends to stored keys and values, whose effect tasks measure.
CHUNK = 128
#: In larger chunks, too much of a prompt attends to its own chunk, so its log-probabilities would not show the cache.
LARGEST_CHUNK = 256
#: This flag is set to 0, so that prompts read records up to the window, as answers do.
PREFILL_FLAG = "--kv-quant-prefill-window"
#: The word for SGLang's own choice of chunk size.
OWN_CHUNK = "own"
_CHUNK_SUFFIX = re.compile(rf"#({OWN_CHUNK}|\d+)$")


def names(flags: Sequence[str], name: str) -> bool:
    """Returns whether flags contain a flag, with its value as the next word or after an equals sign."""
    return any(flag.partition("=")[0] == name for flag in flags)


@dataclass(frozen=True)
class MethodSpec:
    """One row of the comparison.

    Attributes:
        label: name in the table: the spec, with the rotation folder's name only, without ``#CHUNK`` if that is 128.
        method: ``none``, ``fp8``, or a name that ``--kv-quant`` takes.
        bits: the value of ``--kv-quant-bits``, or the type of FP8; empty if not given.
        rotations: folder, or location on the hub, for ``--kv-quant-rotations``.
        extra: further server flags for this method only.
        chunk: tokens of a prompt that the server computes at once; None is SGLang's own choice.
    """

    label: str
    method: str
    bits: str = ""
    rotations: str = ""
    extra: tuple[str, ...] = ()
    chunk: int | None = CHUNK

    @property
    def is_reference(self) -> bool:
        """True for BF16 in small chunks: other specs are compared with its log-probabilities."""
        return self.method == REFERENCE and not self.extra and self.fits(LARGEST_CHUNK)

    def fits(self, largest_chunk: int) -> bool:
        """Returns whether the spec's chunk size is at most ``largest_chunk``; False for SGLang's own choice."""
        return self.chunk is not None and self.chunk <= largest_chunk

    def chunk_flags(self, others: Sequence[str]) -> list[str]:
        """Returns ``--chunked-prefill-size``, unless flags contain it or the choice is SGLang's own.

        Args:
            others: all flags of the server.
        """
        given = any(flag.startswith(CHUNK_FLAG) for flag in others)
        return [] if given or self.chunk is None else [CHUNK_FLAG, str(self.chunk)]

    @property
    def slug(self) -> str:
        """Folder name: readable, and different for different labels."""
        plain = re.sub(r"[^\w.@#-]+", "_", self.label)
        return plain if plain == self.label else f"{plain}-{digest(self.label)[:6]}"

    @property
    def flags(self) -> list[str]:
        """Server flags of this method; they follow the flags that all methods share."""
        if self.method == REFERENCE:
            return list(self.extra)
        if self.method == "fp8":
            return ["--kv-cache-dtype", FP8[self.bits], *self.extra]
        flags = ["--kv-quant", self.method]
        flags += ["--kv-quant-bits", self.bits] if self.bits else []
        flags += ["--kv-quant-rotations", self.rotations] if self.rotations else []
        if not names(self.extra, PREFILL_FLAG):
            flags += [PREFILL_FLAG, "0"]
        return [*flags, *self.extra]

    def identity(self) -> dict[str, Any]:
        """Returns the settings that determine values, without paths: rotations by a hash of their description."""
        return {"spec": self.label, "rotations": _rotation_digest(self.rotations)}

    def calibration(self) -> dict[str, Any]:
        """Returns ``calibration`` (corpus, or the folder's name) and ``seed`` of the spec's rotation folder."""
        config = _rotation_config(self.rotations)
        name = Path(self.rotations).name if self.rotations else None
        return {"calibration": config.get("corpus") or name, "seed": config.get("seed")}


def parse(text: str) -> MethodSpec:
    """Parses ``NAME[:BITS][@ROTATIONS][#CHUNK] [--flag value ...]``, such as ``oscar:auto:2.5@rotations/wiki#own``.

    Raises:
        KVQuantError: the method, FP8 type or folder does not exist, or the chunk size is invalid.
    """
    from sglang_kvq.methods import METHOD_NAMES

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise KVQuantError(f"--methods {text!r}: {error}.") from error
    if not words:
        raise KVQuantError("--methods: an empty name. Separate methods by single commas.")
    first, has_chunk, chunk = words[0].partition("#")
    head, at, rotations = first.partition("@")
    method, _, bits = head.partition(":")
    if method not in (REFERENCE, "fp8", *METHOD_NAMES):
        raise unknown("--methods", method, (REFERENCE, "fp8", *METHOD_NAMES))
    if method == "fp8" and bits not in FP8:
        raise KVQuantError(f"--methods {text!r}: must be fp8:e4m3, which is the default of fp8, or fp8:e5m2.")
    if method == REFERENCE and (bits or rotations):
        raise KVQuantError(f"--methods {text!r}: none takes no bits and no rotations. Leave them out.")
    if at:
        folder = Path(rotations).expanduser()
        if folder.exists():
            rotations = str(folder.resolve())
        elif not rotations or rotations.startswith(("/", ".", "~")) or rotations.count("/") == 0:
            raise KVQuantError(f"--methods {text!r}: no folder {rotations!r} with rotations.")
    label = f"{head}@{Path(rotations).name}" if rotations else head
    spec = MethodSpec(" ".join([label, *map(_plain, words[1:])]), method, bits, rotations, tuple(words[1:]))
    if has_chunk and any(word.startswith(CHUNK_FLAG) for word in words[1:]):
        raise KVQuantError(f"--methods {text!r}: gives its chunk size twice. Leave {CHUNK_FLAG} out.")
    return in_chunks(spec, chunk_size(chunk)) if has_chunk else spec


def chunk_size(word: str) -> int | None:
    """Parses ``own`` (None: SGLang's choice) or a number of tokens.

    Raises:
        KVQuantError: the word is neither.
    """
    if word == OWN_CHUNK:
        return None
    if not word.isdecimal() or int(word) == 0:
        raise KVQuantError(f"chunk size {word!r}: must be a number of tokens, or {OWN_CHUNK} for SGLang's own choice.")
    return int(word)


def in_chunks(spec: MethodSpec, chunk: int | None) -> MethodSpec:
    """Returns the same method on a server with another chunk size."""
    first, *rest = spec.label.split(" ")
    first = _CHUNK_SUFFIX.sub("", first)
    suffix = "" if chunk == CHUNK else f"#{OWN_CHUNK if chunk is None else chunk}"
    return replace(spec, label=" ".join([first + suffix, *rest]), chunk=chunk)


def method_of(label: str) -> str:
    """Reduces a label to its method: without rotations, chunks and seed.

    ``oscar:auto:2.6@wiki0#own`` is ``oscar:auto:2.6``, and ``turboquant:3 --kv-quant-seed 1`` is ``turboquant:3``.
    """
    first, *rest = spec_of(label).split(" ")
    flags = re.sub(r"(^| )--kv-quant-seed[ =]\S+", "", " ".join(rest)).strip()
    return " ".join(filter(None, [first.partition("@")[0], flags]))


def spec_of(label: str) -> str:
    """Removes the chunk size from a label; the rest is the same for all chunk sizes."""
    first, *rest = label.split(" ")
    return " ".join([_CHUNK_SUFFIX.sub("", first), *rest])


def parse_list(text: str, chunks: Sequence[int | None] = (CHUNK,)) -> list[MethodSpec]:
    """Parses comma-separated specs, each once per chunk size unless it has its own.

    Raises:
        KVQuantError: a spec is wrong, or two have the same label.
    """
    specs = []
    for part in text.split(","):
        spec = parse(part.strip())
        fixed = "#" in part or any(word.startswith(CHUNK_FLAG) for word in spec.extra)
        specs += [spec] if fixed else [in_chunks(spec, chunk) for chunk in chunks]
    labels = [spec.label for spec in specs]
    for label in labels:
        if labels.count(label) > 1:
            raise KVQuantError(f"--methods: {label!r} twice. Give it once, or rotation folders of different names.")
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
    except ValueError:  # the server will report the problem with the folder
        return {}


def _rotation_digest(location: str) -> str | None:
    if not location:
        return None
    path = Path(location)
    if path.is_file():
        return digest(path.read_bytes().hex())
    config = _rotation_config(location)
    if "sha256" in config:  # the hash of the rotations
        return digest(config)
    files = [file for file in sorted(path.glob("*")) if file.is_file()]
    return digest([[file.name, hashlib.sha256(file.read_bytes()).hexdigest()] for file in files] or location)
