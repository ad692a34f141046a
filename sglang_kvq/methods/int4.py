from sglang_kvq.formats.code import CodeFormat
from sglang_kvq.methods.base import Method, RotationKind

METHOD = Method(
    name="int4",
    summary="fixed Hadamard rotation, uniform INT4, no clipping: nearly lossless; needs no calibration",
    paper="QuaRot, arXiv 2404.00456",
    rotation=RotationKind.HADAMARD,
    k=CodeFormat(4),
    v=CodeFormat(4),
    widths=(4,),
)
