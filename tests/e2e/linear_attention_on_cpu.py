"""An SGLang plugin for tests: Qwen3-Next's linear attention on SGLang's CPU engine, without its compiled kernels.

SGLang calls operators of ``sgl_kernel`` for a gated delta rule, and Triton kernels around it. Here they are in torch,
as https://arxiv.org/abs/2412.06464 defines the rule. SGLang refuses prefix caching of recurrent states on a CPU,
because its own operators return no state inside a prompt; these do.

States are float ``[heads, value_dim, key_dim]``, convolution states ``[channels, kernel - 1]``.
"""

from __future__ import annotations

import contextlib
import importlib
import sys

import torch
import torch.nn.functional as F

#: Tokens between the states that a prefill returns.
CHUNK = 64


def install() -> None:
    torch.tensor, torch.zeros = _unpinned(torch.tensor), _here(torch.zeros)
    torch.Tensor.pin_memory = lambda self, *_: self
    module = importlib.import_module("sgl_kernel.mamba")
    for function in (causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu):
        _replace(module, function.__name__, function)
    for function in (fused_gdn_gating_cpu, fused_sigmoid_gating_delta_rule_update_cpu):
        setattr(torch.ops.sgl_kernel, function.__name__, function)
    scatter = importlib.import_module("sglang.kernels.ops.mamba.mamba_state_scatter_triton")
    _replace(scatter, "track_mamba_states_if_needed", _keep_states)
    _replace(scatter, "track_mamba_states_all_layers", _keep_states_of_all_layers)
    for name in ("fused_mamba_state_scatter_with_mask", "fused_conv_window_scatter_with_mask"):
        _replace(scatter, name, _take_accepted)
    scatter._conv_multi_eligible = lambda pairs: False  # 0.5.23 has a kernel for several states at once
    norm = importlib.import_module("sglang.kernels.ops.attention.fla.fused_norm_gate")
    norm.FusedRMSNormGated.forward = _norm_gated
    for name in ("sglang.kernels.ops.elementwise.elementwise", "sglang.kernels.ops.layernorm.elementwise"):
        with contextlib.suppress(ModuleNotFoundError):  # 0.5.23 has one, 0.5.16 the other
            _replace(importlib.import_module(name), "fused_gate_sigmoid_mul_add", _add_gated)
    from sglang.srt.server_args import ServerArgs

    if hasattr(ServerArgs, "_validate_mamba_extra_buffer"):
        ServerArgs._validate_mamba_extra_buffer = lambda *words: None
    else:
        hook = importlib.import_module("sglang.srt.arg_groups.mamba_hook")
        hook._platform_supports_mamba_cache_extra_buffer = lambda: True


def _replace(module, name: str, function) -> None:
    """Replaces a module's function, also in modules that imported it before, as those of ``preloaded.py``."""
    found = getattr(module, name, None)
    for other in list(sys.modules.values()):
        if found is not None and getattr(other, "__dict__", {}).get(name) is found:
            setattr(other, name, function)
    setattr(module, name, function)


def _unpinned(make):
    """Returns ``make`` without pinned memory, which this machine has no use for."""

    def plain(*words, pin_memory=False, **more):
        return make(*words, **more)

    return plain


def _here(make):
    """Returns ``make`` without ``cuda``, which 0.5.16 asks for on any device, for the states of drafts."""

    def made(*words, device=None, **more):
        return make(*words, device=None if device == "cuda" else device, **more)

    return made


def _norm_gated(self, x, g, **_):
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
    return (normed * self.weight.float() * F.silu(g.float())).to(x.dtype)


def _add_gated(hidden_states, gate_weight, shared_output, final_hidden_states):
    """Adds the shared expert's part of a mixture."""
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid()[:, None]
    final_hidden_states += (gate * shared_output.float()).to(final_hidden_states.dtype)


def _keep_states(conv_states, ssm_states, cache_indices, mask, kept_indices, batch_size, **_):
    """Copies the states of the requests in ``mask`` to places from which the prefix cache will take them."""
    chosen = mask[:batch_size].bool()
    source, target = cache_indices[:batch_size][chosen].long(), kept_indices[:batch_size][chosen].long()
    conv_states[target], ssm_states[target] = conv_states[source], ssm_states[source]


