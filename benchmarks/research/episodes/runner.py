"""Runs a transformers model with our own attention, so that it need not read the tokens that it has seen."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from sglang_kvq.errors import KVQuantError

#: ``attend(layer, q, k, v, scale)``: q ``[B, q_heads, n, D]``, new keys and values ``[B, kv_heads, n, D]``, all after
#: RoPE; returns ``[B, q_heads, n, D]``.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
_NUMBER = count()


class Runner:
    """Runs tokens at given positions through a model, with ``attend`` in place of its attention.

    Attributes:
        model: a causal language model of transformers, in evaluation mode.
        layers, kv_heads, head_dim: its geometry.
        context: tokens that its RoPE was trained for.
    """

    def __init__(self, model: Any) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        config = model.config
        self.model, self._attend = model, None
        self.layers, self.kv_heads = config.num_hidden_layers, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.context, self.device, self.dtype = config.max_position_embeddings, model.device, model.dtype
        name = f"kvq_episodes_{next(_NUMBER)}"  # a name per runner, because transformers' registry is global
        ALL_ATTENTION_FUNCTIONS.register(name, self._attention)
        model.set_attn_implementation(name)

    def _attention(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        for option in ("sliding_window", "softcap", "s_aux"):
            if kwargs.get(option) is not None:
                raise KVQuantError(f"layer {module.layer_idx} uses {option}={kwargs[option]}: plain attention only.")
        if self._attend is None:
            raise RuntimeError("this model must be run by its Runner")
        scale = scaling if scaling is not None else self.head_dim**-0.5
        return self._attend(module.layer_idx, query, key, value, scale).transpose(1, 2), None

    @torch.inference_mode()
    def hidden(self, ids: torch.Tensor, first: int, attend: Attend) -> torch.Tensor:
        """Returns the last hidden states ``[B, n, hidden]``.

        Args:
            ids: int64 ``[B, n]``; all rows start at position ``first``.

        Raises:
            KVQuantError: positions exceed the model's context.
        """
        end = first + ids.shape[1]
        if end > self.context:
            raise KVQuantError(f"position {end} in a context of {self.context} tokens: shorten --history-tokens.")
        position_ids = torch.arange(first, end, device=self.device)[None]
        self._attend = attend
        try:
            return self.model.base_model(
                ids.to(self.device), position_ids=position_ids, use_cache=False
            ).last_hidden_state
        finally:
            self._attend = None

    @torch.inference_mode()
    def logprobs(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns log-probabilities, float32 ``[n]``, of targets int64 ``[n]`` after hidden states ``[n, hidden]``."""
        logits = self.model.lm_head(hidden).float()
        return logits.gather(1, targets.to(self.device)[:, None])[:, 0] - logits.logsumexp(1)


def pad(rows: list[list[int]]) -> torch.Tensor:
    """Pads rows of tokens at their ends, int64 ``[B, n]``; causal attention never reads the padding."""
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])
