"""KIVI: keys have outlier channels, so they have a scale per channel; values are quantized per token.

The paper's groups are 32 tokens and 32 channels (``--kv-quant-group-size 32``). The default here is the page's 64
tokens and the whole row, which allocates fewer bits. The paper keeps a residual of recent tokens in 16 bits; here
``--kv-quant-recent`` does this.
"""

from sglang_kvq.formats.code import CodeFormat
from sglang_kvq.methods.base import Method, RotationKind

METHOD = Method(
    name="kivi",
    summary="uniform INT2, keys per channel within a page, values per token; needs no calibration",
    paper="KIVI, arXiv 2402.02750",
    rotation=RotationKind.NONE,
    k=CodeFormat(axis="channel"),
    widths=(2, 4),
    group_sizes=(32, 64),
)
