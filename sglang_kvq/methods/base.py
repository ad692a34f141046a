"""Declaration of a quantization method: data only, because pools, pages and kernels are shared."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum

from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.code import INT2, CodeFormat

_AUTO = "auto:"

#: Range of ``--kv-quant-bits`` for planes, in allocated bits per element. Below it some rows would have no code.
PLANE_BITS = (1.25, 4.0)


class RotationKind(Enum):
    """Source of a method's rotations of the head dimension."""

    NONE = "none"  #: the identity
    HADAMARD = "hadamard"  #: a fixed orthonormal transform, needs no data
    RANDOM = "random"  #: drawn per layer and KV head from ``--kv-quant-seed``, needs no data
    LEARNED = "learned"  #: a calibrated file per model (rotation_zoo, ``--kv-quant-rotations``)


@dataclass(frozen=True)
class Width:
    """The parsed value of ``--kv-quant-bits``.

    Attributes:
        bits: bits of a code, averaged over keys and values; an extra half bit goes to the keys. For planes: allocated
            bits per element, gains included, averaged over keys, values and layers.
        target: for ``auto:TARGET``: the most allocated record bits per element that layers of 2 to 4 bits may average.
    """

    bits: float
    target: float | None = None


@dataclass(frozen=True)
class Method:
    """A way to store the history of the KV cache, named by ``--kv-quant``.

    Attributes:
        name: the value of ``--kv-quant``; underscores replace its dashes in the module's name.
        summary: one line for ``--help`` and the docs.
        paper: the publication that the method comes from, or a name for the technique.
        rotation: the kind of rotations that the method needs.
        clip_k, clip_v: default clip quantiles of INT2 codes (see ``KVQuantConfig``); 1 clips nothing.
        k, v: codes of keys and of values at the default width; unused with ``planes``.
        widths: allowed values of ``--kv-quant-bits``, the default first; with ``planes`` only the default.
        mixed: True if ``--kv-quant-bits auto:TARGET`` is allowed (needs rotations with layer sensitivities).
        group_sizes: allowed values of ``--kv-quant-group-size``; empty if the method shares no scale within a row.
        planes: True if pages are ``PlaneFormat``. ``--kv-quant-bits`` is then any number in ``PLANE_BITS``. This number
            and the channel energies in the rotation file determine the planes' widths, so rotations must be learned.
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
        """True if stored tokens can be moved to other pages (``RecordFormat.per_token``)."""
        return self.planes or (self.k.per_token and self.v.per_token)

    def width(self, text: str | None) -> Width:
        """Parses ``--kv-quant-bits`` for this method; None is the default.

        Raises:
            KVQuantError: the text is not a width of this method; the message lists the allowed widths.
        """
        if text is None:
            return Width(self.widths[0])
        number = _number(text.removeprefix(_AUTO))
        if self.planes:
            low, high = PLANE_BITS
            if number is None or text.startswith(_AUTO) or not low <= number <= high:
                raise KVQuantError(
                    f"--kv-quant-bits {text}: --kv-quant {self.name} allocates any number of bits per element from "
                    f"{low:g} to {high:g}, gains included. Give one, or leave the flag out for {self.widths[0]:g}."
                )
            return Width(number)
        if self.mixed and text.startswith(_AUTO) and number is not None:
            return Width(self.widths[0], number)
        if number not in self.widths or text.startswith(_AUTO):
            known = [f"{w:g}" for w in sorted(self.widths)]
            if len(known) > 1 or self.mixed:
                fix = f". Choose {', '.join(known)}" + (" or auto:TARGET, such as auto:2.75" if self.mixed else "")
            else:
                fix = f"; it has {known[0]} bits only. Leave the flag out"
            raise KVQuantError(f"--kv-quant-bits {text}: not a width of --kv-quant {self.name}{fix}.")
        return Width(number)

    def codes(self, bits: float) -> tuple[CodeFormat, CodeFormat]:
        """Returns the codes of keys and of values at a width; keys get an extra half bit.

        Raises:
            ValueError: pages are planes; ``rotations.resolve`` chooses their codes.
        """
        if self.planes:
            raise ValueError(f"{self.name}: codes of planes differ by layer; rotations.resolve chooses them.")
        return replace(self.k, bits=math.ceil(bits)), replace(self.v, bits=math.floor(bits))


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
