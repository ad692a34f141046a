"""What rotations do, layer by layer: the error of the attention output under each method, and the calibration's own data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import RenderableType
from rich.table import Table

from sglang_kvq.config import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.base import Rotations, check_rotations
from sglang_kvq.rotations.calibration.clips import query_blocks
from sglang_kvq.rotations.calibration.hf_attention import attention_hook
from sglang_kvq.rotations.calibration.hf_model import load_model, tokenize
from sglang_kvq.rotations.calibration.run import Progress
from sglang_kvq.rotations.calibration.text import read_corpus
from sglang_kvq.rotations.inspection.candidates import Candidate, candidates_of
from sglang_kvq.rotations.maths.fake_quant import segmented_attention
from sglang_kvq.rotations.storage.card import describe_clips
from sglang_kvq.rotations.storage.zoo import identity

SINK, RECENT = 64, 256


@dataclass(frozen=True)
class Measured:
    """Errors of the attention output, relative to its size, when a layer's history keys or values are quantized.

    Attributes:
        errors: by method, float64 ``[2, layers, kv_heads]``: keys, values.
        contexts, length: what they were measured on.
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
    progress: Progress | None = None,
) -> Measured:
    """Run the model over contexts of the text and quantize each layer's history with every method.

    Args:
        methods: names of the methods registry; none means all that can be measured.
        length: tokens per context.

    Raises:
        KVQuantError: model, text or method not usable; text too short; the rotations are of another model.
    """
    if length < SINK + RECENT + 2 * PAGE_SIZE or contexts < 1:
        least = SINK + RECENT + 2 * PAGE_SIZE
        raise KVQuantError(f"--contexts {contexts} --length {length}: at least 1 context of {least} tokens is needed.")
    corpus, _ = read_corpus(texts)
    model, tokenizer = load_model(model_path, device=device, dtype=dtype)
    shape = identity(model.config)
    layers, kv_heads, dim = (shape[n] for n in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
    check_rotations(rotations, layers=layers, kv_heads=kv_heads, head_dim=dim)
    ids = tokenize(tokenizer, corpus)
    if len(ids) < contexts * length:
        raise KVQuantError(f"the text has {len(ids)} tokens, {contexts} contexts of {length} need {contexts * length}.")
    candidates = candidates_of(methods, rotations, model.config)
    errors = {c.name: torch.zeros(2, layers, kv_heads, dtype=torch.float64) for c in candidates}
    sizes = torch.zeros(layers, kv_heads, dtype=torch.float64)
    blocks = query_blocks(length, SINK, RECENT, 2)

    def hook(layer, q, k, v, scale):
        for candidate in candidates:
            error, size = layer_errors(candidate, layer, q, k, v, scale, blocks)
            errors[candidate.name][:, layer] += error
        sizes[layer] += size

    starts = torch.linspace(0, len(ids) - length, contexts).long().tolist()
    report = progress or (lambda name, done, total: None)
    with torch.inference_mode(), attention_hook(model, hook):
        for i, start in enumerate(starts):
            report("measuring", i, contexts)
            model.base_model(ids[None, start : start + length].to(model.device), use_cache=False)
    report("measuring", contexts, contexts)
    return Measured({name: e / sizes for name, e in errors.items()}, contexts, length)


def layer_errors(
    candidate: Candidate, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, starts: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared error of the attention output per KV head with quantized keys, then values: float64 ``[2, kv_heads]``;
    and the output's squared size, float64 ``[kv_heads]``."""
    heads, group = k.shape[0], q.shape[0] // k.shape[0]
    q, k, v = candidate.rotate(layer, q, k, v)
    k, v = k.bfloat16().float(), v.bfloat16().float()
    whole = k.shape[1] // PAGE_SIZE * PAGE_SIZE
    pages = (x[:, :whole].unflatten(1, (-1, PAGE_SIZE)) for x in (k, v))
    format = candidate.formats[layer]
    back = format.dequantize_pages(format.quantize_pages(*pages))
    old_k, old_v = (torch.cat([b.flatten(1, 2).bfloat16().float(), x[:, whole:]], 1) for b, x in zip(back, (k, v)))

    error, size = torch.zeros(2, heads, dtype=torch.float64), torch.zeros(heads, dtype=torch.float64)
    for start in starts:
        block = q[:, start : start + PAGE_SIZE]

        def attend(key, value):
            out = segmented_attention(block, start, k, v, key, value, scale, sink=SINK, recent=RECENT)
            return out.unflatten(0, (heads, group)).double()

        exact = attend(k, v)
        size += exact.square().sum((1, 2, 3)).cpu()
        for i, out in enumerate((attend(old_k, v), attend(k, old_v))):
            error[i] += (out - exact).square().sum((1, 2, 3)).cpu()
    return error, size


def report(rotations: Rotations, kv_heads: int | None, measured: Measured | None) -> Iterator[RenderableType]:
    """Tables for the terminal."""
    yield _facts(rotations, kv_heads)
    yield _layers(rotations)
    if measured:
        for part, name in enumerate(("keys", "values")):
            yield _errors(measured, part, name)


def _facts(rotations: Rotations, kv_heads: int | None) -> Table:
    meta = rotations.meta
    layers, heads, dim, _ = rotations.k.shape
    table = Table(title=str(meta.source), show_header=False, title_justify="left")
    rows = (
        ("model", meta.base_model),
        ("revision", meta.revision),
        ("geometry", f"{layers} layers, {kv_heads or 'unknown'} KV heads, head_dim {dim}"),
        ("rotations", f"{rotations.granularity}, objective {meta.objective}"),
        ("clip ratios", f"K {describe_clips(meta.clip_k)}, V {describe_clips(meta.clip_v)}"),
        ("corpus", meta.corpus and f"{meta.corpus}, {meta.tokens} tokens, seed {meta.seed}"),
        ("sensitivity", meta.sensitivity_unit),
    )
    for name, value in rows:
        if value:
            table.add_row(name, str(value))
    return table


def _layers(rotations: Rotations) -> Table:
    """Per layer: clips, calibration's errors, sensitivities, and how unequal the directions are."""
    meta, layers = rotations.meta, rotations.k.shape[0]
    table = Table("layer", title="Per layer", title_justify="left")
    columns: list[list[str]] = []

    def add(name: str, values: Sequence[str]) -> None:
        table.add_column(name, justify="right")
        columns.append(list(values))

    for name, clips in zip("KV", meta.clips(layers)):
        if clips[0] is not None:
            add(f"clip {name}", [f"{c:g}" for c in clips])
    for part, errors in (meta.errors or {}).items():
        add(f"error {part.upper()}", [f"{e:.4f}" for e in errors])
    for part, widths in (meta.sensitivity or {}).items():
        for bits, values in widths.items():
            add(f"nats {part.upper()}{bits}", [f"{x:.2g}" for x in values])
    for name, eigenvalues in (("K", rotations.k_eigenvalues), ("V", rotations.v_eigenvalues)):
        if eigenvalues is not None:
            add(f"top 8 {name}", [f"{x:.0%}" for x in top_share(eigenvalues).tolist()])
    for layer in range(layers):
        table.add_row(str(layer), *(column[layer] for column in columns))
    table.caption = (
        "error: of the attention output. nats: sensitivity at 2 and 4 bits. top 8: their share of the spectrum."
    )
    return table


def top_share(eigenvalues: torch.Tensor, count: int = 8) -> torch.Tensor:
    """Share of the largest ``count`` eigenvalues in the sum, mean over heads: ``[layers]`` of ``[layers, heads, D]``."""
    sizes = eigenvalues.double().clamp(min=0).sort(-1, descending=True).values
    return (sizes[..., :count].sum(-1) / sizes.sum(-1).clamp(min=1e-30)).mean(-1)


def _errors(measured: Measured, part: int, name: str) -> Table:
    """Per layer the error of each method over all heads, and the worst head of the last one."""
    methods = list(measured.errors)
    table = Table("layer", *methods, "worst head", title=f"Error, quantized {name}", title_justify="left")
    for column in table.columns:
        column.justify = "right"
    last = measured.errors[methods[-1]][part]
    for layer in range(last.shape[0]):
        values = [measured.errors[m][part, layer].mean() for m in methods]
        head = int(last[layer].argmax())
        table.add_row(str(layer), *(f"{v:.4f}" for v in values), f"{head}: {last[layer, head]:.4f}")
    table.add_row("mean", *(f"{measured.errors[m][part].mean():.4f}" for m in methods), "", style="bold")
    table.caption = f"of the attention output, {measured.contexts} contexts of {measured.length} tokens; worst head of {methods[-1]}"
    return table
