"""The code of keys or values: width, levels, how scale and offset are computed, and the axis that shares them."""

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
        levels: a name in ``formats.levels.LEVELS``.
        statistic: how the elements that share a scale determine it. ``minmax`` puts the outer levels on their
            extremes. ``moments`` centres the levels on their mean and scales by their standard deviation. ``norm``
            centres on 0, scales by their Euclidean norm and stores no offset.
        axis: ``token``: a scale per token and group along head_dim (``norm``: per token). ``channel``: a scale per
            element of head_dim and run of tokens in the page.
        gain: factor on the scale of least mean squared error, for ``moments`` and ``norm``. Without the factor, that
            scale shrinks rows, and so scores, by its relative squared error: 12% at 2 bits on Gaussian rows (Max 1960).
        centred: True to subtract each channel's mean over the page's tokens before coding, and to store the mean. Only
            for keys (``PageFormat``) with codes per token. Some channels of keys barely change from token to token
            (KIVI, arXiv 2402.02750, figure 2); uncentred, they would fill the range of every row.

    Raises:
        KVQuantError: a value does not exist, or values exclude each other.
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
                raise KVQuantError(f"code format: {name}={value!r} does not exist. Choose one of {choices}.")
        if not 0.5 <= self.gain <= 2 or (self.gain != 1 and self.statistic == "minmax"):
            raise KVQuantError(f"code format: gain={self.gain!r}: must be 0.5 to 2, and 1 for statistic 'minmax'.")
        if self.axis == "channel" and self.statistic == "norm":
            raise KVQuantError("code format: statistic 'norm' scales a token's whole row. Use axis='token'.")
        if self.axis == "channel" and self.centred:
            raise KVQuantError(
                "code format: centred=True: codes per channel already store an offset. Use axis='token'."
            )

    @property
    def has_offset(self) -> bool:
        """True if an offset is stored with each scale; otherwise the offset is -middle * scale."""
        return self.statistic != "norm"

    @property
    def clips(self) -> bool:
        """True if rows may be clipped before quantization; centred rows have too few outliers to need it."""
        return self.axis == "token" and self.statistic != "norm" and not self.centred

    @property
    def per_token(self) -> bool:
        """True if a token shares no stored data with other tokens, so it can move to another page."""
        return self.axis == "token" and not self.centred

    def table(self, head_dim: int) -> LevelTable:
        """Returns the levels and their unit, gain included."""
        return level_table(self.levels, self.bits, head_dim, self.gain)

    def describe(self) -> str:
        """Returns a short description for logs, such as ``2 bits uniform minmax per token``."""
        return f"{self.bits} bits {self.levels} {self.statistic} per {self.axis}" + ", centred" * self.centred


#: Asymmetric min-max INT2 per token, the code that the fast kernels are written for.
INT2 = CodeFormat()
