"""Makes an environment in which a published SGLang release serves on a CPU, with this plugin installed.

    python3 launch/cpu_env.py .venvs/sglang-VERSION VERSION

A second run does nothing and takes a fraction of a second. An environment with another SGLang version shares the files
of a finished environment next to it by hard links. It installs only its own SGLang, and what that needs in another
version.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.progress import StepFailed, call, step
from sglang_kvq.releases import described

ROOT = Path(__file__).resolve().parent.parent
CPU = ROOT / "launch" / "cpu"
#: Works with every SGLang release that we support; the suffix keeps pip from taking the CUDA build.
TORCH = "torch==2.13.0+cpu"
TORCHVISION = "torchvision==0.28.0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
#: Packages that are installed in the version that the SGLang release pins: they read configs, tokenizers and requests.
PINNED = ("openai", "tokenizers", "transformers", "xgrammar")
#: The modules of a server's two main processes.
SERVER = "sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler"
MARK = "Appended by sglang-kvq's launch/cpu_env.py"


def digest(*paths: Path, extra: str = "") -> str:
    """Hashes files and a word, to identify what an environment was made from."""
    state = hashlib.sha256(extra.encode())
    for path in paths:
        for file in sorted(path.rglob("*.*")) if path.is_dir() else [path]:
            if file.is_file() and file.suffix != ".pyc":
                state.update(file.name.encode() + file.read_bytes())
    return state.hexdigest()


def recipe() -> str:
    """Hashes everything in an environment except SGLang's version and the plugin."""
    return digest(Path(__file__), CPU, extra=f"{sys.version_info[:3]}")


def compiling_environment() -> dict[str, str]:
    """Returns this process's variables without the one that keeps Python from writing compiled modules.

    Containers often set it. Each of the many processes of a server or a test would then compile the same modules.
    """
    return {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}


class Environment:
    """A virtual environment, and the stamps that record its content."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.python = self.folder / "bin" / "python"
        self.log = self.folder.parent / f"{folder.name}.log"
        self.site = self.folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"

    def stamp(self, name: str) -> str:
        path = self.folder / f".{name}"
        return path.read_text() if path.exists() else ""

    def set_stamp(self, name: str, value: str) -> None:
        (self.folder / f".{name}").write_text(value)

    def pip(self, *words: str | Path) -> None:
        """Installs packages without compiling their modules: a server imports a small part of them."""
        call([self.python, "-m", "pip", "install", "--no-compile", "--disable-pip-version-check", *words], self.log)

    def compile_modules(self) -> None:
        """Compiles what a server imports, once."""
        if self.stamp("compiled"):
            return
        with step("compiled modules of a server"):
            # Without the end, Python would free what it imported, for seconds.
            words = [self.python, "-c", f"import os, {SERVER}; os._exit(0)"]
            call(words, self.log, {**compiling_environment(), "SGLANG_USE_CPU_ENGINE": "1"})
        self.set_stamp("compiled", "yes")


def install_torch(env: Environment, index: str | None) -> None:
    """Installs the CPU build from pip's configured sources (a mirror, a local folder), else from PyTorch's index."""
    try:
        env.pip(TORCH, *(["--index-url", index] if index else []))
    except StepFailed:
        if index:
            raise
        env.pip(TORCH, "--index-url", TORCH_INDEX)


def add_standins(env: Environment) -> None:
    """Adds what the CUDA-built wheels lack on a CPU: SGLang's kernels and two of torchvision's schemas."""
    shutil.copytree(CPU / "sgl_kernel", env.site / "sgl_kernel", dirs_exist_ok=True)
    extension = env.site / "torchvision" / "extension.py"
    if MARK not in extension.read_text():
        with extension.open("a") as file:
            file.write((CPU / "torchvision_schemas.py").read_text())


def finished_sibling(env: Environment) -> Environment | None:
    """Returns an environment next to this one, made by the same recipe, whose files this one can share; or None."""
    for folder in sorted(env.folder.parent.glob("*")):
        sibling = Environment(folder)
        if folder != env.folder and sibling.stamp("recipe") == recipe() and sibling.site.is_dir():
            return sibling
    return None


def own_pins(env: Environment) -> list[str]:
    """Returns the requirements of the installed SGLang for ``PINNED``."""
    (metadata,) = env.site.glob("sglang-*.dist-info/METADATA")
    return re.findall(rf"^Requires-Dist: ((?:{'|'.join(PINNED)})==\S+)$", metadata.read_text(), re.MULTILINE)


def make(env: Environment, version: str, index: str | None) -> None:
    """Makes an environment whose Python can run ``python -m sglang.launch_server`` on a CPU."""
    shutil.rmtree(env.folder, ignore_errors=True)
    env.log.unlink(missing_ok=True)
    sibling = finished_sibling(env)
    with step("virtual environment"):
        call([sys.executable, "-m", "venv", *(["--without-pip"] if sibling else []), env.folder], env.log)
    if sibling:
        with step(f"sharing the files of {sibling.folder.name}"):
            # pip replaces files by new ones and never writes into them, so the other environment is not affected.
            # Tests may run there already: Python writes compiled modules under other names first.
            passing = shutil.ignore_patterns("*.pyc.*")
            shutil.copytree(
                sibling.site, env.site, symlinks=True, ignore=passing, copy_function=os.link, dirs_exist_ok=True
            )
    else:
        with step(f"{TORCH}"):
            install_torch(env, index)
            env.pip("--no-deps", TORCHVISION)
        add_standins(env)
    with step(f"SGLang {version}"):
        env.pip("--no-deps", f"sglang=={version}")
    with step("packages that SGLang imports"):
        env.pip(TORCH, "-r", CPU / "requirements.txt", *own_pins(env))  # naming torch keeps it in place
    env.set_stamp("recipe", recipe())
    env.set_stamp("sglang", version)


def install_plugin(env: Environment) -> None:
    """Installs this repository, editable, with what its tests need."""
    state = digest(ROOT / "pyproject.toml", extra=str(ROOT))
    if env.stamp("plugin") == state:
        return
    with step("sglang-kvq (editable)"):
        env.pip("--no-build-isolation", TORCH, "-e", f"{ROOT}[test]")
    env.set_stamp("plugin", state)


def ensure(folder: Path, version: str, index: str | None = None, compiles: bool = True) -> Path:
    """Makes what is missing and returns the environment's Python.

    Args:
        compiles: compile what a server imports; otherwise the first server does.

    Raises:
        StepFailed: a command failed; the message has the end of its output.
    """
    env = Environment(folder)
    if env.stamp("recipe") != recipe() or env.stamp("sglang") != version:
        make(env, version, index)
    install_plugin(env)
    if compiles:
        env.compile_modules()
    return env.python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("version", help=f"SGLang release: {described()}")
    parser.add_argument("--torch-index-url", help=f"where to get {TORCH}; default: pip's own sources, then PyTorch's")
    options = parser.parse_args()
    if sys.version_info < (3, 10):  # noqa: UP036  (the system's, before any requirement is checked)
        sys.exit(f"Python {sys.version.split()[0]}: 3.10 or newer is needed.")
    try:
        ensure(options.folder, options.version, options.torch_index_url)
    except StepFailed as error:
        sys.exit(f"{error}\n(the whole output: {Environment(options.folder).log})")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
