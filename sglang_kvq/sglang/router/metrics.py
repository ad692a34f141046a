"""Prometheus metrics of sessions, under ``GET /metrics`` with ``--enable-metrics``."""

from __future__ import annotations


class NoMetrics:
    """Metrics of a server without ``--enable-metrics``: every method does nothing."""

    def known(self, sessions: int, state_bytes: int) -> None:
        """Reports how many sessions are remembered, and the bytes of their state."""

    def answered(self, read: str) -> None:
        """Counts a session's request; ``read`` says how much of its prompt it read, "whole" or "chosen"."""

    def rebuilt(self) -> None:
        """Counts a history that was computed again."""

    def folded(self) -> None:
        """Counts a block of a history that was folded into an episode."""

    def computed(self, tokens: int) -> None:
        """Counts prompt tokens of sessions that were computed, because they were not cached."""


class SessionMetrics(NoMetrics):
    """Two gauges and four counters of the process that serves HTTP."""

    def __init__(self) -> None:
        # Imported here because SGLang must set PROMETHEUS_MULTIPROC_DIR first.
        from prometheus_client import Counter, Gauge

        self._known = Gauge("sglang_kvq_sessions", "Sessions that are remembered.", multiprocess_mode="mostrecent")
        self._bytes = Gauge(
            "sglang_kvq_session_state_bytes",
            "Bytes of the state of all remembered sessions.",
            multiprocess_mode="mostrecent",
        )
        self._answered = Counter("sglang_kvq_session_requests", "Requests of sessions.", ["read"])
        self._rebuilt = Counter("sglang_kvq_session_rebuilds", "Histories computed again after they were evicted.")
        self._folded = Counter("sglang_kvq_episode_blocks", "Blocks of histories folded into episodes.")
        self._computed = Counter("sglang_kvq_session_computed_tokens", "Prompt tokens of sessions that were computed.")

    def known(self, sessions: int, state_bytes: int) -> None:
        self._known.set(sessions)
        self._bytes.set(state_bytes)

    def answered(self, read: str) -> None:
        self._answered.labels(read=read).inc()

    def rebuilt(self) -> None:
        self._rebuilt.inc()

    def folded(self) -> None:
        self._folded.inc()

    def computed(self, tokens: int) -> None:
        self._computed.inc(tokens)
