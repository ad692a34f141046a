"""Finds and runs every kernel of the package, for ``kvq doctor``.

There is no list of kernels: a kernel is any jitted function that a module of ``sglang_kvq.kernels`` launches. For each
record layout that a method uses, a check runs a prefill, its continuation with scores of keys, and a decode step on a
small cache. The decode kernel has several routines (``decode.ROUTINES``), chosen by geometry. Each routine runs for one
token and for drafts. Kernels and routines that no check launched are reported by name.
"""

from __future__ import annotations

import ast
import inspect
import math
import os
import pkgutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from types import ModuleType
from typing import Any

import torch

from sglang_kvq.attention.base import AttentionOps, ExtendBatch, LayerRotations
from sglang_kvq.attention.drafts import DraftBatch, chain
from sglang_kvq.attention.planning.new_tokens import direct_tokens
from sglang_kvq.attention.reference import ReferenceOps
from sglang_kvq.attention.scores.scoring import KeyScores, plan_scoring
from sglang_kvq.cache.layout import KVGeometry, share, shared_reserve
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.shared.split import WindowSlots
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.code import CodeFormat
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.planes import PlaneCode, PlaneFormat
from sglang_kvq.formats.record import RecordFormat
from sglang_kvq.methods import METHOD_NAMES, get_method
from sglang_kvq.rotations.resolve import resolve_formats

HEAD_DIM, KV_HEADS, Q_HEADS, SCALE = 128, 1, 4, 128**-0.5
#: One request: tokens of its prefill, then of a continuation; a decode step follows. With one page of sinks and one
#: recent page, continuation and decode step both read history.
FIRST, MORE = 4 * PAGE_SIZE, PAGE_SIZE + 6
SINK_PAGES = RECENT_PAGES = 1
#: A plane format with every kind of cell.
PLANES = PlaneFormat(HEAD_DIM, PlaneCode((5, 3, 3, 1)), PlaneCode((2, 1, 1, 0)))
#: Formats with which ``DECODED`` reaches every routine of the decode kernel: two bits, other codes, planes.
TWO_BITS, THREE_BITS = PageFormat(HEAD_DIM, HEAD_DIM), PageFormat(HEAD_DIM, HEAD_DIM, k=CodeFormat(3), v=CodeFormat(3))
NARROW = (PageFormat(64, 64), PlaneFormat(64, PLANES.k, PLANES.v))
#: Query heads of the one KV head, and formats of the layers. The kernel treats ``DRAFTS`` drafts as that many times
#: more query heads.
DECODED: tuple[tuple[int, tuple[RecordFormat, ...]], ...] = (
    (2, (TWO_BITS, THREE_BITS, PLANES)),
    (4, NARROW),
    (8, (TWO_BITS, PLANES)),
)
DRAFTS = 2
#: The kernel that has these routines.
_DECODE = "decode_attention._decode"
#: CPU cores for each process. Kernels compile on the CPU, so checks run in separate processes if there are enough
#: cores.
CORES_OF_A_WORKER = 2
#: Largest accepted relative error, in the 2-norm. Rounding causes less than a tenth of this, wrong bytes about 1.
BOUND = 0.05


