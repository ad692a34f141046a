"""An SGLang plugin for tests: adapters on SGLang's CPU engine.

SGLang's ``torch_native`` LoRA backend is plain torch, but keeps its indices in pinned memory, which torch offers only
if there is an accelerator.
"""

from __future__ import annotations

import torch


def install() -> None:
    torch.tensor, torch.zeros = _unpinned(torch.tensor), _unpinned(torch.zeros)
    torch.Tensor.pin_memory = lambda self, *_: self


def _unpinned(make):
    def made(*words, pin_memory=False, **more):
        return make(*words, **more)

    return made
