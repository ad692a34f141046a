"""Checks values from a command line, before any model is loaded."""

from __future__ import annotations

import re
import tempfile
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

from sglang_kvq.errors import KVQuantError, first_line, unknown

DEVICES = ("cuda", "cpu", "auto")
DTYPES = ("auto", "bfloat16", "float16", "float32")
#: Short names of dtypes that people and other tools use, mapped to torch's names.
SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}

#: Seconds to wait for the hub. transformers alone would ask it for one file after another, with retries, for a minute.
TIMEOUT = 4.0
_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")


def check_device(device: str) -> None:
    """Refuses a ``--device`` that this machine does not have. An empty string is valid; a device is then chosen later.

    Raises:
        KVQuantError: the value is not ``cuda``, ``cuda:N``, ``cpu`` or ``auto``, there is no such GPU, or it is
            ``auto`` and accelerate is missing.
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
            f"--device {device}: PyTorch {torch.__version__} {why}. Pass --device cpu, or see `kvq doctor`."
        )
    if int(match[1] or 0) >= count:
        raise KVQuantError(
            f"--device {device}: this machine's GPUs are cuda:0 to cuda:{count - 1}. Choose one of them."
        )


def check_dtype(dtype: str) -> None:
    """Refuses a ``--dtype`` that is not one of torch's names. An empty string is valid; a dtype is then chosen later.

    Raises:
        KVQuantError: the message names torch's name for the value, or all valid names.
    """
    if dtype in SHORT_DTYPES:
        raise KVQuantError(f"--dtype {dtype}: unknown name. Pass --dtype {SHORT_DTYPES[dtype]}.")
    if dtype and dtype not in DTYPES:
        raise unknown("--dtype", dtype, DTYPES)


def check_least(flag: str, value: float, least: float, most: float = float("inf")) -> None:
    """Refuses a number below ``least`` or above ``most``, and NaN.

    Raises:
        KVQuantError: the message names the range.
    """
    if not (isfinite(value) and least <= value <= most):
        limit = f" and at most {most:g}" if isfinite(most) else ""
        raise KVQuantError(f"{flag} {value}: must be a number of at least {least:g}{limit}. Change it or leave it out.")


def check_new(flag: str, path: Path, *, folder: bool = False) -> None:
    """Checks that a file, or a ``folder``, can be written; called before the work whose result it will hold.

    Raises:
        KVQuantError: it cannot be written; the message names the folder that prevents it.
    """
    where = path if folder else path.parent
    try:
        while not where.exists():
            where = where.parent
        with tempfile.TemporaryFile(dir=where):
            pass
    except OSError as error:
        raise KVQuantError(
            f"{flag} {path}: cannot be written ({error.strerror}: {where}). Choose another {flag}."
        ) from error


def find_model(path: str, revision: str | None = None) -> dict[str, Any]:
    """Looks for a model before anything is loaded.

    Returns:
        keywords for every ``from_pretrained``: the revision, and ``local_files_only`` if the hub does not answer.
    """
    if path and Path(path).exists():
        if not Path(path).is_dir():
            raise KVQuantError(f"{path}: a file, not the folder of a model. Give its folder.")
        return {"revision": revision}
    if not _HUB_ID.fullmatch(path):
        raise KVQuantError(f"{path}: no such folder, and not a hub id ORG/NAME. Check the path.")
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    problem = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        try:
            HfApi().model_info(path, revision=revision, timeout=TIMEOUT)
            return {"revision": revision}
        except RevisionNotFoundError:
            raise KVQuantError(
                f"--revision {revision}: {path} has no such revision on the hub. Leave it out."
            ) from None
        except GatedRepoError as error:
            raise KVQuantError(
                f"{path}: gated on the hub ({first_line(error)}). Ask for access, and `hf auth login`."
            ) from None
        except RepositoryNotFoundError:
            problem = "the hub has no model of this name that you may see"
        except HfHubHTTPError as error:
            problem = f"the hub answers {first_line(error)}"
        except Exception as error:  # its type depends on the HTTP library that huggingface_hub uses
            problem = f"the hub does not answer ({type(error).__name__}: {first_line(error)})"
    if cached_folder(path, revision) is None:
        raise KVQuantError(
            f"{path}: no such folder, not in the hub's cache, and {problem}. Check the name. Without a network: "
            "download the model where there is one, and give its folder."
        )
    return {"revision": revision, "local_files_only": True}


def cached_folder(path: str, revision: str | None = None) -> Path | None:
    """Returns the folder with a model's files on this machine: ``path``, or one in the hub's cache; None if absent."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(path, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None
