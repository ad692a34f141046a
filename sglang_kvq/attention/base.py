"""What a backend must do: store, quantize, and attend over segments. Data only crosses as tensors.

All keys, values and queries here are in the rotated basis (K' = K R_k - m, Q' = Q R_q, V' = V R_v with R_q R_k^T = I
and a mean m that changes no attention), so one query serves every segment; ``rotate`` and ``rotate_output`` go in and
out of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from sglang_kvq.attention.drafts import DraftBatch
from sglang_kvq.attention.scoring import ScoringPart
from sglang_kvq.cache.pool import PagePool


@dataclass(frozen=True)
class LayerRotations:
    """Rotations of every local layer and KV head, ready to use.

    Attributes:
        k: float32 ``[layers, kv_heads, head_dim, head_dim]`` or None for the identity; rows times
            ``k`` go into the rotated basis.
        v: likewise; None also when it is folded into the weights.
        q: likewise for the queries that read the KV head; None where ``k`` is orthogonal and serves them too.
        o: outputs times its transpose leave the rotated basis; None where ``v`` is orthogonal and serves them too.
        k_mean: float32 ``[layers, kv_heads, head_dim]``, taken off rotated keys before they are rounded; None: nothing.
    """

    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    q: torch.Tensor | None = None
    o: torch.Tensor | None = None
    k_mean: torch.Tensor | None = None

    @property
    def queries(self) -> torch.Tensor | None:
        """What queries are multiplied by: ``q``, or ``k``."""
        return self.k if self.q is None else self.q

    @property
    def outputs(self) -> torch.Tensor | None:
        """What outputs are multiplied by the transpose of: ``o``, or ``v``."""
        return self.v if self.o is None else self.o

    def to(self, device: torch.device | str) -> LayerRotations:
        """All of them on that device."""
        parts = (self.k, self.v, self.q, self.o, self.k_mean)
        return LayerRotations(*(None if r is None else r.to(device) for r in parts))


@dataclass(frozen=True)
class ExtendBatch:
    """New tokens of several requests, concatenated; each continues its row's stored prefix.

    Attributes:
        rows: int64 ``[batch]`` on the device, rows of ``req_to_token``.
        prefix_lens, new_lens: per request, on the host: tokens stored before this batch, and
            tokens in it.
        loc: int64 ``[sum(new_lens)]``, SGLang's location of each new token; padding is left out.
        overlay_tokens: int64 ``[n]`` indices into the new tokens that go to BF16 overlays.
        direct_tokens: int64 ``[m]`` indices of the first token of each page that is quantized
            straight from the activations (whole pages, consecutive tokens).
    """

    rows: torch.Tensor
    prefix_lens: list[int]
    new_lens: list[int]
    loc: torch.Tensor
    overlay_tokens: torch.Tensor
    direct_tokens: torch.Tensor


class AttentionOps(ABC):
    """Operations on one worker's ``PagePool``. Layer arguments are local indices from 0.

    Layers may differ in how their records lie and are clipped. What reads or writes one layer takes
    ``pool.formats[layer]`` and ``pool.records[layer]``. What covers all layers goes store by store
    (``pool.stores``): the layers of a store share a layout, which may be compiled in, while their clip ranks are
    data (``pool.ranks[layer]``), since a calibration may clip every layer differently. Codes must equal those of
    ``PageFormat.quantize_pages`` bit for bit, whichever operation wrote them.
    """

    def __init__(self, pool: PagePool, rotations: LayerRotations) -> None:
        self.pool = pool
        self.rotations = rotations

    @abstractmethod
    def rotate(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Into the rotated basis. q ``[T, q_heads, D]``, k and v ``[T, kv_heads, D]``, BF16 in and out.

        Rows are rotated in float32 (TF32 on a GPU) and rounded to BF16 once.
        """

    @abstractmethod
    def rotate_output(self, layer: int, o: torch.Tensor) -> torch.Tensor:
        """Out of the rotated basis: ``o R_o^T``, of ``rotations.outputs``, for o BF16 ``[T, q_heads, D]``; the identity
        if V is not rotated.
        """

    @abstractmethod
    def store_tokens(self, layer: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write rows k, v ``[T, kv_heads, D]`` to the overlays of the pages that ``loc`` int64 ``[T]`` names.

        A page without an overlay (only page 0's padding should reach here) writes to slot 0.
        Safe inside a CUDA graph.
        """

    def rotate_and_store(
        self, layer: int, loc: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """``rotate``, then ``store_tokens`` of the rotated k and v; returns the rotated q."""
        q, k, v = self.rotate(layer, q, k, v)
        self.store_tokens(layer, loc, k, v)
        return q

    @abstractmethod
    def quantize_tokens(
        self, layer: int, first: torch.Tensor, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Quantize whole pages from activations, one layer.

        Rows ``first[i] .. first[i] + PAGE_SIZE`` of k, v ``[T, kv_heads, D]`` become page ``pages[i]``'s
        record; both index tensors are int64 ``[n]``, ``n`` may be 0.
        """

    @abstractmethod
    def quantize_slots(self, slots: torch.Tensor, pages: torch.Tensor, count: torch.Tensor) -> None:
        """Quantize overlays into records, all layers of all stores.

        For ``i < count``, overlay ``slots[i]`` becomes page ``pages[i]``'s record. ``slots`` and ``pages``
        are int64 ``[n]``; ``count`` is int64 ``[1]`` on the device and is not read on the host of a GPU.
        """

    @abstractmethod
    def restore_pages(self, pages: torch.Tensor) -> None:
        """Fill the overlays of pages from their records, all layers, and their first tokens from ``pool.firsts``.

        pages: int ``[n]`` on the device, whole pages that have a record and whose first token is kept there, none
        twice; 0, and a page without an overlay, stands for none. Values are those that attention reads of records,
        rounded to BF16.
        """

    def reserve(self, batch: int) -> None:  # noqa: B027
        """Make room for decode batches of that many rows, padding counted. Not inside a CUDA graph's capture."""

    def reserve_drafts(self, batch: int, count: int) -> None:  # noqa: B027
        """``reserve`` for batches of that many rows with ``count`` drafts each."""

    def plan_attention(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:  # noqa: B027
        """Once per decode step, before its first layer: divide the batch. Safe inside a CUDA graph.

        rows, seq_lens: int ``[B]``, as ``decode`` gets them for every layer of this step.
        """

    @abstractmethod
    def decode(
        self,
        layer: int,
        q: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One query token per request over everything stored, its own token included.

        q BF16 ``[B, q_heads, D]``, rows and seq_lens int ``[B]``; returns BF16 ``[B, q_heads, D]``,
        softmax(scale q k) v. Segments come from ``pool.row_sink_end`` and ``row_history_end``. Safe
        inside a CUDA graph: every length is read on the device, rows of padding read page 0.

        sinks: the layer's learned sinks, float ``[q_heads]``, this worker's; None where it has none. Each is the score
        (not scaled) of one more key, which every query of its head sees and whose value is zero: with lse the
        log-sum-exp of the scores of all others, the result is multiplied by sigmoid(lse - sink).
        """

    def plan_drafts(self, drafts: DraftBatch) -> None:  # noqa: B027
        """``plan_attention`` for ``verify``. Safe inside a CUDA graph."""

    @abstractmethod
    def verify(
        self,
        layer: int,
        q: torch.Tensor,
        drafts: DraftBatch,
        scale: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Each draft over everything its request has stored before the drafts, and over the drafts that it sees.

        q BF16 ``[batch * count, q_heads, D]``, request by request; keys and values of all drafts are stored, in
        overlays. Returns BF16 like q. Safe inside a CUDA graph, as ``decode``, which it is for one draft. sinks: as of
        ``decode``.
        """

    @abstractmethod
    def extend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: ExtendBatch,
        scale: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of new tokens over the stored prefix and themselves.

        q BF16 ``[T, q_heads, D]``, k and v BF16 ``[T, kv_heads, D]``: the batch's activations, which
        need not be stored yet. Returns BF16 ``[T, q_heads, D]``. sinks: as of ``decode``.
        """

    @abstractmethod
    def score_keys(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, batch: ExtendBatch, part: ScoringPart, scale: float
    ) -> None:
        """Raise ``part.values[layer]`` to ``key_scores.key_scores`` of a request's past keys, where that is higher.

        q, k: as of ``extend``, of the whole batch, before its tokens are stored. Past keys are read as ``extend`` reads
        them: the new ones as they are, the stored ones from overlays and, rounded to BF16, from records.
        """
