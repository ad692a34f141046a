"""``kvq doctor``: checks whether ``--kv-quant`` can work in this environment, and prints one line per check."""

from __future__ import annotations

import json
import os
import platform
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

from sglang_kvq.errors import KVQuantError
from sglang_kvq.interruption import interruptible
from sglang_kvq.releases import SUPPORTED
from sglang_kvq.sglang import compat, hooks
from sglang_kvq.sglang.doctor import host as doctor_host

PLUGIN_GROUP, PLATFORM_GROUP = "sglang.srt.plugins", "sglang.srt.platforms"
ENTRY_POINT = "kvq"


class Failed(Exception):
    """A check that failed; the message says what is wrong and the fix."""


def diagnose() -> Iterator[tuple[str, bool, str]]:
    """Runs every check, also after failures; yields its name, whether it passed, and its result in words."""
    for name, check in CHECKS.items():
        try:
            with interruptible():
                found = check()
            yield name, True, found
        except Exception as error:  # this command must report every kind of failure of a broken environment
            known = isinstance(error, (Failed, KVQuantError))
            yield name, False, str(error) if known else f"{type(error).__name__}: {error}"


def report(show: Callable[[str], None] = print, *, as_json: bool = False) -> int:
    """Shows one line per check, or one JSON object for all checks; returns the exit status, 1 if any check failed."""
    found = []
    for name, passed, text in diagnose():
        found.append({"check": name, "passed": passed, "found": text})
        if not as_json:
            show(f"{'ok  ' if passed else 'FAIL'} {name}: {text}")
    failed = sum(not check["passed"] for check in found)
    if as_json:
        show(json.dumps({"passed": not failed, "checks": found}, indent=1))
    else:
        show(f"{failed} of {len(CHECKS)} checks failed" if failed else f"all {len(CHECKS)} checks passed")
    return int(failed > 0)


def versions() -> str:
    import sglang_kvq

    return f"{sglang_kvq.__version__} in {Path(sglang_kvq.__file__).parent}, Python {platform.python_version()}"


def torch_and_gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        # On a machine without a GPU, SGLang can be imported only for its CPU engine. Our server tests set this as well.
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        return f"{torch.__version__}, no CUDA GPU: only tests and the demo run here"
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    names = ", ".join(f"{gpu.name} (sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB)" for gpu in found)
    return f"{torch.__version__}, {names}"


def triton() -> str:
    return str(import_module("triton").__version__)


def our_kernels() -> str:
    """Imports every module of ``sglang_kvq.kernels``; on a GPU also compiles and runs their kernels."""
    import torch

    from sglang_kvq.sglang.doctor import kernels as kernel_check

    modules, kernels = kernel_check.modules(), kernel_check.kernels()
    imported = f"all {len(modules)} modules can be imported"
    if not torch.cuda.is_available():
        return f"{imported}; without a GPU none of the {len(kernels)} kernels was compiled or run"
    os.environ.setdefault("TRITON_CACHE_DIR", str(doctor_host.triton_cache()))  # so that a server finds the kernels
    ran, left_out = kernel_check.run_all(torch.device("cuda", torch.cuda.current_device()))
    rest = f"; not run: {', '.join(left_out)}" if left_out else ""
    routines = kernel_check.routines()
    ways = len(set(routines) & set(ran))
    return (
        f"{imported}; {len(ran) - ways} of {len(kernels)} kernels, and {ways} of {len(routines)} routines to decode, "
        f"were compiled, run and compared with torch{rest}"
    )


def other_kernels() -> str:
    """Checks that a clone's link ``triton_kernels`` does not hide the module of SGLang's kernels with that name."""
    spec = find_spec("triton_kernels")
    if spec is None or spec.origin is None:  # no module, or a plain folder, over which any package takes precedence
        return "none is installed, so none is hidden"
    ours = Path(next(iter(import_module("sglang_kvq.kernels").__path__))).resolve()
    if Path(spec.origin).resolve().parent == ours:
        raise Failed(f"{ours} hides the module of SGLang's kernels. Remove its __init__.py and reinstall sglang-kvq.")
    return str(Path(spec.origin).parent)


