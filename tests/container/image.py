"""Builds the image of the repository's Dockerfile on a small stand-in for SGLang's image, and runs it.

The stand-in is Debian with the Python of the newest release's test environment, whose packages are mounted at run time.
This module needs root, Debian's packages ``buildah mmdebstrap podman runc``, and no container registry.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.server import CPU_CAPACITY, CPU_FLAGS
from sglang_kvq import __version__
from sglang_kvq.releases import NEWEST
from sglang_kvq.server_process import OPENER, ServerFailed, ServerProcess, free_port
from tests.e2e.preloaded import other_models

ROOT = Path(__file__).resolve().parents[2]
#: Debian's release by Python version, because the environment's compiled packages need the same Python.
DEBIAN = {(3, 11): "bookworm", (3, 13): "trixie"}
#: Folders of files that nothing in the image reads.
LEFT_OUT = ("doc", "info", "locale", "man")
PACKAGES = "python3,python3-pip,curl,ca-certificates,libgomp1,libnuma1"
BASE, IMAGE = f"docker.io/lmsysorg/sglang:v{NEWEST}", "localhost/sglang-kvq"
SITE = "/opt/sglang-cpu"
VARIABLES = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
}
COMMAND = """\
#!/usr/bin/python3
from sglang.cli.main import main

if __name__ == "__main__":
    main()
"""
#: Lower limits than podman's own, which are more than a sandbox may request.
LIMITS = ("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096")
#: Docker's --read-only and Kubernetes' restricted profile, with a user that the image does not know.
RESTRICTED = (
    *("--read-only", "--read-only-tmpfs=false", "--tmpfs", "/tmp", "--user", "123456:0"),
    *("--cap-drop", "all", "--security-opt", "no-new-privileges"),
)


class Images:
    """Storage of images and containers in one folder.

    Args:
        folder: on a file system that supports overlays.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._storage = ["--root", str(folder / "storage"), "--runroot", str(folder / "run")]
        self._storage += ["--storage-driver", "overlay"]
        (folder / "empty").mkdir(exist_ok=True)
        site = Path(sysconfig.get_paths()["purelib"])
        # An empty folder hides the environment's editable install of the plugin, because the image has its own.
        self.site = ["-v", f"{site}:{SITE}:ro"]
        for info in site.glob("sglang_kvq-*.dist-info"):
            self.site += ["-v", f"{folder / 'empty'}:{SITE}/{info.name}:ro"]

    def podman(self, *words: str) -> list[str]:
        """Returns a command for podman."""
        own = ["--cgroup-manager", "cgroupfs", "--events-backend", "none", "--runtime", "runc"]
        return ["podman", *self._storage, *own, *words]

    def build(self) -> None:
        """Builds the stand-in and the image.

        Raises:
            KeyError: no Debian release has this Python.
            subprocess.CalledProcessError: a build failed; its output was shown.
        """
        root, command = self.folder / "root.tar", self.folder / "sglang"
        command.write_text(COMMAND)
        suite = DEBIAN[sys.version_info[:2]]
        _run(
            *("mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", "--dpkgopt=force-unsafe-io"),
            *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in LEFT_OUT),
            f"--customize-hook=echo {SITE} > $1/usr/lib/python3/dist-packages/sglang-cpu.pth",
            f"--customize-hook=install -m 755 {command} $1/usr/local/bin/",
            *(suite, str(root)),
            env={"TMPDIR": str(self.folder)},
        )
        changes = [word for name, value in VARIABLES.items() for word in ("--change", f"ENV {name}={value}")]
        _run(*self.podman("import", "--quiet", *changes, str(root), BASE))
        root.unlink()
        mounts = [word for path in _pip_files() for word in ("-v", f"{path}:{path}:ro")]
        _run(
            *("buildah", *self._storage, "build", "--quiet", "--isolation", "chroot", "--format", "docker"),
            *("--pull-never", *mounts, *self.site, "--build-arg", f"VERSION={__version__}", "--tag", IMAGE, str(ROOT)),
        )


