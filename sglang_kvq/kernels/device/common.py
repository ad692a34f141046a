"""Constants and device functions that several kernels share.

Triton's interpreter (``TRITON_INTERPRET=1``, kernels on a CPU) holds bfloat16 as raw integers, rounds towards zero and
has no inline assembly; ``dot``, ``to_bf16`` and branches on PLAIN hide that. A branch that returns is followed by an
``else``, because the compiler would compile the code after it anyway.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from sglang_kvq.constants import PAGE_SIZE

#: True if kernels run in Triton's interpreter: decided when this module is imported.
INTERPRETED = bool(triton.knobs.runtime.interpret)

PAGE = tl.constexpr(PAGE_SIZE)
_PLAIN = tl.constexpr(INTERPRETED)


@triton.jit
def to_bf16(x):
    """Converts float32 to BF16, to nearest even."""
    if _PLAIN:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def dot(a, b, acc):
    """Returns acc + a b on tensor cores, BF16 operands and float32 sums."""
    if _PLAIN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc)


@dataclass(frozen=True)
class Overlap:
    """Overlap of a launch with its neighbors on the stream (programmatic dependent launch, see ``can_overlap``).

    Attributes:
        early: this launch may start while the previous one runs, and waits before it reads that one's results.
        lets_next: the next launch may start before this one has ended, if the next one is ``early``.
    """

    early: bool = False
    lets_next: bool = False


NO_OVERLAP = Overlap()


def can_overlap(device: torch.device) -> bool:
    """Tells if a launch may start before the previous one has ended (programmatic dependent launch, Hopper)."""
    return device.type == "cuda" and _is_hopper(device)


def has_pairs(device: torch.device) -> bool:
    """Tells if one instruction works on two BF16 numbers (``bf16_pairs``): Hopper.

    True for a CPU without the interpreter: kernels are then only compiled, for Hopper.
    """
    return not INTERPRETED and (device.type != "cuda" or _is_hopper(device))


@cache
def _is_hopper(device: torch.device) -> bool:
    """Tells if the device is Hopper or newer."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def page_of(table, index):
    """Returns the page id of a request's ``index``-th page; ``table`` points at its row of ``row_pages``."""
    return tl.load(table + index).to(tl.int64)


@triton.jit
def quad_order(n):
    """Swaps the second and third of every four numbers, as if a word's bytes 0 and 2 were extracted before 1 and 3."""
    return n // 4 * 4 + n % 2 * 2 + n % 4 // 2


@triton.jit
def key_row(token):
    """Returns the row of a record's K codes that holds a token: the inverse of ``formats.page.KEY_TOKENS``."""
    return token // 16 * 16 + token % 2 * 8 + token % 16 // 2
