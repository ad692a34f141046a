"""Four bits of everything, with nothing to calibrate.

Keys are centred: models with biased keys (Qwen2.5) have a part in every key that is far larger than what tells tokens
apart. Rotated, it fills the range of every row, and sixteen levels are too coarse for the rest.
"""

from sglang_kvq.formats.code import CodeFormat
from sglang_kvq.methods.base import Method, RotationKind

METHOD = Method(
    name="int4",
    summary="fixed Hadamard rotation, uniform INT4, keys less their page's mean: nearly lossless; needs no calibration",
    paper="QuaRot, arXiv 2404.00456; outlier channels of keys: KIVI, arXiv 2402.02750",
    rotation=RotationKind.HADAMARD,
    k=CodeFormat(4, centred=True),
    v=CodeFormat(4),
    widths=(4,),
)
