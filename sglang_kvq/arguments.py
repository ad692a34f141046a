"""Checks of what a command line may name, made before any model is loaded."""

from __future__ import annotations

import re
import tempfile
from importlib.util import find_spec
from math import isfinite
from pathlib import Path

from sglang_kvq.errors import KVQuantError, unknown

DEVICES = ("cuda", "cpu", "auto")
DTYPES = ("auto", "bfloat16", "float16", "float32")
#: Names that people and other tools use, mapped to torch's.
SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def check_device(device: str) -> None:
    """Refuses a ``--device`` that is not on this machine; empty chooses one later.

    Raises:
        KVQuantError: not ``cuda``, ``cuda:N``, ``cpu`` or ``auto``; no such GPU; ``auto`` without accelerate.
    """
    if device in ("", "cpu"):
        return
    if device == "auto":
        if find_spec("accelerate") is None:
            raise KVQuantError(
                "--device auto: it needs accelerate: pip install 'sglang-kvq[calibrate]', or choose cuda or cpu."
            )
        return
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if match is None:
        raise unknown("--device", device, DEVICES)
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        why = "is a CPU build" if torch.version.cuda is None else "sees no GPU"
        raise KVQuantError(
            f"--device {device}: PyTorch {torch.__version__} {why}; pass --device cpu, or see `kvq doctor`."
        )
    if int(match[1] or 0) >= count:
        raise KVQuantError(
            f"--device {device}: this machine's GPUs are cuda:0 to cuda:{count - 1}; choose one of them."
        )


def check_dtype(dtype: str) -> None:
    """Refuses a ``--dtype`` that is not torch's name of one; empty chooses one later.

    Raises:
        KVQuantError: it names the right one.
    """
    if dtype in SHORT_DTYPES:
        raise KVQuantError(f"--dtype {dtype}: torch's name of it is {SHORT_DTYPES[dtype]}; pass --dtype that.")
    if dtype and dtype not in DTYPES:
        raise unknown("--dtype", dtype, DTYPES)


def check_least(flag: str, value: float, least: float, most: float = float("inf")) -> None:
    """Refuses a number below ``least`` or above ``most``, and NaN.

    Raises:
        KVQuantError: it names the range.
    """
    if not (isfinite(value) and least <= value <= most):
        limit = f" and at most {most:g}" if isfinite(most) else ""
        raise KVQuantError(f"{flag} {value}: must be a number of at least {least:g}{limit}; change it or leave it out.")


def check_new(flag: str, path: Path, *, folder: bool = False) -> None:
    """Checks that a file, or a ``folder``, can be written before the work begins whose result it is to hold.

    Raises:
        KVQuantError: it cannot be written; the message names the folder in the way.
    """
    where = path if folder else path.parent
    try:
        while not where.exists():
            where = where.parent
        with tempfile.TemporaryFile(dir=where):
            pass
    except OSError as error:
        raise KVQuantError(
            f"{flag} {path}: cannot be written ({error.strerror}: {where}); choose another {flag}."
        ) from error
