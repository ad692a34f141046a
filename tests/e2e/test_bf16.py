"""Results of the server that must equal plain BF16's."""

from __future__ import annotations

import torch
from transformers import AutoTokenizer

from tests.e2e.client import Client, held_out_text

#: Every requested token is read in BF16.
WIDE = ("--kv-quant", "int2", "--kv-quant-recent", "1024")


def test_without_rotation_and_with_every_page_in_bf16_nothing_changes(servers, model):
    """Log-probabilities equal plain BF16's; on a GPU, they differ about as two of SGLang's own backends do."""
    ids = AutoTokenizer.from_pretrained(model)(held_out_text()).input_ids[:600]

    def logprobs(*flags: str) -> torch.Tensor:
        return torch.tensor(Client(servers(*flags)).token_logprobs(ids, 20))[: len(ids) - 1]

    plain = logprobs()
    ours = (logprobs(*WIDE) - plain).abs()
    print(f"{len(plain)} log-probabilities differ by {ours.mean():.2e} on average, {ours.max():.2e} at most")
    assert len(plain) >= 500
    if torch.cuda.is_available():
        other = (logprobs("--attention-backend", "flashinfer") - plain).abs()
        print(f"those of FlashInfer and Triton by {other.mean():.2e} and {other.max():.2e}")
        assert ours.mean() < 1.5 * other.mean() and ours.max() < 2 * other.max()
    else:
        assert ours.max() < 2e-2
