"""Rotations of a whole model, their checks, and the slice of them that one worker needs."""

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

#: Each tensor must have the layers, heads and head_dim of this other tensor; a matrix also its last dimension.
_LIKE = dict(q="k", o="v", k_eigenvalues="k", v_eigenvalues="v", k_mean="k", k_energies="k", v_energies="v")

#: Accepted clip quantiles, the same range as for ``--kv-quant-clip-k``.
CLIP_RANGE = (0.5, 1.0)


@dataclass(frozen=True)
class RotationMeta:
    """Origin of rotations: the fields of ``config.json`` besides the geometry.

    Attributes:
        objective: the criterion that chose R, see ``rotations.calibration.run``.
        base_model, revision: the model they were calibrated on.
        model: the identity fields of that model's config, see ``rotations.identity``.
        clip_k, clip_v: the clip quantiles that measured best: one for all layers, or a tuple with one per layer.
        corpus: the calibration text, and the part of it that was used.
        tokens: number of calibration tokens.
        seed: seed that drew the contexts from the text, see ``rotations.calibration.run``.
        sensitivity: ``{"k": {"2": [...], "4": [...]}, "v": {...}}``: per layer, the model's loss when only this layer's
            keys (values) are quantized at that many bits.
        sensitivity_unit: unit of the sensitivities.
        importance: ``{"k": [...], "v": [...]}``: per layer, the divergence of the model's output, in nats per token,
            for each unit of the transform coder's squared error (``rotations.maths.transform``).
        errors: ``{"k": [...], "v": [...]}``: per layer, calibration's relative error of the attention output at the
            chosen clip ratios.
        source: the folder or hub repo they were loaded from.
        sha256: hash of the file they were loaded from; for a published pair, of the K file followed by the V file.
        files: sha256 of each file that was read, by name.
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
        k, v: float32 ``[layers, heads, D, D]``; heads is 1 (shared by a layer's heads) or the model's KV heads, not
            necessarily the same for both. v is orthogonal if o is None, and k if q is None.
        q: like k, but multiplies queries; q kᵀ = 1 keeps scores unchanged. None: k multiplies queries too.
        o: like v; its transpose returns attention's outputs to the model's basis, with o vᵀ = 1. None: v does this.
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
    def is_transform(self) -> bool:
        """True if the rotations are for transform coding; no other method can then use them."""
        return self.k_energies is not None

    @property
    def granularity(self) -> str:
        return "per-head" if max(self.k.shape[1], self.v.shape[1]) > 1 else "per-layer"

    def for_worker(self, layers: range, kv_heads_total: int, head_start: int, head_count: int) -> LayerRotations:
        """Returns the rotations of one tensor- and pipeline-parallel rank.

        Ranks that replicate a head pass the same heads. Matrices are contiguous float32 ``[len(layers), head_count, D,
        D]``, the mean is in the rotated basis.

        Raises:
            KVQuantError: these rotations lack the layers or heads.
        """
        if len(layers) and not (min(layers) >= 0 and max(layers) < self.k.shape[0]):
            raise KVQuantError(
                f"rotations {self.meta.source}: they have {self.k.shape[0]} layers, this worker serves "
                f"layers {layers.start} to {layers.stop - 1}. Pass rotations of this model to --kv-quant-rotations."
            )
        if not 0 <= head_start < head_start + head_count <= kv_heads_total:
            raise KVQuantError(
                f"KV heads {head_start} to {head_start + head_count - 1} do not exist in a model of {kv_heads_total}. "
                "Choose a tensor-parallel size that divides the KV heads, or a multiple of them."
            )

        def local(name: str, r: torch.Tensor) -> torch.Tensor:
            if r.shape[1] not in (1, kv_heads_total):
                raise KVQuantError(
                    f"rotations {self.meta.source}: {name} has {r.shape[1]} heads, the model has {kv_heads_total}. "
                    "Pass rotations of this model to --kv-quant-rotations."
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

    def whole(self) -> LayerRotations:
        """Returns the rotations of all layers and heads; of one head if heads share both keys' and values'."""
        layers, heads = len(self.k), max(self.k.shape[1], self.v.shape[1])
        return self.for_worker(range(layers), heads, 0, heads)


def _rows_times(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Multiplies rows ``[..., D]`` by matrices ``[..., D, D]``, in float64: means far exceed keys minus their mean."""
    return (rows.double().unsqueeze(-2) @ matrices.double()).squeeze(-2).float()


