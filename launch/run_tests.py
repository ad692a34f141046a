"""Runs the suite in jobs side by side, the longest first.

./test                    what every change must pass: SGLang's newest release, and what depends on the oldest
./test --quick            linters and what is tested in three minutes, without servers
./test --all              every test (tests/nightly.py), parameter and release: nightly, and before a release of ours
./test --container        builds the container image and runs it: needs root and Debian's packages
./test -k allocator -x    any pytest arguments
./test tests/e2e          only these paths, each in the environments it belongs to
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch import cpu_env
from launch.progress import StepFailed, call
from sglang_kvq.releases import NEWEST, OLDEST

ROOT = Path(__file__).resolve().parent.parent
#: The model that servers and tests of rotations load.
MODEL = ROOT / ".models" / "SmolLM2-135M-Instruct"
#: Linters, which run in the newest release's environment; a finding of any of them fails the whole run.
LINTERS = (("ruff", "format", "--check", "--quiet"), ("ruff", "check", "--quiet"), ("mypy",))
#: Folders of tests that run in both environments; all others are unit tests and run once.
BOTH = ("tests/sglang", "tests/e2e")
#: Jobs in the newest release's environment: those of ``EARLY``, then the longest first. One more job runs all other
#: tests.
JOBS = {
    "compiled kernels": ("tests/kernels/test_compile.py",),
    "kernels": ("tests/kernels",),
    "quick start": ("tests/e2e/test_newcomer.py",),
    "servers": ("tests/e2e",),
    "evaluation and benchmarks": ("tests/evaluation", "tests/benchmarks"),
    "cache and rotations": ("tests/cache", "tests/rotations"),
    "SGLang": ("tests/sglang",),
}
#: Jobs that need only the newest release's environment, so they begin while the rest is prepared.
EARLY = ("compiled kernels", "kernels", "ruff and mypy")
#: Jobs of ``--quick``; none starts a server.
QUICK = {
    "cache and kernels": (
        *("tests/cache/test_[f-r]*.py", "tests/cache/test_s[iopt]*.py", "tests/cache/test_t*.py"),
        *("tests/kernels/test_fold.py", "tests/kernels/test_gather.py", "tests/kernels/test_pairs.py"),
        *("tests/kernels/test_plan.py", "tests/kernels/test_s[ot]*.py", "tests/kernels/test_unpack.py"),
    ),
    "formats, methods and rotations": (
        *("tests/formats", "tests/methods", "tests/attention", "tests/sessions", "tests/test_config.py"),
        *("tests/rotations/maths", "tests/rotations/storage/test_files.py", "tests/mutations"),
        *("tests/packaging/test_english.py", "tests/packaging/test_figures.py", "tests/packaging/test_layers.py"),
        *("tests/packaging/test_re*.py", "tests/contributing/test_checklists.py", "tests/contributing/test_tools.py"),
    ),
    "flags, checks and sessions": (
        *(
            "tests/sglang/memory/test_allocator.py",
            "tests/sglang/memory/test_capacity.py",
            "tests/sglang/test_checks.py",
        ),
        *("tests/sglang/test_flags.py", "tests/sglang/test_hooks.py", "tests/sglang/memory/test_rows.py"),
        "tests/sglang/router",
    ),
    "schedules": ("tests/cache/test_schedules.py",),
}
#: Installs NIXL, with which nightly tests send pages to servers and to storage: 68 MB, without its build for another
#: CUDA release.
NIGHTLY_PACKAGES = ("pip", "install", "--quiet", "--no-deps", "nixl==1.5.1", "nixl-cu12==1.5.1")
#: Programs that ``--container`` needs. Their packages have the same names; kubectl's is in Kubernetes' package source.
CONTAINER_TOOLS = ("buildah", "kubectl", "mmdebstrap", "podman", "runc")
#: Options for unit tests that a command line names: one process per core.
SPREAD = ("--numprocesses=auto", "--dist=worksteal")
#: Gives each process one thread: threads that wait for those of another process cost more time than a core saves.
ONE_CORE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
#: Number of slowest tests in the summary.
SLOWEST = 12
#: pytest's exit code for "no tests collected", which -k may cause in one of the jobs.
NOTHING_COLLECTED = 5


@dataclass(frozen=True)
class Job:
    """Commands that run one after the other; each is a module in a release's environment, with arguments."""

    title: str
    version: str
    commands: tuple[tuple[str, ...], ...]


