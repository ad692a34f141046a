"""OSCAR's rotations with Lloyd and Max's levels instead of uniform ones: keys about each row's mean, values about 0.

Rotated keys have an offset common to the row, which the stored zero takes; rotated values hardly have one, so they are scaled
by their norm and store none (KL 0.0165 instead of 0.0160 for an eighth of a bit less per element at head_dim 64).

Nothing is clipped first: on Gaussian rows of 128 that raises the squared error, from 0.1153 to 0.1155 / 0.1161 / 0.1178 for
clips 0.98 / 0.96 / 0.92. The scale is 10% above the one of least squared error, which shrinks keys and so flattens attention:
KL of SmolLM2-135M falls by a fifth (0.0346 to 0.0267 and 0.0210 to 0.0160 on two texts), more than the error's rise costs.
"""

from sglang_kvq.formats.code import CodeFormat
from sglang_kvq.methods.base import Method, RotationKind

KEYS = CodeFormat(levels="lloyd-max", statistic="moments", gain=1.1)
VALUES = CodeFormat(levels="sphere", statistic="norm", gain=1.1)

METHOD = Method(
    name="oscar-lloyd-max",
    summary="attention-aware rotations, Lloyd-Max levels scaled by each row's deviation or norm",
    paper="OSCAR, arXiv 2605.17757; levels: Max 1960, Lloyd 1982",
    rotation=RotationKind.LEARNED,
    k=KEYS,
    v=VALUES,
    widths=(2, 2.5, 3, 3.5, 4),
    mixed=True,
)