def _keep_states_of_all_layers(conv_pool, ssm_pool, *words, **_):
    for conv_states, ssm_states in zip(conv_pool, ssm_pool):
        _keep_states(conv_states, ssm_states, *words)


def _take_accepted(states, of_drafts, slots, accepted, rows=None):
    """Copies each request's state after its draft ``accepted`` to its slot, unless ``accepted`` is negative.

    states ``[layers, slots, ...]``, of_drafts ``[layers, requests, drafts, ...]``.
    """
    chosen = accepted >= 0
    rows = torch.arange(len(accepted)) if rows is None else rows
    states[:, slots[chosen].long()] = of_drafts[:, rows[chosen].long(), accepted[chosen].long()]


def fused_gdn_gating_cpu(a_log, a, b, dt_bias):
    """Returns log decay and learning rate of each token and head, ``[1, tokens, heads]``."""
    decay = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def causal_conv1d_fn_cpu(
    x, weight, bias, activation, conv_states, has_initial_state, cache_indices, query_start_loc, **_
):
    """Convolves x ``[channels, tokens]``, the tokens of several requests one after another."""
    out, width = torch.empty_like(x), weight.shape[1] - 1
    for n, slot in enumerate(cache_indices.tolist()):
        span = slice(int(query_start_loc[n]), int(query_start_loc[n + 1]))
        before = conv_states[slot] if has_initial_state[n] else torch.zeros_like(conv_states[slot])
        whole = torch.cat([before.to(x.dtype), x[:, span]], dim=1)
        conv_states[slot] = whole[:, -width:].to(conv_states.dtype)
        out[:, span] = _convolved(whole, weight, bias)
    return out


def causal_conv1d_update_cpu(
    x,
    conv_states,
    weight,
    bias,
    activation,
    conv_state_indices,
    intermediate_conv_window=None,
    intermediate_state_indices=None,
    retrieve_next_token=None,
    retrieve_next_sibling=None,
    retrieve_parent_token=None,
    **_,
):
    """Convolves one token of each request, x ``[requests, channels]``, or drafts ``[requests, channels, drafts]``.

    Drafts leave the states as they are: the state after each draft goes to ``intermediate_conv_window``, ``[rows,
    drafts, ...]``. Drafts are a chain or a tree. A tree gives each draft's first child and next sibling, -1 for none;
    its parent is written to ``retrieve_parent_token``.
    """
    slots, width = conv_state_indices.long(), weight.shape[1] - 1
    state, drafts = conv_states[slots].to(x.dtype), x.view(*x.shape[:2], -1)
    if intermediate_conv_window is None:
        whole = torch.cat([state, drafts], dim=2)
        conv_states[slots] = whole[:, :, 1:].to(conv_states.dtype)
        return torch.stack([_convolved(one, weight, bias) for one in whole]).view(x.shape)
    out = torch.empty_like(x)  # keeps the strides of x, on which SGLang relies
    for n, row in enumerate(intermediate_state_indices.tolist()):
        parents = list(range(-1, drafts.shape[2] - 1))
        if retrieve_next_token is not None:
            parents = _parents(retrieve_next_token[n].tolist(), retrieve_next_sibling[n].tolist())
            retrieve_parent_token[n] = torch.tensor(parents)
        before: list[torch.Tensor] = []  # each draft's state, [channels, width]
        for draft, parent in enumerate(parents):
            window = torch.cat([state[n] if parent < 0 else before[parent], drafts[n, :, draft : draft + 1]], dim=1)
            out[n, :, draft] = _convolved(window, weight, bias)[:, -1]
            before.append(window[:, -width:])
        intermediate_conv_window[row] = torch.stack(before).to(intermediate_conv_window.dtype)
    return out


def _parents(children: list[int], siblings: list[int]) -> list[int]:
    """Returns each draft's parent, -1 for the first; drafts that are nobody's child follow the first too."""
    parents = [-1] + [0] * (len(children) - 1)
    for parent, child in enumerate(children):
        while child >= 0:
            parents[child] = parent
            child = siblings[child]
    return parents


