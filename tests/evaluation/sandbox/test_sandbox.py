"""Generated programs really run: each kind of misbehavior is contained and counts as failed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation import sandbox
from sglang_kvq.evaluation.sandbox.filter import instructions
from tests.evaluation.sandbox import hostile

#: Beside other work, a program may wait long for its second of the processor.
LIMITS = sandbox.Limits(cpu_seconds=1, wall_seconds=120, memory_bytes=256 << 20)
REPOSITORY = Path(__file__).resolve().parents[3]
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


@pytest.fixture(autouse=True, params=["root", "user"])
def kind(request, monkeypatch) -> str:
    """Runs each test in both kinds of sandbox; without root only the second kind exists."""
    if request.param == "root" and os.geteuid() != 0:
        pytest.skip("namespaces are made as root")
    monkeypatch.setattr(sandbox, "walls", lambda: sandbox.Walls(request.param))
    return request.param


def once():
    """Marks tests of things outside the sandbox, for which one kind is enough."""
    return pytest.mark.parametrize("kind", ["user"], indirect=True)


def test_namespaces_can_be_made_here(kind):
    """Checks that a sandbox can be made here; otherwise the tests below would show nothing."""
    assert sandbox._start(sandbox._PROBE, LIMITS, kind) == (0, "")


@pytest.fixture(scope="module")
def facts():
    with hostile.targets() as found:
        yield found


def test_what_is_tried_is_refused(facts):
    assert sandbox.run(hostile.attempts(facts)) == sandbox.Verdict(True)


@pytest.mark.parametrize("program", hostile.ordinary().values(), ids=hostile.ordinary())
def test_ordinary_programs_pass(program):
    assert sandbox.run(program) == sandbox.Verdict(True)


def test_programs_that_run_together_are_judged_one_by_one():
    """A joint run reports each failing program; otherwise the two tests above would show nothing."""
    programs = {"one": "1 / 0", "two": "import os; os._exit(0)", "three": "open('x', 'w')"}
    verdict = sandbox.run(hostile.together(programs))
    assert not verdict.passed and "ZeroDivisionError" in verdict.reason
    assert "'two': (0," in verdict.reason and "three" not in verdict.reason


def test_passes():
    program = "print('out'); open('mine', 'w').write('x'); assert open('mine').read()"
    assert sandbox.run(program, LIMITS) == sandbox.Verdict(True)


@pytest.mark.parametrize(
    "program, reason",
    [
        ("assert 1 + 1 == 3", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit(0)", "exit status 0"),
        ("import os; os._exit(0)", "exit status 0"),
        ("while True: pass", "timeout"),
        ("x = bytearray(1 << 32)", "MemoryError"),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", "MemoryError"),
        ("input()", "EOFError"),
        ("import os; assert 'HOME' in os.environ", "AssertionError"),
        ("import numpy", "ModuleNotFoundError"),
        ("while True: print('x' * 1000)", ""),
        ("f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))", "File too large"),
    ],
    ids=lambda value: value[:24],
)
def test_fails_and_says_why(program, reason):
    verdict = sandbox.run(program, LIMITS)
    assert not verdict.passed and reason in verdict.reason


def test_waiting_ends_with_the_wall_clock():
    begin = time.monotonic()
    verdict = sandbox.run("import time; time.sleep(600)", sandbox.Limits(wall_seconds=2))
    assert not verdict.passed and "timeout: 2 s" in verdict.reason and time.monotonic() - begin < 300


@pytest.mark.parametrize("folder", ["/root", "/tmp", "/var/tmp", "/dev/shm", str(Path(__file__).parent)])
def test_writes_stay_inside(folder):
    """A program may create the file in its own /tmp, but the machine's /tmp stays unchanged."""
    target = Path(folder) / "kvq_escaped"
    verdict = sandbox.run(f"open({str(target)!r}, 'w').write('x')", LIMITS)
    assert not verdict.passed or folder == "/tmp"
    assert not target.exists()


