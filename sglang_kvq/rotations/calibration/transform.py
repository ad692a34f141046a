"""Transform coding's part of a calibration: the whitened bases of a model, and how much each layer's error matters.

Errors in values are weighted by the square of each layer's output projection. The sensitivity pass quantizes one
layer's keys or values with the codes that will be served, at a few patterns of widths. The measured cost, divided by
the squared error that the bases predict, is the layer's importance. A starting server chooses the layer's bits from it,
for any budget.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.planes import PLANES, PlaneCode, Widths
from sglang_kvq.rotations.base import RotationMeta, Rotations
from sglang_kvq.rotations.calibration.hf_attention import attention_hook, positions
from sglang_kvq.rotations.calibration.hf_model import one_thread
from sglang_kvq.rotations.calibration.sensitivity import Quantizer, sensitivity_table
from sglang_kvq.rotations.identity import geometry_of, identity
from sglang_kvq.rotations.maths.moments import Moments
from sglang_kvq.rotations.maths.transform import Basis, coded_error, coding_basis, fold_steps
from sglang_kvq.rotations.resolve import coding_parts

#: Names of the projection from heads to the residual stream, in transformers' models.
PROJECTIONS = ("o_proj", "out_proj", "dense", "wo")

#: Number of tokens that are run to see which modules attend.
SEEN = 8

_FIX = "Use another --composition than transform, or calibrate the unquantized model"


@torch.no_grad()
def output_weights(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Returns the weights W of errors in values.

    An error e of a value that gets all attention changes the residual stream by a vector of squared length e W eᵀ.

    W is float64 ``[layers, kv_heads, D, D]`` on the CPU. Let W_h be the columns of a layer's output projection that
    belong to query head h. W is the sum of W_hᵀ W_h over the query heads that read a KV head.
    """
    heads = identity(model.config)["num_attention_heads"]
    layers, kv_heads, head_dim = geometry_of(model.config)
    ids = ids[:SEEN].to(model.device)
    with attention_hook(model, lambda *_: None) as modules:
        model.base_model(ids[None], position_ids=positions(ids, 0), use_cache=False)
    missing = [layer for layer in range(layers) if layer not in modules]
    if missing:
        raise KVQuantError(
            f"layers {missing} should have full attention, but have no standard attention layer, which --kv-quant "
            "needs."
        )
    found = []
    for layer in range(layers):
        weight = _projection(model, modules[layer], layer, heads * head_dim).double()
        of_heads = weight.unflatten(1, (kv_heads, -1, head_dim)).movedim(0, 2)  # [kv_heads, group, hidden, D]
        found.append((of_heads.mT @ of_heads).sum(1).cpu())
    return torch.stack(found)


def _projection(model: Any, attention: torch.nn.Module, layer: int, width: int) -> torch.Tensor:
    """Returns the weight ``[hidden, width]`` of an attention module's output projection, a plain linear layer."""
    where = next((name for name, module in model.named_modules() if module is attention), type(attention).__name__)
    name = next((name for name in PROJECTIONS if isinstance(getattr(attention, name, None), torch.nn.Module)), None)
    if name is None:
        raise KVQuantError(
            f"layer {layer}: {where} ({type(attention).__name__}) has no output projection under any of the names "
            f"{', '.join(PROJECTIONS)}. {_FIX}."
        )
    projection: torch.nn.Module = getattr(attention, name)
    weight = getattr(projection, "weight", None)
    if not isinstance(projection, torch.nn.Linear) or not isinstance(weight, torch.Tensor):
        raise KVQuantError(
            f"layer {layer}: {where}.{name} is a {type(projection).__name__}, not a plain linear layer. {_FIX}."
        )
    if weight.is_meta:
        raise KVQuantError(
            f"layer {layer}: the weight of {where}.{name} is not in memory, because the model was offloaded. Pass "
            "--device cpu, or --device auto with GPUs that hold the whole model."
        )
    if weight.dim() != 2 or weight.shape[1] != width or not weight.is_floating_point() or weight.itemsize < 2:
        raise KVQuantError(
            f"layer {layer}: the weight of {where}.{name} is {weight.dtype} {list(weight.shape)}, expected "
            f"[hidden_size, {width}] (query heads times head_dim) in bfloat16, float16 or float32. {_FIX}."
        )
    return weight


#: Measured patterns of widths, by their bits for four channels, one of each plane.
MEASURED: dict[int, Widths] = {4: (2, 1, 1, 0), 8: (4, 2, 1, 1), 12: (4, 4, 3, 1)}

