"""The tasks of ``kvq eval``, each in a file of its own; those of ``haystacks.KINDS`` share one."""

from sglang_kvq.evaluation.tasks.haystacks import KINDS

__all__ = ["KINDS", "TASK_NAMES"]

#: Names in execution order: the divergence first, because other methods wait for the reference's.
TASK_NAMES = ("kl", "needle", *KINDS, "humaneval", "gsm8k", "math")
