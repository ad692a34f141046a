"""``sglang.Engine(kv_quant="oscar", ...)``: takes the flags as keywords, with underscores.

``Engine.__init__`` loads plugins and then builds ``self.server_args_class(**kwargs)``. The plugin replaces that class
attribute, so the user's program need not import sglang_kvq.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang_kvq.errors import KVQuantError
from sglang_kvq.sglang import flags
from sglang_kvq.sglang.router import flags as episodic_flags
from sglang_kvq.sglang.runtime import attach
from sglang_kvq.sglang.types import ServerArgs


def server_args_from_kwargs(original: type, **kwargs: Any) -> ServerArgs:
    """FACTORY ``Engine.server_args_class``: builds ServerArgs with the config attached.

    Raises:
        KVQuantError: a keyword cannot be combined with ``kv_quant``.
        SystemExit: this SGLang is not as expected.
    """
    if not any(flag in kwargs for flag in (*flags.FIELDS, *episodic_flags.FIELDS)):
        return original(**kwargs)
    capture = kwargs.pop("kv_quant_capture", None)  # not a flag: only ``calibration.calibrate_engine`` sets it
    headers = {name: kwargs.get(name) for name in ("episodic_tenant_header", "episodic_session_header")}
    config = flags.prepare(kwargs)
    if config is None:
        return original(**kwargs)
    for name, header in headers.items():
        if header is not None:
            raise KVQuantError(f"{name} {header}: requests of Engine have no headers. Leave it out.")
    config = replace(config, capture=capture)
    server_args = original(**kwargs)
    attach(config, server_args)
    return server_args
