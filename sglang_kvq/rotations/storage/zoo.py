"""Finds a model's rotations: those shipped in ``rotation_zoo/``, then the published ones.

A model is recognized by its config, not by its path, because local folders and conversions may have any name.
Rotations for transform coding are in a separate folder, NAME-transform next to NAME. Their config.json says so.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.identity import calibrate_options, identity, why_no_transform
from sglang_kvq.rotations.storage.hub import TENSOR_FILE
from sglang_kvq.rotations.storage.registry import ROTATION_ZOO, HubLocation, name_of, published_at, published_for
from sglang_kvq.rotations.storage.schema import CONFIG_FILE, TRANSFORM_VERSION, parse_config


def find_rotations(model_path: str, hf_config: Any, *, transform: bool = False) -> str:
    """Returns the location, for ``load_rotations``, of the rotations calibrated on this model.

    ``model_path`` is as the user gave it. ``transform`` asks for rotations for transform coding instead of others.

    Raises:
        KVQuantError: no rotations are known; the message says how to make or choose some.
    """
    wanted = identity(hf_config)
    calibrate = " ".join(["kvq calibrate", model_path, *calibrate_options(hf_config, transform=transform)])
    name = name_of(model_path)
    for folder, config in shipped():
        if config.get("model") != wanted or is_transform(config) != transform:
            continue
        base = config.get("base_model") or ""
        # A fine-tune has its base's config, so a hub id must name the base. A local folder may have any name.
        if _is_hub_id(model_path) and name.lower() != base.rsplit("/", 1)[-1].lower():
            raise KVQuantError(
                f"{model_path}: no rotations for this model, but it has the shape of {base}. To use that one's, pass "
                f"--kv-quant-rotations {folder}. Better: `{calibrate}`."
            )
        return str(folder)
    entry = None if transform else published_for(name)
    if entry is not None and not entry.refused:
        return entry.location
    if transform and (why := why_no_transform(hf_config)) is not None:
        raise KVQuantError(f"{model_path}: no rotations for transform coding known for this model: {why}")
    raise KVQuantError(
        f"{model_path}: no rotations {'for transform coding ' * transform}known for this model. Make them with "
        f"`{calibrate} --text FILE --output DIR` and pass --kv-quant-rotations DIR, or use --kv-quant int4, which "
        "needs none."
    )


def with_folder(location: str, model_path: str) -> str:
    """Adds the model's folder to a repository that publishes rotations for it: ``org/name[@revision]``.

    Other locations are returned as they are.
    """
    place = None if os.path.exists(location) else HubLocation.parse(location)
    known = place and place.repo == ROTATION_ZOO and not place.folder
    entry = published_for(name_of(model_path)) if known else None
    return str(replace(place, folder=entry.path)) if place and entry else location


def is_inferred(location: str) -> bool:
    """Returns True if the name of a folder on the hub is known only from its authors' scripts."""
    place = HubLocation.parse(location)
    entry = place and published_at(place)
    return bool(entry and entry.inferred)


def is_transform(config: dict[str, Any]) -> bool:
    """Returns True if the ``config.json`` of a folder describes rotations for transform coding."""
    return config.get("format_version") == TRANSFORM_VERSION


def shipped() -> list[tuple[Path, dict[str, Any]]]:
    """Returns the folders of ``rotation_zoo/``, each with the content of its ``config.json``."""
    folders = sorted(
        path.parent for path in zoo_folder().glob(f"*/{CONFIG_FILE}") if (path.parent / TENSOR_FILE).is_file()
    )
    return [(folder, parse_config(path := folder / CONFIG_FILE, path.read_bytes()).model_dump()) for folder in folders]


def zoo_folder() -> Path:
    """Returns the folder of the shipped rotations, which is part of the package."""
    return Path(__file__).parents[2] / "rotation_zoo"


def _is_hub_id(model_path: str) -> bool:
    return not Path(model_path).exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", model_path) is not None
