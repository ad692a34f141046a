"""Runs README's quick start as a newcomer would: in its own environment, word for word, without downloads.

``Qwen/Qwen3-8B`` is a folder of that name in the newcomer's current folder: a random, narrow model of 8 layers with as
many heads. Its rotations are in a hub cache, in the place and layout in which the RotationZoo publishes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.tiny_models import TinyModel
from sglang_kvq.rotations.base import RotationMeta, Rotations
from sglang_kvq.rotations.storage.published import save_published
from sglang_kvq.server_process import OPENER

ROOT = Path(__file__).resolve().parent.parent
MODEL = "Qwen/Qwen3-8B"
STANDIN = TinyModel("Qwen3-8B", "qwen3", layers=8, hidden=64, heads=32, kv_heads=8, positions=40960)
REPOSITORY, FOLDER = "Zhongzhu/OSCAR-RotationZoo", "Qwen3-8B/seq20000_prompt83_group128"
#: Commands that a newcomer may type instead of README's ``pip install .``.
INSTALLS = {
    "installed": "pip install .",
    "editable": "pip install -e .",
    "wheel": "pip wheel --no-deps -w dist . && pip install dist/*.whl",
}
#: SGLang's default address, which README's server listens on and its ``curl`` asks.
URL = "http://localhost:30000"
#: Bytes that SGLang finds free on a CPU host: its cache takes most of them, and several tests share a machine.
SMALL_HOST = 6 << 30
SMALL = f"""
import psutil
real = psutil.virtual_memory
psutil.virtual_memory = lambda: real()._replace(available=min(real().available, {SMALL_HOST}), total={SMALL_HOST})
"""
#: Makes pip ask no index and build with the environment's own setuptools.
PIP = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


class Failed(AssertionError):
    """A command of README did not do what README says; the message includes its output."""


def quick_start(page: str) -> list[str]:
    """Returns the commands of README's quick start without comments; a command may take several lines."""
    section = page.split("\n## Quick start\n")[1].split("\n## ")[0]
    found, begun = [], ""
    for block in re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            begun = f"{begun}\n{line}" if begun else line
            with contextlib.suppress(ValueError):  # a quotation continues in the next line
                if shlex.split(begun, comments=True):
                    found.append(begun)
                begun = ""
    return found


def is_server(command: str) -> bool:
    """Returns True if a command starts a server, which runs until it is stopped."""
    return "sglang.launch_server" in command or command.startswith("sglang serve")


