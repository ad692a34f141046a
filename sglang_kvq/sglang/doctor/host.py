"""Checks of the machine itself for ``kvq doctor``. A failure here causes other errors in later checks.

    python -m sglang_kvq.sglang.doctor.host

runs the quick checks, before a container starts its server.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from sglang_kvq.errors import KVQuantError
from sglang_kvq.releases import ONE_CACHE
from sglang_kvq.sglang import compat

GIB = 1 << 30
#: Least free bytes on each file system that holds caches.
LEAST_DISK = GIB
#: Least free bytes in /dev/shm with several GPUs, which exchange data through it (NCCL), and with one. Docker's default
#: is 64 MiB.
LEAST_SHARED, LEAST_SHARED_ALONE = GIB, 16 << 20

SHARED_MEMORY = Path("/dev/shm")
DRIVER_FILE = Path("/proc/driver/nvidia/version")


def _sglang_cache() -> Path | None:
    """Returns the folder below which a server keeps kernels of all libraries; None if the release has no such folder.

    SGLang sets the libraries' variables when it is imported, which takes seconds.
    """
    try:
        if not compat.applies(ONE_CACHE, compat.sglang_version()):
            return None
    except PackageNotFoundError:  # another check says so
        return None
    return Path(os.environ.get("SGLANG_CACHE_DIR", "~/.cache/sglang")).expanduser()


def triton_cache() -> Path:
    """Returns the folder in which a server's Triton keeps compiled kernels, whether Triton is installed or not."""
    if named := os.environ.get("TRITON_CACHE_DIR"):
        return Path(named)
    shared = _sglang_cache()
    return shared / "triton" if shared else Path(os.environ.get("TRITON_HOME") or Path.home(), ".triton", "cache")


def flashinfer_cache() -> Path:
    """Returns the folder in which a server's FlashInfer keeps compiled kernels."""
    base = os.environ.get("FLASHINFER_WORKSPACE_BASE") or _sglang_cache() or Path.home()
    return Path(base, ".cache", "flashinfer")


def places() -> Iterator[tuple[str, Path, str]]:
    """Yields each folder that must be writable: its content, its path, and how to choose another folder."""
    yield "HOME", Path.home(), "Set HOME to a folder of this user"
    yield "Triton's cache", triton_cache(), "Set TRITON_CACHE_DIR"
    yield "FlashInfer's cache", flashinfer_cache(), "Set FLASHINFER_WORKSPACE_BASE"
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:  # offline the cache is only read
        yield "the Hugging Face cache", Path(constants.HF_HUB_CACHE), "Set HF_HOME, or HF_HUB_OFFLINE=1 to only read it"
    # tempfile.gettempdir() would choose another folder, in the end the current one, if this one cannot be written.
    yield "temporary files", Path(os.environ.get("TMPDIR") or "/tmp"), "Set TMPDIR"


def folders() -> str:
    """Checks that every folder to which a server writes is writable, and that compiled kernels can be loaded.

    Raises:
        KVQuantError: names the folders that are not, why, and the variables that choose others.
    """
    wrong = [
        f"{what} {folder}: {why}. {fix}, or chown it." for what, folder, fix in places() if (why := _refusal(folder))
    ]
    if wrong:
        raise KVQuantError("\n  ".join([f"user {os.geteuid()} cannot write:", *wrong]))
    for folder in (triton_cache(), flashinfer_cache()):
        if os.statvfs(_existing(folder)).f_flag & os.ST_NOEXEC:
            raise KVQuantError(
                f"{folder} is mounted noexec, so compiled kernels cannot be loaded from it. Mount it with exec (in "
                f"Docker --tmpfs {folder}:exec), or set TRITON_CACHE_DIR and FLASHINFER_WORKSPACE_BASE."
            )
    return ", ".join(str(folder) for _, folder, _ in places())


