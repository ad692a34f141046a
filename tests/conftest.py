"""Options and fixtures that all tests share."""

import atexit
import gc
import importlib
import importlib.util
import os
from pathlib import Path

import pytest
import torch

import benchmarks  # noqa: F401  (a GPU host's checkout is not installed)
from tests import nightly, pairs
from tests.leaving import leave

# Importing SGLang makes a million objects, which Python would visit after every few hundred new ones.
gc.set_threshold(50_000)

if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    # Triton decides at its first import, by any library, whether its own functions are made for the interpreter.
    # tests/kernels needs those that are.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("triton.language")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # otherwise each of many workers takes every core

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--model",
        default=str(ROOT / ".models" / "SmolLM2-135M-Instruct"),
        help="folder of the small model that servers in tests load (default: where ./demo and ./test keep it)",
    )
    parser.addoption(
        "--all",
        action="store_true",
        help="run all combinations of parameters (tests/pairs.py), all tests with each release, and the tests in "
        "tests/nightly.py",
    )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        atexit.register(leave_at_once, session)


def leave_at_once(session: pytest.Session) -> None:
    """Ends the process with the session's status."""
    atexit.unregister(leave_at_once)
    leave(int(session.exitstatus))


def pytest_configure(config: pytest.Config) -> None:
    pairs.everything |= config.getoption("--all")
    if importlib.util.find_spec("hypothesis"):  # a GPU host may have none
        from hypothesis import HealthCheck, settings

        # Neither a busy machine nor luck decides whether a change passes; ``--all`` draws examples anew.
        more = {} if pairs.everything else {"derandomize": True}
        slow = [HealthCheck.too_slow]
        settings.register_profile("tests", deadline=None, database=None, suppress_health_check=slow, **more)
        settings.load_profile("tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [] if config.getoption("--all") else [item for item in items if nightly.is_nightly(item.nodeid)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in {*left_out}]
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def model(request: pytest.FixtureRequest) -> Path:
    """Returns the model's folder.

    A missing model is an error, because a skipped end-to-end test would look like a pass.
    """
    path = Path(request.config.getoption("--model")).expanduser().resolve()
    if not (path / "config.json").exists():
        pytest.fail(f"no model in {path}: run `python launch/model.py`, or give --model FOLDER", pytrace=False)
    return path
