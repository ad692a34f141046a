"""Mathematics: an independent computation confirms the answers, and answers are graded correctly."""

from __future__ import annotations

import itertools
import json
import math
import re
from fractions import Fraction
from functools import cache

import pytest

from sglang_kvq.evaluation.client import Client
from sglang_kvq.evaluation.tasks.math_problems import KINDS, make, text_of
from sglang_kvq.evaluation.tasks.mathematics import MathTask, final_answer, number, same
from tests.evaluation.fake_server import FakeServer


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} or rather \boxed{\frac{3}{4}}", r"\frac{3}{4}"),
        (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"\left( 3, \frac{\pi}{2} \right)"),
        ("It is 3, then 4.50.", "4.50"),
        (r"cut off: 17 + \boxed{4", "4"),
        ("no idea", None),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    "found, wanted, equal",
    [
        ("42", "42", True),
        ("1,042", "1042", True),
        ("42.0", "42", True),
        ("x = -3", "-3", True),
        ("$18", "18", True),
        (r"50\%", "50", True),
        (r"\frac{3}{4}", "0.75", True),
        (r"\dfrac{6}{8}", r"\frac34", True),
        (r"-\frac{1}{2}", "-1/2", True),
        (r"90^\circ", "90", True),
        (r"12\text{ cm}", "12", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})", True),
        ("p - q", "p-q", True),
        ("4", "42", False),
        ("1" * 5000, "3", False),
        ("1,04", "104", False),
        (r"\frac{1}{0}", "0", False),
        (r"\frac{3}{4}", r"\frac{4}{3}", False),
        ("(1,2)", "(2,1)", False),
    ],
)
def test_same(found, wanted, equal):
    assert same(found, wanted) is equal


def test_answers_are_numbers_and_problems_are_of_their_seed():
    problems = make(0, 240)
    assert all(number(one["answer"]) is not None for one in problems)
    assert make(0, 30) == problems[:30] and make(1, 30) != problems[:30]
    assert len({one["problem"] for one in problems}) > 200
    assert {one["kind"] for one in problems} == set(KINDS)
    assert text_of(Fraction(-3, 4)) == r"-\frac{3}{4}" and number(text_of(Fraction(-3, 4))) == Fraction(-3, 4)


def numbers(text):
    return [int(found) for found in re.findall(r"-?\d+", text.replace(" -", "-").replace(" +", "+"))]


def linear(problem):
    a, b, c, d = numbers(problem)
    return next(x for x in (Fraction(d - b, a - c),) if a * x + b == c * x + d)


def system(problem):
    # Selects coefficients by pattern, because the last number in the text is an exponent.
    found = re.findall(r"(\d+)x \+ (\d+)y = (-?\d+)", problem)
    (a, b, p), (c, d, q) = (map(int, one) for one in found)
    pairs = itertools.product(range(-9, 10), repeat=2)
    (pair,) = [(x, y) for x, y in pairs if a * x + b * y == p and c * x + d * y == q]
    return pair[0] ** 2 + pair[1] ** 2


def roots(problem):
    a, b, c = map(int, re.search(r"\$(\d+)x\^2 ([+-]\d+)x ([+-]\d+) = 0", problem).groups())
    root = (b * b - 4 * a * c) ** 0.5  # complex if negative
    return (((-b + root) / (2 * a)) ** 2 + ((-b - root) / (2 * a)) ** 2).real


def remainder(problem):
    base, exponent, modulus = map(int, re.search(r"(\d+)\^\{(\d+)\}\$ is divided by \$(\d+)", problem).groups())
    return base**exponent % modulus


def divisors(problem):
    (value,) = numbers(problem)
    small = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
    return 2 * len(small) - (math.isqrt(value) ** 2 == value)


def series(problem):
    terms, first, second, _ = numbers(problem)
    return sum(first + (second - first) * n for n in range(terms))


def geometric(problem):
    first, top, bottom = numbers(problem)
    return sum(first * (top / bottom) ** n for n in range(500))


def draws(problem):
    red, blue = numbers(problem)
    pairs = list(itertools.combinations("r" * red + "b" * blue, 2))
    return Fraction(sum(a == b for a, b in pairs), len(pairs))


def committees(problem):
    size, women, men = numbers(problem)
    return sum(len(set(one)) == 2 for one in itertools.combinations("w" * women + "m" * men, size))


def bases(problem):
    digits, base = re.search(r"\$(\d+)_\{(\d)\}", problem).groups()
    return int(digits, int(base))


def determinant(problem):
    import numpy as np

    inside = re.search(r"pmatrix\} (.*) \\end", problem).group(1)
    return np.linalg.det([[int(cell) for cell in row.split("&")] for row in inside.split(r"\\")])


def composition(problem):
    a, b = map(int, re.search(r"f\(x\) = (\d+)x\^2 ([+-]\d+)", problem).groups())
    c = int(re.search(r"frac\{x ([+-]\d+)\}\{3\}", problem).group(1))
    x = int(re.search(r"g\(f\((-?\d+)\)\)", problem).group(1))
    return Fraction(a * x**2 + b + c, 3)


@cache
def made():
    return make(3, 12 * len(KINDS))


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_right(kind):
    """An independent computation from the problem's text gives the same answers."""
    of_kind = [one for one in made() if one["kind"] == kind]
    assert len(of_kind) == 12
    for one in of_kind:
        assert float(globals()[kind](one["problem"])) == pytest.approx(
            float(number(one["answer"])), rel=1e-9, abs=1e-9
        ), one


@pytest.mark.parametrize("style", ["chat", "completion"])
def test_problems_of_a_file(bench, tmp_path, style):
    path = tmp_path / "math.jsonl"
    answers = ("42", r"\frac{84}{2}", "41")
    path.write_text("\n".join(json.dumps({"problem": f"Q{n}?", "answer": a}) for n, a in enumerate(answers)))
    with FakeServer() as server:
        outcome = MathTask(path, style=style).run(Client(server.url), bench)
    assert outcome.details["items"] == [1, 1, 0] and outcome.row["math_n"] == 3
    assert MathTask(path).identity()["sha256"] and "seed" not in MathTask(path).identity()


def test_an_answer_without_a_number_is_wrong(bench, monkeypatch):
    monkeypatch.setattr("tests.evaluation.fake_server.answer_to", lambda prompt: "no idea")
    with FakeServer() as server:
        outcome = MathTask(problems=2).run(Client(server.url), bench)
    assert [(one["passed"], one["found"]) for one in outcome.details["problems"]] == [(False, None)] * 2


def test_generated_problems(bench):
    with FakeServer() as server:
        outcome = MathTask(problems=24).run(Client(server.url), bench)
    assert outcome.n == 24 and outcome.value < 0.2
    assert MathTask(seed=1).identity() != MathTask(seed=2).identity()
