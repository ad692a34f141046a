"""Compiles the kernels that attention operations launch for an H100 or H200 (sm_90), on any machine and without a GPU.

    python tests/kernels/compile_sm90.py [--all] [--sass=SCENE] [--arch=N] [PART ...]

Triton's interpreter accepts programs that the compiler refuses, so tests run this script too. It compiles every kernel
for one geometry, kernels that touch records for some kinds of codes, and decoding for some more geometries; with
``--all``, everything that tests use. For each kernel it prints registers, bytes of stack (spills), shared memory and
instructions, and how many instructions load less than 4 bytes, are warpgroup products, or wait for such products. A
kernel that another launch has already compiled is not shown again. Each of ``PARTS`` can be compiled alone. Once Triton
has cached its kernels, disassembling takes as long as everything else: ``--sass`` limits it to one scene, named as it
is printed, and ``--sass=none`` skips it.

Fails if an SM cannot hold as many programs as a launch assumes (``programs_per_sm``), given the registers and the
shared memory that the compiler assigns. Decode launches are planned as a starting server plans them: after their
kernels are compiled. Fails, too, if a program needs more shared memory than one can have.

``--arch=80`` compiles for another compute capability, here 8.0, with the options that such a GPU gets. The number of
programs on an SM is then checked only for decoding: other launches are chosen for Hopper's.

Another Triton release needs no environment: put its folder ahead of the installed release.

    python -m pip install --no-deps --target /tmp/triton-3.6 triton==3.6.0
    PYTHONPATH=/tmp/triton-3.6 python tests/kernels/compile_sm90.py
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from sglang_kvq.attention import triton_ops, verification
from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.attention.drafts import DraftBatch, chain
from sglang_kvq.attention.planning.short_extend import ShortExtends
from sglang_kvq.attention.scores.scoring import KeyScores, plan_scoring
from sglang_kvq.attention.triton_ops import TritonOps
from sglang_kvq.cache.host_pages import HostLayout
from sglang_kvq.cache.triton_tiers import TritonTierManager
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.planes import PlaneCode, PlaneFormat
from sglang_kvq.kernels.decode.decode_attention import DecodeLaunch
from sglang_kvq.kernels.decode.learned_sinks import scale_by_sinks
from sglang_kvq.kernels.device import launch as device_launch
from sglang_kvq.kernels.device.codes import PlaneRecord, Record, record_of
from sglang_kvq.kernels.extend.append_tokens import append_tokens
from sglang_kvq.kernels.extend.extend_attention import extend as triton_extend
from sglang_kvq.kernels.extend.extend_attention import is_cheap
from sglang_kvq.kernels.quantize import quantize_pages
from sglang_kvq.kernels.quantize.fold_tokens import fold_pages
from sglang_kvq.kernels.quantize.keep_sink_tokens import keep_sink_tokens
from sglang_kvq.kernels.tiers import host_rows
from tests.kernels import scene as scenes
from tests.kernels.test_decode import HALF_HEADS
from tests.kernels.test_formats import KINDS, make_format
from tests.leaving import leave

#: Kinds of codes that together take every branch.
SOME = ("oscar-lloyd-max", "lloyd-max-4-3-g32", "uniform-3-3", "sphere-4-3", "channel-2", "centred-4")
#: Widths of planes: two bits, the widest, planes without bits, halves and quarters of bytes. Only the first is compiled
#: without ``--all``.
PLANES = ("4321-2211", "6532-5443", "6420-2110", "3210-4321", "5300-4200")
#: Widths that ``choose_widths`` gives layers of the models in ``rotation_zoo``, from 4 to 1.25 bits, the widest first.
PRODUCTION = ("6442-6442", "6532-5443", "6321-4332", "5320-4321", "5210-3210", "4110-2110", "3100-2000", "2000-2000")
#: Geometries (head_dim, query heads per KV head, KV heads) that together use every launch of ``decode_launch``.
DECODED = [(64, 3, 1), (64, 12, 1), (96, 4, 1), (96, 6, 1), (96, 12, 1), (128, 4, 1), (128, 6, 1), (128, 12, 2),
           (128, 12, 1), (256, 4, 1), (256, 8, 1), (256, 12, 1)]  # fmt: skip
#: Codes with which an SM may hold fewer programs for heads of 96 or 256 than ``decode_launch`` wants.
LARGE = ("centred-4", "channel-4", "lloyd-max", "uniform-3-3", "uniform-4-2")
#: Decode launches compiled without ``--all``: two-bit codes for each head_dim that models have, and one of planes.
#: ``compile_all`` compiles the launch of 4 heads of 128.
SOME_DECODED = [((64, 12, 1), None), ((96, 4, 1), None), ((128, 12, 1), None), ((128, 4, 1), "5320-4321"),
                ((256, 4, 1), "centred-4")]  # fmt: skip
#: Limits of one SM: bytes of shared memory that each program reserves, and registers.
PROGRAM_BYTES, SM_REGISTERS = 1024, 65536
#: Bytes of shared memory that one program can have, by compute capability (CUDA C++ Programming Guide). An SM has as
#: many, and ``PROGRAM_BYTES``.
MOST_SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
#: Launches that decode with products in FP16. ``decode_launch`` returns the first, apart from its costs. Without
#: ``--all`` only that one is compiled.
HALF_LAUNCHES = [DecodeLaunch(4, 168, 12, 1), DecodeLaunch(3, 255, 8, 2)]
ANY = ShortExtends(costs=None, most_rows_unpacked=1 << 20, least_prefix=0)
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


#: State of the run: the target; the scene being compiled; the scene to disassemble (None for all); registers of the
#: kernels shown, by their hashes; the programs per SM that the current launch assumes (None if it assumes nothing);
#: whether to check that number; and the shared memory of the last decode kernel.
STATE = SimpleNamespace(
    target=GPUTarget("cuda", 90, 32), scene="", disassembled=None, shown={}, planned=None, checked=True, decode=0
)


def begin(scene: str) -> None:
    """Prints a scene's name; kernels compiled from now on belong to that scene."""
    STATE.scene = scene
    print(scene, flush=True)