def plugin_is_visible() -> str:
    for group in (PLUGIN_GROUP, PLATFORM_GROUP):
        found = [e for e in metadata.entry_points(group=group) if e.name == ENTRY_POINT]
        if not found:
            raise Failed(
                f"no entry point {ENTRY_POINT} in group {group}. Run pip install . in a clone of sglang-kvq, in this "
                "environment."
            )
        found[0].load()
    allowed = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    if allowed and ENTRY_POINT not in allowed:
        raise Failed(f"SGLANG_PLUGINS={os.environ['SGLANG_PLUGINS']} leaves it out. Add {ENTRY_POINT}, or unset it.")
    if os.environ.get("SGLANG_PLATFORM", ENTRY_POINT) not in ("", ENTRY_POINT):
        raise Failed(f"SGLANG_PLATFORM={os.environ['SGLANG_PLATFORM']} makes SGLang skip this plugin. Unset it.")
    return f"entry point {ENTRY_POINT} in {PLUGIN_GROUP} and {PLATFORM_GROUP}"


def sglang_release() -> str:
    try:
        version = compat.sglang_version()
    except metadata.PackageNotFoundError:
        raise Failed(
            "not installed in this environment. Run pip install 'sglang-kvq[sglang]', or use SGLang's image."
        ) from None
    if not compat.is_supported(version):
        raise Failed(f"{version} is not supported. Install one of {' and '.join(SUPPORTED)}.")
    return str(version)


def sglang_symbols() -> str:
    table = hooks.for_release(compat.sglang_version())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's modules warn of everything that this machine lacks, needed or not
        if (error := _import_error(table)) is not None:
            raise Failed(
                f"SGLang cannot be imported, so none of {len(table)} symbols could be checked: {type(error).__name__}: "
                f"{error}. Fix this first: the permissions of a path, or the installation of a library."
            )
        wrong = hooks.problems(table)
    if wrong:
        raise Failed("\n  ".join([f"{len(wrong)} of {len(table)} are not as expected:", *wrong]))
    return f"all {len(table)} are as expected"


def _import_error(table: list[hooks.Hook]) -> Exception | None:
    """Returns the error that keeps SGLang's modules from being imported; ignores missing symbols of SGLang."""
    for hook in table:
        try:
            hooks.find(hook)
        except (AttributeError, KeyError):
            continue
        except ImportError as error:
            if not (error.name or "").startswith("sglang"):
                return error
        except Exception as error:
            return error
    return None


def shipped_rotations() -> str:
    from sglang_kvq.rotations.storage.files import read_rotations
    from sglang_kvq.rotations.storage.schema import CONFIG_FILE
    from sglang_kvq.rotations.storage.zoo import zoo_folder

    folders = sorted(path.parent for path in zoo_folder().glob(f"*/{CONFIG_FILE}"))
    for folder in folders:
        read_rotations(folder)  # hash and orthogonality
    return f"{', '.join(folder.name for folder in folders)}: undamaged"


#: The checks in the order shown: causes come before their effects. ``torch_and_gpus`` must run before SGLang is
#: imported, because it chooses SGLang's engine.
CHECKS: dict[str, Callable[[], str]] = {
    "sglang-kvq": versions,
    "folders": doctor_host.folders,
    "disk": doctor_host.disk,
    "/dev/shm": doctor_host.shared_memory,
    "driver": doctor_host.driver,
    "torch": torch_and_gpus,
    "triton": triton,
    "kernels": our_kernels,
    "triton_kernels": other_kernels,
    "plugin": plugin_is_visible,
    "SGLang": sglang_release,
    "SGLang's symbols": sglang_symbols,
    "rotations": shipped_rotations,
}
