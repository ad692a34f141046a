"""Speculative decoding between two servers: provides the input of a decode server's first round of drafts.

A draft model's cache is SGLang's own, unquantized. SGLang sends its pages after ours, page by page. For EAGLE SGLang
also sends the first round's input together with the first token. For two other algorithms SGLang has the fields, but
neither fills nor reads them. So the hooks here provide the input:

- *STANDALONE* needs the draft model's first guess, which the prefill server has made.
- *NGRAM* needs to know that no accepted token is still to come.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_kvq.sglang.types import Original

#: Algorithms with which a decode server may have its own prefix cache; SGLang refuses that with all others.
WITH_PREFIX_CACHE = ("EAGLE", "EAGLE3", "NEXTN")


def layout_of(pool: Any, kv_args: Any) -> str:
    """Returns a name for the layout of a draft model's pages and of the data sent with the first token.

    SGLang compares neither between servers: it sends as many bytes of each as the prefill server has.
    """
    from sglang.srt.runtime_context import get_spec

    shape, dtype = f"{pool.layer_num}x{pool.head_num}x{pool.head_dim}", str(pool.dtype).removeprefix("torch.")
    return f"{get_spec().speculative_algorithm}-{shape}-{dtype}-first:{sum(kv_args.aux_item_lens)}"


# -- prefill ----------------------------------------------------------------------------------------


def before_prefill_result(self: Any, batch: Any, result: Any) -> None:
    """BEFORE ``process_batch_result_disagg_prefill``: keeps the first guess of STANDALONE's draft model."""
    guess = result.next_draft_input
    if guess is None or not self.spec_algorithm.is_standalone():
        return
    for place, req in enumerate(batch.reqs):
        req.output_topk_p, req.output_topk_index = guess.topk_p[place], guess.topk_index[place]


def around_metadata(original: Original, self: Any, req: Any) -> None:
    """AROUND ``MetadataBuffers.set_buf``: adds hidden states to a guess, without which SGLang would not send it.

    STANDALONE's draft model reads no hidden states, so they are zeros.
    """
    if req.hidden_states_tensor is None and req.output_topk_p is not None:
        req.hidden_states_tensor = torch.zeros_like(self.output_hidden_states[0])
    original(self, req)


# -- decode -----------------------------------------------------------------------------------------


def around_first_round(original: Original, self: Any, batch: Any, last_tokens: torch.Tensor, future_map: Any) -> Any:
    """AROUND ``SpeculativeAlgorithm.build_disagg_draft_input``: builds the first input of STANDALONE and NGRAM."""
    if self.is_standalone():
        return _first_guess(batch, last_tokens, future_map)
    if self.is_ngram():
        return _nothing_accepted(batch, future_map)
    return original(self, batch, last_tokens, future_map)


def _first_guess(batch: Any, last_tokens: torch.Tensor, future_map: Any) -> Any:
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.eagle_disaggregation import build_eagle_disagg_draft_input

    guess = build_eagle_disagg_draft_input(batch, last_tokens, future_map)
    guess.hidden_states, guess.capture_hidden_mode = None, CaptureHiddenMode.NULL
    return guess


def _nothing_accepted(batch: Any, future_map: Any) -> Any:
    """Returns a verify input without accepted tokens.

    The request has its first token already, but SGLang would look for that token among the accepted ones.
    """
    from sglang.srt.managers.overlap_utils import RelayPayload
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

    count, requests = int(get_spec().speculative_num_draft_tokens), len(batch.reqs)
    none = NgramVerifyInput(
        draft_token_num=count,
        new_seq_lens=batch.seq_lens,
        accept_tokens=torch.zeros(requests * count, dtype=torch.int32, device=batch.device),
        accept_lens=torch.zeros(requests, dtype=torch.int32, device=batch.device),
    )
    if batch.enable_overlap:
        none.future_indices = batch.req_pool_indices
        future_map.publish(none.future_indices, batch.seq_lens)
        future_map.stash(none.future_indices, RelayPayload.from_ngram(none))
    return none