def type_of(value: object, general: bool = False) -> str | tuple:
    """Returns the signature entry of a launch argument; ``general`` does not specialize the value 1."""
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, tuple):
        return _same(value, [type_of(x, general) for x in value])
    if isinstance(value, float):
        return "fp32"
    return "constexpr" if value == 1 and not general else "i32" if abs(value) < 2**31 else "i64"


def _same(kind: tuple, values: list) -> tuple:
    """Returns ``values`` as a tuple of the type of ``kind``, which may be a named tuple."""
    return type(kind)(*values) if hasattr(kind, "_fields") else tuple(values)


def leaves(value: object, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], object]]:
    """Yields the path and value of an argument or, if it is a tuple, of every value in it."""
    if isinstance(value, tuple):
        for i, x in enumerate(value):
            yield from leaves(x, (*path, i))
    else:
        yield path, value


def check_operands(name: str, ttgir: str) -> None:
    """Checks that no operand of ``mma`` is laid out for more columns than it has: 4 lanes share a row.

    Triton 3.6 does this to byte codes that are joined before their product. The product is then wrong, but only on a
    GPU.
    """
    operands = r"(\d+)x(\d+)x\w+, #ttg\.dot_op<\{opIdx = ([01]), parent = #mma\d*, kWidth = (\d+)\}>"
    for rows, columns, index, width in set(re.findall(operands, ttgir)):
        k = int(rows if index == "1" else columns)
        assert k >= 4 * int(width), f"{name}: operand {index} of {rows} x {columns} is laid out for {width} x 4 of K"


def check_copies(name: str, ttgir: str) -> None:
    """Checks that rows of words lie in shared memory as they do in the record, one after the other.

    Triton 3.8 interleaves the rows of two pages if pages are an axis of their own. Loops then take longer.
    """
    orders = dict(re.findall(r"^#(shared\d*) = #ttg\.swizzled_shared<\{.*order = \[([\d, ]+)\]", ttgir, re.MULTILINE))
    for shape, shared in set(re.findall(r"async_copy_global_to_local .*-> <([\dx]+)xi16, #(shared\d*)", ttgir)):
        order = [int(axis) for axis in orders[shared].split(", ")]
        assert order == sorted(order, reverse=True), f"{name}: axes of {shape} are in the order {order}"


