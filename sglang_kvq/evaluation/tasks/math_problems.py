"""Generates problems of school mathematics with exact answers, which need long derivations.

Nothing is downloaded, and no model has seen the problems. Each needs several steps, and its answer is one integer or
fraction. ``make(seed, count)`` takes the kinds of problems in turn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction

#: A problem and its answer, as a data set has them.
Problem = dict[str, str]


def make(seed: int, count: int) -> list[Problem]:
    """Returns ``problem`` and ``answer`` of ``count`` problems; the first ones of a larger ``count`` are the same."""
    kinds = list(KINDS.items())
    found = []
    for number in range(count):
        name, kind = kinds[number % len(kinds)]
        problem, answer = kind(random.Random(f"{seed}/{number}"))
        found.append({"problem": problem, "answer": text_of(answer), "kind": name})
    return found


def text_of(answer: Fraction | int) -> str:
    """Formats an answer as LaTeX: an integer, or ``\\frac{a}{b}``."""
    value = Fraction(answer)
    if value.denominator == 1:
        return str(value.numerator)
    return f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _linear(draw: random.Random) -> tuple[str, Fraction]:
    a, c = draw.sample(range(2, 10), 2)
    b, d = draw.randint(-20, 20), draw.randint(-20, 20)
    return f"Solve for $x$: ${a}x {b:+d} = {c}x {d:+d}$.", Fraction(d - b, a - c)


def _system(draw: random.Random) -> tuple[str, Fraction]:
    x, y = draw.randint(-9, 9), draw.randint(-9, 9)
    a, b, c, d = 1, 1, 1, 1
    while a * d == b * c:
        a, b, c, d = (draw.randint(1, 7) for _ in range(4))
    first, second = f"{a}x + {b}y = {a * x + b * y}", f"{c}x + {d}y = {c * x + d * y}"
    return f"If ${first}$ and ${second}$, what is $x^2 + y^2$?", Fraction(x * x + y * y)


def _roots(draw: random.Random) -> tuple[str, Fraction]:
    a, b, c = draw.randint(1, 5), draw.randint(-9, 9), draw.choice([n for n in range(-9, 10) if n])
    text = f"Let $r$ and $s$ be the roots of ${a}x^2 {b:+d}x {c:+d} = 0$. Find $r^2 + s^2$."
    return text, Fraction(b * b - 2 * a * c, a * a)


def _remainder(draw: random.Random) -> tuple[str, Fraction]:
    base, exponent, modulus = draw.randint(2, 12), draw.randint(20, 200), draw.choice((7, 11, 13, 17, 19, 23))
    text = f"What is the remainder when ${base}^{{{exponent}}}$ is divided by ${modulus}$?"
    return text, Fraction(pow(base, exponent, modulus))


def _divisors(draw: random.Random) -> tuple[str, Fraction]:
    number = math.prod(prime ** draw.randint(0, 3) for prime in (2, 3, 5, 7)) * draw.choice((11, 13))
    count = sum(1 for divisor in range(1, number + 1) if number % divisor == 0)
    return f"How many positive divisors does ${number}$ have?", Fraction(count)


def _series(draw: random.Random) -> tuple[str, Fraction]:
    first, step, terms = draw.randint(-15, 15), draw.randint(2, 9), draw.randint(12, 40)
    shown = ", ".join(str(first + step * n) for n in range(3))
    text = f"Find the sum of the first ${terms}$ terms of the arithmetic sequence ${shown}, \\ldots$."
    return text, Fraction(terms * (2 * first + (terms - 1) * step), 2)


def _geometric(draw: random.Random) -> tuple[str, Fraction]:
    first, top, bottom = draw.randint(1, 9), draw.randint(1, 4), draw.randint(5, 9)
    ratio = f"\\frac{{{top}}}{{{bottom}}}"
    text = f"Find the sum of the infinite geometric series with first term ${first}$ and ratio ${ratio}$."
    return text, Fraction(first) / (1 - Fraction(top, bottom))


def _draws(draw: random.Random) -> tuple[str, Fraction]:
    red, blue = draw.randint(3, 8), draw.randint(3, 8)
    chance = Fraction(math.comb(red, 2) + math.comb(blue, 2), math.comb(red + blue, 2))
    text = f"A bag has {red} red and {blue} blue balls. Two are drawn without replacement. "
    return f"{text}What is the probability that both have the same color?", chance


def _committees(draw: random.Random) -> tuple[str, Fraction]:
    women, men, size = draw.randint(4, 7), draw.randint(4, 7), draw.randint(3, 4)
    count = math.comb(women + men, size) - math.comb(men, size) - math.comb(women, size)
    text = f"In how many ways can a committee of {size} be chosen from {women} women and {men} men "
    return f"{text}if it must have at least one woman and at least one man?", Fraction(count)


def _bases(draw: random.Random) -> tuple[str, Fraction]:
    base, number = draw.randint(3, 8), draw.randint(200, 2000)
    digits, rest = "", number
    while rest:
        digits, rest = str(rest % base) + digits, rest // base
    return f"Write ${digits}_{{{base}}}$, a number in base {base}, in base ten.", Fraction(number)


def _determinant(draw: random.Random) -> tuple[str, Fraction]:
    rows = [[draw.randint(-5, 5) for _ in range(3)] for _ in range(3)]
    (a, b, c), (d, e, f), (g, h, i) = rows
    shown = " \\\\ ".join(" & ".join(map(str, row)) for row in rows)
    value = a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g)
    return f"Find the determinant of $\\begin{{pmatrix}} {shown} \\end{{pmatrix}}$.", Fraction(value)


def _composition(draw: random.Random) -> tuple[str, Fraction]:
    a, b, c, x = draw.randint(1, 4), draw.randint(-6, 6), draw.randint(-9, 9), draw.randint(-4, 4)
    inner = a * x * x + b
    text = f"Let $f(x) = {a}x^2 {b:+d}$ and $g(x) = \\frac{{x {c:+d}}}{{3}}$. Find $g(f({x}))$."
    return text, Fraction(inner + c, 3)


#: Kinds of problems by name; each function draws a problem and its answer.
KINDS: dict[str, Callable[[random.Random], tuple[str, Fraction]]] = {
    "linear": _linear,
    "system": _system,
    "roots": _roots,
    "remainder": _remainder,
    "divisors": _divisors,
    "series": _series,
    "geometric": _geometric,
    "draws": _draws,
    "committees": _committees,
    "bases": _bases,
    "determinant": _determinant,
    "composition": _composition,
}