def modules() -> list[ModuleType]:
    """Imports and returns every module of ``sglang_kvq.kernels``."""
    package = import_module("sglang_kvq.kernels")
    names = [found.name for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.") if not found.ispkg]
    return [import_module(name) for name in names]


@cache
def kernels() -> dict[str, Any]:
    """Returns the jitted functions that these modules launch, by ``module.name``.

    A launch is ``kernel[grid](...)`` or ``start_kernel(kernel, grid, ...)``.
    """
    found: dict[str, Any] = {}
    for module in modules():
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            kernel: Any = getattr(module, _launched(node), None)
            if hasattr(kernel, "add_pre_run_hook"):
                found[f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.__name__}"] = kernel
    return found


def _launched(node: ast.AST) -> str:
    """Returns the expression of the kernel that a node may launch; "" if it launches none."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
        return ast.unparse(node.func.value)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "start_kernel":
        return ast.unparse(node.args[0])
    return ""


def routines() -> list[str]:
    """Returns the names of the decode kernel's routines, ``module.kernel: routine``, without and with drafts."""
    names = import_module("sglang_kvq.kernels.decode.decode_attention").ROUTINES
    return [_routine(name, drafts) for name in names for drafts in (1, DRAFTS)]


def _routine(name: str, drafts: int) -> str:
    return f"{_DECODE}: {name}{' of drafts' if drafts > 1 else ''}"


def formats() -> tuple[RecordFormat, ...]:
    """Returns every record layout that some method has at its default width.

    Plane layouts depend on a model's rotations, so ``PLANES`` replaces them here.
    """
    model = {
        "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 1, "hidden_size": Q_HEADS * HEAD_DIM,
        "vocab_size": 1, "num_attention_heads": Q_HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    }  # fmt: skip
    names = [name for name in METHOD_NAMES if not get_method(name).planes]
    chosen = [resolve_formats(KVQuantConfig(name), None, model)[0] for name in names]
    return (*{format.layout: format for format in chosen}.values(), PLANES)


def run_all(device: torch.device) -> tuple[list[str], list[str]]:
    """Compiles and runs the kernels on a GPU (or interprets them), and compares them with the same arithmetic in torch.

    Returns:
        Names of the kernels and routines that ran, and of those that nothing here launched.

    Raises:
        KVQuantError: a result differs from the reference; names the operation and the layer's codes.
    """
    parts = [(check, n) for check, count in ((_serve, len(formats())), (_decode, len(DECODED))) for n in range(count)]
    workers = min(len(parts), (os.cpu_count() or 1) // CORES_OF_A_WORKER)
    if device.type == "cuda" and workers > 1:
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            done = [pool.submit(_ran, check, n, device) for check, n in parts]
            ran = set().union(*(part.result() for part in done))
    else:
        ran = set().union(*(_ran(check, n, device) for check, n in parts))
    known = [*kernels(), *routines()]
    return [name for name in known if name in ran], [name for name in known if name not in ran]


def _ran(check: Callable[[int, torch.device], None], number: int, device: torch.device) -> set[str]:
    """Runs one check; returns the names of the kernels and routines that it launched."""
    with _recorded() as ran, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        check(number, device)
    return ran


def _serve(number: int, device: torch.device) -> None:
    """Serves a request with one record layout, and runs the other operations on its pages."""
    request = _Request(device, formats()[number], sinks=number % 2 == 1)
    request.prefill(0, FIRST)
    request.prefill(FIRST, MORE)
    request.decode(FIRST + MORE + 1)
    request.fold()
    if number == 0:
        request.append_to_workspace()
        request.finish_with_sinks()
        request.restore()
        request.copy_to_host()


def _decode(number: int, device: torch.device) -> None:
    decode_and_verify(*DECODED[number], device)


@contextmanager
def _recorded() -> Iterator[set[str]]:
    """Collects the names of the kernels that the body launches, and of the decode kernel's routines."""
    ran: set[str] = set()

    def recorder(name: str) -> Callable[..., None]:
        if name == _DECODE:
            return lambda *args, **kwargs: ran.update((name, _routine(kwargs["ROUTINE"], kwargs["DRAFTS"])))
        return lambda *args, **kwargs: ran.add(name)

    hooks = [(kernel, recorder(name)) for name, kernel in kernels().items()]
    for kernel, hook in hooks:
        kernel.add_pre_run_hook(hook)
    try:
        yield ran
    finally:
        for kernel, hook in hooks:
            kernel.pre_run_hooks.remove(hook)


def decode_and_verify(q_heads: int, formats: tuple[RecordFormat, ...], device: torch.device) -> None:
    """Decodes one token, then verifies drafts, over records and BF16 pages that torch filled."""
    from sglang_kvq.attention.triton_ops import TritonOps

    pool, head_dim = _allocate(formats, device), formats[0].head_dim
    pages, length = pool.pages, FIRST + MORE
    for format, records in zip(formats, pool.records):
        k, v = torch.randn(2, pages, KV_HEADS, PAGE_SIZE, head_dim, device=device).bfloat16()
        records[1:] = format.quantize_pages(k, v)
    pool.bf16_pages.normal_()
    pool.page_slot.copy_(torch.arange(pages + 1, device=device))
    pool.row_sink_end[1], pool.row_history_end[1] = PAGE_SIZE, FIRST
    pool.read_rows()
    ops, reference = TritonOps(pool, LayerRotations(), q_heads, max_batch=1), ReferenceOps(pool, LayerRotations())
    rows, lens = torch.ones(1, dtype=torch.int64, device=device), torch.full((1,), length, device=device)
    drafts = DraftBatch(rows, lens, chain(DRAFTS, device)[None].contiguous())
    ops.plan_attention(rows, lens)
    ops.plan_drafts(drafts)
    for layer, format in enumerate(formats):
        q = torch.randn(DRAFTS, q_heads, head_dim, device=device).bfloat16()
        one, several = ((layer, q[:1], rows, lens, SCALE), (layer, q, drafts, SCALE))
        _compare("decode", format, ops.decode(*one), reference.decode(*one))
        _compare("verifying drafts", format, ops.verify(*several), reference.verify(*several))


def _allocate(formats: tuple[RecordFormat, ...], device: torch.device, shared: bool = False) -> PagePool:
    """Allocates a pool for one request on row 1, whose pages are not in order.

    shared: records and BF16 pages share one memory, in which no page id has a page yet.
    """
    pages = -(-(FIRST + MORE + 1) // PAGE_SIZE)
    table = torch.zeros(3, pages * PAGE_SIZE, dtype=torch.int32)
    shuffled = torch.arange(pages, 0, -1)
    table[1] = (shuffled[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()
    slots, arena = pages, None
    if shared:
        geometry = KVGeometry(KV_HEADS, formats)
        windows = WindowSlots(pages, pages, 1)
        reserve = shared_reserve(geometry, windows) + geometry.slot_bytes
        bytes_ = reserve + pages * geometry.shared_page_bytes
        layout = share(geometry, windows, pages=pages, budget_bytes=bytes_, wanted=1)
        slots, arena = layout.slots, layout.arena
    table = table.to(device)
    return PagePool.allocate(formats, kv_heads=KV_HEADS, pages=pages, slots=slots, req_to_token=table, arena=arena)


class _Request:
    """One request on row 1 of two caches: kernels write and read one of them, torch the other.

    In the kernels' cache records and BF16 pages share one memory; in torch's they are separate.
    """

    def __init__(self, device: torch.device, format: RecordFormat, sinks: bool) -> None:
        from sglang_kvq.attention.planning.short_extend import ShortExtends
        from sglang_kvq.attention.triton_ops import TritonOps
        from sglang_kvq.cache.triton_tiers import TritonTierManager

        self.device, self.formats = device, (format,)
        #: Learned sinks.
        self.sinks = torch.linspace(2, 8, Q_HEADS).to(device) if sinks else None
        rotation = torch.linalg.qr(torch.randn(HEAD_DIM, HEAD_DIM))[0].to(device)
        rotation = rotation.expand(len(self.formats), 1, HEAD_DIM, HEAD_DIM).contiguous()
        rotations = LayerRotations(rotation, rotation)
        pool, plain = _allocate(self.formats, self.device, shared=True), self._pool()
        #: ``ops`` dequantizes prefixes first; ``direct`` always reads records in place.
        self.ops, self.direct = (
            TritonOps(pool, rotations, Q_HEADS, max_batch=1, slab_tokens=FIRST, short=short)
            for short in (None, ShortExtends(costs=None, most_rows_unpacked=MORE * Q_HEADS, least_prefix=0))
        )
        self.reference = ReferenceOps(plain, rotations)
        operations = ((ops.quantize_slots, ops.restore_pages) for ops in (self.ops, self.reference))
        self.tiers = TritonTierManager(pool, SINK_PAGES, RECENT_PAGES, *next(operations))
        self.plain_tiers = TierManager(plain, SINK_PAGES, RECENT_PAGES, *next(operations))
        self.tiers.pending.allocate_pages(torch.arange(1, pool.pages + 1, device=device))

    def _pool(self, formats: tuple[RecordFormat, ...] | None = None) -> PagePool:
        return _allocate(formats or self.formats, self.device)

    def _int64(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _activations(self, tokens: int) -> tuple[torch.Tensor, ...]:
        heads = (Q_HEADS, KV_HEADS, KV_HEADS)
        return tuple(torch.randn(tokens, n, HEAD_DIM, device=self.device).bfloat16() for n in heads)

    def append_to_workspace(self) -> None:
        """Checks the kernel that copies new tokens behind stored ones, before a library's attention."""
        from sglang_kvq.kernels.extend.append_tokens import append_tokens

        _, *new = self._activations(MORE)
        _, *stored = self._activations(2 * MORE)
        positions = torch.arange(2 * MORE - 1, 0, -2, device=self.device)
        want = [x.clone() for x in stored]
        for x, y in zip(want, new):
            x[positions] = y
        append_tokens((stored[0], stored[1]), positions.int(), (new[0], new[1]))
        for x, y in zip(stored, want):
            _compare("appending to the workspace", self.formats[0], x, y)

    def finish_with_sinks(self) -> None:
        """Checks the kernel that applies learned sinks after FlashInfer's attention; works without FlashInfer."""
        from sglang_kvq.kernels.decode.learned_sinks import scale_by_sinks

        out, _, _ = self._activations(MORE)
        lse = torch.randn(out.shape[:2], device=self.device) * 4 + 6
        sinks = torch.linspace(2, 8, Q_HEADS).to(self.device)
        want = out.float() * torch.sigmoid(lse * math.log(2) - sinks)[..., None]
        scale_by_sinks(out, lse, sinks)
        _compare("scaling by sinks", self.formats[0], out, want)

    def fold(self) -> None:
        """Folds tokens of three pages into two, in all layouts whose tokens can move, and compares the bytes."""
        from sglang_kvq.cache.fold import fold_pages
        from sglang_kvq.cache.triton_tiers import move_tokens

        formats = tuple(format for format in self.formats if format.per_token)
        if not formats:
            return
        pool, plain = self._pool(formats), self._pool(formats)
        for mine, theirs in zip(pool.records, plain.records):
            theirs.copy_(mine.random_(256))
        chosen = torch.rand(len(formats), KV_HEADS, 3 * PAGE_SIZE, device=self.device).argsort(-1)
        fold = (self._int64(2, 5, 1), self._int64(4, 3), chosen[..., : 2 * PAGE_SIZE])
        move_tokens(pool, *fold)
        fold_pages(plain, *fold)
        for format, got, want in zip(formats, pool.records, plain.records):
            if not torch.equal(got, want):
                raise KVQuantError(
                    f"moving tokens with keys in {format.k.describe()} and values in {format.v.describe()} is wrong: "
                    f"{int((got != want).sum())} bytes differ from PyTorch's. Try another Triton release, and report "
                    "this."
                )

    def copy_to_host(self) -> None:
        """Copies pages of layers with different widths to host memory and back into other pages, and compares them."""
        from sglang_kvq.cache.host_pages import HostLayout
        from sglang_kvq.kernels.tiers import host_rows

        # Servers share the memory, so that pages of a layer have gaps between them.
        pool, on_gpu = _allocate((TWO_BITS, PLANES), self.device, shared=True), self.device.type == "cuda"
        for records in pool.records:
            records.random_(256)
        want = [records.clone() for records in pool.records]
        layout, pages, there = HostLayout(pool), self._int64(4, 2), self._int64(0, 2)
        table = host_rows.row_table(pool.records, layout.offsets)
        host = torch.zeros(3, layout.page_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        buffer = torch.zeros_like(host, device=self.device)
        host_rows.gather_rows(table, pages, buffer, there)
        host.copy_(buffer)
        for layer, records in enumerate(want):
            host_rows.load_rows(table, layer, pages - 1, host, there)
            records[pages - 1] = records[pages]
        wrong = sum(int((got != records).sum()) for got, records in zip(pool.records, want))
        if wrong:
            raise KVQuantError(
                f"copying pages to host memory and back is wrong: {wrong} bytes differ. Try another Triton release, "
                "and report this."
            )

    def restore(self) -> None:
        """Keeps a page's first token and restores the page's BF16 copy, and compares both bit by bit."""
        from sglang_kvq.attention.triton_ops import TritonOps
        from sglang_kvq.kernels.quantize.keep_sink_tokens import keep_sink_tokens

        pool, plain, pages = self._pool((PLANES,)), self._pool((PLANES,)), self._int64(0, 2)
        plain.bf16_pages.copy_(pool.bf16_pages.normal_())
        for mine, theirs in zip(pool.records, plain.records):
            theirs.copy_(mine.random_(256))
        for each in (pool, plain):
            each.page_slot[2] = 3
        cache, plain_cache = pool.sink_cache, plain.sink_cache
        if cache is None or plain_cache is None:
            raise KVQuantError("a pool with records of planes keeps no first tokens. Report this.")
        slots = self._int64(3)
        plain_cache.keep(pages[1:], pages[1:] > 0, plain.bf16_pages[:, slots, :, :, 0], plain.page_slot, 1)
        cache.entry.copy_(plain_cache.entry)
        keep_sink_tokens(slots, cache.entry[pages[1:]], self._int64(1), pool.bf16_pages, cache.tokens)
        TritonOps(pool, LayerRotations(), Q_HEADS, max_batch=1).restore_pages(pages)
        ReferenceOps(plain, LayerRotations()).restore_pages(pages)
        if not (torch.equal(pool.bf16_pages, plain.bf16_pages) and torch.equal(cache.tokens, plain_cache.tokens)):
            raise KVQuantError(
                f"restoring a page with keys in {PLANES.k.describe()} and values in {PLANES.v.describe()} differs from "
                "PyTorch's result. Try another Triton release, and report this."
            )

    def prefill(self, prefix: int, new: int) -> None:
        """Runs a chunk of ``new`` tokens through every layer, and compares the results."""
        direct = torch.from_numpy(direct_tokens([prefix], [new], SINK_PAGES, RECENT_PAGES)).to(self.device)
        loc = self.tiers.pool.req_to_token[1, prefix : prefix + new].long()
        direct_pages = {}
        batch = ExtendBatch(self._int64(1), [prefix], [new], loc, direct)
        for ops, tiers in ((self.ops, self.tiers), (self.reference, self.plain_tiers)):
            tiers.pending.free_rows([2])
            lens = (self._int64(prefix), self._int64(prefix + new))
            direct_pages[ops] = tiers.plan_extend(batch.rows, *lens, prefix, loc[direct] // PAGE_SIZE)
        for layer, format in enumerate(self.formats):
            given, outputs, scores = self._activations(new), [], []
            for ops in (self.reference, self.ops, self.direct):
                if ops is self.direct:  # shares its cache with ``self.ops``, which has written the tokens
                    q, k, v = ops.rotate(layer, *given)
                else:
                    q, k, v = ops.rotate_and_keep(layer, loc, *given)
                if prefix:
                    scores.append(self._scores(ops, layer, q, k, batch))
                outputs.append(ops.rotate_output(layer, ops.extend(layer, q, k, v, batch, SCALE, self.sinks)))
                if ops is not self.direct:
                    ops.quantize_tokens(layer, direct, direct_pages[ops], k, v)
            for name, output in zip(("prefill", "prefill without a workspace"), outputs[1:]):
                _compare(name, format, output, outputs[0])
            if prefix:
                _compare("scoring keys", format, scores[1], scores[0])

    def _scores(
        self, ops: AttentionOps, layer: int, q: torch.Tensor, k: torch.Tensor, batch: ExtendBatch
    ) -> torch.Tensor:
        """Returns the scores of all tokens except the batch's last page."""
        scores = KeyScores(len(self.formats), KV_HEADS, batch.prefix_lens[0] + len(q) - PAGE_SIZE, self.device)
        for part in plan_scoring(batch.prefix_lens, batch.new_lens, {0: scores}):
            ops.score_keys(layer, q, k, batch, part, SCALE)
        return scores.values[layer]

    def decode(self, length: int) -> None:
        """Runs one token through every layer, and compares the results. length: of the request with this token."""
        rows, lens = self._int64(1), self._int64(length)
        loc = self.tiers.pool.req_to_token[1, length - 1 : length].long()
        for ops, tiers in ((self.ops, self.tiers), (self.reference, self.plain_tiers)):
            tiers.plan_decode(rows, lens, length)
            ops.plan_attention(rows, lens)
        for layer, format in enumerate(self.formats):
            given, outputs = self._activations(1), []
            for ops in (self.ops, self.reference):
                q = ops.rotate_and_store(layer, loc, *given)
                outputs.append(ops.rotate_output(layer, ops.decode(layer, q, rows, lens, SCALE, self.sinks)))
            _compare("decode", format, *outputs)


def _compare(operation: str, format: RecordFormat, got: torch.Tensor, want: torch.Tensor) -> None:
    error = ((got.double() - want.double()).norm() / want.double().norm()).item()
    if not error <= BOUND:  # NaN too
        raise KVQuantError(
            f"{operation} over keys in {format.k.describe()} and values in {format.v.describe()} is wrong: relative "
            f"error {error:.2g} compared with PyTorch. Try another Triton release, and report this."
        )