def check_vectors(name: str, ptx: str) -> None:
    """Checks that rows go to and from host memory 16 bytes at a time, so that the bus carries whole requests."""
    if name == "_copy_rows":
        moved = re.findall(r"(ld|st)\.global\S*?(\.v\d)?\.b32", ptx)
        assert {("ld", ".v4"), ("st", ".v4")} == set(moved), f"{name}: moves {moved}"


def sm_bytes() -> int:
    """Returns the bytes of shared memory of the target's SMs."""
    return MOST_SHARED[STATE.target.arch] + PROGRAM_BYTES


def check_occupancy(name: str, registers: int, shared: int, warps: int, planned: int) -> None:
    """Checks that an SM holds as many programs as the plan assumes; else some wait for a second wave."""
    by_registers = SM_REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    by_memory = sm_bytes() // (shared + PROGRAM_BYTES)
    assert min(by_registers, by_memory) >= planned, (
        f"{STATE.scene}: {planned} programs of {name} are planned on an SM, which holds {by_memory} with {shared} "
        f"bytes of shared memory and {by_registers} with {registers} registers"
    )


def counted_on(function):
    """Wraps a function that launches a kernel as its argument ``launch`` says, so that its occupancy is checked.

    Extends over records without fitted costs (not ``is_cheap``) are not checked: an SM holds only one or two of their
    programs where the launch assumes three.
    """

    def run(*args, launch, **kwargs):
        record, head_dim = next(x for x in args if isinstance(x, (Record, PlaneRecord))), args[0].shape[-1]
        of_extend = STATE.target.arch == 90 and is_cheap(record, head_dim)
        counts = STATE.checked and (function is not triton_extend or of_extend)
        STATE.planned = launch.programs_per_sm if counts else None
        try:
            return function(*args, launch=launch, **kwargs)
        finally:
            STATE.planned = None

    return run


def decode(ops: TritonOps, launch: Callable[[], object], drafts: int = 0) -> None:
    """Compiles a launch of decoding, plans it as a starting server does, and checks the plan.

    A server does this in ``compile_kernels.fit_programs``.
    """
    STATE.checked = False
    launch()
    STATE.checked = True
    ops.fit_programs([STATE.decode] * ops.pool.layers, drafts)
    launch()


def compile_launch(self, *args, grid, warmup=False, **kwargs) -> None:
    """Replaces ``JITFunction.run``: compiles for the target and prints a line."""
    given = dict(zip(self.arg_names, args)) | {k: v for k, v in kwargs.items() if k in self.arg_names}
    constants = {p.name for p in self.params if p.is_constexpr}
    options = {k: v for k, v in kwargs.items() if k not in self.arg_names}
    general = {p.name for p in self.params if p.do_not_specialize}
    unaligned = general | {p.name for p in self.params if p.do_not_specialize_on_alignment}
    signature = {n: "constexpr" if n in constants else type_of(given[n], n in general) for n in self.arg_names}
    constexprs, aligned = {}, []
    for i, n in enumerate(self.arg_names):
        if n in constants:
            constexprs[(i,)] = given[n]
            continue
        for path, value in leaves(given[n], (i,)):
            kind = type_of(value, n in general)
            if kind == "constexpr":
                constexprs[path] = value
            elif n not in unaligned and (kind[0] == "*" or (kind[0] == "i" and value % 16 == 0)):
                aligned.append(path)
    source = ASTSource(
        fn=self,
        signature=signature,
        constexprs=constexprs,
        attrs={path: [["tt.divisibility", 16]] for path in aligned},
    )
    kernel = triton.compile(source, target=STATE.target, options=options)
    check_operands(self.__name__, kernel.asm["ttgir"])
    check_copies(self.__name__, kernel.asm["ttgir"])
    check_vectors(self.__name__, kernel.asm["ptx"])
    assert kernel.metadata.shared <= MOST_SHARED[STATE.target.arch], f"{STATE.scene}: {self.__name__}"
    if self.__name__ == "_decode":
        STATE.decode = kernel.metadata.shared
    if kernel.hash not in STATE.shown:
        STATE.shown[kernel.hash] = show(self.__name__, kernel, options)
    if STATE.planned is not None:
        registers, shared = STATE.shown[kernel.hash], kernel.metadata.shared
        check_occupancy(self.__name__, registers, shared, options["num_warps"], STATE.planned)


