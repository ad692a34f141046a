"""OSCAR's rotations with Lloyd and Max's levels instead of uniform ones: keys about each row's mean, values about 0.

Rotated keys have a mean of the row, which the stored offset takes; rotated values hardly have one, so they are
scaled by their norm and store none: 16 bits less per vector.

Nothing is clipped first: on Gaussian rows that raises the squared error of these levels. The scale is 10% above the one
of least squared error. That one shrinks keys, by 11% in the mean, and so flattens attention; 10% more leave 8%, for 3%
more squared error (``benchmarks/results/quantizers.json``: clip, gain, score_slope).
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
