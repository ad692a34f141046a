"""OSCAR's rotations with Lloyd-Max levels instead of uniform ones: keys around each row's mean, values around 0.

The row mean of rotated keys is not 0; the stored offset holds it. The mean of rotated values is close to 0. Values are
therefore scaled by their norm and store no offset, which saves 16 bits per vector.

Nothing is clipped first: on Gaussian rows, clipping raises the squared error of these levels. The scale of least
squared error would shrink keys by 11% on average and so flatten attention. Here the scale is 10% larger, which reduces
the shrinkage to 8%, for 3% more squared error (``benchmarks/results/quantizers.json``: clip, gain, score_slope).
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
