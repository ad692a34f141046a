"""The stand-in for SGLang's operators, against transformers' own."""

from __future__ import annotations

import pytest
import torch

from tests.e2e import linear_attention_on_cpu as ours

KEY_HEADS, HEADS, K, V = 2, 4, 16, 24


def tokens(count: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(count)
    q, k = (torch.randn(1, count, KEY_HEADS, K, generator=draw) for _ in range(2))
    v = torch.randn(1, count, HEADS, V, generator=draw)
    decay = -torch.rand(1, count, HEADS, generator=draw) / 10
    return q, k, v, decay, torch.rand(1, count, HEADS, generator=draw)


@pytest.mark.parametrize("lengths", [(5,), (64,), (130, 1, 70)])
def test_prefill_then_decode(lengths):
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    states = torch.zeros(len(lengths) + 1, HEADS, V, K)
    slots = torch.arange(1, len(lengths) + 1)
    whole = [tokens(length + 1) for length in lengths]
    parts = [torch.cat([w[i][:, :-1] for w in whole], 1) for i in range(5)]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    out, _, kept = ours.chunk_gated_delta_rule_cpu(
        *parts, initial_state=states, cu_seqlens=starts, initial_state_indices=slots
    )
    assert kept.shape == (1, sum(-(-length // 64) for length in lengths), HEADS, V, K)
    at = 0
    for n, (q, k, v, decay, beta) in enumerate(whole):
        q, k = (x.repeat_interleave(HEADS // KEY_HEADS, 2) for x in (q, k))

        def run(end, parts=(q, k, v, decay, beta)):
            parts = (x[:, :end] for x in parts)
            return torch_recurrent_gated_delta_rule(*parts, None, True, use_qk_l2norm_in_kernel=True)

        expected, last = run(lengths[n])
        torch.testing.assert_close(out[:, starts[n] : starts[n + 1]], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states[n + 1], last[0].mT, rtol=1e-4, atol=1e-5)
        for chunk in range(1, -(-lengths[n] // 64)):
            torch.testing.assert_close(kept[0, at + chunk], run(64 * chunk)[1][0].mT, rtol=1e-4, atol=1e-5)
        at += -(-lengths[n] // 64)
        step, after, _ = ours._delta_rule(*(x[0, -1:] for x in whole[n]), states[n + 1])
        expected, last = run(lengths[n] + 1)
        torch.testing.assert_close(step, expected[0, -1:], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(after, last[0].mT, rtol=1e-4, atol=1e-5)


def test_convolution_goes_on_where_it_stopped():
    draw = torch.Generator().manual_seed(1)
    x, weight = torch.randn(6, 12, generator=draw), torch.randn(6, 4, generator=draw)
    expected = torch.nn.functional.silu(
        torch.nn.functional.conv1d(torch.nn.functional.pad(x, (3, 0))[None], weight[:, None], groups=6)[0]
    )
    states, slot = torch.zeros(3, 6, 3), torch.tensor([2])
    first = ours.causal_conv1d_fn_cpu(
        x[:, :7], weight, None, "silu", conv_states=states, has_initial_state=torch.tensor([False]),
        cache_indices=slot, query_start_loc=torch.tensor([0, 7]),
    )  # fmt: skip
    second = ours.causal_conv1d_fn_cpu(
        x[:, 7:11], weight, None, "silu", conv_states=states, has_initial_state=torch.tensor([True]),
        cache_indices=slot, query_start_loc=torch.tensor([0, 4]),
    )  # fmt: skip
    last = ours.causal_conv1d_update_cpu(x[None, :, 11], states, weight, None, "silu", slot)
    torch.testing.assert_close(torch.cat([first, second, last.t()], 1), expected)
