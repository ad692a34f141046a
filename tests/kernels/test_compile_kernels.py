"""A server compiles its kernels before it serves, so no request waits for the compiler."""

from __future__ import annotations

from tests.kernels.no_gpu import output_of


def test_captures_batches_and_what_happens_between_them_compile_no_kernel():
    """Runs compiled_kernels.py."""
    output = output_of("tests.kernels.compiled_kernels")
    lines = [line.partition(": ") for line in output.splitlines()]
    first = {name: set(kernels.split()) for name, _, kernels in reversed(lines)}
    assert first["oscar, at startup"] >= {"_rotate", "_gather", "_append", "_extend", "_flash", "_merge"}
    decoding = next(kernels for name, _, kernels in lines if name == "oscar, at startup").split().count("_decode")
    assert decoding == 2, "one kernel for a step of one token, one for drafts"
    later = [kernels for name, _, kernels in lines if name.endswith("later")]
    assert len(later) == 9 and not any(later), output
