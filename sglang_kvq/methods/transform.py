"""Transform coding: stores keys and values in a basis of independent channels and spends bits where the energy is.

``kvq calibrate --composition transform`` finds a basis for each layer and head. In it, the error of scores (of outputs)
is the plain sum of the channels' errors. It also measures how sensitive the model is to this error. At start,
``rotations.resolve`` divides ``--kv-quant-bits`` over layers, keys, values and four planes of channels each. It
minimizes the weighted sum. Nothing is clipped by rank. A row shares only its 8-bit gain, the one of least error.
"""

from sglang_kvq.methods.base import Method, RotationKind

METHOD = Method(
    name="transform",
    summary="bits by energy in a basis of independent channels; any budget from 1.25 to 4 bits per element",
    paper="Goyal, Theoretical foundations of transform coding, 2001; quantizers: Max 1960",
    rotation=RotationKind.LEARNED,
    widths=(2.5,),
    group_sizes=(),
    planes=True,
)
