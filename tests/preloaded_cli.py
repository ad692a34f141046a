"""Runs ``kvq`` and programs in processes forked from one that has imported torch, which saves each two seconds.

    python -m tests.preloaded_cli    # one command a line on stdin, as JSON; its exit status on stdout

Each process itself imports the modules that read the environment at import, such as the hub's client.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.conftest import ROOT
from tests.leaving import leave

#: Modules that commands import before they read their arguments; the first ones are slow.
HEAVY = ("torch", "safetensors.torch", "rich.table", "typer", "sglang_kvq.cli", "sglang_kvq.rotations")
#: Packages that read environment variables when they are imported.
READS_VARIABLES = ("huggingface_hub", "transformers")


def run(
    words: list[str], env: dict[str, str], timeout: float = 600, code: str = ""
) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m sglang_kvq.cli`` with these words and variables, in the repository's root.

    Args:
        code: a program to run instead.
    """
    parent = _parent()
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        request = {"argv": ["kvq", *words], "env": env, "code": code, "timeout": int(timeout)}
        request |= {"out": str(out), "err": str(err)}
        parent.stdin.write(json.dumps(request) + "\n")
        parent.stdin.flush()
        answer = parent.stdout.readline()
        assert answer, "the process that forks commands ended"
        return subprocess.CompletedProcess(words, int(answer), out.read_text(), err.read_text())


@cache
def _parent() -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.preloaded_cli"]
    parent = subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(parent.stdin.close)
    return parent


def _become(request: dict) -> None:
    """Becomes the command; a signal ends it if it takes too long."""
    import signal

    signal.alarm(request["timeout"])
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), *((n, os.open(request[name], os.O_WRONLY | os.O_CREAT)) for n, name in OUTPUTS)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["argv"]
    status = 0
    try:
        if request["code"]:
            exec(request["code"], {"__name__": "__main__"})
        else:
            runpy.run_module("sglang_kvq.cli", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        status = ended.code or 0
    leave(status)


OUTPUTS = ((1, "out"), (2, "err"))


def _main() -> None:
    import importlib

    for name in HEAVY:
        importlib.import_module(name)
    del sys.modules["sglang_kvq.cli"]  # it runs as __main__
    early = [name for name in READS_VARIABLES if name in sys.modules]
    assert not early, f"{early} are imported before a command's variables are set"
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            _become(json.loads(line))
            return
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    _main()
