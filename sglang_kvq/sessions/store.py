"""Sessions by tenant and id, limited in number and bytes, in total and per tenant; forgets idle sessions."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.session import Session

logger = logging.getLogger("sglang_kvq")

MIB = 1 << 20
#: Least seconds between two searches for idle sessions; a busy one may have been idle for long otherwise.
LOOK = 1.0
_Key: TypeAlias = tuple[str, str]


@dataclass
class _Held:
    """Number and bytes of the sessions of one tenant, or of all tenants."""

    sessions: int = 0
    bytes: int = 0

    def add(self, sessions: int, bytes: int) -> None:
        self.sessions += sessions
        self.bytes += bytes


@dataclass
class _Tenant:
    """One tenant's sessions, the one used longest ago first."""

    held: _Held = field(default_factory=_Held)
    sessions: OrderedDict[str, Session] = field(default_factory=OrderedDict)


class SessionStore:
    """Sessions that one server remembers; not thread-safe.

    If a limit is exceeded, sessions are forgotten, the one used longest ago first. They belong to the tenant that
    exceeds its share, otherwise to the tenant that holds the most. No session is forgotten while its answer is
    generated or its next turn prepared.

    Args:
        sessions: the most sessions.
        idle_seconds: idle time after which a session is forgotten; 0 means never.
        clock: returns seconds; must not follow changes of the wall clock, which would forget sessions in use.
        memory: the most bytes, by ``Session.nbytes``.
        share: share of both limits that one tenant may hold; above 0, at most 1.
    """

    def __init__(
        self,
        sessions: int,
        idle_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        memory: float = float("inf"),
        share: float = 1.0,
    ) -> None:
        self.most, self.idle_seconds, self.clock = sessions, idle_seconds, clock
        self.memory, self.share = memory, share
        #: The session used longest ago comes first.
        self._sessions: OrderedDict[_Key, Session] = OrderedDict()
        #: Bytes of each session when it was last measured.
        self._bytes: dict[_Key, int] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._held = _Held()
        #: Numbers of sessions that were forgotten to make room, and because they were idle.
        self.evicted = self.expired = 0

    def __len__(self) -> int:
        self.expire()
        return len(self._sessions)

    @property
    def bytes(self) -> int:
        """Bytes of all sessions."""
        return self._held.bytes

    def use(self, tenant: str, session_id: str) -> Session:
        """Returns the session and marks it as used last; makes a new one if it is not known."""
        self.expire()
        session = self._sessions.get((tenant, session_id))
        if session is None:
            session = Session(tenant, session_id)
            self._sessions[tenant, session_id] = session
            self._tenants.setdefault(tenant, _Tenant()).sessions[session_id] = session
            self._count(session, 1, session.nbytes)
            self._make_room(tenant, session)
        self._touch(session)
        return session

    def get(self, tenant: str, session_id: str) -> Session:
        """Returns the session without marking it as used.

        Raises:
            KVQuantError: this tenant has no session of this name.
        """
        self.expire()
        try:
            return self._sessions[tenant, session_id]
        except KeyError:
            raise KVQuantError(
                f"session {session_id!r}: unknown; it was never used with this key, or has been deleted or forgotten."
            ) from None

    def holds(self, session: Session) -> bool:
        """Returns True if the session is still remembered."""
        return self._sessions.get((session.tenant, session.id)) is session

    def delete(self, tenant: str, session_id: str) -> None:
        """Forgets a session; its running requests continue.

        Raises:
            KVQuantError: this tenant has no session of this name.
        """
        self._drop(self.get(tenant, session_id))

    def of(self, tenant: str) -> list[Session]:
        """Returns a tenant's sessions, the one used last first."""
        self.expire()
        return list(reversed(self._tenants[tenant].sessions.values())) if tenant in self._tenants else []

    def weigh(self, session: Session) -> None:
        """Measures a session's memory again after a change; forgets other sessions if a limit is now exceeded.

        If the session alone exceeds its tenant's share, no others are forgotten. It is forgotten itself unless it is
        busy.
        """
        if not self.holds(session):
            return
        size, key = session.nbytes, (session.tenant, session.id)
        self._count(session, 0, size - self._bytes[key])
        if size <= self.memory * self.share:
            self._make_room(session.tenant, None)
        elif not _is_busy(session):
            logger.warning(
                "kv-quant: session %r is forgotten: it takes %.1f MiB of the %.1f MiB that one tenant may hold. Raise "
                "--episodic-state-memory or --episodic-tenant-share.",
                session.id,
                size / MIB,
                self.memory * self.share / MIB,
            )
            self._drop(session)
            self.evicted += 1

    @contextmanager
    def answering(self, session: Session) -> Iterator[None]:
        """Marks the session as busy while its answer is generated, and as used when that ends."""
        session.answering += 1
        try:
            yield
        finally:
            session.answering -= 1
            if self.holds(session):
                self._touch(session)
                self.weigh(session)

    @contextmanager
    def preparing(self, session: Session) -> Iterator[None]:
        """Marks the session as busy while its next turn is prepared, so that it is not forgotten to make room."""
        session.preparing += 1
        try:
            yield
        finally:
            session.preparing -= 1
            self.weigh(session)

    def expire(self) -> None:
        """Forgets sessions that have been idle for too long."""
        if not self.idle_seconds:
            return
        for session in list(self._sessions.values()):
            if self.clock() - session.idle_since <= self.idle_seconds:
                break
            if not _is_busy(session):
                self._drop(session)
                self.expired += 1

    def expires_in(self) -> float | None:
        """Returns after how many seconds ``expire`` may find an idle session; None if there is none to wait for."""
        oldest = next(iter(self._sessions.values()), None)
        if oldest is None or not self.idle_seconds:
            return None
        return max(LOOK, oldest.idle_since + self.idle_seconds - self.clock())

    def _touch(self, session: Session) -> None:
        session.used, session.idle_since = time.time(), self.clock()
        self._sessions.move_to_end((session.tenant, session.id))
        self._tenants[session.tenant].sessions.move_to_end(session.id)

    def _count(self, session: Session, sessions: int, bytes: int) -> None:
        key = session.tenant, session.id
        self._bytes[key] = self._bytes.get(key, 0) + bytes
        for held in (self._held, self._tenants[session.tenant].held):
            held.add(sessions, bytes)

    def _drop(self, session: Session) -> None:
        key = session.tenant, session.id
        self._count(session, -1, -self._bytes[key])
        del self._sessions[key], self._bytes[key], self._tenants[session.tenant].sessions[session.id]
        if not self._tenants[session.tenant].sessions:
            del self._tenants[session.tenant]

    def _make_room(self, tenant: str, kept: Session | None) -> None:
        """Forgets sessions until the limits hold, or until no session may be forgotten.

        Args:
            tenant: the tenant whose sessions have grown.
            kept: a session that is not forgotten.
        """
        while (session := self._too_much(tenant, kept)) is not None:
            self._drop(session)
            self.evicted += 1

    def _too_much(self, tenant: str, kept: Session | None) -> Session | None:
        """Returns the session to forget next; None if the limits hold, or if no session may be forgotten."""
        own = self._tenants.get(tenant)
        if own is not None and self._exceeds(own.held, self.share) and (found := _oldest(own, kept)):
            return found
        if not self._exceeds(self._held, 1.0):
            return None
        by_number = self._held.sessions > self.most
        most = sorted(self._tenants.values(), key=lambda one: -(one.held.sessions if by_number else one.held.bytes))
        return next((found for one in most if (found := _oldest(one, kept))), None)

    def _exceeds(self, held: _Held, share: float) -> bool:
        return held.sessions > max(1, int(self.most * share)) or held.bytes > self.memory * share


def _oldest(tenant: _Tenant, kept: Session | None) -> Session | None:
    """Returns the session used longest ago that may be forgotten; None if there is none."""
    return next((one for one in tenant.sessions.values() if one is not kept and not _is_busy(one)), None)


def _is_busy(session: Session) -> bool:
    return bool(session.answering or session.preparing)
