"""Without a terminal, lines say what each method does, and repeat it while it takes long."""

from __future__ import annotations

import threading
import time

from sglang_kvq.evaluation import progress


def test_a_task_that_takes_long_says_so_again(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY", 0.05)
    said: list[str] = []

    def wait_for(line: str, times: int) -> None:
        """Waits until a line was printed so often; the display may need long on a busy machine."""
        deadline = time.monotonic() + 120
        while said.count(line) < times:
            assert time.monotonic() < deadline, said
            time.sleep(0.01)
            said.extend(line.partition("] ")[2] for line in capsys.readouterr().err.splitlines())

    with progress.Display() as display:
        display.status("oscar", "starting its server")
        wait_for("oscar: starting its server", 3)
        display.status("oscar", "humaneval")
        display.counter("oscar", "humaneval")(40, 164)
        wait_for("oscar: humaneval: 40 of 164", 2)
        display.status("oscar", "gsm8k")
        wait_for("oscar: gsm8k", 3)
        display.finish("oscar")
        capsys.readouterr()
        time.sleep(0.2)
    assert capsys.readouterr().err == "", "nothing runs"
    later = said[said.index("oscar: humaneval: 40 of 164") :]
    assert "oscar: humaneval" not in later, "the count is repeated, not the name"


def test_nothing_is_said_of_a_method_that_has_ended(monkeypatch, capsys):
    """A reminder that has begun is printed before the method ends, and none after the display has ended."""
    monkeypatch.setattr(progress, "EVERY", 0.01)
    began, go, say = threading.Event(), threading.Event(), progress.Display.say

    def slowly(self, text: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            began.set()
            go.wait(0.5)
        say(self, text)

    monkeypatch.setattr(progress.Display, "say", slowly)
    with progress.Display() as display:
        display.status("oscar", "gsm8k")
        assert began.wait(120)
        display.finish("oscar")
        capsys.readouterr()
        go.set()
        time.sleep(0.2)
        assert capsys.readouterr().err == "", "a line after its end"
        display.status("oscar", "gsm8k")
        began.clear()
        go.clear()
        assert began.wait(120)
    capsys.readouterr()
    go.set()
    time.sleep(0.2)
    assert capsys.readouterr().err == "", "a line after the display's end"


def test_lines_are_printed_as_they_are(capsys):
    """Messages of errors may have brackets, or be longer than a terminal."""
    text = "oscar: FAILED: list[int] [/red] :x: " + "word " * 60
    with progress.Display() as display:
        display.say(text)
    assert capsys.readouterr().err.partition("] ")[2] == text + "\n"
