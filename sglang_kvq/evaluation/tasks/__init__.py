"""The tasks of ``kvq eval``. Each has its own file, except that those of ``haystacks.KINDS`` share ``retrieval``."""

from sglang_kvq.evaluation.tasks.haystacks import KINDS

__all__ = ["KINDS", "TASK_NAMES"]

#: Task names in execution order. The divergence is first, because other methods wait for the reference's distributions.
TASK_NAMES = ("kl", "needle", *KINDS, "humaneval", "gsm8k", "math")