def test_this_machines_files_cannot_be_deleted(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("x")
    victim.chmod(0o666)
    tmp_path.chmod(0o777)
    assert not sandbox.run(f"import os; os.remove({str(victim)!r})", LIMITS).passed
    assert victim.read_text() == "x"


def test_processes_are_counted_for_each_program_alone():
    """Several programs run at once, each with its own limit on processes."""
    forks = textwrap.dedent(hostile.ORDINARY["sixteen processes and no more"])
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(sandbox.run, [forks] * 4)) == [sandbox.Verdict(True)] * 4


def test_fork_bomb_ends():
    """A fork bomb runs out of processes or time, and leaves nothing behind."""
    begin, mark = time.monotonic(), Mark()
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert not sandbox.run(mark.program + bomb, sandbox.Limits(cpu_seconds=1, wall_seconds=4)).passed
    assert time.monotonic() - begin < 300
    mark.assert_gone()


def test_a_daemon_does_not_outlive_its_program():
    mark = Mark()
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\n"
    assert sandbox.run(mark.program + daemon, LIMITS).passed
    mark.assert_gone()


class Mark:
    """A name for a program's processes, by which they differ from those that another test runs at this moment."""

    def __init__(self) -> None:
        self.name = f"kvq-{secrets.token_hex(5)}"
        self.program = f"import ctypes\nctypes.CDLL(None).prctl(15, {self.name.encode()})\n"  # PR_SET_NAME

    def processes(self) -> list[str]:
        shown = subprocess.run(["ps", "-eo", "pid,comm"], capture_output=True, text=True, check=True).stdout
        return [line for line in shown.splitlines() if self.name in line]

    def assert_gone(self) -> None:
        """Asserts that the processes end soon after the sandbox has killed them, and that one would have been seen."""
        deadline = time.monotonic() + 60
        while left := self.processes():
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        command = [sys.executable, "-I", "-c", f"{self.program}print(flush=True); input()"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as control:
            control.stdout.readline()
            assert len(self.processes()) == 1


def test_nothing_else_is_there_and_nothing_but_tmp_can_be_written():
    """The program's file tree holds only files of the interpreter, and only /tmp is writable."""
    layout = sandbox._layout()
    expected = [target for _, target in layout["binds"]]
    expected += ["/dev/null", "/dev/urandom", "/tmp/program.py", "/proc/self/exe"]
    walk = f"""
        import os
        expected, covered = {expected!r}, {layout["covered"]!r}
        for folder, folders, files in os.walk("/"):
            for path in (os.path.join(folder, name) for name in files):
                assert any(path == one or path.startswith(one + "/") for one in expected), path
                assert path[:5] in ("/dev/", "/tmp/") or not os.access(path, os.W_OK), path
            assert folder == "/tmp" or not os.access(folder, os.W_OK), folder
        for folder in covered:
            assert os.listdir(folder) == [], folder
    """
    assert sandbox.run(textwrap.dedent(walk)) == sandbox.Verdict(True)


def test_nothing_of_a_run_remains(tmp_path, monkeypatch):
    """The folder for temporary files is this test's own, because other tests use the machine's at the same time."""
    made, make = [], tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkdtemp", lambda *words, **more: made.append(make(*words, **more)) or made[-1])

    def state():
        return Path("/proc/self/mountinfo").read_text(encoding="utf-8"), list(tmp_path.iterdir())

    before, mark = state(), Mark()
    program = "import os; os.makedirs('a/b/c'); open('a/b/c/d', 'w').write('x' * 1000)"
    assert sandbox.run(mark.program + program, LIMITS).passed
    assert [Path(folder).parent for folder in made] == [tmp_path], "it used no temporary folder"
    assert state() == before
    mark.assert_gone()


def readable_python() -> str:
    """Returns an interpreter that another user may run; it needs only the standard library."""
    candidates = filter(None, (os.path.realpath(sys.executable), shutil.which("python3", path=os.defpath)))
    for python in candidates:
        try:
            command = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 10))"]
            if subprocess.run(command, user=NOBODY, group=NOBODY, extra_groups=[]).returncode == 0:
                return python
        except PermissionError:
            continue
    pytest.skip("no interpreter here that another user may run")


