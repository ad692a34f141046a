"""A patched prompt has every segment, in order, behind the instruction."""

from sglang_kvq.episodic.prompt import INSTRUCTION, patched_prompt


def test_segments_in_order() -> None:
    text = patched_prompt(["Ann: one\n", "Bob: two\n"])
    assert text.startswith(INSTRUCTION)
    assert text.removeprefix(INSTRUCTION) == "Ann: one\n\nBob: two\n"
