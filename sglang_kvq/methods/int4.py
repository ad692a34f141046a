"""INT4 for keys and values; needs no calibration.

Keys are centred. Models with biased keys (Qwen2.5) add a constant to every key, far larger than the differences between
tokens. After rotation it fills the range of every row and leaves too few of the sixteen levels for the differences.
"""

from sglang_kvq.formats.code import CodeFormat
from sglang_kvq.methods.base import Method, RotationKind

METHOD = Method(
    name="int4",
    summary="fixed Hadamard rotation, uniform INT4, keys minus their page mean: nearly lossless; needs no calibration",
    paper="QuaRot, arXiv 2404.00456; outlier channels of keys: KIVI, arXiv 2402.02750",
    rotation=RotationKind.HADAMARD,
    k=CodeFormat(4, centred=True),
    v=CodeFormat(4),
    widths=(4,),
)
