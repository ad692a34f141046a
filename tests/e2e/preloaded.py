"""Starts servers by forking a process that has imported SGLang, which saves each three imports of several seconds.

The server's own processes are forked too, where SGLang would spawn them. Each server loads the plugins on its own
PYTHONPATH. ``test_newcomer.py`` starts its servers as users do.
"""

from __future__ import annotations

import array
import gc
import json
import os
import socket
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from launch.server import Server
from tests import hook_places
from tests.e2e import products

#: Seconds until a preloading process must answer; it imports SGLang first.
PRELOAD = 300


#: Variables that SGLang reads when it uses them, not when it is imported.
READ_LATE = (
    *("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE"),
    *("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"),
    "SGLANG_CPU_OMP_THREADS_BIND",
)
#: Variables that SGLang's scheduler turns into constants when it is imported; a forked server sets these again.
CONSTANTS = ("SGLANG_TEST_RETRACT", "SGLANG_TEST_RETRACT_INTERVAL")
#: SGLang's model modules that servers in tests load.
MODEL_MODULES = ("llama", "llama_eagle", "qwen3_next")
#: Modules that the plugin imports in every server; none of them reads the environment when it is imported.
PLUGIN_MODULES = ("attention.base", "attention.reference", "rotations", "sglang.flags", "sglang.plugin")


@cache
def other_models() -> str:
    """Returns SGLang's model modules except ``MODEL_MODULES``: importing them all takes a tenth of a server's start."""
    spec = find_spec("sglang.srt.models")
    assert spec and spec.submodule_search_locations
    found = {path.stem for path in Path(spec.submodule_search_locations[0]).glob("*.py")}
    assert found >= set(MODEL_MODULES)
    return ",".join(sorted(found - {*MODEL_MODULES, "registry", "utils", "__init__"}))


class Forked:
    """A server's process with the used part of ``subprocess.Popen``; the preloading process is its parent and waits."""

    def __init__(self, parent: socket.socket, words: list[str], env: dict[str, str], log: Path) -> None:
        self.channel, theirs = socket.socketpair()
        body = json.dumps({"argv": words, "env": env, "log": str(log)}).encode()
        socket.send_fds(parent, [len(body).to_bytes(4, "big") + body], [theirs.fileno()])
        theirs.close()
        self.pid = self._number()
        self.returncode: int | None = None

    def _number(self) -> int:
        found = array.array("i")
        found.frombytes(self.channel.recv(4, socket.MSG_WAITALL))
        return found[0]

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the process and returns its exit status, negative for a signal's.

        Raises:
            subprocess.TimeoutExpired: it still runs after that many seconds.
        """
        if self.returncode is None:
            self.channel.settimeout(timeout)
            try:
                self.returncode = self._number()
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired("server", timeout or 0) from None
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, 15)


class Preloaded:
    """A process that has imported SGLang with a server's variables, and forks servers."""

    def __init__(self, server: Server) -> None:
        self.variables, self.kernels = _sglangs(server), _kernels(server)
        self.channel, theirs = socket.socketpair()
        model = server.command[server.command.index("--model-path") + 1]
        words = [server.command[0], "-m", "tests.e2e.preloaded", str(theirs.fileno()), model]
        root = str(Path(__file__).resolve().parents[2])
        # A process whose OpenMP has threads hangs after a fork.
        env = {**server.env, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(words, env=env, cwd=root, pass_fds=[theirs.fileno()])
        theirs.close()
        self.channel.settimeout(PRELOAD)
        if self.channel.recv(1) != b"!":
            raise RuntimeError("the process that preloads SGLang ended")
        self.channel.settimeout(None)

    def can_fork(self, server: Server) -> bool:
        """Returns True if SGLang was imported with this server's variables and stand-in for kernels."""
        return (_sglangs(server), _kernels(server)) == (self.variables, self.kernels)

    def fork(self, server: Server) -> Forked:
        """Forks the server's process, in the folder of its log."""
        words = server.command[server.command.index("-m") + 1 :]
        return Forked(self.channel, words, server.env, server.log_path)

    def stop(self) -> None:
        self.channel.close()
        self.process.wait()


def _sglangs(server: Server) -> dict[str, str]:
    """Returns the variables for SGLang, some of which it may read while it is imported."""
    found = {name: value for name, value in server.env.items() if name.startswith("SGLANG_")}
    return {name: value for name, value in found.items() if name not in READ_LATE + CONSTANTS}


def _kernels(server: Server) -> str | None:
    """Returns the first folder of the server's PYTHONPATH with a stand-in for SGLang's kernels."""
    folders = server.env.get("PYTHONPATH", "").split(os.pathsep)
    return next((folder for folder in folders if folder and Path(folder, "sgl_kernel").exists()), None)


def _serve(request: dict) -> None:
    """Becomes the server, with its own session and log, and runs SGLang's ``__main__``."""
    import ctypes
    import runpy

    from sglang.srt import environ
    from sglang.srt.managers import scheduler

    gc.enable()
    ctypes.CDLL(None).prctl(1, 9)  # the server dies with the preloading process
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(Path(request["log"]).parent)
    sys.path[0] = ""
    sys.path[1:1] = list(filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep)))
    for name in CONSTANTS:
        setattr(scheduler, name.removeprefix("SGLANG_"), getattr(environ.envs, name).get())
    module, *words = request["argv"]
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _keep_tokenizer(model: str) -> None:
    """Loads a model's tokenizer once for all servers: each would load it four times, which is half of its start."""
    from sglang.srt.managers import scheduler

    load = scheduler.get_tokenizer
    kept, file = load(model), os.path.realpath(os.path.join(model, "tokenizer.json"))

    def get_tokenizer(name: str, *args, **options):
        usual = not args and set(options.values()) <= {"auto", False, None, "huggingface"}
        same = usual and os.path.realpath(os.path.join(name, "tokenizer.json")) == file
        return kept if same else load(name, *args, **options)

    for module in list(sys.modules.values()):
        if vars(module).get("get_tokenizer") is load:
            module.get_tokenizer = get_tokenizer