@dataclass(frozen=True)
class Node:
    """A host with SGLang but without this package: a virtual environment that sees this machine's packages.

    Attributes:
        folder: holds the environment, the clone and the hub cache.
    """

    folder: Path
    cpu: bool = True

    @property
    def clone(self) -> Path:
        return self.folder / "sglang-kvq"

    @property
    def python(self) -> Path:
        return self.folder / "env" / "bin" / "python"

    def prepare(self) -> Node:
        """Makes the environment, a clone and the hub cache, in an empty folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.folder / "env"], check=True)
        (site,) = self.folder.glob("env/lib/python*/site-packages")
        (site / "installed_here.pth").write_text("\n".join(_installed()))
        if self.cpu:
            (site / "sitecustomize.py").write_text(SMALL)
        pip = self.python.with_name("pip")
        pip.write_text(f"#!{self.python}\nimport sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n")
        pip.chmod(0o755)
        clone_to(self.clone)
        publish(self.folder / "hf" / "hub")
        return self

    def environment(self) -> dict[str, str]:
        own = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
        return {
            **own,
            **PIP,
            "PATH": f"{self.python.parent}{os.pathsep}{own['PATH']}",
            "HF_HOME": str(self.folder / "hf"),
            "HF_HUB_OFFLINE": "1",
            "SGLANG_USE_CPU_ENGINE": str(int(self.cpu)),
            "no_proxy": "localhost,127.0.0.1",
        }

    def run(self, command: str, where: Path, timeout: float = 600) -> str:
        """Runs a command and returns what it prints.

        Raises:
            Failed: the exit status is not 0.
        """
        words = ["bash", "-o", "pipefail", "-ec", command]
        done = subprocess.run(words, cwd=where, env=self.environment(), capture_output=True, text=True, timeout=timeout)
        if done.returncode:
            raise Failed(f"in {where}: {command}\nexit status {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")
        return done.stdout

    @contextlib.contextmanager
    def serving(self, command: str, where: Path, timeout: float = 600) -> Iterator[Path]:
        """Starts a server and yields its log while it answers at ``URL``; SIGTERM stops it.

        Raises:
            Failed: something else listens there; the server ended, or was not ready in time.
        """
        if _healthy():
            raise Failed(f"{URL} answers before README's server was started. Stop what listens there.")
        log = self.folder / "server.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"], cwd=where, env=self.environment(), stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        try:
            deadline = time.monotonic() + timeout
            while not _healthy():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise Failed(f"in {where}: {command}\nstatus {process.poll()}\n{log.read_text()[-6000:]}")
                time.sleep(0.5)
            yield log
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def follow(self, commands: list[str], where: Path) -> str:
        """Runs commands one after the other; a server keeps running for the commands after it. Returns the last output.

        Raises:
            Failed: a command failed.
        """
        said = ""
        with contextlib.ExitStack() as servers:
            for command in commands:
                print(f"[{time.strftime('%H:%M:%S')}] $ {command}", flush=True)
                if is_server(command):
                    servers.enter_context(_alone())
                    servers.enter_context(self.serving(command, where))
                else:
                    said = self.run(command, where)
        return said


def use(node: Node, where: Path, page: str) -> dict:
    """Follows the quick start after its installation, in a folder; returns the chat completion at its end.

    Raises:
        Failed: a command failed, or there is no answer.
    """
    commands = quick_start(page)
    install = next(n for n, command in enumerate(commands) if command.startswith("pip install"))
    if not (where / MODEL).exists():
        write_model(where / MODEL)
    answer = json.loads(node.follow(commands[install + 1 :], where))
    if not answer.get("choices") or not answer["choices"][0]["message"]["content"]:
        raise Failed(f"no answer: {answer}")
    log = (node.folder / "server.log").read_text()
    if "kv-quant ready: method=oscar" not in log or FOLDER not in log:
        raise Failed(f"the server does not say that it serves with the published rotations:\n{log[-4000:]}")
    return answer


def clone_to(folder: Path) -> None:
    """Copies this repository's files, as git has them in the working tree; links remain links."""
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True)
    names = listed.stdout.decode().split("\0")[:-1] if listed.returncode == 0 else _without_git()
    for name in names:
        source, target = ROOT / name, folder / name
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def write_model(folder: Path) -> None:
    """Writes the stand-in for ``MODEL``, with a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.parent.mkdir(parents=True, exist_ok=True)
    STANDIN.write(folder.parent)
    special = ["<|begin|>", "<|end|>"]
    letters = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | {"bos_token": special[0], "eos_token": special[1]})
    )


def publish(hub: Path) -> None:
    """Writes a hub cache with random rotations for ``STANDIN``, in the place and layout of the published ones."""
    commit, repository = "0" * 40, hub / f"models--{REPOSITORY.replace('/', '--')}"
    folder = repository / "snapshots" / commit / FOLDER
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    generator = torch.Generator().manual_seed(0)
    k, v = torch.linalg.qr(torch.randn(2, STANDIN.layers, 1, STANDIN.head_dim, STANDIN.head_dim, generator=generator))[
        0
    ]
    save_published(Rotations(k, v, RotationMeta(objective="random")), folder)


def _installed() -> list[str]:
    """Returns the folders of packages that this process sees, without Python's own and this repository."""
    own = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
    own |= {path / "lib-dynload" for path in own} | {ROOT}
    return [path for path in sys.path if Path(path).is_dir() and path and Path(path).resolve() not in own]


def _without_git() -> list[str]:
    """Returns the files of a checkout without git, such as an archive, except its hidden folders."""
    paths = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_symlink() or path.is_file())
    return [str(path) for path in paths if "__pycache__" not in path.parts and path.parts[0][0] != "."]


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Waits until no other job of ``./test`` has a server at ``URL``."""
    with (Path(tempfile.gettempdir()) / "sglang-kvq-30000.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _healthy() -> bool:
    try:
        with OPENER.open(urllib.request.Request(f"{URL}/health"), timeout=30) as response:
            return bool(response.status == 200)
    except OSError:
        return False
