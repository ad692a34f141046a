"""Generated retrieval cases are the same everywhere, can be answered from the text alone, and do not reward copies."""

from __future__ import annotations

import re

import pytest

from sglang_kvq.evaluation.tasks.haystacks import CHAIN, KINDS, VALUES, exact_keys, tracking

SIZES = (1, 7, 60, 400)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_cases_are_reproducible_and_hold_their_answers(kind, size):
    cases = [KINDS[kind](f"0/{n}", size) for n in range(5)]
    assert cases == [KINDS[kind](f"0/{n}", size) for n in range(5)]
    assert len({case.text for case in cases}) == 5
    for case in cases:
        assert all(value in case.text for value in case.expected)
        assert not any(value in case.question or value in case.unfinished for value in case.expected)
        joined = "\n".join(f'"{value}"' for value in case.expected)
        assert case.score(f"Sure: {joined}.") == 1 and case.score("I do not know") == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_asked_for_is_not_at_the_end(kind):
    for n in range(40):
        case = KINDS[kind](str(n), 300)
        last = max(case.text.rindex(value) for value in case.expected)
        assert last < 0.72 * len(case.text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_with_one_wrong_character_is_wrong(kind):
    case = KINDS[kind]("1", 50)
    value = case.expected[0]
    for wrong in (value[:-1] + ("0" if value[-1] != "0" else "1"), value + value[-1], value[1:]):
        others = "\n".join(f'"{v}"' for v in case.expected[1:])
        assert case.score(f'"{wrong}"\n{others}') == pytest.approx(1 - 1 / len(case.expected))


def test_keys_differ_and_numbers_of_lines_are_as_asked():
    text = exact_keys("3", 75).text
    keys = re.findall(r'"([0-9a-f-]{36})": ', text)
    assert len(keys) == len(set(keys)) == 75
    assert len(KINDS["multi_value"]("3", 75).expected) == VALUES
    lines = {kind: len(make("3", 75).text.split("\n")) for kind, make in KINDS.items()}
    assert lines == {"exact_keys": 76, "multi_key": 75, "multi_value": 75, "tracking": 75, "tool_call": 150}


def test_a_chain_can_be_followed():
    """An interpreter of the assignments finds exactly the expected variables."""
    for n in range(20):
        case, values = tracking(str(n), 120), {}
        for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", case.text):
            values[name] = values.get(source, source)
        wanted = re.search(r"value (\d+)", case.question).group(1)
        assert {name for name, value in values.items() if value == wanted} == set(case.expected)
        assert len(case.expected) == CHAIN
