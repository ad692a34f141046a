"""The tasks of ``kvq eval``, each in a file of its own."""

#: In the order they run: the divergence first, because the other methods' waits for the reference's.
TASK_NAMES = ("kl", "needle", "humaneval", "gsm8k")