def _run(*command: str, env: Mapping[str, str] | None = None) -> None:
    begin = time.monotonic()
    subprocess.run(command, env={**os.environ, **(env or {})}, check=True, stdin=subprocess.DEVNULL)
    print(f"{command[0]}: {time.monotonic() - begin:.0f} s", flush=True)


def _pip_files() -> list[str]:
    """Returns the files that configure pip on this machine, and the certificates that it trusts."""
    asked = subprocess.run([sys.executable, "-m", "pip", "config", "debug"], capture_output=True, text=True, check=True)
    files = [line.split(", exists:")[0].strip() for line in asked.stdout.splitlines() if ", exists: True" in line]
    # A file in its own folder may refer to others there.
    places = {file if Path(file).parent == Path("/etc") else str(Path(file).parent) for file in files}
    return sorted(places) + [path for path in ("/etc/ssl/certs/ca-certificates.crt",) if Path(path).exists()]


class Container(ServerProcess):
    """The image as a running server, for the duration of the ``with`` block.

    Args:
        images: the storage of the image.
        model: folder that the container sees as ``/model``.
        arguments: of the container, after the CPU's flags and, unless they name a model, ``--model-path=/model``.
        options: of ``podman run``.
    """

    start_timeout = 600.0

    def __init__(
        self, images: Images, log: Path, model: Path, arguments: Sequence[str] = (), options: Sequence[str] = ()
    ) -> None:
        port = free_port()
        self.images, self.name = images, f"kvq-{log.stem}-{port}"
        served = [] if any(word.startswith("--model-path") for word in arguments) else ["--model-path=/model"]
        command = images.podman(
            *("run", "--rm", "--name", self.name, "--network", "host", "--no-healthcheck", "--shm-size", "1g"),
            *(*LIMITS, *images.site, "-v", f"{model}:/model:ro", "--env", "OMP_NUM_THREADS=1"),
            *("--env", f"SGLANG_DISABLED_MODEL_ARCHS={other_models()}"),
            *(*options, IMAGE, *served, *CPU_FLAGS, *CPU_CAPACITY),
            *(f"--port={port}", *arguments),
        )
        super().__init__(command, log, port)

    def start(self, timeout: float | None = None) -> Container:
        try:
            return super().start(timeout)
        except ServerFailed as error:
            raise ServerFailed(f"{error}\n{error.log}", error.log) from None

    def ask(self, path: str, body: Any = None, key: str | None = None) -> tuple[int, str]:
        """Sends a GET, or a POST of ``body`` as JSON; returns status and body of the answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        try:
            with OPENER.open(urllib.request.Request(self.url + path, data, headers), timeout=300) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def generate(self, text: str, tokens: int, key: str | None = None) -> tuple[int, str]:
        """Asks for a completion of so many tokens; returns status and body of the answer."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        return self.ask("/generate", {"text": text, "sampling_params": sampling}, key)

    def execute(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs a command in the container and returns its status and output."""
        return subprocess.run(self.images.podman("exec", self.name, *words), capture_output=True, text=True)

    def pid(self, title: str) -> int:
        """Returns this machine's id of the process whose command line has ``title``."""
        listed = subprocess.run(
            self.images.podman("top", self.name, "hpid", "args"), capture_output=True, text=True, check=True
        )
        (found,) = (line.split()[0] for line in listed.stdout.splitlines() if title in line)
        return int(found)

    def status(self, seconds: float = 120) -> int:
        """Waits until the container has ended and returns its exit status."""
        assert self.process is not None
        return self.process.wait(seconds)

    def stop(self, grace: float = 0) -> None:
        subprocess.run(self.images.podman("rm", "--force", "--time", "0", "--ignore", self.name), capture_output=True)
        super().stop(grace)
