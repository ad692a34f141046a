"""Effect of each method on the attention output of each layer of a model, by KV head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError, first_line
from sglang_kvq.rotations.base import Rotations, check_rotations
from sglang_kvq.rotations.calibration.clips import query_blocks
from sglang_kvq.rotations.calibration.hf_attention import attention_hook, positions
from sglang_kvq.rotations.calibration.hf_model import embedding_rows, load_model, tokenize
from sglang_kvq.rotations.calibration.run import Progress, silent
from sglang_kvq.rotations.calibration.settings import check_length, evenly, read_corpus
from sglang_kvq.rotations.identity import geometry_of
from sglang_kvq.rotations.inspection.candidates import Candidate, candidates_of
from sglang_kvq.rotations.maths.fake_quant import RotatedContext, page_round_trip

SINK, RECENT = 64, 256


@dataclass(frozen=True)
class Measured:
    """Relative errors of the attention output by method: ``errors`` are float64 ``[2, layers, kv_heads]``.

    The first dimension is the quantized part: keys, then values.
    """

    errors: dict[str, torch.Tensor]
    contexts: int
    length: int


def measure(
    model_path: str,
    texts: Sequence[Path],
    rotations: Rotations,
    methods: Sequence[str] = (),
    *,
    contexts: int,
    length: int,
    device: str = "",
    dtype: str = "",
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> Measured:
    """Runs the model over contexts of the text and quantizes each layer's history with every method.

    Raises:
        KVQuantError: the model, text or a method cannot be used, the text is too short, or the rotations do not fit.
    """
    least = SINK + RECENT + 2 * PAGE_SIZE
    if length < least or contexts < 1:
        raise KVQuantError(f"--contexts {contexts} --length {length}: at least 1 context of {least} tokens is needed.")
    progress("loading the model", 0, 1)
    corpus, _ = read_corpus(texts)
    model, tokenizer = load_model(model_path, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    layers, kv_heads, head_dim = geometry_of(model.config)
    check_rotations(rotations, layers=layers, kv_heads=kv_heads, head_dim=head_dim)
    check_length("--length", length, model.config)
    ids = tokenize(tokenizer, corpus, embedding_rows(model))
    if len(ids) < contexts * length:
        raise KVQuantError(f"the text has {len(ids)} tokens, {contexts} contexts of {length} need {contexts * length}.")
    candidates = candidates_of(methods, rotations, model.config)
    errors = {c.name: torch.zeros(2, layers, kv_heads, dtype=torch.float64) for c in candidates}
    sizes = torch.zeros(layers, kv_heads, dtype=torch.float64)
    blocks = query_blocks(length, SINK, RECENT, 2)

    def hook(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
        size = torch.zeros(kv_heads, dtype=torch.float64)
        for candidate in candidates:
            error, size = layer_errors(candidate, layer, q, k, v, scale, blocks)
            errors[candidate.name][:, layer] += error
        sizes[layer] += size

    try:
        with torch.inference_mode(), attention_hook(model, hook):
            for i, start in enumerate(evenly(len(ids) - length, contexts)):
                progress("measuring", i, contexts)
                context = ids[start : start + length].to(model.device)
                model.base_model(context[None], position_ids=positions(context, 0), use_cache=False)
    except torch.OutOfMemoryError as error:
        raise KVQuantError(
            f"--length {length}: not enough GPU memory for contexts of that length ({first_line(error)}). Lower it, or "
            "pass --device auto for all GPUs."
        ) from error
    progress("measuring", contexts, contexts)
    return Measured({name: e / sizes for name, e in errors.items()}, contexts, length)


def layer_errors(
    candidate: Candidate, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, starts: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Measures one method in one layer on one context, at the pages of queries that begin at ``starts``.

    Returns:
        squared error of the attention output with quantized keys, then values, float64 ``[2, kv_heads]``; and the
        output's squared norm, float64 ``[kv_heads]``. Both on the CPU.
    """
    heads = k.shape[0]
    context = RotatedContext.of(candidate.rotations, layer, q, k, v, scale, sink=SINK, recent=RECENT)
    old_k, old_v = page_round_trip(candidate.formats[layer], context.k, context.v)

    def by_head(x: torch.Tensor) -> torch.Tensor:
        squares: torch.Tensor = x.unflatten(0, (heads, -1)).square()
        return squares.sum((1, 2, 3)).cpu()

    error, size = torch.zeros(2, heads, dtype=torch.float64), torch.zeros(heads, dtype=torch.float64)
    for start in starts:
        exact = context.block(start).double()
        size += by_head(exact)
        error[0] += by_head(context.block(start, k=old_k).double() - exact)
        error[1] += by_head(context.block(start, v=old_v).double() - exact)
    return error, size
