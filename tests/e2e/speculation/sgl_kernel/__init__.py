"""The kernels that speculation calls on a CPU, in torch and for chains only.

This folder comes before the environment's stand-in on ``PYTHONPATH``. SGLang's CPU engine has these functions only as
compiled kernels for machines with AMX. As in those, arguments named as results are written in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NoReturn

import torch

__version__ = "0.0.0+standin"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: this environment has no compiled SGLang kernels")

    absent.__name__ = absent.__qualname__ = name
    return absent


def _spans(rows: torch.Tensor, start: torch.Tensor, end: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns row and column of every token of the spans, one span after another."""
    pairs = [(row, torch.arange(a, b)) for row, a, b in zip(rows.tolist(), start.tolist(), end.tolist())]
    return torch.cat([torch.full_like(span, row) for row, span in pairs]), torch.cat([span for _, span in pairs])


def assign_extend_cache_locs_cpu(rows, table, start, end, out, width) -> None:
    """Writes to ``out`` the table's entries in the rows' spans."""
    found = table[_spans(rows, start, end)]
    out[: len(found)] = found.to(out.dtype)


def assign_req_to_token_pool_cpu(rows, table, start, end, locations, width) -> None:
    """Writes locations to the table's entries in the rows' spans."""
    at = _spans(rows, start, end)
    table[at] = locations[: len(at[0])].to(table.dtype)


def fill_accept_out_cache_loc_cpu(accepted, locations, out) -> None:
    """Writes to ``out`` the locations of accepted tokens, one after another; -1 means no token."""
    accepted = accepted.flatten()
    found = locations[accepted[accepted >= 0].long()]
    out[: len(found)] = found


def copy_all_layer_kv_cache_cpu(buffers, strides, targets, sources) -> None:
    """Moves rows of every buffer, given as addresses and bytes per row; all are read before any is written."""
    for buffer, stride in zip(buffers.tolist(), strides.tolist()):
        rows = [ctypes.string_at(buffer + source * stride, stride) for source in sources.tolist()]
        for target, row in zip(targets.tolist(), rows):
            ctypes.memmove(buffer + target * stride, row, stride)


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
) -> None:
    """Walks from each request's root to the child that the target model chose, as long as there is one."""
    target = target_predict.flatten()
    for i in range(len(candidates)):
        last, node, count = int(retrive_index[i, 0]), 0, 0
        accept_index[i, 0] = last
        while count + 1 < accept_index.shape[1]:
            node = int(retrive_next_token[i, node])
            while node != -1 and candidates[i, node] != target[last]:
                node = int(retrive_next_sibling[i, node])
            if node == -1:
                break
            predicts[last] = target[last]
            count, last = count + 1, int(retrive_index[i, node])
            accept_index[i, count] = last
        accept_token_num[i] = count
        predicts[last] = target[last]


def build_tree_kernel_efficient_cpu(
    parents, chosen, lens, mask, positions, index, next_token, next_sibling, topk, depth, count, mode
) -> None:
    """Writes for each request the mask (the drafts that each draft sees), the positions, and the links of its tree."""
    assert topk == 1, "chains only"
    order = torch.arange(count)
    mask.view(-1)[: len(lens) * count**2] = (order <= order[:, None]).repeat(len(lens), 1, 1).flatten().to(mask.dtype)
    positions.copy_((lens[:, None] + order).flatten())
    index.copy_(torch.arange(len(lens) * count).view(-1, count))
    next_token.copy_(torch.where(order + 1 < count, order + 1, -1).expand(len(lens), -1))
    next_sibling.fill_(-1)


def assign_draft_cache_locs_contiguous_cpu(rows, table, lens, out, width, topk, steps) -> None:
    """Writes to ``out`` the locations of each request's next tokens."""
    at = lens[:, None] + torch.arange(topk * steps)
    out.copy_(table[rows[:, None].long(), at.long()].flatten().to(out.dtype))


def fill_bonus_tokens_cpu(accepted, accepted_lens, out, stride) -> None:
    """Writes to ``out`` the last accepted token of each request."""
    out.copy_(accepted.flatten()[torch.arange(len(accepted_lens)) * stride + accepted_lens.long() - 1].to(out.dtype))


def rotate_input_ids_cpu(tokens, starts, lens, new, select=None) -> None:
    """Shifts each request's tokens by one and puts its new token at the end, or where ``select`` says."""
    for i, (start, length) in enumerate(zip(starts.tolist(), lens.tolist())):
        if length:
            tokens[start : start + length - 1] = tokens[start + 1 : start + length].clone()
            tokens[start + length - 1 if select is None else int(select[i])] = new.flatten()[i]
