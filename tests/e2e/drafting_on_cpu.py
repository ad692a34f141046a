"""An SGLang plugin for tests: attention of draft models on SGLang's CPU engine.

SGLang has such attention only for machines with AMX; here its plain backend takes over, for chains of drafts.
"""

from __future__ import annotations

import copy

import torch


def install() -> None:
    torch.cuda.synchronize = lambda *_: None  # some models share their weights with a draft this way
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    DraftBackendFactory.create_decode_backend = lambda self: _steps(self.draft_model_runner, self.speculative_num_steps)
    DraftBackendFactory.create_draft_extend_backend = lambda self: _plain(self.draft_model_runner)


def _plain(runner):
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return TorchNativeAttnBackend(runner)


def _steps(runner, steps: int):
    """Returns what SGLang calls for each draft: one backend per step, which sees the drafts of earlier steps."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class Step(TorchNativeAttnBackend):
        def __init__(self, step: int) -> None:
            super().__init__(runner)
            self.step = step

        def forward_decode(self, q, k, v, layer, forward_batch, *words, **more):
            longer = copy.copy(forward_batch)
            longer.seq_lens = forward_batch.seq_lens + self.step + 1
            return super().forward_decode(q, k, v, layer, longer, *words, **more)

    class Steps:
        def __init__(self) -> None:
            self.attn_backends = [Step(step) for step in range(steps - 1)]

        def init_forward_metadata(self, forward_batch) -> None:
            """Prepares nothing."""

    return Steps()
