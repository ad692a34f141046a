"""Checks the files of a rotation folder, which may contain anything: ``config.json`` and single tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from sglang_kvq.errors import KVQuantError, shorten
from sglang_kvq.rotations.base import RotationMeta

#: Dtypes that files may have; everything is computed in the first.
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

CONFIG_FILE = "config.json"
#: ``format_version`` of rotations for transform coding.
TRANSFORM_VERSION = 3
#: Each ``format_version`` that can be read.
VERSIONS = (1, 2, TRANSFORM_VERSION)

_Size = Annotated[int, Field(ge=1, le=2**20)]
#: Pattern of text on one line without control characters, because messages show it.
ONE_LINE = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$"
_Line = Annotated[str, Field(pattern=ONE_LINE)]


class _Geometry(BaseModel):
    model_config = ConfigDict(strict=True)

    layers: _Size
    kv_heads: _Size
    head_dim: _Size


class RotationConfig(BaseModel):
    """Fields of ``config.json``. ``RotationMeta`` describes those that it also has. Unknown fields are kept as is."""

    model_config = ConfigDict(strict=True, extra="allow")

    format_version: _Size
    geometry: _Geometry
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    granularity: str | None = None
    objective: _Line = "unknown"
    base_model: _Line | None = None
    revision: _Line | None = None
    model: dict[str, Any] = {}
    # Numbers or lists; ``check_rotations`` checks them further, also before a file is written.
    clip_k: Any = None
    clip_v: Any = None
    corpus: str | None = None
    tokens: int | None = None
    seed: int | None = None
    sensitivity: dict[Literal["k", "v"], dict[str, list[FiniteFloat]]] | None = None
    sensitivity_unit: str | None = None
    importance: dict[Literal["k", "v"], list[FiniteFloat]] | None = None
    errors: dict[Literal["k", "v"], list[float]] | None = None

    def meta(self, source: str, files: dict[str, str]) -> RotationMeta:
        """Returns the ``RotationMeta`` of rotations from ``source``; ``files`` are its files' digests, by name."""
        names = set(RotationMeta.__dataclass_fields__) & set(type(self).model_fields)
        values = {name: getattr(self, name) for name in names}
        for name in ("clip_k", "clip_v"):
            if isinstance(values[name], list):
                values[name] = tuple(values[name])
        return RotationMeta(**values, source=source, files=files)


def first_problem(error: ValidationError) -> str:
    """Returns the first field that is wrong, with the reason and its value, on one line."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    problem = f"{field}: {first['msg']}" if field else first["msg"]
    if field and first["type"] != "missing":
        problem += f", not {shorten(first['input'])}"
    return " ".join(problem.split())


def parse_config(path: Path, data: bytes) -> RotationConfig:
    """Parses ``data``, the content of the config file at ``path``.

    Raises:
        KVQuantError: not JSON; a field is missing or of another type; a version that cannot be read. The message names
            the field.
    """
    try:
        config = RotationConfig.model_validate_json(data)
    except ValidationError as error:
        raise KVQuantError(
            f"{path}: not the config.json of rotations ({first_problem(error)}). Correct it, or recreate the folder "
            "with `kvq calibrate`."
        ) from error
    if config.format_version not in VERSIONS:
        raise KVQuantError(
            f"{path}: format_version {config.format_version}, this sglang-kvq reads {', '.join(map(str, VERSIONS))}. "
            "Update sglang-kvq."
        )
    return config


def is_of_a_model(data: bytes) -> bool:
    """Returns True if ``data``, the content of a ``config.json``, is that of a model and not of rotations."""
    try:
        found = json.loads(data)
    except ValueError:
        return False
    return (
        isinstance(found, dict) and "format_version" not in found and bool({"model_type", "architectures"} & {*found})
    )


def plain_tensor(where: str, name: str, x: Any, shape: Sequence[int] | None = None) -> torch.Tensor:
    """Returns ``x`` in float32; refuses all but a dense floating-point tensor whose elements are all in its file.

    If ``shape`` is None, it accepts any shape without an empty dimension. ``where`` and ``name`` are for the error.
    """
    problem = _problem(x, shape)
    if problem is not None:
        raise KVQuantError(f"{where}: {name} {problem}. Fetch the file again or recreate it with `kvq calibrate`.")
    return x.detach().float()  # type: ignore[no-any-return]


def _problem(x: Any, shape: Sequence[int] | None) -> str | None:
    if not isinstance(x, torch.Tensor):
        return f"is not a tensor ({type(x).__name__})"
    if x.layout is not torch.strided or x.is_quantized or x.device.type != "cpu":
        return f"is not a dense CPU tensor ({x.layout}, {x.device})"
    if x.dtype not in DTYPES:
        return f"has dtype {x.dtype}, expected {DTYPES[0]}"
    if shape is not None and list(x.shape) != list(shape):
        return f"has shape {list(x.shape)}, expected {list(shape)}"
    if not x.numel():
        return f"is empty (shape {list(x.shape)})"
    if x.numel() * x.element_size() > x.untyped_storage().nbytes():
        return f"has shape {list(x.shape)}, more than the file holds"
    return None


def dumps(config: dict[str, Any]) -> str:
    """Formats JSON with a line for each field and each row of a table; lists of numbers stay on one line."""
    text = json.dumps(config, indent=2)
    for numbers_or_row in (r"(\[)\n([-\d.e,\s]+)(\])", r"(\{)\n([^{}\[\]]+)(\})"):
        text = re.sub(numbers_or_row, lambda m: m[1] + re.sub(r"\n\s*", " ", m[2]).strip() + m[3], text)
    return text
