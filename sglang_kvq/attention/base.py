"""Interface of attention backends: they store keys and values, quantize them, and attend over segments.

All keys, values and queries here are in the rotated basis: K' = K R_k - m, Q' = Q R_q, V' = V R_v, with R_q R_k^T = I.
The mean m shifts all scores of a query equally, so it does not change attention. The same query can therefore read
every segment. ``rotate`` converts to the rotated basis and ``rotate_output`` converts back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_kvq.attention.drafts import DraftBatch
from sglang_kvq.attention.scores.scoring import ScoringPart
from sglang_kvq.cache.pool import PagePool

if TYPE_CHECKING:  # it imports Triton
    from sglang_kvq.attention.planning.graph_tables import GraphTables


@dataclass(frozen=True)
class LayerRotations:
    """Rotations of every local layer and KV head, ready to use.

    Attributes:
        k: float32 ``[layers, kv_heads, head_dim, head_dim]`` or None for the identity; keys times
            ``k`` are in the rotated basis.
        v: the same for values; None also if the rotation of values is folded into the weights.
        q: the same for the queries of each KV head; None if ``k`` is orthogonal and therefore rotates queries too.
        o: outputs times the transpose of ``o`` leave the rotated basis; None if ``v`` is orthogonal and used instead.
        k_mean: float32 ``[layers, kv_heads, head_dim]``, subtracted from rotated keys before they are rounded, or None.
    """

    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    q: torch.Tensor | None = None
    o: torch.Tensor | None = None
    k_mean: torch.Tensor | None = None

    @property
    def queries(self) -> torch.Tensor | None:
        """The matrices that multiply queries: ``q``, or ``k`` if ``q`` is None."""
        return self.k if self.q is None else self.q

    @property
    def outputs(self) -> torch.Tensor | None:
        """The matrices whose transposes multiply outputs: ``o``, or ``v`` if ``o`` is None."""
        return self.v if self.o is None else self.o

    def to(self, device: torch.device | str) -> LayerRotations:
        """Returns a copy with all matrices on a device."""
        parts = (self.k, self.v, self.q, self.o, self.k_mean)
        return LayerRotations(*(None if r is None else r.to(device) for r in parts))


@dataclass(frozen=True)
class ExtendBatch:
    """New tokens of several requests, concatenated; each continues its row's stored prefix.

    Attributes:
        rows: int64 ``[batch]`` on the device, rows of ``req_to_token``.
        prefix_lens, new_lens: per request, on the host: tokens stored before this batch, and
            tokens in it.
        loc: int64 ``[sum(new_lens)]``, SGLang's location of each new token, without padding.
        direct_tokens: int64 ``[m]``: the index of the first token of each page that is quantized directly from the
            activations. Such a page is whole, and its tokens are consecutive.
        bounds: int32 ``[n + 1]`` on the device: bounds of the requests' tokens, if a CUDA graph is captured that runs
            other batches of new prompts later. No request then has a stored prefix, and ``new_lens`` has only the
            total. Otherwise None.
        tables: the plan, if a CUDA graph is captured that runs other batches over stored prefixes later. Lengths then
            mean nothing, and ``rows`` are those of the tables. Otherwise None.
    """

    rows: torch.Tensor
    prefix_lens: list[int]
    new_lens: list[int]
    loc: torch.Tensor
    direct_tokens: torch.Tensor
    bounds: torch.Tensor | None = None
    tables: GraphTables | None = None


class AttentionOps(ABC):
    """Operations on one worker's ``PagePool``. Layer arguments are local indices from 0.

    Layers may differ in record layout and clipping. Operations on one layer use ``pool.formats[layer]`` and
    ``pool.records[layer]``. Operations on all layers loop over the stores (``pool.stores``). The layers of a store
    share a layout, which a kernel may compile in. Their clip ranks are data (``pool.ranks[layer]``), because a
    calibration may clip every layer differently. Every operation must write the same codes, bit for bit, as
    ``PageFormat.quantize_pages``.
    """

    #: True if a CUDA graph can contain whole prefills (``ExtendBatch.bounds`` and ``tables``).
    in_graphs = False

    def __init__(self, pool: PagePool, rotations: LayerRotations) -> None:
        self.pool = pool
        self.rotations = rotations

    def graph_tables(self, tokens: int, requests: int) -> list[GraphTables]:
        """Returns tables for CUDA graphs over stored prefixes, one for each way to attend, in order of preference.

        Args:
            tokens: new tokens of a batch, padding included.
            requests: most requests of a batch.
        """
        return []

    def suits_graph(self, batch: ExtendBatch, tables: GraphTables) -> bool:
        """Returns whether a CUDA graph with such tables is expected to run a batch faster than layer by layer."""
        return False

    def in_capture(self) -> AbstractContextManager[None]:
        """Prepares for a CUDA graph that is captured meanwhile: it gets buffers of its own, which its layers share."""
        return nullcontext()

    def beside(self, work: Callable[[], None], *reads: torch.Tensor) -> None:
        """Does work of a layer that no layer waits for. In a CUDA graph it runs beside what follows until ``join``.

        Args:
            reads: tensors that the work reads.
        """
        work()

    def join(self) -> None:  # noqa: B027
        """Waits for the work of ``beside``. A layer calls it before its own, and a graph at its end."""

    @abstractmethod
    def rotate(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Transforms q ``[T, q_heads, D]``, k and v ``[T, kv_heads, D]``, all BF16, to the rotated basis.

        Rows are rotated in float32 (TF32 on a GPU) and rounded to BF16 once.
        """

    @abstractmethod
    def rotate_output(self, layer: int, o: torch.Tensor) -> torch.Tensor:
        """Transforms o, BF16 ``[T, q_heads, D]``, out of the rotated basis: ``o R_o^T`` (``rotations.outputs``).

        Returns ``o`` itself if V is not rotated.
        """

    @abstractmethod
    def store_tokens(self, layer: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes rows k, v ``[T, kv_heads, D]`` to the BF16 copies of the pages that contain ``loc``, int64 ``[T]``.

        Tokens of a page without a BF16 copy go to slot 0; only the padding of page 0 should need this.
        Safe inside a CUDA graph.
        """

    def rotate_and_store(
        self, layer: int, loc: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Runs ``rotate``, then ``store_tokens`` on the rotated k and v; returns the rotated q."""
        q, k, v = self.rotate(layer, q, k, v)
        self.store_tokens(layer, loc, k, v)
        return q

    @abstractmethod
    def rotate_and_keep(
        self, layer: int, loc: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Runs ``rotate``, then ``store_tokens`` on the tokens whose pages have BF16 copies; returns rotated q, k, v.

        In a prefill, the stored tokens are those that are not quantized directly.
        """

    @abstractmethod
    def keep_tokens(
        self, layer: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Does what ``rotate_and_keep`` does, without queries: for a prefill that reads nothing stored."""

    @abstractmethod
    def quantize_tokens(
        self, layer: int, first: torch.Tensor, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Quantizes whole pages of one layer from activations.

        Rows ``first[i] .. first[i] + PAGE_SIZE`` of k, v ``[T, kv_heads, D]`` become the records of page ``pages[i]``.
        Both index tensors are int64 ``[n]``; ``n`` may be 0.
        """

    @abstractmethod
    def quantize_slots(self, slots: torch.Tensor, pages: torch.Tensor, count: torch.Tensor) -> None:
        """Quantizes BF16 pages into records, in all layers of all stores.

        For ``i < count``, the BF16 page in slot ``slots[i]`` becomes the records of page ``pages[i]``. ``slots`` and
        ``pages`` are int64 ``[n]``; ``count`` is int64 ``[1]`` on the device. On a GPU, the host does not read it.
        """

    @abstractmethod
    def restore_pages(self, pages: torch.Tensor) -> None:
        """Rebuilds the BF16 copies of ``pages``, in all layers.

        First tokens come from ``pool.sink_cache``. The values of other tokens are those that attention reads from
        records, rounded to BF16.

        pages: int ``[n]`` on the device, distinct whole pages with a record and a kept first token. 0, and a page
        without a BF16 copy, are skipped.
        """

    def reserve(self, batch: int) -> None:  # noqa: B027
        """Allocates buffers for decode batches of ``batch`` rows, padding included. Must not run in a graph capture."""

    def reserve_drafts(self, batch: int, count: int) -> None:  # noqa: B027
        """Allocates buffers for batches of ``batch`` rows with ``count`` drafts each; see ``reserve``."""

    def plan_attention(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:  # noqa: B027
        """Divides the batch among programs, once per decode step before its first layer. Safe inside a CUDA graph.

        rows, seq_lens: int ``[B]``, the arguments that ``decode`` gets in every layer of this step.
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
        """Attends with one query token per request to all its stored tokens, the new one included.

        q BF16 ``[B, q_heads, D]``, rows and seq_lens int ``[B]``; returns BF16 ``[B, q_heads, D]``,
        softmax(scale q k) v. Segments come from ``pool.row_sink_end`` and ``row_history_end``. Safe
        inside a CUDA graph: every length is read on the device, and padding rows read page 0.

        sinks: this worker's learned sinks of the layer, float ``[q_heads]``, or None. A sink is the unscaled score of
        one more key, which every query of its head sees and whose value is zero. With lse the log-sum-exp of all other
        scores, the result is multiplied by sigmoid(lse - sink).
        """

    def plan_drafts(self, drafts: DraftBatch) -> None:  # noqa: B027
        """Divides the batch for ``verify``, like ``plan_attention``. Safe inside a CUDA graph."""

    @abstractmethod
    def verify(
        self,
        layer: int,
        q: torch.Tensor,
        drafts: DraftBatch,
        scale: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends with each draft to everything stored before its request's drafts, and to the drafts it sees.

        q BF16 ``[batch * count, q_heads, D]``, request by request; keys and values of all drafts are stored in
        BF16 pages. Returns BF16 of the same shape. Safe inside a CUDA graph. With one draft the result equals
        ``decode``'s. sinks: see ``decode``.
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
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends causally with new tokens to the stored prefix and to themselves.

        q BF16 ``[T, q_heads, D]``, k and v BF16 ``[T, kv_heads, D]``: the batch's activations, which
        need not be stored yet. In a batch without a stored prefix all may be unrotated, and then the result is; so
        nothing that is stored may be read there. Returns BF16 ``[T, q_heads, D]``, in ``out`` if that is given;
        ``out`` must be contiguous. sinks: see ``decode``.
        """

    @abstractmethod
    def score_keys(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, batch: ExtendBatch, part: ScoringPart, scale: float
    ) -> None:
        """Scores a request's past keys (``key_scores.key_scores``); keeps the maximum in ``part.values[layer]``.

        q, k: activations of the whole batch, see ``extend``, before its tokens are stored. Past keys are read as
        ``extend`` reads them: new ones from ``k``, stored ones from BF16 pages, or from records and rounded to BF16.
        """
