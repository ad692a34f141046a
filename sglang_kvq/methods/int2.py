from sglang_kvq.methods.base import Method, RotationKind

METHOD = Method(
    name="int2",
    summary="plain asymmetric INT2, no rotation, no clipping: the baseline",
    paper="round-to-nearest min-max quantization",
    rotation=RotationKind.NONE,
)