@as_root
@once()
@pytest.mark.parametrize("through", [[], ["unshare", "--user", "--map-root-user"]], ids=["user", "only-user-mapped"])
def test_another_user_is_contained_as_well(through):
    """Another user without rights makes the same attempts, whose targets belong to that user.

    The second case is that user's root in a container that maps no other user.
    """
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    with contextlib.ExitStack() as stack:
        # Some machines deny other users /tmp and /var/tmp.
        parents = ("/tmp", "/var/tmp")
        folders = [stack.enter_context(tempfile.TemporaryDirectory(prefix="hostile-", dir=one)) for one in parents]
        for folder in folders:
            os.chown(folder, NOBODY, NOBODY)
        command = [*through, readable_python(), "-m", "tests.evaluation.sandbox.hostile", *folders]
        user |= {"env": {**os.environ, "TMPDIR": folders[0]}}
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, **user)
    assert done.returncode == 0, done.stderr
    verdicts = json.loads(done.stdout)
    assert list(verdicts) == ["attempts", *hostile.ordinary()]
    assert {name: reason for name, (passed, reason) in verdicts.items() if not passed} == {}


@once()
def test_the_attempts_are_real(facts, tmp_path):
    """Without the sandbox, each attempt reaches its target."""
    all_of_them = hostile.together({name: hostile.outside(name, facts) for name in hostile.SUCCEED_OUTSIDE})
    done = subprocess.run([sys.executable, "-I", "-c", all_of_them], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


KIND = "from sglang_kvq.evaluation import sandbox; sandbox.require(False); print(sandbox.walls().kind)"
#: Enters a user namespace in which nobody may create another one, without any capability.
FORBIDDEN = "echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-all --inh-caps=-all -- "


@as_root
@once()
def test_root_without_the_capability_uses_a_user_namespace():
    """Root in a container that lacks CAP_SYS_ADMIN but may create user namespaces uses a user namespace."""
    limited = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-all", "--", sys.executable, "-c", KIND]
    done = subprocess.run(limited, capture_output=True, text=True, cwd=REPOSITORY)
    assert (done.returncode, done.stdout.strip()) == (0, "user"), done.stderr


@as_root
@once()
@pytest.mark.parametrize(
    "through, why",
    [
        # The kernel does not limit the processes of the machine's root.
        (["unshare", "--user", "--map-root-user"], "maps no user.*the limit on processes does not hold"),
        (["setpriv", "--bounding-set=-sys_admin,-setuid", "--inh-caps=-all", "--"], "unshare: .*; .*map users: "),
    ],
    ids=["root-that-stays-root", "no-right-to-another-user"],
)
def test_root_that_cannot_become_another_user_is_refused(through, why):
    """Root that cannot become another user is refused, because the limit on processes would not hold."""
    done = subprocess.run([*through, sys.executable, "-c", KIND], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 1 and re.search(why, done.stderr), done.stderr


@once()
def test_where_namespaces_are_forbidden_it_refuses_and_names_the_setting():
    inner = f"{FORBIDDEN}{sys.executable} -c '{KIND}'"
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", inner]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    message = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and done.stdout == ""
    assert "KVQuantError" in message and "as root: [Errno 22] this user namespace maps no user" in message
    assert "in a user namespace: [Errno 28] unshare: No space left on device" in message
    assert "sysctl -w user.max_user_namespaces=15000" in message and "--allow-unsandboxed" in message


@once()
def test_the_filter_knows_its_machine():
    assert instructions("aarch64") != instructions("x86_64")
    with pytest.raises(KVQuantError, match="'riscv64'.*x86_64 and aarch64"):
        instructions("riscv64")


@once()
def test_without_namespaces_nothing_runs_unless_allowed(monkeypatch):
    monkeypatch.setattr(sandbox, "walls", lambda: sandbox.Walls(None, ("as root: unshare: Operation not permitted",)))
    with pytest.raises(KVQuantError, match="unshare: Operation not permitted.*--allow-unsandboxed"):
        sandbox.require(allow_unsandboxed=False)
    assert "network" in sandbox.require(allow_unsandboxed=True)
    assert sandbox.run("assert True", LIMITS).passed
    assert "timeout" in sandbox.run("while True: pass", LIMITS).reason
