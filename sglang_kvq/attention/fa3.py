"""Adapter from FlashAttention 3 (SGLang's ``sgl_kernel``) to the part of FlashInfer's interface that ``ragged`` uses.

SGLang uses FlashAttention 3 on Hopper GPUs. The kernels come compiled with SGLang, and they need no plan on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

#: The major compute capability for which SGLang chooses FlashAttention 3.
HOPPER = 9
#: The head_dims that both the cache and FlashAttention 3 support.
HEAD_DIMS = (64, 96, 128, 256)
_LN2 = math.log(2)


class FlashAttention3(NamedTuple):
    """FlashAttention 3 in the form that ``RaggedPrefill`` expects of the ``flashinfer`` module.

    Attributes:
        attend: ``sgl_kernel.flash_attn.flash_attn_varlen_func``.
        merge: ``sgl_kernel.merge_state_v2``.
    """

    attend: Callable[..., Any]
    merge: Callable[..., Any]

    def BatchPrefillWithRaggedKVCacheWrapper(self, floats: torch.Tensor, layout: str, backend: str) -> Wrapper:
        """Returns an unplanned wrapper; the workspace serves only to find the device, and ``backend`` is ignored."""
        return Wrapper(self.attend, floats.device)

    def merge_state_in_place(
        self, out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
    ) -> None:
        """Merges attention over further keys into ``out`` and ``lse``.

        Args:
            out, part: BF16 ``[T, q_heads, D]``; lse, part_lse: float32 ``[T, q_heads]``, base 2, contiguous.
        """
        # Merge into a second tensor: programs of the same head read the log-sum-exp that one of them writes.
        merged = torch.empty_like(lse)
        self.merge(out, lse * _LN2, part, part_lse * _LN2, out, merged)
        torch.div(merged, _LN2, out=lse)


class Wrapper:
    """One planned call of attention over ragged keys; causal attention aligns the last query with the last key."""

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
        """Stores the call's settings and copies the bounds to the device.

        Args:
            q_bounds, kv_bounds: int32 ``[requests + 1]`` on the host, each request's first query or key, and the total.
        """
        self._how: dict[str, Any] = {"softmax_scale": sm_scale, "causal": causal}
        for side, bounds in (("q", q_bounds), ("k", kv_bounds)):
            self._how[f"cu_seqlens_{side}"] = bounds.to(self._device, non_blocking=True)
            self._how[f"max_seqlen_{side}"] = int(bounds.diff().max())

    def plan_graph(self, bounds: tuple[torch.Tensor, torch.Tensor], longest: tuple[int, int], sm_scale: float) -> None:
        """Stores the settings of a CUDA graph in which new tokens attend to their own request, whatever its length.

        Args:
            bounds: int32 ``[requests + 1]`` on the device, of queries and of keys; every run reads the values that
                they have then.
            longest: most queries and most keys of a request.
        """
        self._how = {"softmax_scale": sm_scale, "causal": True}
        for side, bound, most in zip("qk", bounds, longest):
            self._how[f"cu_seqlens_{side}"], self._how[f"max_seqlen_{side}"] = bound, most

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
            The output, in ``out`` if that is given; with ``return_lse`` also the log-sum-exps, float32
            ``[T, q_heads]``, base 2.
        """
        if not return_lse:
            return self._attend(q, k, v, out=out, **self._how)
        out, lse, *_ = self._attend(q, k, v, out=out, return_softmax_lse=True, **self._how)
        return out, torch.div(lse.T, _LN2).contiguous()  # the library returns [q_heads, T], base e


def load(device: torch.device, head_dim: int) -> tuple[FlashAttention3, str]:
    """Returns FlashAttention 3, and a string with its name and version.

    Raises:
        RuntimeError: not a Hopper GPU, an unsupported head_dim, or no such package; the message says which.
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