def _refusal(folder: Path) -> str | None:
    """Returns why a folder, which need not exist yet, cannot be written to; None if it can."""
    try:
        where = _existing(folder)
        with tempfile.TemporaryFile(dir=where):
            return None
    except OSError as error:
        return (error.strerror or str(error)).lower()


def _existing(folder: Path) -> Path:
    """Returns the folder itself, or its nearest parent that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def disk() -> str:
    """Checks that the file systems of these folders have free space.

    Raises:
        KVQuantError: names the file systems that are full.
    """
    found: dict[int, tuple[Path, int]] = {}
    for _, folder, _ in places():
        where = _existing(folder)
        found.setdefault(where.stat().st_dev, (where, shutil.disk_usage(where).free))
    full = [f"{where} has {free / 2**20:,.0f} MiB left" for where, free in found.values() if free < LEAST_DISK]
    if full:
        raise KVQuantError(
            f"{'; '.join(full)}, and kernels and models are kept there: free at least {LEAST_DISK / GIB:g} GiB, or "
            "move the caches (HF_HOME, TRITON_CACHE_DIR, FLASHINFER_WORKSPACE_BASE)."
        )
    return ", ".join(f"{where} {free / GIB:,.0f} GiB free" for where, free in found.values())


def shared_memory() -> str:
    """Checks that /dev/shm has enough free space for the processes of a server.

    Raises:
        KVQuantError: it is missing or too small.
    """
    if not SHARED_MEMORY.is_dir():
        raise KVQuantError(f"{SHARED_MEMORY} is missing: processes of a server share data there. Mount a tmpfs on it.")
    gpus, free = _gpu_count(), shutil.disk_usage(SHARED_MEMORY).free
    least = LEAST_SHARED if gpus > 1 else LEAST_SHARED_ALONE
    if free < least:
        raise KVQuantError(
            f"{free / 2**20:,.0f} MiB are free, and {f'{gpus} GPUs need' if gpus > 1 else 'a server needs'} "
            f"{least / 2**20:,.0f}: docker run --ipc host or --shm-size 16g; Kubernetes: an emptyDir of medium Memory."
        )
    return f"{free / 2**20:,.0f} MiB free"


def _gpu_count() -> int:
    return len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])


def driver() -> str:
    """Checks that the NVIDIA driver is new enough for this build of torch.

    Raises:
        KVQuantError: torch is a CPU build on a machine with a driver, or is built for a newer CUDA, or the driver's
            library cannot be loaded.
    """
    version, supported = driver_version(), driver_cuda()
    if version is None and supported is None:
        return "no NVIDIA driver: only tests and the demo run here"
    named = f"NVIDIA driver {version or 'of unknown version'}"
    if supported is None:
        raise KVQuantError(
            f"{named} is loaded, but libcuda.so.1 cannot be loaded. In Docker, add --gpus all; otherwise install the "
            "driver's libraries."
        )
    import torch

    named += f" for CUDA {supported[0]}.{supported[1]}"
    built = torch.version.cuda
    if built is None:
        if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
            return f"{named}; SGLANG_USE_CPU_ENGINE=1 leaves it alone"
        raise KVQuantError(
            f"{named} is here, but torch {torch.__version__} is a CPU build. Install a CUDA build of it."
        )
    if int(built.split(".")[0]) > supported[0]:
        raise KVQuantError(
            f"{named}: torch {torch.__version__} is built for CUDA {built}. Update the driver, or install a torch for "
            f"CUDA {supported[0]}."
        )
    return f"{named}; torch is built for CUDA {built}"


def driver_version() -> str | None:
    """Returns the version of the driver's loaded kernel module; None if none is loaded."""
    try:
        found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", DRIVER_FILE.read_text())
    except OSError:
        return None
    return found[1] if found else None


def driver_cuda() -> tuple[int, int] | None:
    """Returns the newest CUDA that the driver's library supports: major and minor; None without the library."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


if __name__ == "__main__":
    try:
        folders()
        shared_memory()
    except KVQuantError as error:
        sys.exit(f"sglang-kvq: {error}")
