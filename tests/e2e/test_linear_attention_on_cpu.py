"""The stand-in for SGLang's operators agrees with transformers' own."""

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


def test_drafts_leave_states_until_one_is_accepted():
    """Each draft's output is a decode step's; states after drafts are kept apart until one of them is accepted."""
    draw, count, rows = torch.Generator().manual_seed(3), 4, 2
    states = torch.randn(5, HEADS, V, K, generator=draw)
    slots, starts = torch.tensor([3, 1]), torch.tensor([0, count, 2 * count])
    q, k, v, a, b = (x[0] for x in tokens(rows * count))
    a_log, dt_bias = (torch.randn(HEADS, generator=draw) for _ in range(2))
    parts = dict(A_log=a_log, dt_bias=dt_bias, initial_state_indices=slots)
    kept, before = torch.zeros(rows + 1, count, HEADS, V, K), states.clone()
    out = ours.fused_sigmoid_gating_delta_rule_update_cpu(
        q=q[None], k=k[None], v=v[None], a=a, b=b, initial_state_source=states, cu_seqlens=starts,
        disable_state_update=True, intermediate_states_buffer=kept, intermediate_state_indices=torch.arange(9), **parts,
    )  # fmt: skip
    assert torch.equal(states, before)
    for t in range(count):
        at = torch.tensor([t, count + t])
        step = ours.fused_sigmoid_gating_delta_rule_update_cpu(
            q=q[None, at], k=k[None, at], v=v[None, at], a=a[at], b=b[at], initial_state_source=before,
            cu_seqlens=torch.arange(rows + 1), **parts,
        )  # fmt: skip
        torch.testing.assert_close(out[0, at], step[0])
        torch.testing.assert_close(kept[:rows, t], before[slots])
    layers = torch.stack([states, states + 1])
    ours._take_accepted(layers, torch.stack([kept, kept + 1]), slots, torch.tensor([-1, 2]))
    assert torch.equal(layers[0, 1], kept[1, 2]) and torch.equal(layers[1, 1], kept[1, 2] + 1)
    assert torch.equal(layers[0, [0, 2, 3, 4]], states[[0, 2, 3, 4]])


def test_drafts_are_convolved_as_tokens_one_by_one():
    draw, count = torch.Generator().manual_seed(4), 3
    x, weight = torch.randn(2, count, 6, generator=draw).transpose(1, 2), torch.randn(6, 4, generator=draw)
    states, slots = torch.randn(4, 6, 3, generator=draw), torch.tensor([2, 0])
    kept, before = torch.zeros(3, count, 6, 3), states.clone()
    out = ours.causal_conv1d_update_cpu(
        x, states, weight, None, "silu", slots, intermediate_conv_window=kept,
        intermediate_state_indices=torch.arange(2),
    )  # fmt: skip
    assert torch.equal(states, before)
    assert out.transpose(1, 2).is_contiguous(), "SGLang views it as tokens, one behind the other"
    for t in range(count):
        step = ours.causal_conv1d_update_cpu(x[:, :, t], before, weight, None, "silu", slots)
        torch.testing.assert_close(out[:, :, t], step)
        torch.testing.assert_close(kept[:2, t], before[slots])


def test_drafts_of_a_tree_go_on_from_their_parents():
    """Each draft's output and state equal those of its path, given as a chain."""
    draw = torch.Generator().manual_seed(5)
    children, siblings = torch.tensor([[1, -1, 3, 4, -1, -1]]), torch.tensor([[-1, 2, -1, -1, -1, -1]])
    paths = ((0,), (0, 1), (0, 2), (0, 2, 3), (0, 2, 3, 4), (0, 5))  # the last is no draft, because nothing leads to it
    count, slot, parents = len(paths), torch.tensor([1]), torch.zeros(1, len(paths), dtype=torch.int64)
    x, weight = torch.randn(1, count, 6, generator=draw).transpose(1, 2), torch.randn(6, 4, generator=draw)
    windows, states = torch.randn(2, 6, 3, generator=draw), torch.randn(2, HEADS, V, K, generator=draw)
    q, k, v, a, b = (part[0] for part in tokens(count))
    gates = dict(A_log=torch.randn(HEADS, generator=draw), dt_bias=torch.randn(HEADS, generator=draw))

    def run(at: list[int], **tree):
        kept = torch.zeros(1, len(at), 6, 3), torch.zeros(1, len(at), HEADS, V, K)
        row = torch.arange(1)
        convolved = ours.causal_conv1d_update_cpu(
            x[:, :, at], windows, weight, None, "silu", slot, intermediate_conv_window=kept[0],
            intermediate_state_indices=row, **tree,
        )  # fmt: skip
        out = ours.fused_sigmoid_gating_delta_rule_update_cpu(
            q=q[None, at], k=k[None, at], v=v[None, at], a=a[at], b=b[at], initial_state_source=states,
            initial_state_indices=slot, cu_seqlens=torch.tensor([0, len(at)]), intermediate_states_buffer=kept[1],
            intermediate_state_indices=row, retrieve_parent_token=tree.get("retrieve_parent_token"), **gates,
        )  # fmt: skip
        return convolved[0].t(), out[0], kept[0][0], kept[1][0]

    tree = dict(retrieve_next_token=children, retrieve_next_sibling=siblings, retrieve_parent_token=parents)
    whole = run(list(range(count)), **tree)
    assert parents.tolist() == [[-1, 0, 0, 2, 3, 0]]
    for draft, path in enumerate(paths):
        for of_tree, of_chain in zip(whole, run(list(path))):
            torch.testing.assert_close(of_tree[draft], of_chain[-1])
