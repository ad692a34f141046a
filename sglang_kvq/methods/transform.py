"""Transform coding: keys and values in a basis of independent channels, and bits where their energy is.

``kvq calibrate --composition transform`` finds, for each layer and head, the basis in which the error of scores (of
outputs) is the plain sum of the channels' errors, and how much the model minds it. At start ``--kv-quant-bits`` is
divided over layers, keys, values and four planes of channels each, so that this sum is least (``rotations.resolve``).
Nothing is clipped by rank and nothing shared within a row but its gain of 8 bits, which is that of least error.
"""

from sglang_kvq.methods.base import Method, RotationKind

METHOD = Method(
    name="transform",
    summary="bits by energy in a basis of independent channels, any number of them from 1.25 to 4 per element",
    paper="Goyal, Theoretical foundations of transform coding, 2001; quantizers: Max 1960",
    rotation=RotationKind.LEARNED,
    widths=(2.5,),
    group_sizes=(),
    planes=True,
)
