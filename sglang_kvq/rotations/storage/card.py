"""The model card of a rotation folder, for the hub."""

from __future__ import annotations

from sglang_kvq.rotations.base import Rotations
from sglang_kvq.rotations.maths.transform import coding_gain


def model_card(rotations: Rotations, kv_heads: int | None, target: str | None = None) -> str:
    """Returns Markdown with the hub's metadata block: the rotations' origin, their errors, and how to serve them."""
    meta = rotations.meta
    layers, _, dim, _ = rotations.k.shape
    hub_id = meta.base_model if meta.base_model and meta.base_model.count("/") == 1 else None
    front = ["---", "library_name: sglang-kvq", "tags: [kv-cache, quantization, rotation, sglang]"]
    front += [f"base_model: {hub_id}"] if hub_id else []
    rows = [
        ("model", meta.base_model),
        ("revision", meta.revision),
        ("geometry", f"{layers} layers, {kv_heads or '?'} KV heads, head_dim {dim}"),
        ("rotations", f"{rotations.granularity}, objective `{meta.objective}`"),
        ("corpus", f"{meta.corpus}, {meta.tokens} tokens, seed {meta.seed}"),
        ("clip ratios", f"K {describe_clips(meta.clip_k)}, V {describe_clips(meta.clip_v)}"),
    ]
    about = "Rotations and clip ratios for a 2-bit KV cache, made with `kvq calibrate` after OSCAR (arXiv 2605.17757)."
    if rotations.is_transform:
        rows[-1] = ("coding gain", describe_gains(rotations))
        about = (
            "Bases, energies and importances for a KV cache by transform coding, made with `kvq calibrate "
            "--composition transform`; bits are chosen at start (`--kv-quant-bits`)."
        )
    body = [
        "",
        f"# KV-cache rotations for {meta.base_model or 'a model'}",
        "",
        about,
        "",
        "```",
        f"python -m sglang.launch_server --model-path {meta.base_model or 'MODEL'} --kv-quant {served_by(rotations)} "
        f"--kv-quant-rotations {target or 'FOLDER'}",
        "```",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows if value),
        "",
    ]
    return "\n".join([*front, "---", *body, *layer_table(rotations)]) + "\n"


def layer_columns(rotations: Rotations) -> list[tuple[str, str, list[str]]]:
    """Returns columns of measurements per layer: heading in a model card, heading in a terminal, cells."""
    meta, layers = rotations.meta, rotations.k.shape[0]
    columns: list[tuple[str, str, list[str]]] = []
    for part, clips in zip("KV", meta.clips(layers)):
        if clips[0] is not None:
            columns.append((f"clip {part}", f"clip\n{part}", [f"{c:g}" for c in clips]))
    for part, errors in (meta.errors or {}).items():
        name = part.upper()
        columns.append((f"output error, 2-bit {name}", f"error\n{name}", [f"{e:.4f}" for e in errors]))
    for part, gains in (coding_gains(rotations) or {}).items():
        name = part.upper()
        columns.append((f"coding gain {name}, dB", f"gain\n{name} dB", [f"{x:.1f}" for x in gains]))
    for part, values in (meta.importance or {}).items():
        name = part.upper()
        columns.append((f"importance {name}", f"weight\n{name}", [f"{x:.2g}" for x in values]))
    for part, table in (meta.sensitivity or {}).items():
        for bits, values in table.items():
            name = part.upper()
            columns.append((f"sensitivity, {bits}-bit {name}", f"nats\n{name}{bits}", [f"{x:.2g}" for x in values]))
    return columns


def layer_table(rotations: Rotations) -> list[str]:
    """Formats ``layer_columns`` as lines of Markdown."""
    meta, columns = rotations.meta, layer_columns(rotations)
    if not columns:
        return []
    head = ["| layer | " + " | ".join(name for name, _, _ in columns) + " |", "|" + "---:|" * (len(columns) + 1)]
    cells = zip(*(values for _, _, values in columns))
    rows = [f"| {layer} | {' | '.join(row)} |" for layer, row in enumerate(cells)]
    notes = []
    if meta.errors:
        notes.append(
            "Output error: squared error of a layer's attention output when its history keys (values) are quantized."
        )
    if meta.sensitivity_unit:
        notes.append(f"Sensitivity: {meta.sensitivity_unit}.")
    return [*head, *rows, "", *notes]


def served_by(rotations: Rotations) -> str:
    """Returns a value of ``--kv-quant`` that uses these rotations."""
    return "transform" if rotations.is_transform else "oscar"


def coding_gains(rotations: Rotations) -> dict[str, list[float]] | None:
    """Returns the coding gains of keys ("k") and values ("v") in dB, per layer, averaged over heads.

    Returns None for rotations that are not for transform coding.
    """
    if rotations.k_energies is None or rotations.v_energies is None:
        return None
    parts = (("k", rotations.k_energies), ("v", rotations.v_energies))
    return {part: coding_gain(energies).mean(1).tolist() for part, energies in parts}


def describe_gains(rotations: Rotations) -> str:
    """Formats the coding gains of keys and values, averaged over layers."""
    gains = coding_gains(rotations) or {}
    return ", ".join(f"{part.upper()} {sum(values) / len(values):.1f} dB" for part, values in gains.items())


def describe_clips(clip: float | tuple[float, ...] | None) -> str:
    """Describes one clip ratio, or the range of the layers' ratios, in words."""
    found = clip_range(clip)
    return f"{found.replace('-', ' to ')} by layer" if "-" in found else found or "not measured"


def clip_range(clip: float | tuple[float, ...] | None) -> str:
    """Formats one clip ratio, or the least and greatest of the layers' ratios; empty if not measured."""
    if clip is None:
        return ""
    low, high = (min(clip), max(clip)) if isinstance(clip, tuple) else (clip, clip)
    return f"{low:g}" if low == high else f"{low:g}-{high:g}"
