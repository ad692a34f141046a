"""How keys or values become codes: width, levels, where scale and offset come from, and along which axis."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.levels import LEVELS, LevelTable, level_table

BITS = (2, 3, 4)
STATISTICS = ("minmax", "moments", "norm")
AXES = ("token", "channel")


@dataclass(frozen=True)
class CodeFormat:
    """The code of keys or of values; the arithmetic is in ``formats.quantize``.

    Attributes:
        bits: 2, 3 or 4.
        levels: a name of ``formats.levels.LEVELS``.
        statistic: of the elements that share a scale: ``minmax`` puts the outer levels on their extremes; ``moments``
            centres the levels on their mean and scales by their standard deviation; ``norm`` centres on 0 and scales by
            their Euclidean norm: no offset is stored.
        axis: ``token``: a scale per token and group along head_dim (``norm``: per token). ``channel``: a scale per
            element of head_dim and run of tokens in the page.
        gain: scale of ``moments`` and ``norm`` over the one of least mean squared error. That one shrinks rows, and
            scores with them: by its own relative squared error, 12% at 2 bits on Gaussian rows (Max 1960).
        centred: whether each channel's mean over the page's tokens is stored beside the codes, which are then of what
            is left. Only per token, and only of keys (``PageFormat``). Keys have channels that hardly change from token
            to token (KIVI, arXiv 2402.02750, figure 2): they would take up the range of every row.

    Raises:
        KVQuantError: a value that does not exist, or values that exclude each other.
    """

    bits: int = 2
    levels: str = "uniform"
    statistic: str = "minmax"
    axis: str = "token"
    gain: float = 1.0
    centred: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (
            ("bits", self.bits, BITS),
            ("levels", self.levels, LEVELS),
            ("statistic", self.statistic, STATISTICS),
            ("axis", self.axis, AXES),
        ):
            if value not in known:
                choices = ", ".join(map(str, known))
                raise KVQuantError(f"code format: {name}={value!r} does not exist; choose one of {choices}.")
        if not 0.5 <= self.gain <= 2 or (self.gain != 1 and self.statistic == "minmax"):
            raise KVQuantError(f"code format: gain={self.gain!r}: 0.5 to 2, and 1 for statistic 'minmax'.")
        if self.axis == "channel" and self.statistic == "norm":
            raise KVQuantError("code format: statistic 'norm' is of a token's whole row; use axis='token'.")
        if self.axis == "channel" and self.centred:
            raise KVQuantError(
                "code format: centred=True: codes per channel have an offset of their own; use axis='token'."
            )

    @property
    def has_offset(self) -> bool:
        """Whether an offset is stored beside each scale; else it is -middle * scale."""
        return self.statistic != "norm"

    @property
    def clips(self) -> bool:
        """Whether a row may be clipped before it is quantized: what centring leaves has hardly an outlier to clip."""
        return self.axis == "token" and self.statistic != "norm" and not self.centred

    @property
    def per_token(self) -> bool:
        """Whether all that is stored of a token is its own, so that it means the same in another page."""
        return self.axis == "token" and not self.centred

    def table(self, head_dim: int) -> LevelTable:
        """Levels and unit, gain included."""
        return level_table(self.levels, self.bits, head_dim, self.gain)

    def describe(self) -> str:
        """Such as ``2 bits uniform minmax per token``, for logs."""
        return f"{self.bits} bits {self.levels} {self.statistic} per {self.axis}" + ", centred" * self.centred


#: Asymmetric min-max INT2 per token: what the fast kernels were made for.
INT2 = CodeFormat()
