"""Transform coding: stores keys and values in a basis of independent channels and spends bits where the energy is.

``kvq calibrate --composition transform`` finds a basis for each layer and head. In this basis, the error of scores (for
values: of outputs) is the plain sum of the channels' errors. The command also measures how sensitive the model is to
this error. When the server starts, ``rotations.resolve`` divides ``--kv-quant-bits`` over layers, keys, values and four
planes of channels each, so that the weighted sum of errors is least. Nothing is clipped by rank. The elements of a row
share only an 8-bit gain, the one of two candidates with less error.
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