def show(name: str, kernel: CompiledKernel, options: dict[str, object]) -> int:
    """Prints a compiled kernel's line; returns its registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        sass = ["-sass"] if STATE.disassembled in (None, STATE.scene) else []
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", *sass, file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", code)[-1]
    operations = re.findall(r"/\*[0-9a-f]{4,5}\*/ +(?:@!?U?P\w+ +)?([A-Z0-9_.]+)", code)
    narrow = sum(bool(re.match(r"LDG\.E\.[US](8|16)", x)) for x in operations)
    products, waits = (sum(x.startswith(name) for x in operations) for name in ("HGMMA", "WARPGROUP.DEPBAR"))
    launch = " ".join(f"{k}={v}" for k, v in options.items())
    found = f"instructions {len(operations):>5}  narrow loads {narrow:>3}  products {products:>3}  waits {waits:>3}  "
    print(
        f"  {name:18} registers {registers:>3}  stack {stack:>4}  shared {kernel.metadata.shared:>6}  "
        f"{found if sass else ''}{launch}",
        flush=True,
    )
    return int(registers)


def compile_all(heads: scenes.Heads) -> None:
    """Compiles every operation once."""
    begin(str(heads))
    scene = scenes.make_scene(heads, [200, 90])
    ops, _ = scene.ops(scenes.rotations("per-head", heads))
    q, k, v = (scenes.randn(130, n, heads.head_dim) for n in (heads.q, heads.kv, heads.kv))
    loc, pages = torch.arange(130), scenes.int64(1)
    ops.rotate(0, q, k, v)
    ops.store_tokens(0, loc, k, v)
    ops.quantize_tokens(0, scenes.int64(2), pages, k, v)
    ops.quantize_slots(pages, pages, pages)
    ops.plan_attention(scene.rows, scene.seq_lens)
    ops.rotate_and_store(0, loc, q, k, v)
    ops.rotate_and_keep(0, loc, q, k, v)
    ops.keep_tokens(0, loc, k, v)
    append_tokens((k.contiguous(), v.contiguous()), loc.int(), (k, v))
    decode(ops, partial(ops.decode, 0, q[:2], scene.rows, scene.seq_lens, scene.scale))
    extend_both_ways(ops, q, k, v, scene)
    fold(scene.pool)
    verify(ops, q, scene)


def restore(ops) -> None:
    """Compiles the kernels that keep first tokens and restore BF16 pages, if this pool's records ask for them."""
    pool = ops.pool
    if pool.sink_cache is not None:
        one = scenes.int64(1)
        keep_sink_tokens(one, one.int(), one, pool.bf16_pages, pool.sink_cache.tokens)
        ops.restore_pages(one.int())


def fold(pool) -> None:
    """Compiles the kernel that moves tokens to other pages, for stores whose format supports it."""
    for store in pool.stores:
        if store.format.per_token:
            pages, tokens = scenes.int64(1), torch.zeros(pool.layers, pool.kv_heads, 64, dtype=torch.int64)
            record = record_of(store.format)
            fold_pages(store.records, record, store.layer_ids, pages, pages, tokens, pool.head_dim)


def verify(ops, q, scene, count: int = 3) -> None:
    """Compiles the verification of drafts, as a scene of its own."""
    begin(f"{count} drafts, {scene.heads}")
    drafts = DraftBatch(scene.rows, scene.seq_lens, chain(count).expand(2, -1).contiguous())
    ops.plan_drafts(drafts)
    decode(ops, partial(ops.verify, 0, q[: 2 * count], drafts, scene.scale), count)


