"""What a quantization method declares. Data only: pools, pages and kernels are shared."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum

from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.code import INT2, CodeFormat

_AUTO = "auto:"

#: What ``--kv-quant-bits`` may be where pages are planes: allocated bits per element. Below, not every row has a code.
PLANE_BITS = (1.25, 4.0)


class RotationKind(Enum):
    """Where a method's rotations of the head dimension come from."""

    NONE = "none"  #: the identity
    HADAMARD = "hadamard"  #: a fixed orthonormal transform, needs no data
    RANDOM = "random"  #: drawn per layer and KV head from ``--kv-quant-seed``, needs no data
    LEARNED = "learned"  #: a calibrated file per model (rotation_zoo, ``--kv-quant-rotations``)


@dataclass(frozen=True)
class Width:
    """What ``--kv-quant-bits`` says.

    Attributes:
        bits: of a code, keys and values averaged; a half goes to the keys. Of planes: allocated for an element, gains
            included, averaged over keys, values and layers.
        target: for ``auto:TARGET``, the allocated record bits per element that layers of 2 to 4 bits may average.
    """

    bits: float
    target: float | None = None


@dataclass(frozen=True)
class Method:
    """A way to store the history of the KV cache.

    Attributes:
        name: the value of ``--kv-quant``; its module's name with dashes for underscores.
        summary: one line for ``--help`` and the docs.
        paper: where it comes from.
        rotation: which rotations it needs.
        clip_k, clip_v: default clip quantiles of INT2 codes (see ``KVQuantConfig``); 1 clips nothing.
        k, v: how keys and values are coded, at the default width; means nothing with ``planes``.
        widths: what ``--kv-quant-bits`` may say, the default first; with ``planes`` the default.
        mixed: whether it may also say ``auto:TARGET`` (needs rotations with layer sensitivities).
        group_sizes: what ``--kv-quant-group-size`` may say; empty: the method shares no scale within a row.
        planes: whether pages are ``PlaneFormat``, their widths chosen by ``--kv-quant-bits``, which is then any number
            in ``PLANE_BITS``, and what the rotations' file says of its channels' energies (so they must be learned).
    """

    name: str
    summary: str
    paper: str
    rotation: RotationKind
    clip_k: float = 1.0
    clip_v: float = 1.0
    k: CodeFormat = field(default=INT2)
    v: CodeFormat = field(default=INT2)
    widths: tuple[float, ...] = (2,)
    mixed: bool = False
    group_sizes: tuple[int, ...] = (32, 64, 96, 128)
    planes: bool = False

    @property
    def moves_tokens(self) -> bool:
        """Whether tokens can be moved to other pages as they are stored (``RecordFormat.per_token``)."""
        return self.planes or (self.k.per_token and self.v.per_token)

    def width(self, text: str | None) -> Width:
        """What ``--kv-quant-bits`` means for this method; None is the default.

        Raises:
            KVQuantError: not a width of this method; names those it has.
        """
        if text is None:
            return Width(self.widths[0])
        number = _number(text.removeprefix(_AUTO))
        if self.planes:
            low, high = PLANE_BITS
            if number is None or text.startswith(_AUTO) or not low <= number <= high:
                raise KVQuantError(
                    f"--kv-quant-bits {text}: --kv-quant {self.name} allocates any number of bits per element from "
                    f"{low:g} to {high:g}, gains included; give one, or leave the flag out for {self.widths[0]:g}."
                )
            return Width(number)
        if self.mixed and text.startswith(_AUTO) and number is not None:
            return Width(self.widths[0], number)
        if number not in self.widths or text.startswith(_AUTO):
            known = [f"{w:g}" for w in sorted(self.widths)]
            if len(known) > 1 or self.mixed:
                fix = f"choose {', '.join(known)}" + (" or auto:TARGET, such as auto:2.75" if self.mixed else "")
            else:
                fix = f"it has {known[0]} bits only; leave the flag out"
            raise KVQuantError(f"--kv-quant-bits {text}: not a width of --kv-quant {self.name}; {fix}.")
        return Width(number)

    def codes(self, bits: float) -> tuple[CodeFormat, CodeFormat]:
        """Codes of keys and of values at a width: keys take what is left of a half.

        Raises:
            ValueError: pages are planes: ``rotations.resolve`` has their codes.
        """
        if self.planes:
            raise ValueError(f"{self.name} has planes, which are chosen for each layer")
        return replace(self.k, bits=math.ceil(bits)), replace(self.v, bits=math.floor(bits))


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
