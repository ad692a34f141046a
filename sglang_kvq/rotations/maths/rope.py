"""How RoPE turns a model's keys and queries, and their second moments over all the positions that will be served.

RoPE (arXiv 2104.09864) turns keys with their absolute position; attention sees differences of positions only. So whoever knows
keys at the first positions knows them anywhere: those of a context that begins d tokens later are k T(d), T(d) orthogonal and
the same for all layers. One pass over the text gives the moments of prompts of any length.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.calibration.hf_attention import attention_hook, positions

#: ``turn(d)``: T(d), float64 ``[D, D]``; rows of keys times it are those of the same tokens d positions later.
Turn = Callable[[int], torch.Tensor]

#: BF16 models round their way to the last layer differently at another place: some 2%. A wrong turn is off by about 1.
TURN_TOLERANCE = 0.2


def turn_of(hf_config: object, head_dim: int) -> Turn:
    """T of a transformers model, by its own rotary embedding: any layout, scaling or part of head_dim that RoPE covers.

    Raises:
        KVQuantError: transformers' code for the model has no rotary embedding of the usual form.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    known = type(hf_config) in MODEL_FOR_CAUSAL_LM_MAPPING
    module = sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)].__module__] if known else None
    apply = getattr(module, "apply_rotary_pos_emb", None)
    classes = [c for name, c in vars(module or turn_of).items() if name.endswith("RotaryEmbedding")]
    if apply is None or len(classes) != 1:
        raise KVQuantError(
            f"{type(hf_config).__name__}: transformers has no rotary embedding of the usual form for this model, so keys far out "
            "cannot be foreseen; pass --positions equal to --context to calibrate for prompts of that length only."
        )
    embedding = classes[0](hf_config)

    def turn(distance: int) -> torch.Tensor:
        at = torch.tensor([[0, distance]])
        cos, sin = (x.double() for x in embedding(torch.zeros(1), at))
        n = cos.shape[-1]  # less than head_dim where RoPE covers a part of it
        basis = torch.eye(n, dtype=torch.float64)[None, None]
        (begin, _), (end, _) = (apply(basis, basis, cos[:, [i]], sin[:, [i]]) for i in (0, 1))
        whole = torch.eye(head_dim, dtype=torch.float64)
        whole[:n, :n] = end[0, 0] / begin[0, 0, 0, 0]  # some scale cos and sin
        return whole

    return turn


def over_places(moment: torch.Tensor, turn: Turn, places: Sequence[int]) -> torch.Tensor:
    """The mean of T(d)ᵀ M T(d) over the places d, for M float64 ``[..., D, D]``."""
    total = torch.zeros_like(moment)
    for place in places:
        t = turn(place)
        total += t.mT @ moment @ t
    return total / len(places)


def roped_layers(hf_config: object, layers: int) -> torch.Tensor:
    """Which layers use RoPE at all, bool ``[layers]``: some models leave it out in every few layers."""
    given = getattr(hf_config.get_text_config(), "no_rope_layers", None)  # 1 where RoPE is used, despite its name
    return torch.tensor([bool(x) for x in given] if given else [True] * layers)


@torch.inference_mode()
def check_turn(model: torch.nn.Module, ids: torch.Tensor, turn: Turn, place: int) -> None:
    """See the model turn its keys as foreseen.

    Args:
        ids: int64 ``[n]``; a hundred or so are enough.

    Raises:
        KVQuantError: the keys of these tokens at ``place`` are not those at 0, turned.
    """
    ids, keys = ids.to(model.device), []
    for first in (0, place):
        keys.append([])
        with attention_hook(model, lambda layer, q, k, v, scale: keys[-1].append(k.double().cpu())):
            model.base_model(ids[None], position_ids=positions(ids, first), use_cache=False)
    t = turn(place)
    roped = roped_layers(model.config, len(keys[0]))
    for layer, (near, far) in enumerate(zip(*keys)):
        error = float((far - (near @ t if roped[layer] else near)).norm() / far.norm().clamp(min=1e-30))
        if error > TURN_TOLERANCE:
            raise KVQuantError(
                f"layer {layer}: at position {place} keys differ by {error:.2f} of their size from what RoPE makes of those at 0; this "
                "model's positions are not understood: pass --positions equal to --context to calibrate for prompts of that length only."
            )
