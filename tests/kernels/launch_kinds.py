"""Compares ``start_kernel`` with Triton's own launches for randomly drawn arguments; test_launch.py runs this script.

``no_gpu`` records which compiled kernel would run, and with which arguments. Triton looks the kernel up as it does on a
GPU. Triton always gets plain tuples, some of which are ``Fixed`` for ``start_kernel``.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvq.kernels.device import launch
from sglang_kvq.kernels.device.launch import Fixed, start_kernel
from sglang_kvq.kernels.device.shape import shape_of
from tests.kernels import no_gpu
from tests.kernels.no_gpu import STATE, noted

#: Number of launches that took a kernel found earlier.
STATE.repeats = 0


class Pair(NamedTuple):
    data: torch.Tensor
    stride: int


@triton.jit(do_not_specialize=["count"])
def _first(x, pair, pairs, count, number, scale, flag, KIND: tl.constexpr, SIZE: tl.constexpr):
    pass


@triton.jit(do_not_specialize=["count"])
def _second(x, pair, pairs, count, number, scale, flag, KIND: tl.constexpr, SIZE: tl.constexpr):
    pass


STORAGE = torch.zeros(256, dtype=torch.uint8)
assert STORAGE.data_ptr() % 16 == 0
KINDS = (shape_of(1, 64), shape_of(2, 64))

integers = st.sampled_from([0, 1, 2, 7, 16, 17, 32, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, -(2**31) - 1])
tensors = st.builds(
    lambda dtype, offset: STORAGE[offset : offset + 32].view(dtype),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64]),
    st.sampled_from([0, 16, 32, 8, 40]),
)
pairs = st.builds(Pair, tensors, integers)
arguments = (
    tensors | st.none(), pairs, st.tuples(pairs, tensors), integers, integers,
    st.sampled_from([0.5, 1.0, 2.0]), st.booleans() | st.just(1),
)  # fmt: skip
PAIR, PAIRS = 1, 2  # indices of the tuples
options = {"KIND": st.sampled_from(KINDS), "SIZE": st.sampled_from([1, 16, 17]), "num_warps": st.sampled_from([4, 8])}


grids = st.sampled_from([(3,), (3, 5), (3, 5, 7)])


@st.composite
def launches(draw: Any) -> list[tuple[Any, ...]]:
    """Draws three launches: the second changes one argument or option of the first, and the third repeats the first.

    A launch is the kernel, the device, the arguments, the options, and the indices of tuples that are ``Fixed``.
    """
    drawn = [draw(strategy) for strategy in arguments]
    chosen = {name: draw(strategy) for name, strategy in options.items()}
    other, changed = list(drawn), dict(chosen)
    which = draw(st.integers(0, len(arguments)) | st.sampled_from(list(options)))
    if which == len(arguments):
        del changed["num_warps"]
    elif isinstance(which, str):
        changed[which] = draw(options[which])
    else:
        other[which] = draw(arguments[which])
    kernels, fixed = st.sampled_from([_first, _second]), st.sets(st.sampled_from([PAIR, PAIRS]))
    first = (draw(kernels), 0, drawn, chosen, draw(fixed))
    return [first, (draw(kernels), draw(st.integers(0, 1)), other, changed, draw(fixed)), first]


@settings(max_examples=800, deadline=None, database=None, derandomize=True)
@given(launches(), grids)
def compare(several: list[tuple[Any, ...]], grid: tuple[int, ...]) -> None:
    for kernel, STATE.device, drawn, chosen, fixed in several:
        before = sum(len(compiled) for _, compiled in launch._known.values())
        noted.clear()
        start_kernel(kernel, grid, *[Fixed(x) if i in fixed else x for i, x in enumerate(drawn)], **chosen)
        STATE.repeats += sum(len(compiled) for _, compiled in launch._known.values()) == before
        kernel[grid](*drawn, **chosen)
        assert len(noted) == 2 and all(a is b or a == b for a, b in zip(*noted)), noted


def check_hooks() -> None:
    """Checks that a kernel's hooks see each of its launches."""
    seen: list[tuple[Any, ...]] = []
    call = (_first, (1,), STORAGE, Fixed(Pair(STORAGE, 1)), (Pair(STORAGE, 1), STORAGE), 1, 1, 0.5, False)
    start_kernel(*call, KIND=KINDS[0], SIZE=1)
    hook = lambda *args, **kwargs: seen.append(args)  # noqa: E731
    _first.add_pre_run_hook(hook)
    for _ in range(2):
        start_kernel(*call, KIND=KINDS[0], SIZE=1)
    _first.pre_run_hooks.remove(hook)
    assert len(seen) == 2, seen


def check_tensors_are_freed() -> None:
    """Checks that neither known launches nor the kinds of a tuple keep its tensors."""
    tensor = torch.zeros(16)
    fixed, freed = Fixed(Pair(tensor, 1)), weakref.ref(tensor)
    for _ in range(2):
        start_kernel(_first, (1,), STORAGE, fixed, (fixed.fields, STORAGE), 1, 1, 0.5, False, KIND=KINDS[0], SIZE=1)
    kinds = fixed.kinds
    noted.clear()
    del tensor, fixed
    assert freed() is None and hash(kinds)


def main() -> None:
    no_gpu.install()
    compare()
    check_hooks()
    check_tensors_are_freed()
    found = sum(len(cache[0]) for kernel in (_first, _second) for cache in kernel.device_caches.values())
    print(f"{STATE.repeats} repeats, {found} compiled kernels")


main()
