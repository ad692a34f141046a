"""The one error type users see."""


class KVQuantError(ValueError):
    """A setting, file or model that ``--kv-quant`` cannot serve.

    The message names the offending value and the fix. It is raised before the server starts
    serving; nothing is written and no fallback is taken.
    """
