"""Servers of tiny models, several on a GPU or one on the CPU engine; they find the plugin in a bare checkout."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import late_kernels
from launch.server import Server
from sglang_kvq import __version__
from sglang_kvq.server_process import OPENER
from sglang_kvq.sglang.observe import QUIET

ROOT = Path(__file__).resolve().parent.parent
#: Flags of every server on a GPU. Each server takes a small share of the memory, so that others fit on the same GPU.
GPU_FLAGS = (
    *("--dtype", "bfloat16", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--mem-fraction-static", "0.3", "--watchdog-timeout", "120"),
)
FLAGS = ("--random-seed", "0", "--skip-server-warmup")
#: Plain BF16 attends with Triton kernels too, which need no compiler at startup.
PLAIN_ON_GPU = ("--attention-backend", "triton", "--cuda-graph-backend-prefill", "disabled")
#: With these checks, any leak that SGLang or the plugin finds when idle or between steps ends the server.
IDLE_CHECK = "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE"
BUSY_CHECK = "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"
STRICT = {IDLE_CHECK: "1", BUSY_CHECK: "1"}
#: Several servers may load on one GPU at once, so its free memory differs between ranks.
ENV = {
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    "HF_HUB_OFFLINE": "1",
    **late_kernels.ENV,
}

_FIND = (
    "import importlib.metadata as m, importlib.util as u\n"
    "print([e.value for e in m.entry_points(group='sglang.srt.plugins') if e.name == 'kvq'])\n"
    "print(*(u.find_spec('sglang_kvq') or type('', (), {'submodule_search_locations': []})).submodule_search_locations)"
)


def plugin_path(folder: Path) -> dict[str, str]:
    """Returns variables with which a server finds this checkout's plugin: none if it is installed, else a PYTHONPATH.

    This editable install needs no pip: ``folder`` gets links to the package's folders under their import names, and the
    files that pip would write for their entry points.
    """
    asked = subprocess.run([sys.executable, "-c", _FIND], cwd="/", capture_output=True, text=True, timeout=120)
    lines = [*asked.stdout.splitlines(), "", ""]
    here = any(Path(place).resolve() == ROOT / "sglang_kvq" for place in lines[1].split())
    if lines[0] not in ("", "[]") and here:
        return {}
    site = folder / "site"
    _write_entry_points(site, "sglang_kvq", __version__, _entry_points())
    if not (package := site / "sglang_kvq").exists():
        package.symlink_to(ROOT / "sglang_kvq")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))}


def with_plugin(folder: Path, module: Path, path: str) -> str:
    """Returns a PYTHONPATH with which a server also loads this file as a plugin, by its function ``install``.

    Args:
        folder: gets a folder with the file and what pip would write for its entry point.
        path: the rest of the PYTHONPATH.
    """
    name, place = module.stem, folder / "plugins" / module.stem
    _write_entry_points(place, name, "0.0", f"[sglang.srt.plugins]\n{name} = {name}:install\n")
    shutil.copy(module, place)
    return os.pathsep.join(filter(None, (str(place), path)))


def _write_entry_points(site: Path, name: str, version: str, entry_points: str) -> None:
    """Writes what pip would write to the folder ``site`` for a distribution with these entry points."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    called = name.replace("_", "-")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {called}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


def _entry_points() -> str:
    """Returns the tables of pyproject.toml whose names begin with ``project.entry-points``, in pip's format."""
    text, found, inside = (ROOT / "pyproject.toml").read_text(), [], False
    for line in text.splitlines():
        if line.startswith("["):
            inside = line.startswith("[project.entry-points.")
            found += [f"[{line.split(chr(34))[1]}]"] if inside else []
        elif inside and "=" in line and not line.startswith("#"):
            found.append(line.replace('"', ""))
    return "\n".join(found) + "\n"


