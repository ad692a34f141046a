from sglang_kvq.methods.base import Method, RotationKind

METHOD = Method(
    name="oscar",
    summary="attention-aware rotations, clipped uniform INT2",
    paper="OSCAR, arXiv 2605.17757",
    rotation=RotationKind.LEARNED,
    clip_k=0.96,
    clip_v=0.92,
    widths=(2, 2.5, 3, 3.5, 4),
    mixed=True,
)