def _main(channel: socket.socket, model: str) -> None:
    """Forks servers until the channel closes; reports each server's pid and exit status to its own channel."""
    import importlib
    import multiprocessing.context
    import multiprocessing.popen_fork
    import select
    import signal

    import setproctitle

    gc.disable()  # collections would visit the million objects of SGLang's modules again and again
    setproctitle.setproctitle("tests.e2e.preloaded")  # works only before a child has other variables
    names = ("entrypoints.http_server", "managers.scheduler", "managers.detokenizer_manager")
    for name in (*names, *(f"models.{model}" for model in MODEL_MODULES)):
        importlib.import_module(f"sglang.srt.{name}")
    for name in PLUGIN_MODULES:
        importlib.import_module(f"sglang_kvq.{name}")
    products.install()
    hook_places.install()
    if Path(model, "tokenizer.json").exists():
        _keep_tokenizer(model)
    gc.freeze()
    multiprocessing.context.SpawnProcess._Popen = staticmethod(multiprocessing.popen_fork.Popen)
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, socket.socket] = {}
    channel.sendall(b"!")
    while True:
        ready, _, _ = select.select([channel, wake], [], [])
        if wake in ready:
            os.read(wake, 512)
            while children:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                with children.pop(pid) as ended:
                    ended.sendall(array.array("i", [os.waitstatus_to_exitcode(status)]).tobytes())
        if channel in ready:
            head, fds, _, _ = socket.recv_fds(channel, 4, 1)
            if not head:
                os._exit(0)  # Python would first free what it imported, for seconds
            request = json.loads(channel.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
            own = socket.socket(fileno=fds[0])
            pid = os.fork()
            if not pid:
                for other in (channel, own, *children.values()):
                    other.close()
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(wake), os.close(waker)
                _serve(request)
                break
            children[pid] = own
            own.sendall(array.array("i", [pid]).tobytes())


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
