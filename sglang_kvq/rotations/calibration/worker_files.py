"""Files in which an engine's workers leave captured activations and their sums, and the merge into a model's moments.

``rank{r}.stage{first layer}.safetensors`` has the sums of ``MomentSums`` for the worker's KV heads. Its metadata are
``contexts``, the number of contexts, and ``place``, the ``Worker``. ``rank{r}.layer{l}.sample.safetensors`` has BF16 q,
k, v ``[heads, T, D]`` of the last context. Its metadata are ``scale``, the layer's factor on scores. Every file appears
whole or not at all. This module does not import sglang.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.calibration.checkpoint import read_tensors, write_tensors
from sglang_kvq.rotations.maths.moments import MomentSums


@dataclass(frozen=True)
class Worker:
    """Heads and layers of the model that a worker holds; ``rank`` is its number among ``size`` that share the heads.

    It holds ``layers`` of the model's ``identity.cached_layers``, from the index ``first_layer`` on.
    """

    rank: int
    size: int
    kv_heads_total: int
    layers: int
    first_layer: int


def write_sums(folder: Path, sums: MomentSums, contexts: int, worker: Worker) -> None:
    """Writes one worker's sums over ``contexts`` contexts."""
    metadata = {"contexts": str(contexts), "place": json.dumps(asdict(worker))}
    write_tensors(folder / f"rank{worker.rank}.stage{worker.first_layer}.safetensors", sums.state, metadata)


def write_sample(
    folder: Path, rank: int, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> None:
    """Writes one context's activations of one layer, each ``[heads, T, D]``, and the layer's factor on scores."""
    tensors = {name: x.to(torch.bfloat16) for name, x in (("q", q), ("k", k), ("v", v))}
    write_tensors(folder / f"rank{rank}.layer{layer}.sample.safetensors", tensors, {"scale": repr(scale)})


def read_sums(folder: Path, contexts: int, skip: int) -> MomentSums:
    """Reads the whole model's sums: the heads of all ranks side by side; averages a head that several ranks hold.

    Raises:
        KVQuantError: a worker wrote nothing, or counted another number of contexts than ``contexts``.
    """
    state: dict[str, torch.Tensor] = {}
    stages: dict[int, dict[int, dict[str, torch.Tensor]]] = {}
    workers: dict[int, Worker] = {}
    for path in folder.glob("rank*.stage*.safetensors"):
        tensors, metadata = read_tensors(path)
        worker, done = Worker(**json.loads(metadata["place"])), int(metadata["contexts"])
        if done != contexts:
            raise KVQuantError(
                f"{path.name}: this worker has seen {done} of {contexts} contexts whole; a context must fit one "
                "prefill chunk. Lower --context, or give the engine a larger chunked_prefill_size and memory."
            )
        stages.setdefault(worker.first_layer, {})[worker.rank] = tensors
        workers[worker.first_layer] = worker
    if not stages:
        raise KVQuantError(f"{folder}: the engine's workers captured nothing; the plugin did not see its prompts.")
    for first_layer, ranks in stages.items():
        size, kv_heads = workers[first_layer].size, workers[first_layer].kv_heads_total
        missing = [r for r in range(size) if r not in ranks]
        if missing:
            raise KVQuantError(f"{folder}: ranks {missing} of {size} wrote nothing. See the engine's log.")
        for name in ranks[0]:
            parts = torch.cat([ranks[r][name] for r in range(size)])
            # If there are more ranks than heads, consecutive ranks hold the same head.
            state[name] = parts.unflatten(0, (kv_heads, -1)).mean(1)
    return MomentSums(skip, state)


def read_samples(
    folder: Path, layers: int, kv_heads: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, float]]:
    """Yields an ``AttentionHook``'s arguments for each layer, of the last context."""
    for layer in range(layers):
        paths = list(folder.glob(f"rank*.layer{layer}.sample.safetensors"))
        if not paths:
            raise KVQuantError(f"{folder}: no activations of layer {layer}; --kv-quant needs attention in every layer.")
        parts = [read_tensors(p) for p in sorted(paths, key=lambda p: int(p.name.split(".")[0][4:]))]
        q, k, v = (torch.cat([tensors[name] for tensors, _ in parts]) for name in "qkv")
        copies = k.shape[0] // kv_heads
        yield layer, q, k[::copies], v[::copies], float(parts[0][1]["scale"])
