"""Folding: each layer and KV head keeps its own selection of some pages' tokens, moved unchanged into fewer pages.

    target[l, h, j] = source[l, h, tokens[l, h, j]]        codes, scales and offsets, or gains

Nothing is quantized again, so a token's values stay bit-identical. Keys already contain their RoPE, and attention does
not depend on the order of tokens. So a request can read the new pages like any other prefix.

This is the reference implementation in torch; ``kernels.quantize.fold_tokens`` does the same on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_kvq.cache.pool import PagePool
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.record import RecordFormat
from sglang_kvq.methods import METHOD_NAMES, get_method


def check_moves(method: str, formats: Sequence[RecordFormat]) -> None:
    """Refuses formats whose tokens cannot be moved; called when the server starts.

    Args:
        method: the value of ``--kv-quant``, for the message.
        formats: one for each layer.

    Raises:
        KVQuantError: the tokens of a page share stored data; the message names the method and the methods that work.
    """
    for layer, format in enumerate(formats):
        if not format.per_token:
            others = ", ".join(name for name in METHOD_NAMES if get_method(name).moves_tokens)
            raise KVQuantError(
                f"--kv-quant {method}: keys in {format.k.describe()}, values in {format.v.describe()} (layer {layer}): "
                "tokens of a page share stored data, so chosen tokens cannot be moved to other pages. "
                f"Choose one of {others}."
            )


def check_fold(pool: PagePool, source_pages: torch.Tensor, target_pages: torch.Tensor, tokens: torch.Tensor) -> None:
    """Checks the arguments of ``fold_pages`` as far as that is possible without waiting for the device.

    Raises:
        KVQuantError: a shape or dtype does not fit, or tokens of a record share data; the message names it.
    """
    for store in pool.stores:
        store.format.check_per_token()
    ids = {"source_pages": source_pages, "target_pages": target_pages}
    for name, pages in ids.items():
        if pages.dim() != 1 or not pages.numel() or pages.dtype != torch.int64:
            raise KVQuantError(f"{name}: {pages.dtype} {list(pages.shape)}; must be int64 [n], one page at least.")
    if len(target_pages) > len(source_pages):
        raise KVQuantError(
            f"{len(target_pages)} target pages for the tokens of {len(source_pages)}: no token is kept twice. Name at "
            "most as many."
        )
    want = (pool.layers, pool.kv_heads, PAGE_SIZE * len(target_pages))
    if tokens.shape != want or tokens.dtype != torch.int64:
        raise KVQuantError(
            f"tokens: {tokens.dtype} {list(tokens.shape)}; must be int64 {list(want)}: one for each layer, KV head and "
            "token of the target pages."
        )


def fold_pages(pool: PagePool, source_pages: torch.Tensor, target_pages: torch.Tensor, tokens: torch.Tensor) -> None:
    """Fills the records of ``target_pages`` with chosen tokens of ``source_pages``.

    Args:
        source_pages: int64 ``[n]``, pages with valid records; target_pages: int64 ``[m]``, other pages.
        tokens: int64 ``[layers, kv_heads, m PAGE_SIZE]``, indices into the sources' tokens, below ``n PAGE_SIZE``.

    Raises:
        KVQuantError: a shape does not fit, or tokens of a record share data.
    """
    check_fold(pool, source_pages, target_pages, tokens)
    for layer, records in enumerate(pool.records):
        format = pool.formats[layer]
        parts = format.split_tokens(records[source_pages])  # each [n, kv_heads, PAGE_SIZE, x]
        records[target_pages] = format.join_tokens(tuple(_take(part, tokens[layer]) for part in parts))


def _take(part: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the chosen tokens of a part of records, arranged as pages: ``[m, kv_heads, PAGE_SIZE, x]``.

    part: ``[n, kv_heads, PAGE_SIZE, x]``. tokens: indices ``[kv_heads, m PAGE_SIZE]``.
    """
    rows = part.transpose(0, 1).flatten(1, 2)  # [kv_heads, n PAGE_SIZE, x]
    taken = rows.gather(1, tokens[..., None].expand(-1, -1, rows.shape[-1]))
    pages: torch.Tensor = taken.unflatten(1, (-1, PAGE_SIZE)).transpose(0, 1)
    return pages
