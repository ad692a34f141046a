"""sglang-kvq: a 2-bit KV cache for SGLang, as a plugin."""

from sglang_kvq.config import KVQuantConfig
from sglang_kvq.errors import KVQuantError

__version__ = "0.1.0"
__all__ = ["KVQuantConfig", "KVQuantError", "__version__"]
