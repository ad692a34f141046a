"""``sglang serve --help`` lists the plugin's flags."""

import os
import subprocess
import sys

import pytest

from sglang_kvq.methods import METHOD_NAMES

ENTRY_POINT = "[sglang.srt.platforms]\nkvq = sglang_kvq.sglang.serve_help:activate\n"
DIFFUSION = "sglang.multimodal_gen.runtime.entrypoints.cli.serve"


@pytest.mark.slow
def test_flags_are_in_the_help_of_sglang_serve(tmp_path):
    installed = tmp_path / "kvq_help-0.dist-info"  # declares the entry point even if this checkout is not installed
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: kvq-help\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(ENTRY_POINT)
    # SGLang prints the help for diffusion models after ours, and imports as much again for it.
    program = f"import os, sys; sys.modules[{DIFFUSION!r}] = None; sys.argv = ['sglang', 'serve', '--help']; "
    program += "from sglang.cli.main import main; main(); "
    program += "sys.stdout.flush(); os._exit(0)"  # Python would first free what it imported, for seconds
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=800)
    assert run.returncode == 0, run.stderr
    assert "Diffusion model support is not available" in run.stdout
    assert f"--kv-quant {{none,{','.join(METHOD_NAMES)}}}" in run.stdout


def test_nothing_happens_unless_help_is_asked_for(monkeypatch):
    from sglang_kvq.sglang import serve_help

    monkeypatch.setattr(sys, "argv", ["sglang", "serve", "--model-path", "m"])
    monkeypatch.setitem(sys.modules, "wrapt", None)  # importing it would fail
    assert serve_help.activate() is None
