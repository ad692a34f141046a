"""Rotations of a whole model with their checks, and the slice that one worker needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.errors import KVQuantError

#: Largest accepted |R R^T - I|, or |R_q R_k^T - I|. Float32 files of orthonormal matrices measure below 1e-6. For exact
#: inverses, entries are rounded by 2^-24 relative. An entry of the product is then off by at most 2^-23 times the
#: product of two rows' lengths. For transform coding that product is at most the condition number of the basis: W^1/2
#: times its inverse, 1 / sqrt(maths.transform.FLOOR). This gives 4e-4.
ORTHOGONALITY_TOLERANCE = 1e-3

#: Tensors that rotations for transform coding have besides k, v and q. Other rotations have none of them.
TRANSFORM_TENSORS = ("o", "k_mean", "k_energies", "v_energies")

#: Accepted clip quantiles, the same range as for ``--kv-quant-clip-k``.
CLIP_RANGE = (0.5, 1.0)


@dataclass(frozen=True)
class RotationMeta:
    """Origin of rotations: the fields of ``config.json`` besides the geometry.

    Attributes:
        objective: the criterion that chose R, see ``rotations.calibration.run``.
        base_model, revision: the model they were calibrated on.
        model: the identity fields of its config, see ``rotations.identity``.
        clip_k, clip_v: the clip quantiles that measured best: one for all layers, or a tuple with one per layer; None
            if not measured.
        corpus: the calibration text, and the part of it that was used.
        tokens: number of calibration tokens.
        seed: seed that drew the contexts from the text, see ``rotations.calibration.run``.
        sensitivity: ``{"k": {"2": [...], "4": [...]}, "v": {...}}``: per layer, the model's loss when only this layer's
            keys (values) are quantized at that many bits; None if not measured.
        sensitivity_unit: unit of the sensitivities.
        importance: ``{"k": [...], "v": [...]}``: per layer, nats per token that the model's output moves for each unit
            of the transform coder's squared error (``rotations.maths.transform``); None if not measured.
        errors: ``{"k": [...], "v": [...]}``: per layer, calibration's relative error of the attention output at the
            chosen clip ratios; None if not measured.
        source: the folder or hub repo they were loaded from.
        sha256: of the file they were loaded from, in hexadecimal; of the published pair, of K's and V's behind each
            other. None if they come from no file.
        files: sha256 of each file that was read, by name; None if they come from no file.
    """

    objective: str = "unknown"
    base_model: str | None = None
    revision: str | None = None
    model: dict[str, Any] = field(default_factory=dict)
    clip_k: float | tuple[float, ...] | None = None
    clip_v: float | tuple[float, ...] | None = None
    corpus: str | None = None
    tokens: int | None = None
    seed: int | None = None
    sensitivity: dict[str, dict[str, list[float]]] | None = None
    sensitivity_unit: str | None = None
    importance: dict[str, list[float]] | None = None
    errors: dict[str, list[float]] | None = None
    source: str | None = None
    sha256: str | None = None
    files: dict[str, str] | None = field(default=None, compare=False)

    def clips(self, layers: int) -> tuple[tuple[float | None, ...], tuple[float | None, ...]]:
        """Returns ``clip_k`` and ``clip_v`` of each of ``layers`` layers."""
        clip_k, clip_v = (c if isinstance(c, tuple) else (c,) * layers for c in (self.clip_k, self.clip_v))
        return clip_k, clip_v


@dataclass(frozen=True)
class Rotations:
    """Rotations of every layer of a model: keys are multiplied by ``k[layer, head]``, values by ``v[layer, head]``.

    Attributes:
        k, v: float32 ``[layers, heads, D, D]``; heads is 1 (shared by a layer's heads) or the
            model's KV heads. k and v may differ in heads. v is orthogonal if o is None, and k if q is None.
        q: like k, multiplies queries; q kᵀ = 1 keeps scores unchanged. None: k.
        o: like v; its transpose returns attention's outputs to the model's basis, with o vᵀ = 1. None: v.
        k_mean: float32 ``[layers, heads, D]``, subtracted from keys before they are multiplied by k. It shifts all
            scores of a query equally, so attention does not change. None: subtract nothing.
        k_energies, v_energies: float32 ``[layers, heads, D]``, descending: the cost of an error of one standard
            deviation in each channel, in the units of ``rotations.maths.transform``. Only for transform coding, whose
            channels have variance 1 in the bases k and v; else None.
        meta: their origin.
        k_eigenvalues, v_eigenvalues: float32 ``[layers, heads, D]`` or None: the spectrum of the
            calibration covariances, ascending; for inspection only.
    """

    k: torch.Tensor
    v: torch.Tensor
    meta: RotationMeta = RotationMeta()
    k_eigenvalues: torch.Tensor | None = None
    v_eigenvalues: torch.Tensor | None = None
    q: torch.Tensor | None = None
    o: torch.Tensor | None = None
    k_mean: torch.Tensor | None = None
    k_energies: torch.Tensor | None = None
    v_energies: torch.Tensor | None = None

    @property
    def queries(self) -> torch.Tensor:
        """The matrices that multiply queries: ``q``, or ``k`` if ``q`` is None."""
        return self.k if self.q is None else self.q

    @property
    def outputs(self) -> torch.Tensor:
        """The matrices whose transposes multiply attention's outputs: ``o``, or ``v`` if ``o`` is None."""
        return self.v if self.o is None else self.o

    @property
    def is_transform(self) -> bool:
        """True if they are for transform coding, which no other method can use."""
        return self.k_energies is not None

    @property
    def granularity(self) -> str:
        return "per-head" if max(self.k.shape[1], self.v.shape[1]) > 1 else "per-layer"

    def for_worker(self, layers: range, kv_heads_total: int, head_start: int, head_count: int) -> LayerRotations:
        """Returns the rotations of one tensor- and pipeline-parallel rank.

        Args:
            layers: indices of the rank's layers in these rotations.
            kv_heads_total: KV heads of the model.
            head_start, head_count: the rank's KV heads; ranks that replicate a head pass the same ones.

        Returns:
            ``LayerRotations`` with matrices contiguous float32 ``[len(layers), head_count, D, D]`` and the mean in the
            rotated basis: k_mean k.

        Raises:
            KVQuantError: these rotations lack the layers or heads.
        """
        if len(layers) and not (min(layers) >= 0 and max(layers) < self.k.shape[0]):
            raise KVQuantError(
                f"rotations {self.meta.source}: they have {self.k.shape[0]} layers, this worker serves "
                f"layers {layers.start} to {layers.stop - 1}; pass rotations of this model to --kv-quant-rotations."
            )
        if not 0 <= head_start < head_start + head_count <= kv_heads_total:
            raise KVQuantError(
                f"KV heads {head_start} to {head_start + head_count - 1} do not exist in a model of {kv_heads_total}; "
                "choose a tensor-parallel size that divides the KV heads, or a multiple of them."
            )

        def local(name: str, r: torch.Tensor) -> torch.Tensor:
            if r.shape[1] not in (1, kv_heads_total):
                raise KVQuantError(
                    f"rotations {self.meta.source}: {name} has {r.shape[1]} heads, the model has {kv_heads_total}; "
                    "pass rotations of this model to --kv-quant-rotations."
                )
            r = r[list(layers)]
            shared = r.shape[1] == 1
            r = r.expand(-1, head_count, *r.shape[2:]) if shared else r[:, head_start : head_start + head_count]
            return r.contiguous()

        k = local("k", self.k)
        return LayerRotations(
            k,
            local("v", self.v),
            None if self.q is None else local("q", self.q),
            None if self.o is None else local("o", self.o),
            None if self.k_mean is None else _rows_times(local("k_mean", self.k_mean), k),
        )

    def rotated_mean(self, layer: int) -> torch.Tensor | None:
        """Returns the mean that is subtracted from a layer's rotated keys, float32 ``[heads, D]``, or None."""
        return None if self.k_mean is None else _rows_times(self.k_mean[layer], self.k[layer])


def _rows_times(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Multiplies rows ``[..., D]`` by matrices ``[..., D, D]`` in float64: means far exceed what remains of keys."""
    return (rows.double().unsqueeze(-2) @ matrices.double()).squeeze(-2).float()


def check_rotations(rotations: Rotations, *, layers: int, kv_heads: int, head_dim: int) -> None:
    """Refuses rotations that do not fit the model, are not orthonormal, or would change attention.

    Raises:
        KVQuantError: other layers, heads or head_dim; NaN or infinity; |R^T R - I|, or with a matrix that undoes it
            |R_q R_k^T - I| and |R_o R_v^T - I|, above ``ORTHOGONALITY_TOLERANCE``, with the layer and head;
            eigenvalues of another shape; of transform coding also a missing part, energies that do not fall, or no
            importance.
    """
    where = rotations.meta.source or "rotations"
    given = {name: r for name in ("q", "k", "o", "v") if (r := getattr(rotations, name)) is not None}
    for name, r in given.items():
        if r.dim() != 4 or r.shape[2] != r.shape[3]:
            raise KVQuantError(
                f"{where}: tensor {name} has shape {list(r.shape)}, expected [layers, heads, head_dim, head_dim]; "
                "recreate it with `kvq calibrate`."
            )
        fits = r.shape[0] == layers and r.shape[1] in (1, kv_heads) and r.shape[2] == head_dim
        if not fits:
            raise KVQuantError(
                f"{where}: {name} is for {r.shape[0]} layers, {r.shape[1]} KV heads (1 means shared), head_dim "
                f"{r.shape[2]}; the model has {layers} layers, {kv_heads} KV heads, head_dim {head_dim}. They belong "
                "to another model: pass this one's with --kv-quant-rotations, make them with `kvq calibrate`, or use "
                "--kv-quant hadamard, which needs none."
            )
        _check_finite(where, name, r)
    for name, like in (("k_eigenvalues", "k"), ("v_eigenvalues", "v")):
        x, shape = getattr(rotations, name), list(given[like].shape[:3])
        if x is not None and list(x.shape) != shape:
            raise KVQuantError(
                f"{where}: {name} has shape {list(x.shape)}, expected {shape}, as {like} has; recreate the folder with "
                "`kvq calibrate`."
            )
        if x is not None:
            _check_finite(where, name, x)
    _check_transform(rotations, where)
    for name, reader in (("k", "q"), ("v", "o")):
        r, other = given[name], given.get(reader)
        if other is not None and other.shape != r.shape:
            raise KVQuantError(
                f"{where}: {reader} has shape {list(other.shape)}, {name} {list(r.shape)}; recreate the folder with "
                "`kvq calibrate`."
            )
        product = (r if other is None else other).double() @ r.double().mT
        error = (product - torch.eye(head_dim, dtype=torch.float64)).abs().amax((-1, -2))
        if error.max() > ORTHOGONALITY_TOLERANCE:
            layer, head = divmod(int(error.argmax()), error.shape[1])
            what = f"the inverse of {reader}'s transpose (max |R_{reader} R_{name}^T - I|"
            raise KVQuantError(
                f"{where}: {name} of layer {layer}, head {head} is not "
                f"{'orthogonal (max |R R^T - I|' if other is None else what} = {error[layer, head]:.2g}, allowed "
                f"{ORTHOGONALITY_TOLERANCE:g}); attention would change. The file is damaged or not a rotation: "
                "recreate it with `kvq calibrate`."
            )


def _check_finite(where: str, name: str, x: torch.Tensor) -> None:
    bad = ~torch.isfinite(x).flatten(2).all(-1)
    if bad.any():
        layer, head = bad.nonzero()[0].tolist()
        raise KVQuantError(
            f"{where}: {name} of layer {layer}, head {head} holds NaN or infinity; the file is damaged: fetch it "
            "again or recreate it with `kvq calibrate`."
        )


def _check_transform(rotations: Rotations, where: str) -> None:
    """Refuses rotations for transform coding that are incomplete, misshapen, or have energies that do not descend.

    Raises:
        KVQuantError: names the tensor, layer and head.
    """
    needed = ("q", *TRANSFORM_TENSORS)
    fix = "recreate the folder with `kvq calibrate MODEL --composition transform`."
    if all(getattr(rotations, name) is None for name in TRANSFORM_TENSORS):
        return
    missing = [name for name in needed if getattr(rotations, name) is None]
    if missing:
        raise KVQuantError(f"{where}: transform coding needs {', '.join(needed)}; {missing[0]} is missing; {fix}")
    for name, like in (("k_mean", "k"), ("k_energies", "k"), ("v_energies", "v")):
        x, shape = getattr(rotations, name), list(getattr(rotations, like).shape[:3])
        if list(x.shape) != shape:
            raise KVQuantError(f"{where}: {name} has shape {list(x.shape)}, expected {shape}, as {like} has; {fix}")
        _check_finite(where, name, x)
        wrong = (x <= 0).any(-1) | (x.diff(dim=-1) > 0).any(-1)
        if name != "k_mean" and wrong.any():
            layer, head = wrong.nonzero()[0].tolist()
            raise KVQuantError(
                f"{where}: {name} of layer {layer}, head {head} are not positive and descending, which planes "
                f"require; {fix}"
            )
    if rotations.meta.importance is None:
        raise KVQuantError(f"{where}: its config.json has no importance, which the division of bits requires; {fix}")


def _is_finite(x: Any) -> bool:
    return isinstance(x, (int, float)) and abs(x) < inf


def check_meta(meta: RotationMeta, *, layers: int) -> None:
    """Refuse clip ratios, errors, sensitivities and importances that do not fit the layers.

    Raises:
        KVQuantError: a clip ratio is outside ``CLIP_RANGE``; a list does not have ``layers`` entries; a sensitivity
            is not a table of finite numbers; an importance is not positive and finite.
    """
    where = meta.source or "rotations"
    low, high = CLIP_RANGE
    for name in ("clip_k", "clip_v"):
        clip = getattr(meta, name)
        if clip is None:
            continue
        if isinstance(clip, tuple) and len(clip) != layers:
            raise KVQuantError(
                f"{where}: {name} has {len(clip)} values, the rotations have {layers} layers; give one number, or one "
                "per layer, or recreate the folder with `kvq calibrate`."
            )
        for layer, value in enumerate(clip if isinstance(clip, tuple) else (clip,)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                of_layer = f" of layer {layer}" if isinstance(clip, tuple) else ""
                raise KVQuantError(
                    f"{where}: {name}{of_layer} is {value!r}; it must be a number from {low:g} to {high:g} (1 clips "
                    "nothing). Correct config.json, or recreate the folder with `kvq calibrate`."
                )
    tables = {} if meta.sensitivity is None else meta.sensitivity
    for part, table in tables.items() if isinstance(tables, dict) else [("?", tables)]:
        for bits, values in table.items() if isinstance(table, dict) else [("?", table)]:
            numbers = isinstance(values, list) and all(map(_is_finite, values))
            if part not in ("k", "v") or not numbers or len(values) != layers:
                raise KVQuantError(
                    f"{where}: sensitivity[{part!r}][{bits!r}] must be a list of one finite number for each of the "
                    f"{layers} "
                    'layers, under "k" or "v"; recreate the folder with `kvq calibrate`.'
                )
    for part, values in ({} if meta.errors is None else meta.errors).items():
        if len(values) != layers:
            raise KVQuantError(
                f"{where}: errors[{part!r}] has {len(values)} values, the rotations have {layers} layers; recreate the "
                "folder with `kvq calibrate`."
            )
    importance = meta.importance
    if importance is None:
        return
    for part in ("k", "v"):
        given = importance.get(part) if isinstance(importance, dict) else None
        fits = isinstance(given, list) and len(given) == layers
        if not fits or not all(_is_finite(x) and x > 0 for x in given or ()):
            raise KVQuantError(
                f"{where}: importance[{part!r}] must be a list of one positive finite number for each of the {layers} "
                "layers; recreate the folder with `kvq calibrate MODEL --composition transform`."
            )
