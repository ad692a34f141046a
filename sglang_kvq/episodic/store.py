"""Sessions by tenant and id: a bounded number, least recently used out first, idle ones forgotten."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sglang_kvq.episodic.session import Session
from sglang_kvq.errors import KVQuantError


class SessionStore:
    """Sessions that one server remembers; not thread-safe.

    Args:
        sessions: at most.
        idle_seconds: after which one is forgotten; 0 is never.
        clock: seconds since the epoch.
    """

    def __init__(self, sessions: int, idle_seconds: float, clock: Callable[[], float] = time.time) -> None:
        self.most, self.idle_seconds, self.clock = sessions, idle_seconds, clock
        #: The one used longest ago first.
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()
        #: Sessions that were forgotten to make room, and for being idle.
        self.evicted = self.expired = 0

    def __len__(self) -> int:
        self.expire()
        return len(self._sessions)

    def use(self, tenant: str, session_id: str) -> Session:
        """The session, now the one used last; a new one if it is not known."""
        self.expire()
        now = self.clock()
        session = self._sessions.pop((tenant, session_id), None)
        if session is None:
            session = Session(tenant, session_id, created=now)
            while len(self._sessions) >= self.most:
                self._sessions.popitem(last=False)
                self.evicted += 1
        session.used = now
        self._sessions[tenant, session_id] = session
        return session

    def get(self, tenant: str, session_id: str) -> Session:
        """The session, as it is.

        Raises:
            KVQuantError: this tenant has none of this name.
        """
        self.expire()
        try:
            return self._sessions[tenant, session_id]
        except KeyError:
            raise KVQuantError(
                f"session {session_id!r}: not known; it was never used with this key, deleted or forgotten."
            ) from None

    def holds(self, session: Session) -> bool:
        """Returns True if the session is still remembered."""
        return self._sessions.get((session.tenant, session.id)) is session

    def delete(self, tenant: str, session_id: str) -> None:
        """Forget it; a request under way goes on.

        Raises:
            KVQuantError: as ``get``.
        """
        self.get(tenant, session_id)
        del self._sessions[tenant, session_id]

    def of(self, tenant: str) -> list[Session]:
        """A tenant's sessions, the one used last first."""
        self.expire()
        return [session for session in reversed(self._sessions.values()) if session.tenant == tenant]

    @contextmanager
    def answering(self, session: Session) -> Iterator[None]:
        """While an answer is made the session is not idle; it was used when that ends."""
        session.answering += 1
        try:
            yield
        finally:
            session.answering -= 1
            session.used = self.clock()
            if self.holds(session):
                self._sessions.move_to_end((session.tenant, session.id))

    def expire(self) -> None:
        """Forget what was idle for too long."""
        if not self.idle_seconds:
            return
        for key, session in list(self._sessions.items()):
            if self.clock() - session.used <= self.idle_seconds:
                break
            if not session.answering:
                del self._sessions[key]
                self.expired += 1
