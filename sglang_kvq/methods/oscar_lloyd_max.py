from sglang_kvq.formats.code import CodeFormat
from sglang_kvq.methods.base import Method, RotationKind

#: Nothing is clipped: on Gaussian rows clipping first at 0.98 / 0.96 / 0.92 raises the error by 0.2 / 0.7 / 2.2% at D = 128.
LLOYD_MAX = CodeFormat(levels="lloyd-max", statistic="moments")

METHOD = Method(
    name="oscar-lloyd-max",
    summary="attention-aware rotations, Lloyd-Max levels at each row's mean and deviation",
    paper="OSCAR, arXiv 2605.17757; levels: Max 1960, Lloyd 1982",
    rotation=RotationKind.LEARNED,
    k=LLOYD_MAX,
    v=LLOYD_MAX,
    widths=(2, 3, 4),
    mixed=True,
)
