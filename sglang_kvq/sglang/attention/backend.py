"""Attention backend for SGLang: plans the tiers before a batch, then rotates, stores and attends in each layer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_kvq.attention.base import AttentionOps, ExtendBatch
from sglang_kvq.attention.drafts import DraftBatch
from sglang_kvq.attention.planning.new_tokens import direct_tokens
from sglang_kvq.attention.scores.scoring import ScoringPart, plan_scoring
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.cache.transfer import to_device
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.sglang.attention import scoring
from sglang_kvq.sglang.attention.drafts import SeenBuffers, draft_count
from sglang_kvq.sglang.attention.error_watch import ErrorWatch
from sglang_kvq.sglang.attention.layers import learned_sinks, own_keys_and_values
from sglang_kvq.sglang.types import AttentionLayer, ForwardBatch, Original, ReqToTokenPool


@dataclass(frozen=True)
class Decoding:
    """The decoding requests of a mixed batch, which come last in it, with one token each.

    Attributes:
        rows, seq_lens: int64 ``[n]``, as ``AttentionOps.decode`` takes them.
        loc: int64 ``[n]``, SGLang's location of each token.
        tokens: slice of the batch's tokens that belongs to these requests.
    """

    rows: torch.Tensor
    seq_lens: torch.Tensor
    loc: torch.Tensor
    tokens: slice


class KVQuantBackend(AttentionBackend):
    """One worker's attention over the two-tier cache."""

    #: SGLang reads it: with speculation its scheduler need not wait until the host knows the lengths.
    needs_cpu_seq_lens = False
    #: SGLang reads it as upper bound of lengths that the host does not know.
    max_context_len: int
    #: SGLang's pools of this worker, which models read from the backend (``model_executor.forward_context``).
    token_to_kv_pool: Any = None
    req_to_token_pool: ReqToTokenPool = None

    #: State of the current prefill; set before its first layer, by ``init_forward_metadata_out_graph``.
    batch: ExtendBatch
    fresh: bool  # no stored prefix is read, and no query scores keys
    direct_pages: torch.Tensor
    scored: list[ScoringPart]
    decoding: Decoding | None
    #: State of the drafts under verification; set in their first layer.
    drafts: DraftBatch

    def __init__(
        self,
        ops: AttentionOps,
        tiers: TierManager,
        layer_ids: Sequence[int],
        branching: bool = False,
        mixed: bool = False,
    ) -> None:
        """
        Args:
            layer_ids: the model's ids of the pool's layers, in the pool's order.
            branching: drafts come with masks, see ``drafts.BRANCHING``.
            mixed: prefill batches may end with decoding requests (``--enable-mixed-chunk``).
        """
        super().__init__()
        self.ops, self.tiers, self.watch, self.mixed = ops, tiers, ErrorWatch(tiers), mixed
        self.index_of = {layer_id: index for index, layer_id in enumerate(layer_ids)}
        rows, self.max_context_len = tiers.pool.req_to_token.shape
        self.seen = SeenBuffers(2 * rows, branching, tiers.pool.device)  # padded batches may exceed the table

    # -- once per batch -------------------------------------------------------------------------

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        if in_capture or forward_batch.forward_mode.is_idle():
            return
        self.watch.look()
        if forward_batch.forward_mode.is_decode():
            lens = forward_batch.seq_lens_cpu
            if not self.tiers.decode_needs_plan(lens):
                return
            self.tiers.plan_decode(
                forward_batch.req_pool_indices.long(), forward_batch.seq_lens.long(), int(lens.max())
            )
        elif forward_batch.forward_mode.is_target_verify():
            self._plan_drafts(forward_batch)
        else:
            self._plan_extend(forward_batch)
        self.watch.ask()

    def _plan_drafts(self, fb: ForwardBatch) -> None:
        """Plans the verification of drafts.

        It uses the committed lengths, because only the device knows how many drafts of the last batch were accepted.
        """
        count, lens = draft_count(fb), fb.seq_lens_cpu
        longest = self.max_context_len if lens is None else int(lens.max()) + count
        self.tiers.plan_drafts(fb.req_pool_indices.long(), fb.seq_lens.long() + count, longest, count)
        self.seen.fill(fb)

    def _plan_extend(self, fb: ForwardBatch) -> None:
        prefix, new = list(map(int, fb.extend_prefix_lens_cpu)), list(map(int, fb.extend_seq_lens_cpu))
        scored = scoring.wanted(fb)
        prefills = len(new)
        if self.mixed:  # a request whose prompt's queries score must run as prefill
            prefills = max(prefills - decoding_requests(prefix, new), 1 + max(scored, default=-1))
        longest = max((p + (n == 1) for p, n in zip(prefix, new)), default=0)
        first, tokens = (prefix[:prefills], new[:prefills]), sum(new)
        pages = direct_tokens(*first, self.tiers.sink_pages, self.tiers.recent_pages)
        lens = np.array([prefix, new], np.int64)
        lens[1] += lens[0]
        prefix_lens, seq_lens, direct = to_device([*lens, pages], fb.out_cache_loc.device)
        rows = fb.req_pool_indices.long()
        loc = fb.out_cache_loc[:tokens].long()  # without padding tokens of data-parallel attention or all-to-all MoE
        own = loc[: sum(first[1])]
        self.batch = ExtendBatch(rows[:prefills], *first, own, direct)
        self.scored = plan_scoring(*first, scored)
        self.fresh = not (any(first[0]) or self.scored)
        self.decoding = None
        if prefills < len(new):
            here = slice(len(own), tokens)
            # Copies, because kernels are compiled for tensors that begin at multiples of 16 bytes.
            own_rows, own_lens = rows[prefills:].clone(), seq_lens[prefills:].clone()
            self.decoding = Decoding(own_rows, own_lens, loc[here].clone(), here)
        ids = own[direct] // PAGE_SIZE if pages.size else direct  # short prompts have none
        self.direct_pages = self.tiers.plan_extend(rows, prefix_lens, seq_lens, longest, ids)

    def plan_graph(self, batch: ExtendBatch, pages: torch.Tensor) -> None:
        """Prepares the layers of a CUDA graph that later runs other batches.

        Args:
            batch: has ``bounds`` or ``tables``.
            pages: int64 ``[n]``, the pages that ``batch.direct_tokens`` become.
        """
        self.batch, self.fresh, self.direct_pages = batch, batch.tables is None, pages
        self.scored, self.decoding = [], None

    def wait_for_pages(self, layer: int) -> None:
        """Makes the device wait until the pages of a layer, and of those before it, have arrived from the host."""
        if (loaded := getattr(self.token_to_kv_pool, "layer_transfer_counter", None)) is not None:
            loaded.wait_until(layer)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.ops.reserve(max_bs)  # graphs pad batches to more rows than requests may run
        if (count := max_num_tokens // max_bs) > 1:
            self.ops.reserve_drafts(max_bs, count)
            self.seen.of(max_bs, count)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        return 1  # SGLang also pads batches with it that run without a graph

    # -- once per layer ---------------------------------------------------------------------------

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attends with one new token per request.

        On a GPU it launches 3 kernels per layer, or 4 if V's rotation is not folded into the weights, and one or two
        more per step:

        0. ``plan_attention``: in the first layer, divides lengths into items of work, once for each way to launch 2.

        1. ``rotate_and_store``: rotates q, k and v, and writes k and v to their BF16 copies.
        2. ``decode``: computes the partial result of every item.
        3. ``decode``: merges each request's items.
        4. ``rotate_output``: rotates the result back, if the weights do not do so.
        """
        sinks = learned_sinks(layer, kwargs)
        k, v = own_keys_and_values(layer, k, v, save_kv_cache, kwargs)
        q, k, v, index = self._heads(q, k, v, layer)
        if index == 0:
            self.ops.plan_attention(forward_batch.req_pool_indices, forward_batch.seq_lens)
        q = self.ops.rotate_and_store(index, forward_batch.out_cache_loc, q, k, v)
        o = self.ops.decode(index, q, forward_batch.req_pool_indices, forward_batch.seq_lens, layer.scaling, sinks)
        return self.ops.rotate_output(index, o).flatten(1)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        sinks = learned_sinks(layer, kwargs)
        k, v = own_keys_and_values(layer, k, v, save_kv_cache, kwargs)
        q, k, v, index = self._heads(q, k, v, layer)
        if forward_batch.forward_mode.is_target_verify():
            return self._verify(index, q, k, v, layer.scaling, forward_batch, sinks)
        tokens = self.batch.loc.shape[0]  # ``len`` of a tensor takes longer
        if tokens == q.shape[0] > 0:
            out = self._destination(q, forward_batch)
            return self._prefill(index, q, k, v, layer.scaling, sinks, out).flatten(1)
        o = q.new_zeros(q.shape)  # SGLang's padding tokens attend to nothing
        if tokens > 0:
            o[:tokens] = self._prefill(index, q[:tokens], k[:tokens], v[:tokens], layer.scaling, sinks)
        if self.decoding is not None:
            here = self.decoding.tokens
            decoded = self._decode(index, q[here], k[here], v[here], layer.scaling, self.decoding, sinks)
            o[here] = self.ops.rotate_output(index, decoded)
        return o.flatten(1)

    def _prefill(
        self,
        index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends with the tokens of ``batch``, and stores them; returns the result, BF16 like q, in ``out`` if given.

        Without a stored prefix nothing in the rotated basis is read, so attention takes what the model gives. The
        rounding of a prompt therefore depends on whether another request of its batch reads stored tokens.
        """
        batch, ops = self.batch, self.ops

        def quantize(k: torch.Tensor, v: torch.Tensor) -> None:
            ops.quantize_tokens(index, batch.direct_tokens, self.direct_pages, k, v)

        ops.join()  # the layer before may still store its tokens
        if self.fresh:
            ops.beside(lambda: quantize(*ops.keep_tokens(index, batch.loc, k, v)), k, v)
            return ops.extend(index, q, k, v, batch, scale, sinks, out)
        q, k, v = ops.rotate_and_keep(index, batch.loc, q, k, v)
        ops.beside(lambda: quantize(k, v), k, v)
        o = ops.extend(index, q, k, v, batch, scale, sinks, out)
        for part in self.scored:
            ops.score_keys(index, q, k, batch, part, scale)
        return ops.rotate_output(index, o)

    def _destination(self, q: torch.Tensor, fb: ForwardBatch) -> torch.Tensor | None:
        """Returns the buffer in which a prefill's CUDA graph expects this layer's result; None if there is none.

        SGLang copies a result that is not in this buffer.
        """
        out: torch.Tensor | None = getattr(fb, "_attn_output", None)
        if out is None or not (self.fresh or self.ops.rotations.outputs is None):
            return None
        return out.view(q.shape)

    def _decode(
        self,
        index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        decoding: Decoding,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attends like ``forward_decode``, without dequantizing history; returns BF16 like q, in the rotated basis."""
        if index == 0:
            self.ops.plan_attention(decoding.rows, decoding.seq_lens)
        q = self.ops.rotate_and_store(index, decoding.loc, q, k, v)
        return self.ops.decode(index, q, decoding.rows, decoding.seq_lens, scale, sinks)

    def _verify(
        self,
        index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        fb: ForwardBatch,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attends like ``forward_decode``, but with several drafts per request; also runs in a CUDA graph."""
        if index == 0:
            count = draft_count(fb)
            seen = self.seen.of(len(fb.req_pool_indices), count)
            self.drafts = DraftBatch(fb.req_pool_indices, fb.seq_lens + count, seen)
            self.ops.plan_drafts(self.drafts)
        drafts = self.drafts
        tokens = len(drafts.rows) * drafts.count  # SGLang's padding tokens attend to nothing
        loc = fb.out_cache_loc[:tokens]
        x = self.ops.rotate_and_store(index, loc, q[:tokens], k[:tokens], v[:tokens])
        o = self.ops.rotate_output(index, self.ops.verify(index, x, drafts, scale, sinks)).flatten(1)
        if tokens == len(q):
            return o
        return torch.cat([o, o.new_zeros(len(q) - tokens, o.shape[1])])

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Does nothing: no plan runs before drafts are known (``SGLANG_ENABLE_OVERLAP_PLAN_STREAM`` is refused)."""

    def _heads(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """Returns q, k and v as ``[T, heads, D]``, views where possible, and the layer's index in the pool.

        Makes the device wait until this layer's pages have arrived from the host.
        """
        if q.dim() == 2:
            q = q.reshape(q.shape[0], -1, layer.head_dim)
        if k.dim() == 2:
            k = k.reshape(k.shape[0], -1, layer.head_dim)
        if v.dim() == 2:
            v = v.reshape(v.shape[0], -1, layer.head_dim)
        index = self.index_of[layer.layer_id]
        self.wait_for_pages(index)
        return q, k, v, index


def decoding_requests(prefix_lens: Sequence[int], new_lens: Sequence[int]) -> int:
    """Returns how many of a batch's last requests may decode: each has one new token after stored ones.

    In a mixed batch SGLang's decoding requests come last. A prefill of one token just before them counts too: its other
    tokens are already stored, and both ways compute the same result.
    """
    count = 0
    for prefix, new in zip(reversed(prefix_lens), reversed(new_lens)):
        if new != 1 or prefix == 0:
            break
        count += 1
    return count


def around_capture_plan(original: Original, self: Any, forward_batch: ForwardBatch, shape_key: Any) -> None:
    """AROUND ``PrefillCudaGraphRunner._init_forward_metadata_for_capture``: turns its dummy requests into padding.

    Dummy requests have rows 0, 1, 2, … A plan would give a length and a window to all rows but 0.
    """
    if self.model_runner.is_draft_worker:  # a draft model's cache is SGLang's
        original(self, forward_batch, shape_key)
        return
    padding = copy.copy(forward_batch)
    padding.req_pool_indices = torch.zeros_like(forward_batch.req_pool_indices)
    original(self, padding, shape_key)
