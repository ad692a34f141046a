"""What workers of a captured engine leave in a folder, and how it becomes one model's moments again.

``rank{r}.stage{first layer}.safetensors``: the sums of ``MomentSums`` over the worker's KV heads; metadata: contexts and the
worker's place. ``rank{r}.layer{l}.sample.safetensors``: BF16 q, k, v ``[heads, T, D]`` of the last context. Every file
appears whole or not at all. Nothing here imports sglang.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.maths.moments import MomentSums


def write_sums(folder: Path, sums: MomentSums, contexts: int, place: dict[str, int]) -> None:
    """One worker's sums. ``place``: rank, size, kv_heads_total, layers, first_layer."""
    metadata = {"contexts": str(contexts), "place": json.dumps(place)}
    _write(folder / f"rank{place['rank']}.stage{place['first_layer']}.safetensors", sums.state(), metadata)


def write_sample(folder: Path, rank: int, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """One context's activations of one layer, ``[heads, T, D]``."""
    tensors = {name: x.to(torch.bfloat16) for name, x in (("q", q), ("k", k), ("v", v))}
    _write(folder / f"rank{rank}.layer{layer}.sample.safetensors", tensors, None)


def read_sums(folder: Path, contexts: int, skip: int) -> MomentSums:
    """The whole model's sums: heads of all ranks side by side; a head that several ranks hold is their mean, for each
    has seen other queries.

    Raises:
        KVQuantError: a worker wrote nothing, or counted another number of contexts than ``contexts``.
    """
    state: dict[str, torch.Tensor] = {}
    stages: dict[int, dict[int, tuple[dict, dict]]] = {}
    for path in folder.glob("rank*.stage*.safetensors"):
        with safe_open(path, "pt") as file:
            place, done = json.loads(file.metadata()["place"]), int(file.metadata()["contexts"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if done != contexts:
            raise KVQuantError(
                f"{path.name}: this worker has seen {done} of {contexts} contexts whole; a context must fit one prefill chunk: "
                "lower --context, or give the engine a larger chunked_prefill_size and memory."
            )
        stages.setdefault(place["first_layer"], {})[place["rank"]] = (place, tensors)
    if not stages:
        raise KVQuantError(f"{folder}: the engine's workers captured nothing; the plugin did not see its prompts.")
    for ranks in stages.values():
        place = next(iter(ranks.values()))[0]
        missing = [r for r in range(place["size"]) if r not in ranks]
        if missing:
            raise KVQuantError(f"{folder}: ranks {missing} of {place['size']} wrote nothing; see the engine's log.")
        for name in ranks[0][1]:
            parts = torch.cat([ranks[r][1][name] for r in range(place["size"])])
            # More ranks than heads: consecutive ranks hold the same one.
            state[name] = parts.unflatten(0, (place["kv_heads_total"], -1)).mean(1)
    sums = MomentSums(skip)
    sums.restore(state)
    return sums


def read_samples(
    folder: Path, layers: int, kv_heads: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Layer by layer: its number, q ``[q_heads, T, D]``, k, v ``[kv_heads, T, D]`` of the last context."""
    for layer in range(layers):
        paths = list(folder.glob(f"rank*.layer{layer}.sample.safetensors"))
        if not paths:
            raise KVQuantError(f"{folder}: no activations of layer {layer}; --kv-quant needs attention in every layer.")
        parts = [load_file(p) for p in sorted(paths, key=lambda p: int(p.name.split(".")[0][4:]))]
        q, k, v = (torch.cat([part[name] for part in parts]) for name in "qkv")
        copies = k.shape[0] // kv_heads
        yield layer, q, k[::copies], v[::copies]


def _write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    save_file({name: x.cpu().contiguous() for name, x in tensors.items()}, temporary, metadata=metadata)
    temporary.rename(path)
