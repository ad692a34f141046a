"""FlashAttention 3 of SGLang's kernel package, under the names of FlashInfer's ragged prefill that ``ragged`` uses.

It is SGLang's own attention on Hopper GPUs. It is installed with SGLang and compiled, and plans nothing on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

#: The compute capability for which SGLang chooses it.
HOPPER = 9
#: The head_dims that the cache serves and it is built for.
HEAD_DIMS = (64, 96, 128, 256)
_LN2 = math.log(2)


class FlashAttention3(NamedTuple):
    """Takes FlashInfer's place in ``RaggedPrefill``.

    Attributes:
        attend: ``sgl_kernel.flash_attn.flash_attn_varlen_func``.
        merge: ``sgl_kernel.merge_state_v2``.
    """

    attend: Callable[..., Any]
    merge: Callable[..., Any]

    def BatchPrefillWithRaggedKVCacheWrapper(self, floats: torch.Tensor, layout: str, backend: str) -> Wrapper:
        """Returns a call's plan; it needs no workspace, and has one backend."""
        return Wrapper(self.attend, floats.device)

    def merge_state_in_place(
        self, out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
    ) -> None:
        """Merges attention over further keys into ``out`` and ``lse``.

        Args:
            out, part: BF16 ``[T, q_heads, D]``; lse, part_lse: float32 ``[T, q_heads]``, base 2, contiguous.
        """
        # Not in place: programs of the same head read the log-sum-exp that one of them writes.
        merged = torch.empty_like(lse)
        self.merge(out, lse * _LN2, part, part_lse * _LN2, out, merged)
        torch.div(merged, _LN2, out=lse)


class Wrapper:
    """A call of attention over ragged keys; causal attention aligns the last tokens of both sides."""

    def __init__(self, attend: Callable[..., Any], device: torch.device) -> None:
        self._attend, self._device = attend, device

    def plan(
        self,
        q_bounds: torch.Tensor,
        kv_bounds: torch.Tensor,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        """Copies bounds to the device.

        Args:
            q_bounds, kv_bounds: int32 ``[requests + 1]`` on the host, each side's first tokens and its end.
        """
        self._how: dict[str, Any] = {"softmax_scale": sm_scale, "causal": causal}
        for side, bounds in (("q", q_bounds), ("k", kv_bounds)):
            self._how[f"cu_seqlens_{side}"] = bounds.to(self._device, non_blocking=True)
            self._how[f"max_seqlen_{side}"] = int(bounds.diff().max())

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Attends with BF16 ``[T, q_heads, D]`` to ``[N, kv_heads, D]``.

        Returns:
            The output, in ``out`` if that is given; with ``return_lse`` also float32 ``[T, q_heads]``, base 2.
        """
        if not return_lse:
            return self._attend(q, k, v, out=out, **self._how)
        out, lse, *_ = self._attend(q, k, v, out=out, return_softmax_lse=True, **self._how)
        return out, torch.div(lse.T, _LN2).contiguous()  # it has heads first, base e


def load(device: torch.device, head_dim: int) -> tuple[FlashAttention3, str]:
    """Returns it with its name and version.

    Raises:
        RuntimeError: this GPU, these heads or this installation do not have it; the message says which.
    """
    if torch.cuda.get_device_capability(device)[0] != HOPPER:
        raise RuntimeError("for Hopper GPUs only")
    if head_dim not in HEAD_DIMS:
        raise RuntimeError(f"no kernels for heads of {head_dim}")
    try:
        import sgl_kernel
        from sgl_kernel.flash_attn import flash_attn_varlen_func
    except ImportError as error:
        raise RuntimeError(f"sgl_kernel has none: {error}") from None
    version = getattr(sgl_kernel, "__version__", "")
    return FlashAttention3(
        flash_attn_varlen_func, sgl_kernel.merge_state_v2
    ), f"FlashAttention 3 of sgl_kernel {version}"