def extend_both_ways(ops, q, k, v, scene, sinks=None) -> None:
    """Compiles extends that dequantize the prefix first, extends that read pages directly, and scores of keys."""
    lens = [(128, 100), (64, 30)]
    for short in (None, ANY):
        ops.short = short
        ops.extend(0, q, k, v, scenes.make_batch(scene.rows, lens), scene.scale, sinks)
    batch, scores = scenes.make_batch(scene.rows, lens), KeyScores(1, k.shape[1], 150, "cpu")
    (part,) = plan_scoring(batch.prefix_lens, batch.new_lens, {0: scores})
    ops.score_keys(0, q, k, batch, part, scene.scale)


def compile_sinks() -> None:
    """Compiles the kernels that take learned sinks, with gpt-oss's heads."""
    heads = scenes.Heads(64, 64, 1, 8)
    begin(f"sinks, {heads}")
    scene = scenes.make_scene(heads, [200, 90])
    ops, _ = scene.ops()
    q, k, v = (scenes.randn(130, n, heads.head_dim) for n in (heads.q, heads.kv, heads.kv))
    sinks = torch.zeros(heads.q, dtype=torch.bfloat16)
    decode(ops, partial(ops.decode, 0, q[:2], scene.rows, scene.seq_lens, scene.scale, sinks))
    extend_both_ways(ops, q, k, v, scene, sinks)
    scale_by_sinks(q, torch.zeros(q.shape[:2]), sinks)


def compile_records(kind: str, head_dim: int = 128) -> None:
    """Compiles the kernels that write and read records of one kind of codes, or of planes such as 4310-3221."""
    heads = scenes.Heads(head_dim, min(head_dim, 128), 2, 4)
    begin(f"{kind}, {heads}")
    scene = scenes.make_scene(heads, [200, 90], formats=[format_of(kind, head_dim)])
    ops, _ = scene.ops()
    q, k, v = (scenes.randn(130, n, heads.head_dim) for n in (heads.q, heads.kv, heads.kv))
    pages = scenes.int64(1)
    ops.quantize_tokens(0, scenes.int64(2), pages, k, v)
    ops.quantize_slots(pages, pages, pages)
    decode(ops, partial(ops.decode, 0, q[:2], scene.rows, scene.seq_lens, scene.scale))
    extend_both_ways(ops, q, k, v, scene)
    fold(scene.pool)
    restore(ops)
    verify(ops, q, scene)


def format_of(kind: str, head_dim: int) -> PageFormat | PlaneFormat:
    if kind in KINDS:
        return make_format(kind, head_dim)
    k, v = (PlaneCode((int(w[0]), int(w[1]), int(w[2]), int(w[3]))) for w in kind.split("-"))
    return PlaneFormat(head_dim, k, v)


def compile_half(heads: scenes.Heads, kind: str | None = None, launches: list[DecodeLaunch] = HALF_LAUNCHES) -> None:
    """Compiles decoding with products in FP16; for planes, with the launch that serves them."""
    begin(f"FP16, {kind or ''} {heads}")
    formats = [format_of(kind, heads.head_dim)] if kind else None
    scene = scenes.make_scene(heads, [200, 90], formats=formats)
    for launch in [None] if kind else launches:
        ops = TritonOps(scene.pool, LayerRotations(), heads.q, 2, launch=launch)
        q = scenes.randn(2, heads.q, heads.head_dim)
        decode(ops, partial(ops.decode, 0, q, scene.rows, scene.seq_lens, scene.scale))


