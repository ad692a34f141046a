"""Speculative decoding: checks settings, reads a batch of drafts, and prices the draft model's cache."""

from __future__ import annotations

from typing import Any

import torch

from sglang_kvq.attention.drafts import chain, check_count, from_mask
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sglang import compat, runtime
from sglang_kvq.sglang.runtime import config_of
from sglang_kvq.sglang.types import Configurator, ForwardBatch, ModelConfig, ModelRunner, Original, ServerArgs

#: Supported algorithms: they verify the same number of drafts for every request, in a chain or with a mask. NEXTN is an
#: alias of EAGLE.
SERVED = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
#: The algorithm that looks drafts up; they may branch, and its mask says which drafts see which.
BRANCHING = "NGRAM"
#: Flags with which recurrent states follow the drafts as a chain, even if the drafts branch; newer releases have the
#: second flag.
AS_A_CHAIN = ("enable_gdn_replayssm_spec", "enable_linear_replayssm_spec")
#: Values of ``--speculative-draft-kv-cache-dtype`` with their dtypes; None means the target's dtype, BF16.
DRAFT_DTYPES = {
    None: None,
    "auto": None,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def check_speculation(server_args: ServerArgs, model: ModelConfig) -> None:
    """Refuses settings of speculation, as SGLang decided them, and draft models that were not tried.

    Raises:
        KVQuantError: names the setting and the fix.
    """
    algorithm = compat.resolved(server_args, "speculative_algorithm")
    if algorithm is None:
        return
    count = compat.resolved(server_args, "speculative_num_draft_tokens")
    check_count(int(count))
    if getattr(server_args, "enable_streaming_session", False):
        raise KVQuantError(
            "--enable-streaming-session: speculative decoding in sessions that keep their rows was not tried with "
            "--kv-quant. Leave out one of the two."
        )
    chained = next((name for name in AS_A_CHAIN if getattr(server_args, name, False)), None)
    if algorithm == BRANCHING and chained is not None:
        raise KVQuantError(
            f"--{chained.replace('_', '-')}: it verifies a chain of drafts, and those of {BRANCHING} branch. Leave it "
            "out, or take another --speculative-algorithm."
        )
    if algorithm == "STANDALONE":
        _check_draft(draft_model(server_args, model))


def keeps_states(model: ModelConfig) -> bool:
    """Returns True if some layers have a recurrent state instead of a KV cache."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model) is not None


def _check_draft(model: ModelConfig) -> None:
    """Refuses a draft model that keeps more than a KV cache, because rejected drafts cannot be undone in other state.

    Raises:
        KVQuantError: names the model and its other state.
    """
    beside = "sliding windows" if model.is_hybrid_swa else "recurrent states" if keeps_states(model) else None
    if beside is not None:
        raise KVQuantError(
            f"--speculative-draft-model-path {model.model_path}: a draft model that keeps {beside} beside its KV cache "
            "was not tried with --kv-quant. Take one without, or another --speculative-algorithm."
        )


def draft_model(server_args: ServerArgs, model: ModelConfig) -> ModelConfig:
    """Returns the draft model's config, or ``model``, the target's config, if the target's own layers make drafts."""
    path = compat.resolved(server_args, "speculative_draft_model_path")
    if path is None:
        return model
    from sglang.srt.configs.model_config import ModelConfig

    revision = compat.resolved(server_args, "speculative_draft_model_revision")
    return ModelConfig.from_server_args(server_args, model_path=path, model_revision=revision, is_draft_model=True)


def draft_count(forward_batch: ForwardBatch) -> int:
    """Returns the number of drafts of each request in a batch to verify."""
    return int(forward_batch.spec_info.draft_token_num)


class SeenBuffers:
    """Buffers that say which drafts see which, at fixed addresses for CUDA graphs.

    Args:
        rows: maximum number of requests in a batch.
        branching: whether batches have masks; otherwise all drafts are chains.
    """

    def __init__(self, rows: int, branching: bool, device: torch.device) -> None:
        self.rows, self.branching, self.device = rows, branching, device
        self._buffers: dict[int, torch.Tensor] = {}

    def of(self, batch: int, count: int) -> torch.Tensor:
        """Returns ``DraftBatch.seen`` of the last batch passed to ``fill``, int64 ``[batch, count]``; chains at first.

        Raises:
            RuntimeError: ``batch`` exceeds the maximum.
        """
        if batch > self.rows:
            raise RuntimeError(
                f"kv-quant: a batch of {batch} requests to verify, but at most {self.rows} are possible. Please report "
                "this."
            )
        if count not in self._buffers:
            self._buffers[count] = chain(count, self.device).expand(self.rows, -1).contiguous()
        return self._buffers[count][:batch]

    def fill(self, forward_batch: ForwardBatch) -> None:
        """Copies a batch's mask into the buffers. Does not wait for the device."""
        if not self.branching:
            return
        count, lens = draft_count(forward_batch), forward_batch.seq_lens
        # On a CPU SGLang's n-gram masks leave out stored tokens (``ngram_worker.USE_FULL_MASK``).
        full = self.device.type != "cpu"
        mask = among_drafts(forward_batch.spec_info.custom_mask, lens, count, full)
        self.of(len(mask), count).copy_(from_mask(mask))


def among_drafts(mask: torch.Tensor, stored_lens: torch.Tensor, count: int, full: bool) -> torch.Tensor:
    """Returns which drafts see which, bool ``[batch, count, count]``, from SGLang's mask.

    Args:
        mask: bool, flat, request by request and draft by draft: which drafts each draft sees, or, if ``full``, which of
            all tokens, stored ones first. It may cover fewer requests than a padded batch has; for the padding, results
            are missing or meaningless.
        stored_lens: int ``[batch]``, stored tokens of each request.
    """
    if not full:
        return mask[: len(stored_lens) * count**2].view(-1, count, count)
    row = stored_lens.long() + count
    first = torch.cumsum(row * count, 0) - row * count
    i = torch.arange(count, device=mask.device)
    at = first[:, None, None] + i[:, None] * row[:, None, None] + stored_lens.long()[:, None, None] + i
    return mask[at.clamp(max=len(mask) - 1)]


class _DraftConfigurator:
    """SGLang's configurator, with the draft model's config and dtype in place of the target's."""

    def __init__(self, kvc: Configurator, model: Any, dtype: torch.dtype) -> None:
        self.kvc, self.model_config, self.kv_cache_dtype = kvc, model, dtype
        self.is_draft_worker = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kvc, name)