@dataclass
class Found:
    """Outcomes and times of the tests that ended so far."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def read(self, report: Path, title: str) -> None:
        """Adds a JUnit file's tests."""
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag for child in case}
            outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            self.counts[outcome] += 1
            self.seconds[f"{case.get('classname')}::{case.get('name')} ({title})"] = float(case.get("time", 0))


def pytest_job(title: str, version: str, words: Sequence[str]) -> Job:
    return Job(title, version, (("pytest", *words, "-q", "-p", "no:cacheprovider"),))


def container_job(options: Sequence[str]) -> Job:
    """Returns the job of ``--container``, which first installs the packages that only these tests need.

    Raises:
        StepFailed: this machine cannot build or run images.
    """
    if missing := [tool for tool in CONTAINER_TOOLS if not shutil.which(tool)]:
        raise StepFailed(f"--container: {', '.join(missing)}: not found. Run apt-get install {' '.join(missing)}.")
    if os.geteuid():
        raise StepFailed("--container: needs root. Run sudo ./test --container.")
    import tomllib  # from Python 3.11 on, like the stand-in for SGLang's image

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    install = ("pip", "install", "--quiet", *extras["container"])
    tests = pytest_job("container", NEWEST, ["tests/container", *options])
    return Job(tests.title, NEWEST, (install, *tests.commands))


def is_sglang(path: str) -> bool:
    """Returns whether a path from the command line is in the folders that run in both environments."""
    relative = Path(os.path.relpath(path.split("::")[0], ROOT))
    return any(Path(folder) == relative or Path(folder) in relative.parents for folder in BOTH)