def _convolved(x, weight, bias):
    out = F.conv1d(x[None].float(), weight[:, None].float(), None if bias is None else bias.float(), groups=len(weight))
    return F.silu(out[0]).to(x.dtype)


def chunk_gated_delta_rule_cpu(q, k, v, g, beta, initial_state, cu_seqlens, initial_state_indices, **_):
    """Computes a prefill: output ``[1, tokens, heads, value_dim]``, None, and the states before all chunks."""
    out, states = torch.empty_like(v), []
    for n, slot in enumerate(initial_state_indices.tolist()):
        span = slice(int(cu_seqlens[n]), int(cu_seqlens[n + 1]))
        parts = (x[0, span] for x in (q, k, v, g, beta))
        out[0, span], last, found = _delta_rule(*parts, initial_state[slot])
        initial_state[slot] = last.to(initial_state.dtype)
        states += found
    return out, None, torch.stack(states)[None].to(q.dtype)


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log,
    dt_bias,
    q,
    k,
    v,
    a,
    b,
    initial_state_source,
    initial_state_indices,
    cu_seqlens,
    intermediate_states_buffer=None,
    intermediate_state_indices=None,
    retrieve_parent_token=None,
    **_,
):
    """Computes one token of each request, or their drafts.

    Drafts leave the states as they are: the state after each draft goes to ``intermediate_states_buffer``, ``[rows,
    drafts, ...]``. A draft continues its parent's state, or without a tree that of the draft before it.
    """
    decay, beta = fused_gdn_gating_cpu(A_log, a.view(-1, A_log.shape[0]), b.view(-1, A_log.shape[0]), dt_bias)
    q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
    out, starts = torch.empty_like(v), cu_seqlens.tolist()
    for n, slot in enumerate(initial_state_indices.tolist()):
        state = initial_state_source[slot]
        row = None if intermediate_states_buffer is None else int(intermediate_state_indices[n])
        for token in range(starts[n], starts[n + 1]):
            if retrieve_parent_token is not None and token > starts[n]:
                state = intermediate_states_buffer[row, int(retrieve_parent_token[n, token - starts[n]])]
            parts = (x[token : token + 1] for x in (q, k, v, decay[0], beta[0]))
            out[token : token + 1], state, _ = _delta_rule(*parts, state)
            if intermediate_states_buffer is not None:
                intermediate_states_buffer[row, token - starts[n]] = state.to(intermediate_states_buffer.dtype)
        if intermediate_states_buffer is None:
            initial_state_source[slot] = state.to(initial_state_source.dtype)
    return out[None]


def _delta_rule(q, k, v, decay, beta, state):
    """Computes one request's tokens: output, the state after them, and the states before each chunk.

    A chunk's tokens are computed together: what each writes to the state depends on what earlier ones wrote, which is a
    triangular system.
    """
    group = v.shape[1] // k.shape[1]
    q, k = (F.normalize(x.float(), dim=-1, eps=1e-6).repeat_interleave(group, 1).transpose(0, 1) for x in (q, k))
    v, q = v.float().transpose(0, 1), q * q.shape[-1] ** -0.5
    decay, beta, state = decay.float().t(), beta.float().t()[..., None], state.float().mT  # [heads, key_dim, value_dim]
    out, before = [], []
    for start in range(0, v.shape[1], CHUNK):
        span = slice(start, start + CHUNK)
        before.append(state.mT.clone())
        qs, ks, vs, bs, since = q[:, span], k[:, span], v[:, span], beta[:, span], decay[:, span].cumsum(1)
        between = (since[:, :, None] - since[:, None, :]).tril().exp().tril()  # how much is left at i of what j wrote
        system = torch.eye(ks.shape[1]) + (bs * ks @ ks.mT * between).tril(-1)
        wanted = bs * (vs - (ks * since.exp()[..., None]) @ state)
        written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        out.append((qs * since.exp()[..., None]) @ state + (qs @ ks.mT * between) @ written)
        left = (since[:, -1:] - since).exp()[..., None]
        state = state * since[:, -1:, None].exp() + (ks * left).mT @ written
    return torch.cat(out, 1).transpose(0, 1), state.mT, before
