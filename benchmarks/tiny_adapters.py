"""Writes random LoRA adapters of a tiny model in PEFT's format, for queries, keys, values and outputs."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.tiny_models import TinyModel

RANK = 8
#: Flags of a server with adapters; ``--lora-paths NAME=FOLDER ...`` follows.
FLAGS = ("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras-per-batch", "3")


def write(folder: Path, model: TinyModel, seed: int) -> Path:
    """Writes an adapter to ``folder``, which adds about half of what each projection itself gives."""
    draw = torch.Generator().manual_seed(seed)
    q_rows, kv_rows = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes = {"q": (q_rows, model.hidden), "k": (kv_rows, model.hidden), "v": (kv_rows, model.hidden)}
    shapes["o"] = (model.hidden, q_rows)
    base, tensors = model.tensors(), {}
    for layer in range(model.layers):
        for name, (rows, columns) in shapes.items():
            at = f"model.layers.{layer}.self_attn.{name}_proj"
            size = float(base[f"{at}.weight"].float().std()) * (columns / RANK) ** 0.5 / 2
            for part, shape, std in (("A", (RANK, columns), columns**-0.5), ("B", (rows, RANK), size)):
                tensors[f"base_model.model.{at}.lora_{part}.weight"] = torch.randn(*shape, generator=draw) * std
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none", "task_type": "CAUSAL_LM"}
    config["target_modules"] = [f"{name}_proj" for name in shapes]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