def compile_tiers(kind: str | None = None) -> None:
    """Compiles the kernels that plan the tiers, for a prefill and a decode step; planes also keep first tokens."""
    begin(f"tiers{f', {kind}' if kind else ''}")
    formats = [format_of(kind, 128)] if kind else None
    scene = scenes.make_scene(scenes.HEADS[1], [200, 90], formats=formats)
    tiers = TritonTierManager(scene.pool, 1, 4, lambda *batch: None, lambda pages: None)
    tiers.pending.free_rows([2])
    tiers.plan_extend(scene.rows, scene.seq_lens - 10, scene.seq_lens, 200, scene.rows[:1])
    tiers.plan_decode(scene.rows, scene.seq_lens, 200)
    copy_to_host(scene.pool)


def copy_to_host(pool) -> None:
    """Compiles the copies of records to host memory and back; one kernel serves every kind of records."""
    layout, page = HostLayout(pool), scenes.int64(1)
    host = torch.zeros(2, layout.page_bytes, dtype=torch.uint8)
    table = host_rows.row_table(pool.records, layout.offsets)
    host_rows.gather_rows(table, page, host, page)
    host_rows.load_rows(table, 0, page, host, page)


def geometries(all_of_them: bool) -> None:
    for heads in scenes.HEADS if all_of_them else scenes.HEADS[1:2]:
        compile_all(heads)
    compile_sinks()
    for heads in HALF_HEADS if all_of_them else HALF_HEADS[:1]:
        compile_half(heads, launches=HALF_LAUNCHES if all_of_them else HALF_LAUNCHES[:1])
    compile_tiers()


def codes(all_of_them: bool) -> None:
    for kind in KINDS if all_of_them else SOME:
        compile_records(kind)


def planes(all_of_them: bool) -> None:
    for widths in PLANES if all_of_them else PLANES[:1]:
        compile_records(widths)
    for head_dim in (64, 96, 256) if all_of_them else ():
        compile_records(PLANES[0], head_dim)
    halves = (scenes.Heads(128, 128, 1, 8), scenes.Heads(128, 128, 1, 16), scenes.Heads(64, 64, 1, 8))
    for heads in halves if all_of_them else halves[:1]:
        compile_half(heads, PLANES[0])
    compile_tiers(PLANES[0])


def launches(all_of_them: bool) -> None:
    """Compiles decoding with the launches that serve it, for every geometry and widths from wide to narrow."""
    every = (*product(DECODED, (None, *PRODUCTION)), *product([(96, 4, 1), (256, 4, 1), (256, 16, 1)], LARGE))
    for (head_dim, group, kv_heads), kind in every if all_of_them else SOME_DECODED:
        heads = scenes.Heads(head_dim, min(head_dim, 128), kv_heads, group)
        begin(f"as launched, {kind or 'two bits'}, {heads}")
        scene = scenes.make_scene(heads, [200, 90], formats=[format_of(kind, head_dim)] if kind else None)
        ops = TritonOps(scene.pool, LayerRotations(), heads.q, 2)
        q = scenes.randn(2, heads.q, head_dim)
        decode(ops, partial(ops.decode, 0, q, scene.rows, scene.seq_lens, scene.scale))


#: Parts that take about equally long.
PARTS = {"geometries": geometries, "codes": codes, "planes": planes, "launches": launches}


def main() -> None:
    triton.runtime.jit.JITFunction.run = compile_launch
    device_launch.searches = True
    triton_ops.INTERPRETED = True  # lets the backend run on CPU tensors; the kernels are not interpreted
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--all", action="store_true", help="everything that tests use")
    parser.add_argument("--sass", metavar="SCENE", help="the only scene to disassemble; none for none")
    parser.add_argument("--arch", type=int, choices=MOST_SHARED, default=90, help="compute capability times ten")
    args = parser.parse_args()
    STATE.target, STATE.disassembled = GPUTarget("cuda", args.arch, 32), args.sass
    triton_ops.can_overlap = quantize_pages.has_pairs = lambda device: args.arch >= 90
    triton_ops.shared_memory = lambda device: sm_bytes()
    triton_ops.decode, verification.decode = counted_on(triton_ops.decode), counted_on(verification.decode)
    triton_ops.extend = counted_on(triton_ops.extend)
    print(f"triton {triton.__version__}")
    for name in args.parts or PARTS:
        PARTS[name](args.all)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    leave()
