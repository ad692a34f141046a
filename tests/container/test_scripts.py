"""The image's two scripts understand the server's flags; a stand-in for what they start prints its words."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
PRINT = '#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n'


def words(tmp_path: Path, script: str, program: str, *arguments: str) -> list[str]:
    """Runs the script's text; returns the words with which it starts the program."""
    for name, text in ((program, PRINT), ("python3", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "-c", script, "script", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ((), "http://localhost:30000/health"),
        (("--port", "1", "--port=2"), "http://localhost:2/health"),
        (("--host", "::"), "http://localhost:30000/health"),
        (("--host=10.1.2.3",), "http://10.1.2.3:30000/health"),
        (("--host", "fd00::7", "--port=8"), "http://[fd00::7]:8/health"),
        (("--ssl-keyfile", "k", "--ssl-certfile", "c"), "https://localhost:30000/health"),
        (("--ssl-keyfile=k", "--ssl-certfile=c"), "https://localhost:30000/health"),
    ],
)
def test_health_check_asks_where_the_server_listens(tmp_path: Path, given: tuple[str, ...], asked: str) -> None:
    line = tmp_path / "cmdline"
    line.write_text("\0".join(("tini", "--", "serve.sh", *given, "")))
    script = (LAUNCH / "health.sh").read_text().replace("/proc/1/cmdline", str(line))
    curl = words(tmp_path, script, "curl")
    assert curl[-1] == asked
    assert "--insecure" in curl, "a certificate is not for the name localhost"


@pytest.mark.parametrize(
    ("given", "served"),
    [
        (("--model-path", "a b"), ("--kv-quant", "int4", "--model-path", "a b")),
        (("org/model", "--kv-quant", "oscar"), ("--model-path", "org/model", "--kv-quant", "oscar")),
        (("org/model",), ("--kv-quant", "int4", "--model-path", "org/model")),
        (("--kv-quant=none", "--port=7"), ("--kv-quant=none", "--port=7")),
        (("--kv-quant-bits", "3"), ("--kv-quant", "int4", "--kv-quant-bits", "3")),
        (("--config", "file"), ("--config", "file")),
        ((), ("--kv-quant", "int4")),
    ],
)
def test_entry_point_passes_arguments_on(tmp_path: Path, given: tuple[str, ...], served: tuple[str, ...]) -> None:
    script = (LAUNCH / "serve.sh").read_text()
    assert words(tmp_path, script, "sglang", *given) == ["serve", "--host", "0.0.0.0", "--port", "30000", *served]
