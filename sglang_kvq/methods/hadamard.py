from sglang_kvq.methods.base import Method, RotationKind

METHOD = Method(
    name="hadamard",
    summary="fixed Hadamard rotation, clipped uniform INT2; needs no calibration",
    paper="QuaRot, arXiv 2404.00456",
    rotation=RotationKind.HADAMARD,
    clip_k=0.96,
    clip_v=0.92,
    widths=(2, 2.5, 3, 3.5, 4),
)
