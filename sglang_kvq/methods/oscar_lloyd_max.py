"""OSCAR's rotations with Lloyd and Max's levels instead of uniform ones, scaled by each row's mean and deviation.

Nothing is clipped first: on Gaussian rows of 128 that raises the squared error, from 0.1153 to 0.1155 / 0.1161 / 0.1178 for
clips 0.98 / 0.96 / 0.92. The scale is 10% above the one of least squared error, which shrinks keys and so flattens attention:
KL of SmolLM2-135M falls by a fifth (0.0346 to 0.0267 and 0.0210 to 0.0160 on two texts), more than the error's rise costs.
"""

from sglang_kvq.formats.code import CodeFormat
from sglang_kvq.methods.base import Method, RotationKind

LLOYD_MAX = CodeFormat(levels="lloyd-max", statistic="moments", gain=1.1)

METHOD = Method(
    name="oscar-lloyd-max",
    summary="attention-aware rotations, Lloyd-Max levels at each row's mean and deviation",
    paper="OSCAR, arXiv 2605.17757; levels: Max 1960, Lloyd 1982",
    rotation=RotationKind.LEARNED,
    k=LLOYD_MAX,
    v=LLOYD_MAX,
    widths=(2, 2.5, 3, 3.5, 4),
    mixed=True,
)