#: Unit of ``meta.sensitivity``.
UNIT = (
    "nats per token: KL divergence to second order (Fisher information), at 4, 8 and 12 bits for every four channels ("
    + ", ".join("+".join(map(str, widths)) for widths in MEASURED.values())
    + ")"
)
#: Text in place of the unit if no sensitivities were measured.
UNMEASURED = "not measured; importance is one over the energy of a layer's keys (values): errors count relative to it"

#: A layer's importance is at least this share of the largest.
LEAST_IMPORTANCE = 1e-9


def transform_rotations(moments: Moments, weights: torch.Tensor, meta: RotationMeta) -> Rotations:
    """Computes whitened bases, with importances in case no sensitivities are measured; weights: ``output_weights``."""
    if moments.vv.shape[1] == 1:
        weights = weights.mean(1, keepdim=True)
    mean = moments.k_mean
    with one_thread():
        keys = coding_basis(moments.kk - mean[..., :, None] * mean[..., None, :], moments.qq)
        values = coding_basis(moments.vv, weights)
    (k, q), (v, o) = _whitened(keys), _whitened(values)
    importance = {
        part: _rounded(1 / basis.energies.sum((1, 2)), digits=6) for part, basis in (("k", keys), ("v", values))
    }
    return Rotations(
        k,
        v,
        replace(meta, importance=importance, sensitivity_unit=UNMEASURED),
        q=q,
        o=o,
        k_mean=mean.float(),
        k_energies=keys.energies.float(),
        v_energies=values.energies.float(),
    )


def _whitened(basis: Basis) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the matrix for coded rows, which gives channels variance 1, and that for queries or outputs: float32."""
    sigma = basis.energies.sqrt()
    return (basis.encode / sigma[..., None, :]).float(), (basis.decode * sigma[..., :, None]).mT.float()


class PlaneQuantizer(Quantizer):
    """The ``Quantizer`` of transform coding, with the codes that are served and each pattern of ``MEASURED``."""

    variants = tuple((part, bits) for bits in MEASURED for part in ("k", "v"))

    def __init__(self, rotations: Rotations, sink: int, recent: int) -> None:
        super().__init__(sink, recent)
        whole = rotations.whole()
        every = {bits: torch.tensor(widths).expand(len(rotations.k), PLANES) for bits, widths in MEASURED.items()}
        self._rotations = {bits: fold_steps(whole, widths, widths) for bits, widths in every.items()}

    def matrices(self, bits: int) -> LayerRotations:
        return self._rotations[bits]

    def read(self, rows: torch.Tensor, layer: int, part: str, bits: int) -> torch.Tensor:
        code = PlaneCode(MEASURED[bits])
        return code.dequantize(*code.quantize(rows)).bfloat16().float()


def with_importance(rotations: Rotations, nats: torch.Tensor) -> Rotations:
    """Returns the rotations with measured sensitivities and importances in their meta.

    ``nats`` has the costs of ``PlaneQuantizer``'s variants, float64 ``[layers, variants]``.

    Raises:
        KVQuantError: a cost is not finite.
    """
    table, importance = sensitivity_table(nats, PlaneQuantizer.variants), {}
    for part, (energies, _) in zip("kv", coding_parts(rotations)):
        foreseen = torch.stack([coded_error(energies, torch.tensor(widths)) for widths in MEASURED.values()], dim=1)
        columns = [PlaneQuantizer.variants.index((part, bits)) for bits in MEASURED]
        importance[part] = _rounded(importance_of(nats[:, columns], foreseen), digits=6)
    return replace(
        rotations, meta=replace(rotations.meta, sensitivity=table, sensitivity_unit=UNIT, importance=importance)
    )


def importance_of(nats: torch.Tensor, foreseen: torch.Tensor) -> torch.Tensor:
    """Returns the geometric mean, over patterns, of cost divided by predicted error: float64 ``[layers]``.

    Both arguments are float64 ``[layers, patterns]``.
    """
    # A cost is 0 if nothing reads the error, or if it is lost in rounding. In a mean of logarithms, a single 0 would
    # make the layer's errors free at any width.
    ratio = nats / foreseen
    least = (LEAST_IMPORTANCE * ratio.amax()).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.maximum(ratio, least).log().mean(-1).exp()


def _rounded(values: torch.Tensor, digits: int) -> list[float]:
    return [float(f"{x:.{digits}g}") for x in values.tolist()]
