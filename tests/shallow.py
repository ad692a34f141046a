"""A model's first layers, for tests of a server's behavior: on a CPU, decoding takes a fifth of the time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

LAYERS = 4


def cut(model: Path, folder: Path, links: bool = True) -> Path:
    """Writes a model's first ``LAYERS`` layers to a folder that does not exist yet.

    Args:
        links: link the other files; otherwise copy them, for readers that see only this folder.
    """
    folder.mkdir()
    config = json.loads((model / "config.json").read_text())
    for path in model.iterdir():
        if path.suffix == ".safetensors" or path.name == "config.json":
            continue
        if links:
            (folder / path.name).symlink_to(path)
        else:
            shutil.copyfile(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))
    weights = {}
    for path in model.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = (name.split(".") for name in file.keys())  # noqa: SIM118  (it is no dictionary)
            kept = (name for name in names if "layers" not in name or int(name[name.index("layers") + 1]) < LAYERS)
            weights |= {name: file.get_tensor(name) for name in map(".".join, kept)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