def plain_price(kvc: Configurator, layers: int) -> int:
    """Returns the bytes per token, over all layers, that SGLang counts for a draft model's cache."""
    from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator

    # Its __init__ would price the target too, so it is not called. Newer releases read the flag from this attribute.
    configurator = object.__new__(DefaultPoolConfigurator)
    configurator.kv_cache_dtype_str = "auto"
    return int(configurator._compute_cell_size(kvc, layers))


def draft_page_bytes(kvc: Configurator, price: Original = plain_price) -> int:
    """Returns the bytes per page of the draft model's own cache, in its own dtype; 0 without a draft model."""
    algorithm = kvc.spec_algorithm
    if not (algorithm.is_eagle() or algorithm.is_standalone()):
        return 0
    layers = int(kvc.spec_aux_config.eagle_draft_num_layers or 0)
    if not layers and compat.resolved(kvc.server_args, "speculative_draft_model_path") is None:
        layers = 1  # the checkpoint's own draft layer (NEXTN), which SGLang's budget omits for some models
    if not layers:
        return 0
    args, model = kvc.server_args, draft_model(kvc.server_args, kvc.model_config)
    dtype = DRAFT_DTYPES[compat.resolved(args, "speculative_draft_kv_cache_dtype")] or kvc.kv_cache_dtype
    return int(price(_DraftConfigurator(kvc, model, dtype), layers)) * PAGE_SIZE


def after_sizes(result: None, configurator: Configurator, kvc: Configurator) -> None:
    """AFTER ``DefaultPoolConfigurator.__init__``: corrects the price of a draft layer.

    SGLang prices it like one of the target's layers, in 2 bits.
    """
    state = runtime.current()
    if state is None or config_of(kvc.server_args) is None or kvc.is_draft_worker:
        return
    geometry = state.geometry
    page_bytes = geometry.page_bytes if state.shared is None else geometry.shared_page_bytes
    configurator._cell_size = (page_bytes + geometry.draft_page_bytes) // PAGE_SIZE


def _branches(server_args: ServerArgs) -> bool:
    """Returns True if this server's drafts may branch, which recurrent states must follow.

    SGLang treats n-grams of breadth 1 as a chain. But every suffix of the text that occurred before begins its own
    branch. Drafts of the second branch would be verified, and kept, with states that went through the first branch.
    """
    return config_of(server_args) is not None and compat.resolved(server_args, "speculative_algorithm") == BRANCHING


def after_states(result: None, backend: Any, model_runner: ModelRunner) -> None:
    """AFTER ``MambaAttnBackendBase.__init__``: makes recurrent states follow the tree of drafts that n-grams make."""
    if _branches(model_runner.server_args):
        backend.topk = max(int(backend.topk), 2)


def around_shared_windows(
    original: Original, is_npu: bool, is_cpu: bool, speculative_eagle_topk: int | None, is_kda: bool
) -> bool:
    """AROUND ``conv_window_dedup_enabled``: gives drafts that branch separate convolution windows.

    On a GPU the convolution windows of consecutive drafts in a chain overlap in memory. Windows of two drafts that
    follow the same draft would overwrite each other.
    """
    from sglang.srt.runtime_context import get_server_args

    if _branches(get_server_args()):
        speculative_eagle_topk = max(speculative_eagle_topk or 0, 2)
    shared: bool = original(is_npu, is_cpu, speculative_eagle_topk, is_kda)
    return shared