def check_rotations(rotations: Rotations, *, layers: int, kv_heads: int, head_dim: int) -> None:
    """Refuses rotations that do not fit the model, are not orthonormal, or would change attention.

    Raises:
        KVQuantError: other layers, heads or head_dim; NaN or infinity; |R R^T - I|, or, if q or o is given,
            |R_q R_k^T - I| or |R_o R_v^T - I|, above ``ORTHOGONALITY_TOLERANCE``; for transform coding also a missing
            part, energies that do not fall, or no importance; measurements that are not one per layer, or out of range.
    """
    where = rotations.meta.source or "rotations"
    given = {name: x for name in ("k", "v", *_LIKE) if (x := getattr(rotations, name)) is not None}
    transform = any(name in given for name in TRANSFORM_TENSORS)
    fix = f"the folder with `kvq calibrate{' MODEL --composition transform' * transform}`."
    for name in ("k", "v"):
        r = given[name]
        if r.dim() != 4 or r.shape[2] != r.shape[3]:
            raise KVQuantError(
                f"{where}: tensor {name} has shape {list(r.shape)}, expected [layers, heads, head_dim, head_dim]. "
                f"Recreate {fix}"
            )
        if r.shape[0] != layers or r.shape[1] not in (1, kv_heads) or r.shape[2] != head_dim:
            raise KVQuantError(
                f"{where}: {name} is for {r.shape[0]} layers, {r.shape[1]} KV heads (1 means shared), head_dim "
                f"{r.shape[2]}; the model has {layers} layers, {kv_heads} KV heads, head_dim {head_dim}. They belong "
                "to another model. Pass this one's with --kv-quant-rotations, make them with `kvq calibrate`, or use "
                "--kv-quant int4, which needs none."
            )
    needed = ("q", *TRANSFORM_TENSORS)
    missing = [name for name in needed if name not in given]
    if transform and missing:
        raise KVQuantError(
            f"{where}: transform coding needs {', '.join(needed)}; {missing[0]} is missing. Recreate {fix}"
        )
    for name, x in given.items():
        shape = list(given[_LIKE.get(name, name)].shape)[: 4 if name in ("k", "v", "q", "o") else 3]
        if list(x.shape) != shape:
            raise KVQuantError(
                f"{where}: {name} has shape {list(x.shape)}, expected {shape}, as {_LIKE[name]} has. Recreate {fix}"
            )
        _refuse_head(
            where,
            name,
            ~torch.isfinite(x).flatten(2).all(-1),
            f"holds NaN or infinity. Fetch it again or recreate {fix}",
        )
    for name in ("k_energies", "v_energies"):
        if transform:
            wrong = (given[name] <= 0).any(-1) | (given[name].diff(dim=-1) > 0).any(-1)
            _refuse_head(where, name, wrong, f"are not positive and descending, which planes require. Recreate {fix}")
    if transform and rotations.meta.importance is None:
        raise KVQuantError(
            f"{where}: its config.json has no field importance, which is needed to divide bits among layers. "
            f"Recreate {fix}"
        )
    for name, reader in (("k", "q"), ("v", "o")):
        product = given.get(reader, given[name]).double() @ given[name].double().mT
        error = (product - torch.eye(head_dim, dtype=torch.float64)).abs().amax((-1, -2))
        what = "orthogonal (max |R R^T - I|"
        if reader in given:
            what = f"the inverse of {reader}'s transpose (max |R_{reader} R_{name}^T - I|"
        _refuse_head(
            where,
            name,
            error > ORTHOGONALITY_TOLERANCE,
            f"is not {what} = {error.max():.2g}, allowed {ORTHOGONALITY_TOLERANCE:g}); attention would change. The "
            f"file is damaged or not a rotation. Recreate {fix}",
        )
    _check_meta(rotations.meta, layers=layers)


def _refuse_head(where: str, name: str, wrong: torch.Tensor, problem: str) -> None:
    """Raises an error about the first head that ``wrong``, bool ``[layers, heads]``, marks; passes if there is none."""
    if wrong.any():
        layer, head = wrong.nonzero()[0].tolist()
        raise KVQuantError(f"{where}: {name} of layer {layer}, head {head} {problem}")


def _check_meta(meta: RotationMeta, *, layers: int) -> None:
    """Refuses measurements without one value for each layer, and clip quantiles and importances out of range."""
    where, (low, high) = meta.source or "rotations", CLIP_RANGE
    fix = f"the folder with `kvq calibrate{' MODEL --composition transform' * (meta.importance is not None)}`."
    lists: dict[str, Any] = {
        name: clip for name in ("clip_k", "clip_v") if isinstance(clip := getattr(meta, name), tuple)
    }
    for field_name in ("errors", "importance"):
        lists |= {f"{field_name}[{part!r}]": xs for part, xs in (getattr(meta, field_name) or {}).items()}
    for part, table in (meta.sensitivity or {}).items():
        lists |= {f"sensitivity[{part!r}][{bits!r}]": values for bits, values in table.items()}
    for name, values in lists.items():
        if len(values) != layers:
            raise KVQuantError(
                f"{where}: {name} has {len(values)} values, the rotations have {layers} layers. Recreate {fix}"
            )
    for name in ("clip_k", "clip_v"):
        clip = getattr(meta, name)
        for layer, value in enumerate(clip if isinstance(clip, tuple) else () if clip is None else (clip,)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                of_layer = f" of layer {layer}" if isinstance(clip, tuple) else ""
                raise KVQuantError(
                    f"{where}: {name}{of_layer} is {value!r}; it must be a number from {low:g} to {high:g} (1 clips "
                    f"nothing). Correct config.json, or recreate {fix}"
                )
    for part in ("k", "v"):
        if meta.importance is not None and not all(0 < x < inf for x in meta.importance.get(part, [0.0])):
            raise KVQuantError(
                f"{where}: importance[{part!r}] must be a list of positive finite numbers. Recreate {fix}"
            )
