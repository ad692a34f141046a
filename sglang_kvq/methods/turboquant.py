"""TurboQuant's MSE quantizer: a random rotation makes every vector uniform on its sphere, for any model.

The paper reaches 2.5 and 3.5 bits by giving outlier channels one bit more than the others. After a rotation per head no
channel is an outlier, and rows of mixed widths would need another record layout. Here the half bit goes to the keys:
2.5 means keys at 3 bits and values at 2. Attention is more sensitive to keys: their errors pass through the softmax's
exponential.

The paper's second quantizer, with a 1-bit QJL sketch of the residual on keys, is in ``benchmarks/qjl.py``.
docs/methods.md says why it is not served.
"""

from sglang_kvq.formats.code import CodeFormat
from sglang_kvq.methods.base import Method, RotationKind

SPHERE = CodeFormat(3, "sphere", "norm")

METHOD = Method(
    name="turboquant",
    summary="random rotation per head, Lloyd-Max levels for the sphere, one norm per vector; needs no calibration",
    paper="TurboQuant, arXiv 2504.19874",
    rotation=RotationKind.RANDOM,
    k=SPHERE,
    v=SPHERE,
    widths=(3, 2, 2.5, 3.5, 4),
    group_sizes=(),
)
