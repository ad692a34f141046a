"""The tasks of ``kvq eval``, each in a file of its own; those of ``haystacks.KINDS`` share one."""

from sglang_kvq.evaluation.tasks.haystacks import KINDS

__all__ = ["KINDS", "TASK_NAMES"]

#: In the order they run: the divergence first, because the other methods' waits for the reference's.
TASK_NAMES = ("kl", "needle", *KINDS, "humaneval", "gsm8k")
