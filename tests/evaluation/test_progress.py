"""Without a terminal, lines say what each method does, and repeat it while it takes long."""

from __future__ import annotations

import time

from sglang_kvq.evaluation import progress


def test_a_task_that_takes_long_says_so_again(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY", 0.05)
    with progress.Display() as display:
        display.status("oscar", "starting its server")
        time.sleep(0.2)
        display.status("oscar", "humaneval")
        display.counter("oscar", "humaneval")(40, 164)
        time.sleep(0.2)
        display.status("oscar", "gsm8k")
        time.sleep(0.2)
        display.finish("oscar")
        time.sleep(0.1)
        said = [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()]
        time.sleep(0.2)
    assert capsys.readouterr().err == "", "nothing runs"
    assert said.count("oscar: starting its server") >= 3
    assert said.count("oscar: humaneval") == 1 and said.count("oscar: humaneval: 40 of 164") >= 2
    assert said.count("oscar: gsm8k") >= 3
