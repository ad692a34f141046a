"""An SGLang plugin of the tests: adapters on SGLang's CPU engine. Its ``torch_native`` LoRA backend is plain torch, but
keeps its indices in pinned memory, which torch has beside an accelerator only."""

from __future__ import annotations

import torch


def install() -> None:
    torch.tensor, torch.zeros = _unpinned(torch.tensor), _unpinned(torch.zeros)
    torch.Tensor.pin_memory = lambda self, *_: self


def _unpinned(make):
    def made(*words, pin_memory=False, **more):
        return make(*words, **more)

    return made
