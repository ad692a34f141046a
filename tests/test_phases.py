"""Phases of a long command: lines without a terminal, bars on a terminal, times at the end."""

import contextlib
import io
import re
import time

from rich.console import Console

from sglang_kvq import phases as phases_module
from sglang_kvq.phases import Phases


def shown(run, terminal=False, **options):
    file = io.StringIO()
    with Phases(Console(file=file, force_terminal=terminal, width=80), **options) as phases:
        run(phases)
    return file.getvalue()


def test_each_phase_begins_and_ends_with_a_line():
    def run(phases):
        phases("loading", 0, 1)  # this phase ends when the next one begins
        for done in range(4):
            phases("moments", done, 3)
        phases("moments", 3, 3)

    lines = shown(run).splitlines()
    assert [line.split(" in ")[0] for line in lines[2:]] == ["moments: 0 of 3", "moments: 3 of 3"]
    assert (
        lines[0] == "loading"
        and re.fullmatch(r"loading: \d+\.\d s", lines[1])
        and lines[3].endswith(" s")
        and len(lines) == 4
    )


def test_a_phase_that_takes_long_says_so_again(monkeypatch):
    monkeypatch.setattr(phases_module, "EVERY", 0.05)

    file, deadline = io.StringIO(), time.monotonic() + 120

    def wait_for(line):
        while len(re.findall(f"^{line} [0-9]+ s$", file.getvalue(), re.MULTILINE)) < 2:
            assert time.monotonic() < deadline, file.getvalue()
            time.sleep(0.01)

    with Phases(Console(file=file)) as phases:
        phases("loading", 0, 1)
        wait_for("loading:")
        phases("moments", 2, 16)
        wait_for("moments: 2 of 16 after")


def test_an_error_is_not_the_end_of_a_phase():
    file = io.StringIO()
    with contextlib.suppress(ZeroDivisionError), Phases(Console(file=file)) as phases:
        phases("moments", 1, 3)
        raise ZeroDivisionError
    assert file.getvalue().splitlines() == ["moments: 0 of 3"]


def test_a_terminal_has_bars():
    text = shown(lambda phases: [phases("loading", 0, 1), phases("moments", 3, 3)], terminal=True)
    assert "loading" in text and "3/3" in text and "moments: " not in text


def test_timings_are_of_every_phase():
    def run(phases):
        phases("loading", 0, 1)
        until = time.process_time() + 0.2
        while time.process_time() < until:
            pass
        phases("moments", 1, 1)

    lines = shown(run, timings=True).splitlines()[-3:]
    assert [line.split()[0] for line in lines] == ["loading", "moments", "in"]
    assert float(lines[0].split()[3]) >= 0.2 and float(lines[2].split()[2]) >= 0.2