def versions() -> str:
    """Returns the versions of what serves, for a log's first line."""
    found = []
    for name in ("torch", "triton", "sglang", "flashinfer-python"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


class TinyServer(Server):
    """A server of a tiny model.

    Args:
        model: the model's folder.
        flags: flags after those of this module.
        cpu: whether to use the CPU engine.
        gpus: indices of the GPUs that it may use.
        env: more variables.
        tokenizer: whether the model's folder has a tokenizer.
    """

    def __init__(
        self,
        model: Path,
        flags: Sequence[str],
        *,
        cpu: bool,
        log: Path,
        env: Mapping[str, str],
        gpus: Sequence[int] = (0,),
        tokenizer: bool = False,
    ) -> None:
        own = [*([] if tokenizer else ["--skip-tokenizer-init"]), *FLAGS, *([] if cpu else GPU_FLAGS), *flags]
        if "--kv-quant" not in flags and not cpu:
            own += PLAIN_ON_GPU
        self.cpu = cpu
        more = {} if cpu else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, _visible(gpus)))}
        super().__init__(model, *own, cpu=cpu, env={**ENV, **more, **env}, log_path=log)

    def stream(self, path: str, asked: dict | None, timeout: float = 120, headers: Mapping[str, str] | None = None):
        """Returns an open response to a POST, or to a GET without ``asked``; closing it early disconnects the client.

        Raises:
            OSError: the server refused, or did not answer in time.
        """
        all_headers = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, None if asked is None else dumps(asked), all_headers)
        return OPENER.open(request, timeout=timeout)

    def states(self) -> list[dict]:
        """Returns ``internal_states`` of ``/server_info``, one for each data-parallel worker."""
        return self.info().get("internal_states", [])

    def held_when_empty(self) -> list[str]:
        """Flushes the cache while nothing runs, and lists everything still in use; [] if all is right."""
        empty(self)
        return self.held()

    def held(self) -> list[str]:
        """Lists what is in use, or went wrong, on a server that nobody uses and whose cache is empty."""
        found = []
        for worker, state in enumerate(self.states()):
            held = {key: value for key, value in state.get("kv_quant", {}).get("tiers", {}).items() if value}
            found += [f"worker {worker} holds {held}"] if held else []
        if "--kv-quant" in self.command and not any("kv_quant" in state for state in self.states()):
            found.append("/server_info has no kv_quant")
        if not self.running:
            found.append("the server ended")
        if "--kv-quant" in self.command and (late := late_kernels.own_late_kernels(self.log())):
            found.append(f"it loaded kernels while it served: {', '.join(late)}")
        return found + [line for line in self.log().splitlines() if "leak detected" in line.lower()][:3]


def empty(server: Any) -> None:
    """Flushes a server's cache twice around a tiny request, because the next batch releases what a request frees.

    server: a ``TinyServer``, or a ``PairServer``, which is two servers.
    """
    server.drain()
    ids = [[5, 6, 7 + n] for n in range(8)]  # several prompts, so that each data-parallel worker gets one
    server.json("/generate", body(ids, 2), timeout=60)
    server.drain()
    # Waits for the idle checks of SGLang and of the plugin, which end the server with STRICT. The plugin's check comes
    # after a while; it also releases what was freed after the last batch.
    time.sleep(QUIET + 1.0)
    server.check_alive()


def _visible(gpus: Sequence[int]) -> list[str]:
    """Returns these GPUs' names among the GPUs that this process may use."""
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return [names[gpu] if names else str(gpu) for gpu in gpus]


def gpu_names() -> list[str]:
    """Returns the names of this host's GPUs, according to the driver; [] without one. Does not load torch."""
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    names = [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names if allowed is None else names[: len([n for n in allowed.split(",") if n])]


def body(ids: list, tokens: int, **options) -> dict:
    """Returns a greedy request of exactly ``tokens`` tokens; ``ids`` may be a list of prompts."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **options.pop("sampling_params", {})}
    return {"input_ids": ids, "sampling_params": sampling, **options}


def dumps(value: object) -> bytes:
    return json.dumps(value).encode()