def without_earlier(groups: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Returns pytest's paths for groups of patterns; each group leaves out the files of earlier groups."""
    words: dict[str, tuple[str, ...]] = {}
    taken: list[str] = []
    for title, patterns in groups.items():
        found = {pattern: sorted(ROOT.glob(pattern)) for pattern in patterns}
        if missing := [pattern for pattern, places in found.items() if not places]:
            raise ValueError(f"{', '.join(missing)}: no such tests. Correct {Path(__file__).name}.")
        paths = [str(place.relative_to(ROOT)) for places in found.values() for place in places]
        words[title] = (*paths, *(f"--ignore={path}" for path in taken))
        taken += paths
    return words


def plan(words: Sequence[str], quick: bool = False, everything: bool = False) -> list[Job]:
    """Returns the jobs for a command line. Words that name existing files or folders are paths; others go to pytest."""
    paths = [word for word in words if not word.startswith("-") and Path(word.split("::")[0]).exists()]
    options = [*(word for word in words if word not in paths), *(["--all"] if everything else [])]
    linters = [] if words else [Job("ruff and mypy", NEWEST, LINTERS)]
    if quick and not paths:
        groups = without_earlier(QUICK)
        return [*(pytest_job(title, NEWEST, [*own, *options]) for title, own in groups.items()), *linters]
    older: Sequence[str] = BOTH
    if not paths or any(path.rstrip("/") == "tests" for path in paths):
        groups = without_earlier({**JOBS, "other unit tests": ("tests",)})
        jobs = [pytest_job(title, NEWEST, [*own, *options]) for title, own in groups.items()]
    else:
        unit, older = ([path for path in paths if is_sglang(path) == both] for both in (False, True))
        jobs = [pytest_job("unit tests", NEWEST, [*unit, *SPREAD, *options])] if unit else []
        jobs += [pytest_job(f"SGLang {NEWEST}", NEWEST, [*older, *options])] if older else []
    if older and not quick:
        # After the newest release's servers: memory suffices for the servers of two jobs.
        place = next((n for n, job in enumerate(jobs) if job.title == "servers"), 0)
        jobs.insert(place + 1, pytest_job(f"SGLang {OLDEST}", OLDEST, [*older, *options]))
    return [*(with_packages(job) if everything else job for job in jobs), *linters]


def with_packages(job: Job) -> Job:
    """Returns the job; if it starts servers in the environment, it first installs what nightly servers need."""
    paths = [os.path.relpath(word, ROOT) for words in job.commands for word in words if not word.startswith("-")]
    servers = job.version == NEWEST and any(path.startswith("tests/e2e") for path in paths)
    installs = servers and job.title != "quick start"  # which has an environment of its own
    return replace(job, commands=(NIGHTLY_PACKAGES, *job.commands)) if installs else job


class Runner:
    """Executes jobs side by side: one more than there are cores, because jobs with servers often wait.

    Attributes:
        prepared: by release, futures that end when its environment and the model are ready. Jobs of ``EARLY`` do not
            wait for them.
    """

    def __init__(self, prepared: Mapping[str, Sequence[Future[Any]]], folder: Path) -> None:
        self.prepared, self.folder, self.found = prepared, folder, Found()
        self._running: list[subprocess.Popen[str]] = []

    def execute(self, jobs: Sequence[Job]) -> Found:
        pool = ThreadPoolExecutor(1 + (os.cpu_count() or 1))
        try:
            for done in as_completed([pool.submit(self._execute, job) for job in jobs]):
                done.result()  # raises immediately if something could not be prepared
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in self._running:
                process.terminate()
            pool.shutdown()
        return self.found

    def _execute(self, job: Job) -> None:
        if job.title not in EARLY:
            for part in self.prepared[job.version]:
                part.result()
        begin, output, codes = time.monotonic(), "", []
        report = self.folder / f"{job.title}.xml"
        python = ROOT / ".venvs" / f"sglang-{job.version}" / "bin" / "python"
        print(f"begun: {job.title}", flush=True)
        for words in job.commands:
            more = ("--model", str(MODEL), f"--junitxml={report}") if words[0] == "pytest" else ()
            process = subprocess.Popen(
                [python, "-m", *words, *more], cwd=ROOT, env={**cpu_env.compiling_environment(), **ONE_CORE},
                text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            self._running.append(process)
            output += process.communicate()[0]
            self._running.remove(process)
            if process.returncode not in (0, NOTHING_COLLECTED):
                codes.append(f"{job.title} ({words[0]} exited with {process.returncode})")
        print(f"\n=== {job.title}: {time.monotonic() - begin:.0f} s ===\n{output}", flush=True)
        self.found.broken += codes
        if report.exists():
            self.found.read(report, job.title)


def prepare(version: str, compiles: bool = True) -> Path:
    """Prepares a release's environment and returns its Python; ``compiles`` as in ``cpu_env.ensure``."""
    print(f"environment with SGLang {version}", flush=True)
    return cpu_env.ensure(ROOT / ".venvs" / f"sglang-{version}", version, compiles=compiles)


def fetch_model(python: Path) -> None:
    """Fetches the model of servers and tests; ``python`` is of an environment whose packages can convert it."""
    if not (MODEL / "config.json").exists():
        print("the small model that tests load", flush=True)
        call([python, ROOT / "launch" / "model.py"], ROOT / ".models" / "fetch.log")


def execute(jobs: Sequence[Job], folder: Path) -> Found:
    """Executes jobs; meanwhile prepares everything that the first jobs do not need, the model beside environments.

    Raises:
        StepFailed: something could not be prepared.
    """
    python = prepare(NEWEST, compiles=False)
    environments, models = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    try:
        model = models.submit(fetch_model, python)
        newest = environments.submit(cpu_env.Environment(ROOT / ".venvs" / f"sglang-{NEWEST}").compile_modules)
        others = {job.version: None for job in jobs if job.version != NEWEST}
        prepared = {version: (environments.submit(prepare, version), model) for version in others}
        return Runner({NEWEST: (newest, model), **prepared}, folder).execute(jobs)
    finally:
        environments.shutdown(wait=False, cancel_futures=True)
        models.shutdown(wait=False, cancel_futures=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--quick", action="store_true", help="linters and fast tests, in the newest environment")
    amount.add_argument("--all", action="store_true", help="all combinations of parameters, and all releases")
    amount.add_argument("--container", action="store_true", help="builds and runs the container image; as root")
    options, words = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    begin = time.monotonic()
    try:
        jobs = [container_job(words)] if options.container else plan(words, options.quick, options.all)
        with tempfile.TemporaryDirectory() as folder:
            found = execute(jobs, Path(folder))
    except StepFailed as error:
        print(f"could not prepare the tests: {error}", flush=True)
        return 1
    for name, seconds in sorted(found.seconds.items(), key=lambda item: -item[1])[:SLOWEST]:
        print(f"{seconds:7.1f} s  {name}")
    counts, broken = found.counts, found.broken
    if not counts["passed"] + counts["failed"]:
        broken.append("no test ran")
    print(f"\n{time.monotonic() - begin:.0f} s; " + (f"FAILED: {', '.join(broken)}" if broken else "all good"))
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped", flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
