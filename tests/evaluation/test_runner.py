"""Whole runs of the command, which starts fake servers itself."""

from __future__ import annotations

import errno
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation import comparison
from sglang_kvq.evaluation.comparison import launch_of
from sglang_kvq.evaluation.servers import EvaluatedServer, Launch
from sglang_kvq.evaluation.specs import parse_list
from sglang_kvq.server_process import ServerFailed
from tests.evaluation.conftest import main
from tests.evaluation.fake_server import FakeServer
from tests.pairs import few

SMALL = "--kl-lengths 200x3 --kl-first 50"
FAKE = f"{sys.executable} {Path(__file__).with_name('fake_server.py')}"


def words(text: Path, out: Path, *more: str, command: str = FAKE, model: str | Path = "models/Fake-1B") -> list[str]:
    settings = f"--model {model} --text {text} {SMALL} --kl-top 16 --start-timeout 300 --out {out}".split()
    return [*settings, "--server-command", command, *more]


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    """Keeps the model's name from being found on the hub, so that the server provides the tokenizer."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def rows(out: Path) -> dict[str, dict]:
    content = json.loads((out / "accuracy_fake-1b.json").read_text())
    return {row["method"]: row for row in content["rows"]}


def test_methods_are_compared_and_a_second_run_does_nothing(text, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(words(text, out, "--methods", "hadamard,oscar,int2")) == 0
    found = rows(out)
    assert next(iter(found)) == "none" and set(found) == {"none", "oscar", "hadamard", "int2"}
    assert found["none"]["kl"] < found["oscar"]["kl"] < found["hadamard"]["kl"] < found["int2"]["kl"]
    oscar = found["oscar"]
    assert (found["none"]["allocated_bits"], oscar["allocated_bits"], oscar["pool_bits"]) == (16, 2.5, 2.9)
    assert oscar["needle_16k"] is None and oscar["calibration"] == "wiki"
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/kl.json")}
    # "false" fails as a server, so none is started.
    assert main(words(text, out, "--methods", "hadamard,oscar,int2", command="false")) == 0
    assert before == {path: path.stat().st_mtime_ns for path in out.glob("runs/*/kl.json")}
    assert "already measured" in capsys.readouterr().err


def test_a_method_that_does_not_start_costs_only_itself(text, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(words(text, out, "--methods", "oscar,hadamard", "--", "--fail", "oscar")) == 1
    found = rows(out)
    assert found["hadamard"]["kl"] > 0 and found["oscar"]["kl"] is None
    assert "no rotations for this model: use --kv-quant int4" in found["oscar"]["error"]
    assert "not measured" in capsys.readouterr().out
    # Once the cause is fixed, the next run measures what is missing.
    (out / "runs" / "none" / "kl.json").unlink()
    assert main(words(text, out, "--methods", "oscar,hadamard", "--overwrite")) == 0
    assert rows(out)["oscar"]["error"] is None and rows(out)["oscar"]["kl"] > 0


@pytest.mark.parametrize(
    "log, reason",
    [
        ("RuntimeError: from before: 1\nValueError: no room: 3 GiB\nKilled", "ValueError: no room: 3 GiB"),
        ("sglang-kvq: use --kv-quant hadamard.\nSomeError: later: 1", "sglang-kvq: use --kv-quant hadamard."),
        ("[TP1] kvq.errors.KVQuantError: no room\nSomeError: later: 1", "[TP1] kvq.errors.KVQuantError: no room"),
        ("serve.py: error: unrecognized arguments: --fast\nBye", "serve.py: error: unrecognized arguments: --fast"),
        ("loading\nKilled\n", "Killed"),
        ("", "nothing in its log"),
    ],
)
def test_the_reason_why_a_server_did_not_start_is_found_in_its_log(log, reason, tmp_path):
    script = tmp_path / "serve.py"
    script.write_text(f"import sys\nsys.stdout.write({log!r})\nsys.exit(3)\n")
    with pytest.raises(ServerFailed) as failed:
        server_of(f"python {script}", tmp_path).start()
    assert str(failed.value).endswith(f" ended with code 3: {reason}")


def server_of(command: str, folder: Path) -> EvaluatedServer:
    return EvaluatedServer(Launch("models/Fake-1B", command), *parse_list("int2"), folder / "log", lambda: False, "")


@pytest.mark.parametrize("name", ["python", "python3"])
def test_python_in_the_server_command_is_this_interpreter(name, tmp_path, monkeypatch):
    """The first one on the path may have other packages than the report names, or none."""
    other = tmp_path / name
    other.write_text("#!/bin/sh\nexit 9\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with server_of(f"{name} {Path(__file__).with_name('fake_server.py')}", tmp_path) as server:
        assert server.is_ours and server.running
    assert not server_of("docker run image", tmp_path).is_ours


def test_a_server_that_crashes_costs_only_its_method(text, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.1)))
    out = tmp_path / "out"
    assert main(words(text, out, "--methods", "oscar,hadamard", "--", "--crash", "oscar")) == 1
    found = rows(out)
    assert found["hadamard"]["kl"] > 0 and found["oscar"]["kl"] is None
    assert "code 3: RuntimeError: out of memory" in found["oscar"]["error"]
    assert found["oscar"]["allocated_bits"] == 2.5


@pytest.mark.parametrize(("number", "status"), few([(signal.SIGTERM, 143), (signal.SIGINT, 130)], 1))
def test_an_interrupted_run_stops_its_servers_and_goes_on_later(number, status, text, tmp_path):
    # The model's name is this run's own: another run may test the same at this moment.
    out, model = tmp_path / "out", f"models/{secrets.token_hex(5)}"
    asked = words(text, out, "--methods", "oscar,hadamard", model=model)
    command = [sys.executable, "-m", "sglang_kvq.cli", "eval", *asked]
    run = subprocess.Popen(
        [*command, "--", "--hang", "hadamard"],
        stderr=subprocess.PIPE,
        text=True,
        # Background jobs of shells ignore SIGINT. No other thread runs here.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    for line in run.stderr:
        if "hadamard: kl" in line:
            break
    assert servers_of(model), "its server runs"
    run.send_signal(number)
    assert (
        run.communicate(timeout=200)[1]
        .splitlines()[-1]
        .endswith(f"interrupted; {out} has what was measured: the same command continues from there.")
    )
    assert run.returncode == status
    assert not servers_of(model)
    assert (out / "runs/oscar/kl.json").exists() and not list(out.glob("runs/hadamard/kl*.json"))


def servers_of(model: str) -> list[str]:
    shown = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in shown.splitlines() if "fake_server.py" in line and f"--model-path {model}" in line]


def test_without_its_reference_kl_is_not_measured(text, tmp_path):
    out = tmp_path / "out"
    assert main(words(text, out, "--methods", "none,oscar", "--", "--fail", "none")) == 1
    found = rows(out)
    assert "nothing to compare with" in found["oscar"]["error"] and "code 1" in found["none"]["error"]


def test_a_lost_reference_is_measured_again_where_it_is_needed(text, tmp_path, capsys):
    out = tmp_path / "out"
    asked = words(text, out, "--methods", "none,oscar")
    assert main(asked) == 0
    for path in out.glob("material/reference-*"):
        path.unlink()
    assert main(asked) == 0 and capsys.readouterr().err.count("already measured") == 2
    (out / "runs/oscar/kl.json").unlink()
    assert main(asked) == 0 and "already measured" not in capsys.readouterr().err
    assert rows(out)["oscar"]["kl"] is not None


def test_other_settings_are_refused_or_measured_again(text, tmp_path):
    out = tmp_path / "out"
    main(words(text, out, "--methods", "none"))
    with pytest.raises(KVQuantError, match=r"task\.first: 50, now 60.*--overwrite"):
        main([*words(text, out, "--methods", "none"), "--kl-first", "60"])
    with pytest.raises(KVQuantError, match=r"flags: .*--some"):
        main(words(text, out, "--methods", "none", "--", "--some", "flag"))
    assert main([*words(text, out, "--methods", "none"), "--kl-first", "60", "--overwrite"]) == 0
    assert json.loads((out / "runs/none/kl.json").read_text())["identity"]["task"]["first"] == 60


def test_settings_that_differ_between_methods_are_refused_before_anything_starts(text, tmp_path, gsm8k):
    out, tasks = tmp_path / "out", ["--tasks", "gsm8k", "--gsm8k", str(gsm8k), "--gsm8k-shots", "0"]
    assert main(words(text, out, "--methods", "int2", *tasks)) == 0
    kept = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    other = [*tasks, "--gsm8k-problems", "2"]
    with pytest.raises(KVQuantError, match=r"runs/int2/gsm8k.json .* \(problems: 200, now 2\)"):
        main(words(text, out, "--methods", "oscar", *other, "--overwrite"))
    with FakeServer("oscar") as server, pytest.raises(KVQuantError, match="problems: 200, now 2"):
        main(["--server", server.url, "--out", str(out), *other])
    assert kept == {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert main(words(text, out, "--methods", "oscar,int2", *other, "--overwrite")) == 0


def test_two_runs_do_not_measure_into_one_folder(text, tmp_path, monkeypatch):
    out, asked = tmp_path / "out", words(text, tmp_path / "out", "--methods", "none")
    hung = [sys.executable, "-m", "sglang_kvq.cli", "eval", *asked, "--", "--hang", "none"]
    with subprocess.Popen(hung, stderr=subprocess.PIPE, text=True) as run:
        next(line for line in run.stderr if "none: kl" in line)
        try:
            with pytest.raises(KVQuantError, match=rf"--out {out}: another kvq eval is measuring .* another --out"):
                main(asked)
        finally:
            run.kill()
    assert main(asked) == 0, "a killed run keeps no lock"

    def without_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", without_locks)
    with pytest.raises(KVQuantError, match=r"cannot be locked \(No locks available\). Give another --out"):
        main(asked)


def test_results_of_another_model_are_refused(text, tmp_path, gsm8k):
    """Two checkpoints may have one name, one config and files of one size."""
    out, models = tmp_path / "out", [tmp_path / name / "fake-1b" for name in "ab"]
    for number, model in enumerate(models):
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").write_bytes(bytes([number]) * 100)
    assert main(words(text, out, "--methods", "int2", model=models[0])) == 0
    with pytest.raises(KVQuantError, match=r"was measured with other settings \(model: "):
        main(words(text, out, "--methods", "int2", model=models[1]))
    tasks = ["--tasks", "gsm8k", "--gsm8k", str(gsm8k), "--gsm8k-shots", "0"]
    with pytest.raises(KVQuantError, match=r"runs/int2/kl.json was measured on another model \(fake-1b "):
        main(words(text, out, "--methods", "oscar", *tasks, model=models[1]))


def test_many_servers_at_once(text, tmp_path, humaneval, gsm8k):
    out = tmp_path / "out"
    tasks = f"--tasks kl,humaneval,gsm8k,needle --humaneval {humaneval} --gsm8k {gsm8k} --gsm8k-shots 0"
    more = "--methods none,oscar,hadamard --parallel 3 --needle-lengths 400,1024 --humaneval-problems 1"
    assert main(words(text, out, *tasks.split(), *more.split())) == 0
    for row in rows(out).values():
        assert row["humaneval"] == 1 and row["gsm8k"] == pytest.approx(2 / 3) and row["needle_1k"] == 1
    assert rows(out)["oscar"]["gsm8k_vs_none"] == 0
    assert "vs_none" not in json.dumps(rows(out)["none"])


def test_no_path_of_this_machine_in_the_report(text, tmp_path):
    out = tmp_path / "out"
    main(words(text, out, "--methods", "oscar", "--", "--fail", "oscar"))
    for path in out.glob("accuracy_*"):
        content = path.read_text() if path.suffix != ".png" else ""
        for folder in (tmp_path, Path.home(), Path(sys.executable).parent, "/somewhere", "/models"):
            assert str(folder) not in content, (path.name, folder)


def test_a_model_keeps_the_name_by_which_its_rotations_are_known(tmp_path):
    (tmp_path / "4f1e").mkdir()
    (tmp_path / "Qwen3-8B").symlink_to(tmp_path / "4f1e")
    given = dict(gpus="", server_command="python", plain_flags="", parallel=1, start_timeout=1.0)
    launch = launch_of(SimpleNamespace(model=str(tmp_path / "Qwen3-8B"), **given), [])
    assert launch.model == str(tmp_path / "Qwen3-8B")


# -- running servers --------------------------------------------------------------------------------------


def test_running_servers(text, tmp_path, capsys):
    out = tmp_path / "out"
    settings = f"--text {text} {SMALL} --out {out} --label fake-1b".split()
    with FakeServer() as reference, FakeServer("oscar") as server:
        assert main(["--server", server.url, "--reference-server", reference.url, *settings]) == 0
        asked = len(server.requests)
        assert main(["--server", server.url, *settings]) == 0
        assert not [path for path, _ in server.requests[asked:] if path == "/generate"]
    with FakeServer("hadamard") as server:
        assert main(["--server", server.url, "--name", "mine", *settings]) == 0
        capsys.readouterr()
        assert main(["--server", server.url, "--name", "mine", *settings, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["model"] == "fake-1b"
    with FakeServer("int2") as server, pytest.raises(KVQuantError, match="--overwrite"):
        main(["--server", server.url, "--name", "mine", *settings])
    assert 0 < rows(out)["oscar"]["kl"] < rows(out)["mine"]["kl"]


def test_servers_of_other_models_are_refused(tmp_path, gsm8k):
    class Other(FakeServer):
        def respond(self, path, body):
            answer = super().respond(path, body)
            return {**answer, "model_path": "/models/other"} if path == "/server_info" else answer

    asked = f"--tasks gsm8k --gsm8k {gsm8k} --gsm8k-shots 0 --out {tmp_path / 'out'} --server".split()
    with FakeServer("oscar") as server, Other("int2") as other:
        assert main([*asked, server.url]) == 0
        with pytest.raises(KVQuantError, match="serves other, but runs/oscar was measured on fake. Give another --out"):
            main([*asked, other.url])
        assert not other.asked("/v1/chat/completions")


def test_a_reference_must_be_bf16(text, tmp_path):
    with FakeServer("int2") as reference, FakeServer("oscar") as server, pytest.raises(KVQuantError, match="not BF16"):
        main(["--server", server.url, "--reference-server", reference.url, "--text", str(text), "--out", str(tmp_path)])


@pytest.mark.parametrize(
    "given, message",
    [
        ("", "give one of --server"),
        (
            "--server http://x --model m",
            "give one of --server.* or --report FILE..., not --server and --model together",
        ),
        ("--map nowhere.json --out precise_m.json", "^nowhere.json: No such file or directory. Check the path"),
        ("--model m --text f --server-command nothing/here", "--server-command nothing/here: no such program"),
        ("--model m --tasks kl,sing", "sing: unknown. Choose one of kl,"),
        ("--server http://x --tasks gsm8k --gsm8k f --gsm8k-shots 0 -- --tp 2", "--tp 2: flags after --"),
        ("--model m --text nowhere.txt --kl-lengths 1k", "whole numbers"),
        ("--model m --text nowhere.txt --kl-lengths 600", "longer than the first"),
        ("--model m --text nowhere.txt", "nowhere.txt: cannot be read"),
        ("--model no/such/m --tasks multi_key", "^--model no/such/m: no such folder, and not a hub id"),
        ("--server http://127.0.0.1:1 --tasks multi_key", "^--server http.*refused.* Give a running SGLang server"),
        ("--report nowhere.json --out x.md", "nowhere.json"),
        ("--model m --text f --gpus 0,,1", "--gpus 0,,1: must name each GPU once"),
        ("--model m --text f --gpus 0,0", "--gpus 0,0: must name each GPU once"),
        ("--model m --text f --chunked-prefill-size 128,small", "'small': must be a number of tokens, or own"),
        ("--model m --text f --methods oscar --chunked-prefill-size own", "add 128 to --chunked-prefill-size"),
        ("--model m --text f --chunked-prefill-size 64 -- --chunked-prefill-size 32", "Give it once"),
        ("--model m --text f --chunked-prefill-size 64,64", "--chunked-prefill-size 64,64: 64 twice. Give it once"),
        ("--model m --text f --kl-lengths 800x3,800", "--kl-lengths 800x3,800: 800 twice. Give it once"),
        ("--model m --text f --tasks needle --needle-lengths 512,640,512", "--needle-lengths 512,640,512: 512 twice"),
        (
            "--model m --text f --tasks needle --needle-lengths 100,512",
            "--needle-lengths 100,512: each must be at least",
        ),
        ("--model m --text f --tasks needle --needle-depths 0,101", "--needle-depths 0,101: each must be a percentage"),
        ("--model m --tasks multi_key --retrieval-lengths 100", "--retrieval-lengths 100: each must be at least"),
        ("--server http://x --text f --gpus 0", "servers that --model starts"),
        ("--server http://x --text f --methods int2", "--methods int2: applies only to servers that --model starts"),
        ("--server http://x --text f --parallel=2", "--parallel 2: applies only to servers that --model starts"),
        ("--model m --text f --reference-server http://y", "--reference-server http://y: applies only to --server"),
        ("--model m --text f --name mine -- --name x", "--name mine: applies only to --server. Leave it out"),
        ("--server http://x --text f --chunked-prefill-size own", "servers that --model starts"),
    ],
)
def test_wrong_command_lines(given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KVQuantError, match=message):
        main(["--out", "x", *given.split()])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("model", ["s3://bucket/model", "model.gguf", "org/of-modelscope"])
def test_a_model_that_only_sglang_finds_is_left_to_it(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model.gguf").write_text("")
    monkeypatch.setenv("SGLANG_USE_MODELSCOPE", "true" if "modelscope" in model else "")
    asked = []
    monkeypatch.setattr(comparison, "find_model", asked.append)
    monkeypatch.setattr(comparison, "Store", lambda *_: pytest.fail("found"))
    with pytest.raises(pytest.fail.Exception, match="found"):
        main(["--out", "x", "--model", model, "--tasks", "multi_key"])
    assert not asked
