"""Constants and device functions that several kernels share.

Triton's interpreter (``TRITON_INTERPRET=1``, kernels on a CPU) holds bfloat16 as raw integers, rounds
towards zero and has no inline assembly; ``dot``, ``to_bf16`` and branches on PLAIN hide that. A branch that
returns is followed by an ``else``, as the compiler would compile what follows it anyway.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from sglang_kvq.config import PAGE_SIZE

#: Whether kernels run in Triton's interpreter: decided when this module is imported.
INTERPRETED = bool(triton.knobs.runtime.interpret)

PAGE = tl.constexpr(PAGE_SIZE)
_PLAIN = tl.constexpr(INTERPRETED)


@triton.jit
def to_bf16(x):
    """float32 to BF16, to nearest even."""
    if _PLAIN:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def dot(a, b, acc):
    """acc + a b on tensor cores, BF16 operands and float32 sums."""
    if _PLAIN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc)


@dataclass(frozen=True)
class Overlap:
    """How a launch overlaps its neighbours on the stream (programmatic dependent launch, see ``can_overlap``).

    Attributes:
        early: it may start while the one before it runs, and waits before it reads what that one writes.
        lets_next: the next one may start before this one has ended, if it is early.
    """

    early: bool = False
    lets_next: bool = False


NO_OVERLAP = Overlap()


def can_overlap(device: torch.device) -> bool:
    """Whether a launch there may start before the one ahead of it has ended (programmatic dependent launch, Hopper)."""
    return device.type == "cuda" and _is_hopper(device)


def has_pairs(device: torch.device) -> bool:
    """Whether an instruction there works on two BF16 numbers (``pairs``): Hopper.

    For a CPU kernels are only compiled, for one.
    """
    return not INTERPRETED and (device.type != "cuda" or _is_hopper(device))


@cache
def _is_hopper(device: torch.device) -> bool:
    """Or newer."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def page_of(table, index):
    """Page id of a request's ``index``-th page; ``table`` points at its row of ``row_pages``."""
    return tl.load(table + index).to(tl.int64)


@triton.jit
def quad_order(n):
    """Of every four in a row the second and the third change places, as where a word's bytes 0 and 2 come out first."""
    return n // 4 * 4 + n % 2 * 2 + n % 4 // 2


@triton.jit
def key_row(token):
    """Row of a record's K codes that holds a token of its page: the inverse of ``formats.page.KEY_TOKENS``."""
    return token // 16 * 16 + token % 2 * 8 + token % 16 // 2
